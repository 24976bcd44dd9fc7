"""How the weights of a learner are factorized, what that adds to its objective, and what of it is sent."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jsonargparse.typing import NonNegativeFloat, PositiveInt
from torch import Tensor, nn

from lit_pfl.errors import ConfigError, within_memory
from lit_pfl.nn import Form, Pi, Start, factorize, factorized_layers, l1_norm_of_masks
from lit_pfl.ops import soft_threshold


@dataclass(frozen=True)
class Factorization:
    """Weights ``pi(u v^T + mu)`` instead of dense ones.

    Args:
        form: shape of a convolution's factors, ``IFxOF`` (SimFed) or ``FFxIO`` (Factorized-FL).
        rank: number of columns of u and v.
        mask: whether there is a mu.
        l1: weight of the L1 norm of mu in the objective, lambda.
        l1_mode: how the norm is minimized. ``subgradient``: as part of the loss; mu gets small, never exactly zero.
            ``proximal``: every optimizer step is followed by soft thresholding at lambda times the learning rate.
            ``inert``: not at all, as in Factorized-FL's released code, whose penalty has no gradient.
        threshold: entries of mu below it in size count as zero wherever the model is used or sent.
        below_threshold: what becomes of these entries where mu is sent. ``keep``: they are kept local and are added to
            the reply, so that they grow on until they are sent (error feedback). ``send``: they are sent all the same;
            the threshold is for using the model only, as in Factorized-FL's released code.
        pi: how the matrices of form ``FFxIO`` become weights, see :class:`~lit_pfl.nn.FactorizedConv2d`.
        start: how weights start. ``dense``: as those of the dense network of the same seed, u v^T their best
            approximation of this rank and mu the rest; without a mask the approximation only. ``paper``: mu zero,
            as Factorized-FL says, u and v drawn Xavier-uniform, as in its released code. ``released``: the same, but mu
            and the bias of linear layers drawn so too, as in that code. Papers that do not say (SimFed) get ``dense``:
            a weight of rank 1 learns slowly until mu has grown.

    Source:
        Error feedback: Seide et al. 2014; Karimireddy et al. 2019.
    """

    form: Form = "IFxOF"
    rank: PositiveInt = 1
    mask: bool = True
    l1: NonNegativeFloat = 1e-4
    l1_mode: Literal["subgradient", "proximal", "inert"] = "subgradient"
    threshold: NonNegativeFloat = 0.0
    below_threshold: Literal["keep", "send"] = "keep"
    pi: Pi = "spatial"
    start: Start = "dense"

    @property
    def penalizes(self) -> bool:
        """Whether the L1 norm of mu is a part of the loss."""
        return self._l1 > 0 and self.l1_mode == "subgradient"

    @property
    def _l1(self) -> float:
        return self.l1 if self.mask else 0.0

    def factorize(self, module: nn.Module) -> None:
        """Factorize every ``Conv2d`` and ``Linear`` of a module, in place.

        Raises:
            ConfigError: when there is none that is trained; see also :func:`~lit_pfl.nn.factorize`.
        """
        with within_memory(f"model.factorization.rank={self.rank}"):
            factorize(module, self.form, self.rank, self.mask, self.pi, self.threshold, self.start)
        if next(factorized_layers(module), None) is None:
            raise ConfigError(
                f"model.factorization: {type(module).__name__} has no two-dimensional convolution and no linear layer "
                "that is trained; leave it out (model.factorization=null)."
            )

    def penalty(self, module: nn.Module) -> Tensor:
        """Return ``l1 * sum |mu|``."""
        return self._l1 * l1_norm_of_masks(module)

    def shrink_after_steps(self, optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
        """Let every step of an optimizer be followed by the proximal one, if that is how the norm is minimized."""
        if self._l1 and self.l1_mode == "proximal":
            masks = {id(layer.mu) for _, layer in factorized_layers(module)}
            optimizer.register_step_post_hook(lambda optimizer, *_: _shrink(optimizer, masks, self._l1))

    def masks(self, module: nn.Module, names: Iterable[str]) -> list[str]:
        """Return those names of a module's tensors that are a mu."""
        wanted = set(names)
        return [mu for name, _ in factorized_layers(module) if (mu := f"{name}.mu") in wanted]

    @torch.no_grad()
    def sent(self, module: nn.Module, shared: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what is sent of a module's shared tensors: of every mu what the threshold leaves."""
        return {**shared, **self._parts(module, shared, "sparse_mu")}

    @torch.no_grad()
    def unsent(self, module: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
        """Return what is kept local of every mu among these tensors, to be added to what comes back.

        No memory is needed for it: until a reply is loaded, it is what mu has below the threshold.
        """
        return self._parts(module, names, "unsent_mu")

    def _parts(self, module: nn.Module, names: Iterable[str], part: str) -> dict[str, Tensor]:
        if not self.threshold or self.below_threshold == "send":
            return {}
        wanted = set(names)
        layers = {f"{name}.mu": layer for name, layer in factorized_layers(module) if f"{name}.mu" in wanted}
        return {name: mu for name, layer in layers.items() if (mu := getattr(layer, part)) is not None}


@torch.no_grad()
def _shrink(optimizer: torch.optim.Optimizer, masks: set[int], l1: float) -> None:
    """Take the proximal step of ``l1 * sum |mu|`` after a gradient step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in masks and parameter.grad is not None:  # a frozen one took no step
                parameter.copy_(soft_threshold(parameter, l1 * group["lr"]))
