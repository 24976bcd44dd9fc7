"""Layers whose weight is the Hadamard product of two low-rank weights, ``W = W1 * W2`` (FedPara).

Two weights of rank R multiply to one of rank up to R^2, so a small number of parameters reaches full rank. In the
personalized kind, ``W = W1 * (W2 + 1)`` (pFedPara), W1 is everybody's and W2 is a client's own: it scales W1 entry by
entry, and being small at first leaves it nearly as it is.
"""

import math
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from lit_pfl.errors import ConfigError
from lit_pfl.nn.composed import ComposedConv2d, ComposedLinear, geometry
from lit_pfl.nn.replace import replace_layers

RankRule = Literal["ratio", "gamma"]


def rank_for_ratio(out: int, inputs: int, window: int, ratio: float) -> int:
    """Return the smallest rank whose factors have at least a share of the dense weight's parameters.

    Never less than the square roots of ``out`` and ``inputs``, which a weight of full rank takes. So a layer with few
    inputs, as a network's first, can have more parameters than the dense one.

    Args:
        out: outputs O of the layer.
        inputs: inputs I of the layer, of one group.
        window: number of entries of the window, F * F; 0 for a fully connected layer, which has no core tensor.
        ratio: wanted share, 0 or more: 0.72 is 72 % of the dense weight's parameters.

    Raises:
        ConfigError: for a share that is negative or not finite.

    Source:
        Nam et al. 2022, the notebook they released.
    """
    if not 0 <= ratio < math.inf:
        raise ConfigError(f"ratio={ratio}: give a share of the dense weight's parameters, 0 or more.")
    wanted = _rank_with(out, inputs, window, ratio * out * inputs * max(window, 1))
    return max(_ceil_sqrt(out), _ceil_sqrt(inputs), math.ceil(wanted - 1e-9))


def rank_for_gamma(out: int, inputs: int, window: int, gamma: float) -> int:
    """Return the rank ``(1 - gamma) r_min + gamma r_max``, to the nearest whole number.

    ``r_min`` is the smallest rank that a weight of full rank takes, ``r_max`` the largest with no more parameters than
    the dense weight (and never below ``r_min``).

    Args:
        out: outputs O of the layer.
        inputs: inputs I of the layer, of one group.
        window: number of entries of the window, F * F; 0 for a fully connected layer, which has no core tensor.
        gamma: from 0, smallest, to 1, largest.

    Raises:
        ConfigError: for a gamma that is not from 0 to 1.

    Source:
        Nam et al. 2022, Corollary 1 and the rank hyper-parameter of the experimental setup.
    """
    if not 0 <= gamma <= 1:
        raise ConfigError(f"ratio={gamma}: with rank_rule='gamma' it is gamma, from 0 to 1.")
    least = _ceil_sqrt(min(out, inputs))
    most = max(least, math.floor(_rank_with(out, inputs, window, out * inputs * max(window, 1)) + 1e-9))
    return round((1 - gamma) * least + gamma * most)


def _rank_with(out: int, inputs: int, window: int, parameters: float) -> float:
    """Solve ``2 R (O + I + R window) = parameters`` for R, in a form that window = 0 has too."""
    sides = out + inputs
    return parameters / (sides + math.sqrt(sides**2 + 2 * window * parameters))


def _ceil_sqrt(n: int) -> int:
    return math.isqrt(n - 1) + 1


RANK_RULES: dict[str, Callable[[int, int, int, float], int]] = {"ratio": rank_for_ratio, "gamma": rank_for_gamma}


class _Matrix(nn.Module):
    """A low-rank matrix ``X Y^T``.

    Attributes:
        x: (O, R).
        y: (I, R).
    """

    def __init__(self, out: int, inputs: int, rank: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.empty(out, rank))
        self.y = nn.Parameter(torch.empty(inputs, rank))
        for factor in (self.x, self.y):
            nn.init.kaiming_normal_(factor, mode="fan_out", nonlinearity="relu")

    def forward(self) -> Tensor:
        """Return the (O, I) product."""
        return self.x @ self.y.t()


class _Kernel(nn.Module):
    """A low-rank kernel ``T x1 O x2 I``: ``W[o, i, a, b] = sum_xy T[x, y, a, b] O[x, o] I[y, i]``.

    Attributes:
        t: (R, R, H, W), the core.
        o: (R, O).
        i: (R, I).
    """

    def __init__(self, out: int, inputs: int, height: int, width: int, rank: int) -> None:
        super().__init__()
        self.t = nn.Parameter(torch.empty(rank, rank, height, width))
        self.o = nn.Parameter(torch.empty(rank, out))
        self.i = nn.Parameter(torch.empty(rank, inputs))
        for factor in (self.t, self.o, self.i):
            nn.init.kaiming_normal_(factor, nonlinearity="relu")

    def forward(self) -> Tensor:
        """Return the (O, I, H, W) product."""
        # As two matrix products: half an einsum's time on small layers, and the result is contiguous, where einsum's is
        # channels last and would make the convolution so.
        inner = self.i.t() @ self.t.flatten(2)  # (R, I, H W)
        return (self.o.t() @ inner.flatten(1)).view(self.o.shape[1], self.i.shape[1], *self.t.shape[2:])


class _Hadamard(nn.Module):
    """What both layers share.

    Attributes:
        w1: makes W1; its parameters are the shared factors.
        w2: makes W2; its parameters are the private factors of a personalized layer.
        bias: (out,), zero at first, or None.
        is_copy: whether it is a copy of another layer, such as a momentum encoder's.
    """

    bias: nn.Parameter | None
    is_copy: bool = False

    def __init__(self, make: Callable[[], nn.Module], out: int, bias: bool, rank: int, personal: bool) -> None:
        super().__init__()
        if rank < 1:
            raise ConfigError(f"A Hadamard layer needs a rank of 1 or more, not {rank}.")
        self.w1, self.w2 = make(), make()
        self.register_parameter("bias", nn.Parameter(torch.zeros(out)) if bias else None)
        self.rank, self.personal = rank, personal

    @property
    def weight(self) -> Tensor:
        """The dense weight, ``W1 * W2`` or, personalized, ``W1 * (W2 + 1)``."""
        w1, w2 = self.w1(), self.w2()
        return torch.addcmul(w1, w1, w2) if self.personal else w1 * w2


class HadamardLinear(_Hadamard, ComposedLinear):  # type: ignore[misc, override]
    """A fully connected layer with weight ``W = (X1 Y1^T) * (X2 Y2^T)``, of rank up to R^2.

    The factors ``w1.x``, ``w2.x`` are (out, R), ``w1.y``, ``w2.y`` (in, R): 2 R (in + out) parameters, drawn from
    normal distributions of variance 2 / out and 2 / in.

    Args:
        in_features: size of each input sample, I.
        out_features: size of each output sample, O.
        bias: whether to add a learned bias; it stays dense.
        rank: number R of columns of the factors.
        personal: whether the weight is ``W1 * (W2 + 1)``.

    Source:
        Nam et al. 2022, Proposition 1.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, rank: int, personal: bool = False
    ) -> None:
        super().__init__(lambda: _Matrix(out_features, in_features, rank), out_features, bias, rank, personal)
        self.in_features, self.out_features = in_features, out_features

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, rank={self.rank}, personal={self.personal}"


class HadamardConv2d(_Hadamard, ComposedConv2d):
    """A convolution with weight ``W = (T1 x1 O1 x2 I1) * (T2 x1 O2 x2 I2)``, W of shape (O, I, F, F).

    ``W_j[o, i, a, b] = sum_xy T_j[x, y, a, b] O_j[x, o] I_j[y, i]``, with the cores ``w1.t``, ``w2.t`` (R, R, F, F),
    ``w1.o``, ``w2.o`` (R, O) and ``w1.i``, ``w2.i`` (R, I): 2 R (O + I + R F F) parameters. Every factor is drawn from
    a normal distribution of variance 2 / fan-in, the fan-in being R F F, O and I. With groups, I is the number of input
    channels of one group. Windows need not be square.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel_size: F, or height and width of the window.
        stride: as in :class:`torch.nn.Conv2d`.
        padding: as in :class:`torch.nn.Conv2d`, zeros.
        dilation: as in :class:`torch.nn.Conv2d`.
        groups: as in :class:`torch.nn.Conv2d`.
        bias: whether to add a learned bias; it stays dense.
        rank: rank R of the factors.
        personal: whether the weight is ``W1 * (W2 + 1)``.

    Raises:
        ConfigError: when channels do not divide into the groups.

    Source:
        Nam et al. 2022, Proposition 2; initialization of the notebook they released.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: str | int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        rank: int,
        personal: bool = False,
    ) -> None:
        if in_channels % groups or out_channels % groups:
            raise ConfigError(f"groups={groups} must divide in_channels={in_channels} and out_channels={out_channels}.")
        height, width = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
        shape = (out_channels, in_channels // groups, height, width)
        super().__init__(lambda: _Kernel(*shape, rank), out_channels, bias, rank, personal)
        self.weight_shape = shape
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups

    def extra_repr(self) -> str:
        out, inputs, height, width = self.weight_shape
        shape = f"{inputs * self.groups}, {out}, kernel_size=({height}, {width})"
        return f"{shape}, rank={self.rank}, personal={self.personal}"


def hadamard(
    module: nn.Module,
    ratio: float = 0.72,
    rank_rule: RankRule = "ratio",
    personal: bool = False,
    keep: Callable[[str], bool] = lambda path: False,
) -> nn.Module:
    """Replace every ``Conv2d`` and ``Linear`` inside a module by its Hadamard kind, freshly drawn, in place.

    Frozen layers and those without any weights stay as they are. A frozen copy of a trained part (a momentum encoder)
    is replaced as its original is, and starts with the same factors. If its values differed, both stay dense.

    Args:
        module: any network.
        ratio: how large the factors are, by the rule.
        rank_rule: how a layer's rank follows from ``ratio``: :func:`rank_for_ratio` or :func:`rank_for_gamma`.
        personal: whether weights are ``W1 * (W2 + 1)``.
        keep: says of a layer's path whether it stays as it is.

    Returns:
        The same network; or a new layer, if ``module`` is such a layer itself.

    Raises:
        ConfigError: for a convolution that pads with anything but zeros, a layer that is more than its weight (hooks,
            tied weights), a rule that there is not, or a ratio that the rule cannot use.
    """
    if rank_rule not in RANK_RULES:
        raise ConfigError(f"rank_rule={rank_rule!r} is not a rule for ranks; choose one of {', '.join(RANK_RULES)}.")
    rank = RANK_RULES[rank_rule]

    def make(layer: nn.Conv2d | nn.Linear) -> nn.Module:
        bias = layer.bias is not None
        if isinstance(layer, nn.Linear):
            out, inputs = layer.weight.shape
            return HadamardLinear(inputs, out, bias, rank=rank(out, inputs, 0, ratio), personal=personal)
        out, inputs, height, width = layer.weight.shape
        chosen = rank(out, inputs, height * width, ratio)
        window, how = (height, width), geometry(layer)
        return HadamardConv2d(layer.in_channels, out, window, **how, bias=bias, rank=chosen, personal=personal)

    return replace_layers(module, make, keep)


def hadamard_layers(module: nn.Module) -> Iterator[tuple[str, _Hadamard]]:
    """Return the Hadamard layers inside a module, by name."""
    return ((name, layer) for name, layer in module.named_modules() if isinstance(layer, _Hadamard))
