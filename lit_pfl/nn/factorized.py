"""Layers whose weight is ``W = pi(u v^T + mu)``: two factors and a mask that is kept sparse by an L1 penalty.

``mu`` is stored as ``pi(mu)``, in the weight's own layout: pi only moves entries, so the numbers, their count and
their L1 norm are those of the papers' matrix, and a forward pass needs one fused multiply-add.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_pfl.errors import ConfigError
from lit_pfl.nn.composed import ComposedConv2d, ComposedLinear, geometry
from lit_pfl.nn.replace import replace_layers
from lit_pfl.ops import low_rank_factors
from lit_pfl_callbacks.protocols import WeightParts

Form = Literal["IFxOF", "FFxIO"]
Pi = Literal["spatial", "rawview"]
Start = Literal["paper", "released", "dense"]


class _Factorized(nn.Module):
    """What both layers share.

    Attributes:
        u: (rows, rank).
        v: (columns, rank).
        mu: like the weight, zero when it is made; None without a mask.
        bias: (out,) or None.
        threshold: entries of mu below it in size count as zero wherever the model is used or sent, but not while it is
            trained.
        is_copy: whether it is a copy of another layer, such as a momentum encoder's. It has no penalty.
    """

    bias: nn.Parameter | None
    mu: nn.Parameter | None
    threshold: float = 0.0
    is_copy: bool = False

    def __init__(
        self, rows: int, columns: int, rank: int, weight_shape: tuple[int, ...], bias: bool, mask: bool
    ) -> None:
        super().__init__()
        if rank < 1:
            raise ConfigError(f"A factorized layer needs a rank of 1 or more, not {rank}.")
        self.weight_shape = weight_shape
        self.u = nn.Parameter(torch.empty(rows, rank))
        self.v = nn.Parameter(torch.empty(columns, rank))
        self.register_parameter("mu", nn.Parameter(torch.empty(weight_shape)) if mask else None)
        self.register_parameter("bias", nn.Parameter(torch.empty(weight_shape[0])) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw u and v uniformly (Xavier: Factorized-FL, released code), and zero mu (Section 4.1) and the bias."""
        nn.init.xavier_uniform_(self.u)
        nn.init.xavier_uniform_(self.v)
        for zero in (self.mu, self.bias):
            if zero is not None:
                nn.init.zeros_(zero)

    @torch.no_grad()
    def load_dense(self, weight: Tensor, bias: Tensor | None) -> None:
        """Become a dense layer: u v^T the best approximation of its weight by their rank, mu the rest.

        Without a mask that approximation is all. Columns of the factors that the weight has no use for, because their
        number is more than its rank, add nothing and can still learn: u stays as drawn, v is zero.

        Args:
            weight: of the shape of the dense layer's.
            bias: (out,), for a layer with a bias.

        Raises:
            ConfigError: when the weight holds NaN or infinity.

        Source:
            Khodak et al. 2021, spectral initialization; that mu takes the rest is of this library.
        """
        if not weight.is_meta and not weight.isfinite().all():
            raise ConfigError(f"{self}: the weight to start from holds NaN or infinity; start='paper' needs none.")
        u, v = low_rank_factors(self._matrix(weight), self.u.shape[1])
        used = u.shape[1]
        self.u[:, :used] = u.to(self.u).where((u != 0).any(0), self.u[:, :used])
        self.v.zero_()[:, :used] = v.to(self.v)
        if self.mu is not None:
            self.mu.zero_()
            self.mu.copy_(weight - self.weight)
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias)

    def _factors(self) -> tuple[Tensor, Tensor]:
        """Return u and v as tensors whose product, summed over a last dimension of size rank, is the weight."""
        raise NotImplementedError

    def _matrix(self, weight: Tensor) -> Tensor:
        """Return the matrix, (rows, columns), that pi makes a weight of."""
        raise NotImplementedError

    @property
    def sparse_mu(self) -> Tensor | None:
        """``mu`` as it is used and sent: entries below the threshold are zero (Factorized-FL, released code)."""
        if self.mu is None or not self.threshold:
            return self.mu
        return self.mu.masked_fill(self.mu.abs() < self.threshold, 0)  # times 0 would leave -0.0, which travels

    @property
    def unsent_mu(self) -> Tensor | None:
        """What :attr:`sparse_mu` leaves out of ``mu``; of an entry that is not finite, nothing."""
        return None if self.mu is None else self.mu.where(self.mu.abs() < self.threshold, 0)

    @property
    def weight(self) -> Tensor:
        """The dense weight, pi(u v^T + mu)."""
        u, v = self._factors()
        mu = self.mu if self.training else self.sparse_mu
        if self.u.shape[1] > 1:
            product = (u * v).sum(-1).view(self.weight_shape)
            return product if mu is None else product + mu
        u, v = u.squeeze(-1), v.squeeze(-1)
        if mu is None:
            return (u * v).view(self.weight_shape)
        return torch.addcmul(mu.reshape(torch.broadcast_shapes(u.shape, v.shape)), u, v).reshape(self.weight_shape)


class FactorizedLinear(_Factorized, ComposedLinear):  # type: ignore[misc, override]
    """A fully connected layer with weight ``W = u v^T + mu``.

    ``u`` is (in, rank), ``v`` (out, rank), ``mu`` (out, in), as PyTorch stores W.

    Args:
        in_features: size of each input sample, I.
        out_features: size of each output sample, O.
        bias: whether to add a learned bias; it stays dense.
        rank: number of columns of the factors.
        mask: whether there is a mu.

    Source:
        SimFed, Eq. 5; Factorized-FL, Eq. 2.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, rank: int = 1, mask: bool = True
    ) -> None:
        super().__init__(in_features, out_features, rank, (out_features, in_features), bias, mask)
        self.in_features, self.out_features = in_features, out_features

    def _factors(self) -> tuple[Tensor, Tensor]:
        return self.u.unsqueeze(0), self.v.unsqueeze(1)

    def _matrix(self, weight: Tensor) -> Tensor:
        return weight.T

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, rank={self.u.shape[1]}, mask={self.mu is not None}"


class FactorizedConv2d(_Factorized, ComposedConv2d):
    """A convolution with weight ``W = pi(u v^T + mu)``, W of shape (O, I, F, F).

    Two shapes of the factors, with a and b the row and the column in the F x F window:

    * ``IFxOF`` (SimFed): u has I*F entries, v has O*F: ``W[o, i, a, b] = u[i*F + a] v[o*F + b] + mu``;
    * ``FFxIO`` (Factorized-FL): u has F*F entries, a base filter; v one coefficient for every pair of channels:
      ``W[o, i, a, b] = u[a*F + b] v[i*O + o] + mu``.

    ``pi="rawview"`` is what the released code of Factorized-FL does to ``FFxIO``: the F*F x I*O matrix is read row by
    row as (O, I, F, F). Entries of u then scale blocks of output channels instead of places in the window.

    With groups, I is the number of input channels of one group. Windows need not be square.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel_size: F, or height and width of the window.
        stride: as in :class:`torch.nn.Conv2d`.
        padding: as in :class:`torch.nn.Conv2d`, zeros.
        dilation: as in :class:`torch.nn.Conv2d`.
        groups: as in :class:`torch.nn.Conv2d`.
        bias: whether to add a learned bias; it stays dense.
        form: shape of the factors.
        rank: number of columns of the factors.
        mask: whether there is a mu.
        pi: how the matrix of form ``FFxIO`` becomes a weight.

    Raises:
        ConfigError: for another form, and for ``pi="rawview"`` with the form ``IFxOF``.

    Source:
        SimFed, Eq. 6; Factorized-FL, Eq. 3.
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
        form: Form = "IFxOF",
        rank: int = 1,
        mask: bool = True,
        pi: Pi = "spatial",
    ) -> None:
        height, width = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
        inputs = in_channels // groups
        shapes = {
            "IFxOF": (inputs * height, out_channels * width),
            "FFxIO": (height * width, inputs * out_channels),
        }
        if form not in shapes:
            raise ConfigError(f"form={form!r} is not a shape of factors; choose one of {', '.join(shapes)}.")
        if pi == "rawview" and form != "FFxIO":
            raise ConfigError(f"pi='rawview' is a reading of form='FFxIO'; form={form!r} has pi='spatial' only.")
        super().__init__(*shapes[form], rank, (out_channels, inputs, height, width), bias, mask)
        self.form, self.pi = form, pi
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups

    def _factors(self) -> tuple[Tensor, Tensor]:
        out, inputs, height, width = self.weight_shape
        rank = self.u.shape[1]
        if self.pi == "rawview":
            return self.u.unsqueeze(1), self.v.unsqueeze(0)
        if self.form == "IFxOF":
            return self.u.view(1, inputs, height, 1, rank), self.v.view(out, 1, 1, width, rank)
        v = self.v.view(inputs, out, rank).transpose(0, 1)
        return self.u.view(1, 1, height, width, rank), v.view(out, inputs, 1, 1, rank)

    def _matrix(self, weight: Tensor) -> Tensor:
        if self.pi == "spatial":
            weight = weight.permute((1, 2, 0, 3) if self.form == "IFxOF" else (2, 3, 1, 0))
        return weight.reshape(len(self.u), len(self.v))

    def extra_repr(self) -> str:
        out, inputs, height, width = self.weight_shape
        shape = f"{inputs * self.groups}, {out}, kernel_size=({height}, {width}), form={self.form}"
        return f"{shape}, rank={self.u.shape[1]}, mask={self.mu is not None}"


def _released(new: FactorizedConv2d | FactorizedLinear, dense: nn.Conv2d | nn.Linear) -> None:
    if isinstance(new, FactorizedLinear):
        for tensor in (new.mu, new.bias):
            if tensor is not None:
                nn.init.xavier_uniform_(tensor.view(-1, tensor.shape[-1]))


#: what is done to a layer that was drawn as the paper has it, given the one that it replaces
_STARTS: dict[Start, Callable[[FactorizedConv2d | FactorizedLinear, nn.Conv2d | nn.Linear], None]] = {
    "paper": lambda new, dense: None,
    "released": _released,
    "dense": lambda new, dense: new.load_dense(dense.weight, dense.bias),
}


def factorize(
    module: nn.Module,
    form: Form = "IFxOF",
    rank: int = 1,
    mask: bool = True,
    pi: Pi = "spatial",
    threshold: float = 0.0,
    start: Start = "paper",
) -> nn.Module:
    """Replace every ``Conv2d`` and ``Linear`` inside a module by its factorized kind, in place.

    Frozen layers and those without any weights stay as they are. A frozen copy of a trained part (a momentum encoder)
    is factorized as its original is. If their values were equal, they stay so; a copy with other values keeps these,
    as by ``start="dense"``, which takes a mask: without one, it stays dense, and so does its original.

    Args:
        module: any network.
        form: shape of the factors of convolutions.
        rank: number of columns of the factors.
        mask: whether there is a mu.
        pi: how the matrices of form ``FFxIO`` become weights, see :class:`FactorizedConv2d`.
        threshold: entries of mu below it in size count as zero in evaluation mode.
        start: how the new weights start. ``paper``: mu zero (Factorized-FL), u and v drawn Xavier-uniform (the code
            that its authors released), the bias zero. ``released``: the same, but in linear layers mu and the bias are
            drawn so too, as that code does. ``dense``: as the weight and the bias that are replaced, trained or not
            (:meth:`FactorizedLinear.load_dense`).

    Returns:
        The same network; or a new layer, if ``module`` is such a layer itself.

    Raises:
        ConfigError: for a convolution that pads with anything but zeros, a layer that is more than its weight (hooks,
            tied weights), a lazy layer without its shape, a start that there is not, and a dense one from weights that
            are not finite.
    """
    if start not in _STARTS:
        raise ConfigError(f"start={start!r} is not a way to start; choose one of {', '.join(_STARTS)}.")

    def make(layer: nn.Conv2d | nn.Linear) -> nn.Module:
        new: FactorizedConv2d | FactorizedLinear
        bias = layer.bias is not None
        if isinstance(layer, nn.Linear):
            new = FactorizedLinear(layer.in_features, layer.out_features, bias, rank, mask)
        else:
            out, _, *window = layer.weight.shape
            how: dict[str, Any] = {**geometry(layer), "bias": bias, "form": form, "rank": rank, "mask": mask, "pi": pi}
            new = FactorizedConv2d(layer.in_channels, out, (window[0], window[1]), **how)
        _STARTS[start](new.to(layer.weight), layer)
        new.threshold = threshold
        return new

    return replace_layers(module, make, load=_keep_values if mask else None)


@torch.no_grad()
def _keep_values(new: nn.Module, old: nn.Module) -> None:
    """Let a frozen copy continue computing what it did: nothing of it is below a threshold."""
    assert isinstance(new, _Factorized)
    assert isinstance(old.weight, Tensor)
    new.threshold = 0.0
    new.load_dense(old.weight, old.bias)  # type: ignore[arg-type]


def factorized_layers(module: nn.Module) -> Iterator[tuple[str, _Factorized]]:
    """Return the factorized layers inside a module, by name."""
    return ((name, layer) for name, layer in module.named_modules() if isinstance(layer, _Factorized))


def factorized_parts(module: nn.Module) -> dict[str, WeightParts]:
    """Return what the weights of factorized layers are made of, by the layer's name.

    That is mu, as it is used and sent, and the factors u and v.
    """
    return {
        name: WeightParts(None if layer.sparse_mu is None else layer.sparse_mu.detach(), (layer.u, layer.v))
        for name, layer in factorized_layers(module)
    }


def l1_norm_of_masks(module: nn.Module) -> Tensor:
    """Return the sum of ``|mu|`` over all factorized layers, a scalar with a gradient (SimFed, Eq. 7).

    Frozen copies of layers, which nothing minimizes, are left out.
    """
    layers = [layer for _, layer in factorized_layers(module) if not layer.is_copy]
    norms = [layer.mu.abs().sum() for layer in layers if layer.mu is not None]
    return torch.stack(norms).sum() if norms else torch.zeros(())
