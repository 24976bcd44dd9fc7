"""Means that take the place of the weighted one, and that a few wrong uploads cannot move far.

A new one is a subclass of :class:`RobustMean` with one method, and then works by name on the command line.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

import torch
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lit_pfl.core.averaging import weighted_mean, wide_type
from lit_pfl.core.payload import Payload
from lit_pfl.core.updates import norm_of, update_norm, update_of
from lit_pfl.errors import ConfigError, UploadError, check_options_of
from lit_pfl.ops.robust import (
    clipping_factor,
    coordinate_median,
    geometric_median_weights,
    inner_product,
    krum_scores,
    row_distances,
    trimmed_mean,
    trust_scores,
)

Uploads = Mapping[int, Payload]
Tensors = Mapping[str, Tensor]


class RobustMean(ABC):
    """Averages the uploads of a round instead of the weighted mean: ``FedAvg(mean=CoordinateMedian())``.

    Every method whose server averages uploads by :meth:`lit_pfl.Server.average` takes one. What distances and norms
    are of are all floating-point tensors of an upload together; whole numbers, such as counts of batches, only get the
    weights that follow.
    """

    #: whether it measures how far uploads are from what the clients trained from
    from_center: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, uploads: Uploads, weights: Sequence[float], names: Sequence[str], center: Tensors) -> Payload:
        """Average uploads.

        Args:
            uploads: J uploads by client id, at least one.
            weights: J weights that the plain mean would give them. Most means only use their sum, and leave uploads
                with a weight of 0 out.
            names: tensors to average. Of one that only some uploads have, the mean is over those.
            center: what the clients trained from, by name, where uploads are models: an update is what an upload
                differs from it. Tensors that it lacks are updates themselves.

        Returns:
            A payload of new tensors; whole numbers are rounded to the nearest.

        Raises:
            UploadError: when there are too few uploads.
        """

    def check(self, clients: Collection[int]) -> None:  # noqa: B027 - most means do with any
        """See that the mean can do with these clients, by id.

        Raises:
            ConfigError: when it cannot.
        """


class CoordinateMedian(RobustMean):
    """The median of every coordinate over the uploads; weights do not count.

    Holds as long as less than half of the uploads are wrong.

    Source:
        Yin et al. 2018, Algorithm 1, Option I.
    """

    def __call__(self, uploads: Uploads, weights: Sequence[float], names: Sequence[str], center: Tensors) -> Payload:
        used, total = _used(uploads, weights)
        return Payload(
            {name: _rounded(self.location(_stack(name, used)) * total, _like(name, used)) for name in names},
            _sparse(used),
        )

    def location(self, values: Tensor) -> Tensor:
        """Return the middle of (J, ...) values as (...)."""
        return coordinate_median(values)


class TrimmedMean(CoordinateMedian):
    """The mean of every coordinate without its largest and smallest values; weights do not count.

    Args:
        share: share of the uploads that is left out at each end, from 0 and below 0.5. Choose at least the share of
            clients that may be wrong.

    Raises:
        ConfigError: when the share is not from 0 and below 0.5.

    Source:
        Yin et al. 2018, Algorithm 1, Option II.
    """

    def __init__(self, share: float = 0.1) -> None:
        if not 0 <= share < 0.5:
            raise ConfigError(f"model.mean.share={share}: give a share from 0 and below 0.5.")
        self.share = share

    def location(self, values: Tensor) -> Tensor:
        if 0 < self.share * len(values) < 1 - 1e-9:
            rank_zero_warn(
                f"model.mean.share={self.share}: of {len(values)} uploads none is left out, so this is the plain mean; "
                "give a larger share, or let more clients take part."
            )
        return trimmed_mean(values, self.share)


class Reweighted(RobustMean):
    """A weighted mean whose weights follow from the uploads."""

    def __call__(self, uploads: Uploads, weights: Sequence[float], names: Sequence[str], center: Tensors) -> Payload:
        used, total = _used(uploads, weights)
        given = torch.tensor([weight for weight in weights if weight != 0], dtype=torch.float64) / total
        parts = [
            [upload[name] for upload in used.values()]
            for name in names
            if all(name in upload and upload[name].is_floating_point() for upload in used.values())
        ]
        return weighted_mean(list(used.values()), (total * self.weigh(parts, given)).tolist(), names)

    @abstractmethod
    def weigh(self, parts: Sequence[Sequence[Tensor]], weights: Tensor) -> Tensor:
        """Return the uploads' weights.

        Args:
            parts: of every floating-point tensor that all uploads have, those of the J uploads.
            weights: (J,) weights in the plain mean; they sum to 1.

        Returns:
            (J,) weights that sum to 1.
        """


class GeometricMedian(Reweighted):
    """RFA: the point with the smallest weighted sum of distances to the uploads, by smoothed Weiszfeld steps.

    With every step the weight of uploads far away shrinks by their share among all (3 to 7, if they are 3 of 10), so
    that three steps do not bear uploads that are many times as long as the others. Give more steps against those; they
    cost little.

    Args:
        iterations: number of steps from the plain mean. The paper takes three.
        smoothing: smallest distance that counts, the paper's nu.

    Source:
        Pillutla et al. 2022, Algorithm 2; Section 6 for the defaults.
    """

    def __init__(self, iterations: PositiveInt = 3, smoothing: PositiveFloat = 1e-6) -> None:
        self.iterations, self.smoothing = iterations, smoothing
        check_options_of(self, "model.mean")

    def weigh(self, parts: Sequence[Sequence[Tensor]], weights: Tensor) -> Tensor:
        return geometric_median_weights(parts, weights, self.iterations, self.smoothing)


class MultiKrum(Reweighted):
    """The plain mean of those uploads that are nearest to their neighbors; weights do not count.

    An upload's score is the sum of its squared distances to the ``J - byzantine - 2`` uploads nearest to it.

    Args:
        byzantine: number of clients in a round that may send anything. A round needs ``2 byzantine + 3`` uploads.
        chosen: number of uploads with the lowest scores that are averaged. By default ``J - byzantine``.

    Source:
        Blanchard et al. 2017, Sections 4 and 5.
    """

    def __init__(self, byzantine: NonNegativeInt = 1, chosen: PositiveInt | None = None) -> None:
        self.byzantine, self.chosen = byzantine, chosen
        check_options_of(self, "model.mean")

    def weigh(self, parts: Sequence[Sequence[Tensor]], weights: Tensor) -> Tensor:
        count = len(weights)
        if count < 2 * self.byzantine + 3:
            raise UploadError(
                f"model.mean.byzantine={self.byzantine}: {type(self).__name__} needs {2 * self.byzantine + 3} uploads "
                f"in a round, and there are {count}; give a smaller number, or let more clients take part."
            )
        chosen = min(self.chosen or count - self.byzantine, count)
        distances = torch.zeros(count, count, dtype=torch.float64)
        for part in parts:
            distances += row_distances(torch.stack([tensor.detach().flatten() for tensor in part])).cpu()
        best = krum_scores(distances, self.byzantine).argsort(stable=True)[:chosen]
        return torch.zeros_like(weights).index_fill_(0, best, 1 / chosen)


class Krum(MultiKrum):
    """The one upload that is nearest to its neighbors, see :class:`MultiKrum`.

    Args:
        byzantine: number of clients in a round that may send anything. A round needs ``2 byzantine + 3`` uploads.

    Source:
        Blanchard et al. 2017, Section 4.
    """

    def __init__(self, byzantine: NonNegativeInt = 1) -> None:
        super().__init__(byzantine, chosen=1)


class Rescaled(RobustMean):
    """A mean of updates that are scaled first, added to what the clients trained from."""

    from_center = True

    def __call__(self, uploads: Uploads, weights: Sequence[float], names: Sequence[str], center: Tensors) -> Payload:
        scaled = self.scale(uploads, weights, names, center)
        whole, tensors = sum(weights), {}
        for name in names:
            like = _like(name, uploads)
            start = center[name].to(like) if name in center else torch.zeros_like(like)
            every = zip(uploads.values(), scaled, weights, strict=True)
            own = [(upload[name], weight, share) for upload, weight, share in every if name in upload and share]
            held = sum(share for _, _, share in own)
            total = whole * start.double()
            # Not c + sum(a u) - sum(a) c: a tiny update may count a million times, and digits would be lost.
            for tensor, weight, _ in own:
                total = total + weight * whole / held * (tensor.double() - start.double())
            tensors[name] = _rounded(total, start)
        return Payload(tensors, _sparse(uploads))

    @abstractmethod
    def scale(
        self, uploads: Uploads, weights: Sequence[float], names: Sequence[str], center: Tensors
    ) -> Sequence[float]:
        """Return every update's weight; see :meth:`RobustMean.__call__` for the arguments."""


class NormClipping(Rescaled):
    """The weighted mean of updates, each shortened to a norm if it is longer.

    Args:
        norm: largest Euclidean norm of an update, over all its floating-point tensors.

    Source:
        Sun et al. 2019, Section 3.
    """

    def __init__(self, norm: PositiveFloat = 1.0) -> None:
        self.norm = norm
        check_options_of(self, "model.mean")

    def scale(self, uploads: Uploads, weights: Sequence[float], names: Sequence[str], center: Tensors) -> list[float]:
        norms = (update_norm(upload, center, names) for upload in uploads.values())
        return [weight * clipping_factor(norm, self.norm) for weight, norm in zip(weights, norms, strict=True)]


class FLTrust(Rescaled):
    """Updates count by how far they point along the update of one client that the server trusts.

    The trusted client holds the server's own data. Every other update is scaled to the length of the trusted one, and
    weighted by the cosine of the angle between both, or by 0 where that is negative. The trusted update itself is not
    averaged. The trusted client must take part: a round without its upload, or without any update that points along
    its own, leaves the model as it is.

    Args:
        trusted: id of the client that holds the server's data.

    Source:
        Cao et al. 2021, Algorithm 2, with a global learning rate of 1.
    """

    def __init__(self, trusted: NonNegativeInt = 0) -> None:
        self.trusted = trusted

    def check(self, clients: Collection[int]) -> None:
        if self.trusted not in clients:
            raise ConfigError(f"model.mean.trusted={self.trusted}: no client has this id; ids end at {max(clients)}.")

    def scale(self, uploads: Uploads, weights: Sequence[float], names: Sequence[str], center: Tensors) -> list[float]:
        if self.trusted not in uploads:
            rank_zero_warn(
                f"model.mean.trusted={self.trusted}: there is no upload of this client, so the model stays as it is."
            )
            return [0.0] * len(uploads)
        reference = update_of(uploads[self.trusted], center, names)
        norm = norm_of(reference)
        products, norms = [], []
        for client, upload in uploads.items():
            update = {} if client == self.trusted else update_of(upload, center, names)
            products.append(sum(inner_product(reference[name], t) for name, t in update.items() if name in reference))
            norms.append(norm_of(update))
        scores, factors = trust_scores(
            torch.tensor(products, dtype=torch.float64), torch.tensor(norms, dtype=torch.float64), norm
        )
        trust = float(scores.sum())
        return (sum(weights) * scores * factors / trust).tolist() if trust else [0.0] * len(uploads)


def _used(uploads: Uploads, weights: Sequence[float]) -> tuple[Uploads, float]:
    """Return the uploads whose weight is not 0, and the sum of the weights."""
    used = {client: upload for (client, upload), w in zip(uploads.items(), weights, strict=True) if w != 0}
    total = sum(weights)
    return used, 1.0 if abs(total - 1) < 1e-9 else total


def _stack(name: str, uploads: Uploads) -> Tensor:
    tensors = [upload[name] for upload in uploads.values() if name in upload]
    return torch.stack([tensor.detach().to(wide_type(tensor)) for tensor in tensors])


def _like(name: str, uploads: Uploads) -> Tensor:
    return next(upload[name] for upload in uploads.values() if name in upload)


def _rounded(value: Tensor, like: Tensor) -> Tensor:
    return (value if like.is_floating_point() else value.round()).to(like.dtype)


def _sparse(uploads: Uploads) -> frozenset[str]:
    return next(iter(uploads.values())).sparse
