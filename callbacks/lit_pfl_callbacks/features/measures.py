"""What the neurons of a classifier have learnt: which classes each of them prefers, and how much neurons differ."""

from collections.abc import Sequence

from torch import Tensor


def class_preferences(activations: Tensor, gradients: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Return how much every neuron speaks for every class.

    Args:
        activations: (B, L, ...) of the L neurons of a layer, on B samples; further dimensions are places.
        gradients: of the same shape: of each sample's logit of its own class.
        labels: (B,) the samples' classes.
        num_classes: number of classes C.

    Returns:
        (L, C) sums over samples of a class, and over places, of activation times gradient. Of several batches they add.

    Source:
        Psi-Net, Eq. 2.

    Example:
        >>> import torch
        >>> class_preferences(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -1.0]]), torch.tensor([1]), 2)
        tensor([[ 0.,  3.],
                [ 0., -2.]])
    """
    products = (activations * gradients).flatten(2).sum(2) if activations.dim() > 2 else activations * gradients
    sums = products.new_zeros(num_classes, products.shape[1]).index_add_(0, labels, products)
    return sums.T


def preference_shares(preferences: Tensor) -> Tensor:
    """Divide every neuron's preferences by their sum.

    What speaks against a class, a negative preference, counts as none, so that the sum cannot vanish among entries of
    both signs.

    Args:
        preferences: (L, C), see :func:`class_preferences`.

    Returns:
        (L, C), rows of sum 1; all zero for a neuron that prefers nothing.

    Source:
        Psi-Net, P of Eq. 5.
    """
    positive = preferences.double().clamp(min=0)
    sums = positive.sum(1, keepdim=True)
    return positive / sums.where(sums > 0, 1)


def total_variance(preferences: Tensor) -> float:
    """Return how far the neurons of a layer are apart in what they prefer; one that prefers nothing is left out.

    Args:
        preferences: (L, C), see :func:`class_preferences`.

    Returns:
        The mean distance of the neurons' vectors from their mean, from 0 to 1; NaN without neurons.

    Source:
        Psi-Net, Eq. 5.

    Example:
        >>> import torch
        >>> round(total_variance(torch.tensor([[2.0, 0.0], [0.0, 5.0]])), 4)  # both sqrt(1/2) from their mean
        0.7071
    """
    vectors = preference_shares(preferences)
    vectors = vectors[vectors.any(1)]
    return float((vectors - vectors.mean(0)).norm(dim=1).mean())


def sharing_depth(variances: Sequence[float]) -> int:
    """Suggest how many layers to share: those before the first whose total variance is half-way up.

    Args:
        variances: total variance of every layer but the classifier, in order.

    Returns:
        The number of layers before the first that reaches the middle between the least and the greatest variance, at
        least 1.

    Source:
        Psi-Net, Section 3.2: the depth at which total variance surges, which the paper reads off a plot.

    Example:
        >>> sharing_depth([0.1, 0.12, 0.15, 0.4, 0.5])
        3
    """
    middle = (min(variances) + max(variances)) / 2
    return max(1, next(depth for depth, variance in enumerate(variances) if variance >= middle))


def top_classes(preferences: Tensor) -> list[int]:
    """Return the class that each of L neurons prefers most, of (L, C) preferences; -1 for one that prefers none."""
    return preferences.argmax(1).where(preferences.amax(1) > 0, -1).tolist()
