"""Means that a few wrong vectors among many cannot move far."""

from collections.abc import Sequence

import torch
from torch import Tensor

#: elements up to which PyTorch adds up in one thread
SERIAL = 2**15


def coordinate_median(values: Tensor) -> Tensor:
    """Return the median of every coordinate.

    Args:
        values: (J, ...) floating-point values of J clients, finite.

    Returns:
        (...) medians; of an even number of clients, the mean of the two middle values.

    Source:
        Yin et al. 2018, Definition 1.
    """
    return _middle(values, (len(values) - 1) // 2)


def trimmed_mean(values: Tensor, share: float) -> Tensor:
    """Return the mean of every coordinate without its largest and its smallest values.

    Args:
        values: (J, ...) floating-point values of J clients, finite.
        share: share of the clients that is left out at each end, from 0 and below 0.5; rounded down to whole clients.

    Returns:
        (...) means.

    Source:
        Yin et al. 2018, Definition 2.
    """
    return _middle(values, int(share * len(values) + 1e-9))  # 0.29 * 100 is a little less than 29


def _middle(values: Tensor, cut: int) -> Tensor:
    """Return the mean of every coordinate without ``cut`` values at each end."""
    ordered = values.sort(dim=0).values[cut : len(values) - cut]
    total = ordered[0]
    for value in ordered[1:]:
        total += value
    return total / len(ordered)


def row_distances(values: Tensor) -> Tensor:
    """Return the squared Euclidean distances between all rows.

    Args:
        values: (J, n).

    Returns:
        (J, J) of double precision. The result does not depend on the number of threads.
    """
    wide = values.double()
    distances = torch.zeros(len(wide), len(wide), dtype=torch.float64, device=wide.device)
    for i in range(len(wide) - 1):
        # never of a single row: PyTorch splits a sum with one result among threads
        distances[i, i:] = (wide[i:] - wide[i]).square().sum(1)
    return distances + distances.T


def krum_scores(distances: Tensor, byzantine: int) -> Tensor:
    """Return every client's sum of squared distances to the clients nearest to it; the lowest is the most trustworthy.

    Args:
        distances: (J, J) squared distances.
        byzantine: number f of clients that may send anything; ``J - f - 2`` neighbors count.

    Returns:
        (J,) scores.

    Raises:
        ValueError: when J is below ``2 f + 3``, where f clients near each other could win.

    Source:
        Blanchard et al. 2017, Section 4.
    """
    if len(distances) < 2 * byzantine + 3:
        raise ValueError(f"{byzantine} Byzantine clients need {2 * byzantine + 3} clients or more.")
    return distances.sort(dim=1).values[:, 1 : len(distances) - byzantine - 1].sum(1)  # without the 0 to itself


def geometric_median_weights(
    points: Sequence[Sequence[Tensor]], weights: Tensor, iterations: int, smoothing: float
) -> Tensor:
    """Return the weights of points in their geometric median, by smoothed Weiszfeld steps from the weighted mean.

    Args:
        points: J points, in parts: of every part the J tensors of equal shape.
        weights: (J,) weights of the points in the sum of distances that is minimized; they sum to 1.
        iterations: number of steps.
        smoothing: distances below it count as this distance, the paper's nu.

    Returns:
        (J,) weights of double precision that sum to 1.

    Source:
        Pillutla et al. 2022 (RFA), Algorithm 2.
    """
    weights = weights.double()
    p = weights
    for _ in range(iterations):
        apart = torch.zeros_like(weights)
        for part in points:
            rows = torch.stack([tensor.detach().flatten() for tensor in part])
            median = (rows * p.to(rows.device).unsqueeze(1)).sum(0)
            apart += torch.tensor([inner_product(x - median, x - median) for x in rows], dtype=torch.float64)
        p = weights / apart.sqrt().clamp(min=smoothing)
        p = p / p.sum()
    return p


def inner_product(a: Tensor, b: Tensor) -> float:
    """Return the inner product of two tensors of equal shapes, in double precision, whatever the number of threads."""
    pairs = zip(a.flatten().split(SERIAL), b.flatten().split(SERIAL), strict=True)
    parts = [(x.double() * y.double()).sum() for x, y in pairs]
    return float(torch.stack(parts).sum()) if parts else 0.0


def clipping_factor(norm: float, bound: float) -> float:
    """Return by how much a vector of some Euclidean norm is scaled so that it is no longer than a bound.

    Source:
        Sun et al. 2019, Section 3 (norm thresholding): ``1 / max(1, norm / bound)``.
    """
    return 1 / max(1.0, norm / bound)


def trust_scores(products: Tensor, norms: Tensor, norm: float) -> tuple[Tensor, Tensor]:
    """Return how far updates are trusted compared with a reference, and how they are scaled to its length.

    Args:
        products: (J,) inner products with the reference.
        norms: (J,) Euclidean norms.
        norm: that of the reference.

    Returns:
        (J,) cosine similarity with the reference, 0 where it is negative; (J,) factors of the updates. An update
        without length, like every update compared with a reference without length, has a score of 0.

    Source:
        Cao et al. 2021 (FLTrust), Eq. 2 and 3.
    """
    there = norms > 0
    lengths = torch.where(there, norms, 1)
    cosines = torch.where(there, products / (lengths * (norm or 1.0)), 0)
    return cosines.clamp(0, 1), torch.where(there, norm / lengths, 0)


def alie_deviation(clients: int, attackers: int) -> float:
    """Return how many standard deviations from the mean attackers stay unseen among honest clients.

    Args:
        clients: number n of clients in all.
        attackers: number m of attackers among them.

    Returns:
        ``z_max``, the largest z with ``Phi(z) < (n - m - s) / (n - m)``, where ``s = floor(n / 2 + 1) - m`` honest
        clients are to be farther away than the attackers; at least 0, and 0 where attackers need no honest client.

    Source:
        Baruch et al. 2019, Algorithm 3.
    """
    honest = clients - attackers
    farther = clients // 2 + 1 - attackers
    if farther < 1:
        return 0.0
    share = torch.tensor((honest - farther) / honest, dtype=torch.float64)
    return max(0.0, float(torch.special.ndtri(share)))
