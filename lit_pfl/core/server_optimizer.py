"""Optimizers of the server: how far it goes from its model towards the mean of the uploads, and along what."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, PositiveFloat
from torch import Tensor

from lit_pfl.core.averaging import wide_type
from lit_pfl.core.payload import Payload
from lit_pfl.ops.robust import inner_product

Weights = Mapping[str, Tensor]


class ServerOptimizer(ABC):
    """Takes the step of a server that averages: ``D``, the mean less the model, stands for a gradient going down.

    It moves trained parameters alone; what else is averaged, such as running statistics, becomes its mean.

    Attributes:
        state: what it keeps from round to round: tensors by name, by what they are.
    """

    #: whether steps are made of the mean and the shares alone: a robust mean, and central privacy, go with no other
    means_only: ClassVar[bool] = False
    state: dict[str, dict[str, Tensor]]

    def __init__(self) -> None:
        self.state = {}

    @abstractmethod
    def step(self, before: Weights, mean: Weights, uploads: Sequence[Payload], shares: Sequence[float]) -> Weights:
        """Return the new model.

        Args:
            before: the model that the round began with, w.
            mean: the mean of the uploads, by the same names.
            uploads: the J uploads, which may hold more.
            shares: J numbers that sum to 1: what each upload counts in the mean.
        """

    def evaluated(self, model: Payload) -> Payload:
        """Return what is evaluated instead of the model: by default the model."""
        return model

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed server needs, as tensors by name."""
        return {kind: dict(tensors) for kind, tensors in self.state.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state of :meth:`state_dict`."""
        self.state = {kind: dict(tensors) for kind, tensors in state.items()}

    def kept(self, kind: str, name: str, like: Tensor, first: float = 0.0) -> Tensor:
        """Return what is kept for a tensor; at first a number in all places."""
        kept = self.state.setdefault(kind, {})
        if name not in kept:
            kept[name] = torch.full_like(like, first)
        return kept[name]


class ServerMomentum(ServerOptimizer):
    """FedAvgM: ``m <- momentum m + D``, ``w <- w + lr m``, or ``w + lr (D + momentum m)`` with ``nesterov``.

    With ``momentum=0`` and ``lr=1`` this is plain averaging, bit for bit.

    Args:
        lr: the server's learning rate.
        momentum: how much of the former step is kept.
        nesterov: whether the step looks ahead.

    Source:
        Hsu et al. 2019, Section 4.3.
    """

    means_only = True

    def __init__(self, lr: PositiveFloat = 1.0, momentum: ClosedUnitInterval = 0.9, nesterov: bool = False) -> None:
        super().__init__()
        self.lr, self.momentum, self.nesterov = lr, momentum, nesterov

    def step(self, before: Weights, mean: Weights, uploads: Sequence[Payload], shares: Sequence[float]) -> Weights:
        moved = {}
        for name, end in mean.items():
            start, wide_end = _wide(before[name]), _wide(end)
            former = self.kept("momentum", name, start)
            new = self.state["momentum"][name] = self.momentum * former + (wide_end - start)
            along = new if self.nesterov else former
            # w + lr D as a point between w and the mean, which is the mean itself for a rate of 1
            moved[name] = (torch.lerp(start, wide_end, self.lr) + self.lr * self.momentum * along).to(end.dtype)
        return moved


class _Adaptive(ServerOptimizer):
    """What ServerAdagrad, ServerAdam and ServerYogi share."""

    means_only = True

    def __init__(self, lr: float, beta1: float, tau: float) -> None:
        super().__init__()
        self.lr, self.beta1, self.tau = lr, beta1, tau

    @abstractmethod
    def second_moment(self, former: Tensor, square: Tensor) -> Tensor:
        """Return the new v from the former one and D^2."""

    def step(self, before: Weights, mean: Weights, uploads: Sequence[Payload], shares: Sequence[float]) -> Weights:
        moved = {}
        for name, end in mean.items():
            start = _wide(before[name])
            went = _wide(end) - start
            m = self.beta1 * self.kept("m", name, start) + (1 - self.beta1) * went
            v = self.second_moment(self.kept("v", name, start, self.tau**2), went.square())
            self.state["m"][name], self.state["v"][name] = m, v
            moved[name] = (start + self.lr * m / (v.sqrt() + self.tau)).to(end.dtype)
        return moved


class ServerAdagrad(_Adaptive):
    """FedAdagrad: ``m <- beta1 m + (1 - beta1) D``, ``v <- v + D^2``, ``w <- w + lr m / (sqrt(v) + tau)``.

    Args:
        lr: the server's learning rate, the paper's eta.
        beta1: how slowly m follows; 0 in the paper's experiments.
        tau: how far it is from the sign of m; v starts at its square.

    Source:
        Reddi et al. 2021, Algorithm 2.
    """

    def __init__(self, lr: PositiveFloat = 0.1, beta1: ClosedUnitInterval = 0.0, tau: PositiveFloat = 1e-3) -> None:
        super().__init__(lr, beta1, tau)

    def second_moment(self, former: Tensor, square: Tensor) -> Tensor:
        return former + square


class ServerAdam(_Adaptive):
    """FedAdam: as :class:`ServerAdagrad` with ``v <- beta2 v + (1 - beta2) D^2``; no correction of the first rounds.

    Args:
        lr: the server's learning rate, the paper's eta.
        beta1: how slowly m follows.
        beta2: how slowly v follows.
        tau: how far it is from the sign of m; v starts at its square.

    Source:
        Reddi et al. 2021, Algorithm 2.
    """

    def __init__(
        self,
        lr: PositiveFloat = 0.1,
        beta1: ClosedUnitInterval = 0.9,
        beta2: ClosedUnitInterval = 0.99,
        tau: PositiveFloat = 1e-3,
    ) -> None:
        super().__init__(lr, beta1, tau)
        self.beta2 = beta2

    def second_moment(self, former: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * former + (1 - self.beta2) * square


class ServerYogi(ServerAdam):
    """FedYogi: as :class:`ServerAdagrad` with ``v <- v - (1 - beta2) D^2 sign(v - D^2)``.

    Args:
        lr: the server's learning rate, the paper's eta.
        beta1: how slowly m follows.
        beta2: how slowly v follows.
        tau: how far it is from the sign of m; v starts at its square.

    Source:
        Reddi et al. 2021, Algorithm 2.
    """

    def second_moment(self, former: Tensor, square: Tensor) -> Tensor:
        return former - (1 - self.beta2) * square * (former - square).sign()


class ServerExtrapolation(ServerOptimizer):
    """FedExP: ``w <- w + eta D`` with ``eta = max(1, sum p_i |D_i|^2 / (2 (|D|^2 + eps)))``.

    ``D_i`` is how far client i went and ``p_i`` what it counts; the further clients go into different directions, the
    further the server goes. Norms are of all weights together.

    Args:
        eps: the larger, the nearer is eta to 1. The authors have 0.001 for CIFAR and 0.1 for EMNIST.
        shows_mean: whether what is evaluated is the mean of the last two models, without which the training continues.
            After round 1 it is the new model, as in the authors' code.

    Source:
        Jhunjhunwala et al. 2023, Algorithm 1 and Eq. 6.
    """

    def __init__(self, eps: NonNegativeFloat = 1e-3, shows_mean: bool = True) -> None:
        super().__init__()
        self.eps, self.shows_mean = eps, shows_mean

    def step(self, before: Weights, mean: Weights, uploads: Sequence[Payload], shares: Sequence[float]) -> Weights:
        rate = self.rate(before, mean, uploads, shares)
        self.state["before"] = dict(before) if self.shows_mean and self.state else {}  # the first one is not shown
        return {name: torch.lerp(_wide(before[name]), _wide(end), rate).to(end.dtype) for name, end in mean.items()}

    def rate(self, before: Weights, mean: Weights, uploads: Sequence[Payload], shares: Sequence[float]) -> float:
        """Return eta."""
        every = [squared_distance(before, upload) for upload in uploads]
        spread = sum(share * each for share, each in zip(shares, every, strict=True))
        together = 2 * (squared_distance(before, mean) + self.eps)
        return max(1.0, spread / together) if together else 1.0

    def evaluated(self, model: Payload) -> Payload:
        former = {name: w.to(model[name].device) for name, w in self.state.get("before", {}).items() if name in model}
        means = {name: torch.lerp(_wide(w), _wide(model[name]), 0.5).to(w.dtype) for name, w in former.items()}
        return model.with_(means)


def squared_distance(a: Weights, b: Weights) -> float:
    """Return the sum of the squares of the differences of all tensors of a and those of the same names of b."""
    apart = [_wide(a[name]) - _wide(b[name]) for name in a]
    return sum(inner_product(tensor, tensor) for tensor in apart)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(wide_type(tensor))
