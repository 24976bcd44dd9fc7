"""APFL: every client's model is a mixture of the global model and one of its own."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor, nn

from lit_pfl.core.server import Weighting
from lit_pfl.errors import ConfigError
from lit_pfl.learners import (
    Mixture,
    Step,
    call_with,
    forward_changed,
    holding,
    network_of,
    refuse_scaled_gradients,
    silenced,
)
from lit_pfl.methods.two_models.base import TwoModels
from lit_pfl_callbacks.random_state import torch_state_kept
from lit_pfl_callbacks.tensors import evaluating


class APFL(TwoModels):
    """Next to FedAvg's model w, every client trains a model v such that ``alpha * v + (1 - alpha) * w`` suits its data.

    On every batch w takes FedAvg's step; v takes one with the gradient of the mixture's loss by v, which is ``alpha *
    grad f(alpha * v + (1 - alpha) * w)``, at v and w as they were before either step, as in the paper's Algorithm 1
    (some codes take w's step first; in FL-bench's w takes it twice). w does not feel that loss. What is evaluated is
    the mixture. With ``alpha=0`` that is FedAvg's model of the same weighting, with ``alpha=1`` Stand-Alone's, bit for
    bit.

    Weight decay and the L1 norm of a factorization apply to v, not to the mixture.

    Args:
        alpha: the weight of the personal model, from 0 to 1; where it starts, if ``adaptive``.
        adaptive: whether every client learns its alpha: on the first batch of a round it takes a step of its own, with
            the optimizer's learning rate, against the gradient of the mixture's loss by alpha, with parameters
            ``<v - w, grad f(mixture)>``, and is cut to 0 and 1. The batch itself still uses the former alpha. The
            authors' code adds 0.02 alpha to that gradient, and mixes the gradients of both networks in it.
        mixing: what is mixed: ``parameters``, as in the paper, or ``logits``, as in its released code: what the
            learners' ``forward`` returns. By default parameters, but logits for networks with batch norm, whose running
            statistics then are each network's own. With parameters, ``personal`` keeps those of the mixture, which
            follow it as it trains and are never sent: the mean of two networks' statistics is not those of their mean.
        weighting: the mean of the global models: by numbers of ``samples``, as in FedAvg, or ``uniform``, as in the
            paper and its released code.
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: for an alpha outside 0 to 1, or an adaptive one with ``trainer.precision=16-mixed``.

    Source:
        Deng et al. 2020, Algorithm 1 and its adaptive alpha.
    """

    needs_automatic = "steps two models on one loss"

    alpha: Tensor

    def __init__(
        self,
        alpha: float = 0.5,
        adaptive: bool = False,
        mixing: Literal["parameters", "logits"] | None = None,
        weighting: Weighting = "samples",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.weighting = weighting
        if not 0 <= alpha <= 1:
            raise ConfigError(f"model.alpha={alpha}: give a weight from 0, the global model, to 1, the personal one.")
        self.first_alpha, self.adaptive, self.mixing = alpha, adaptive, mixing
        self._adapts = False

    def configure_state(self) -> None:
        super().configure_state()
        self.register_buffer("alpha", torch.tensor(float(self.first_alpha)))
        if self.mixing is None:
            has_batch_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.learner.modules())
            self.mixing = "logits" if has_batch_norm else "parameters"

    def configure_optimizers(self) -> Any:
        if self.adaptive:
            refuse_scaled_gradients(self.trainer, "APFL with model.adaptive=true")
        return super().configure_optimizers()

    def begin_round(self) -> None:
        self._adapts = self.adaptive

    def objective(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the sum of the global model's loss, felt by w alone, and of the mixture's, felt by v alone."""
        alpha = self.alpha.clone().requires_grad_(self._adapts)
        outputs: list[Tensor] = []
        with torch_state_kept(), self._watched(outputs):
            common = self.loss(self.learner, batch, batch_idx)
        if self.mixing == "parameters":
            personal = self._at_mixed_parameters(alpha, batch, batch_idx)
        else:
            self._check_outputs(outputs)
            with self._mixed_outputs(alpha, iter(outputs)):
                personal = self.personal_loss(batch, batch_idx)
        if self._adapts:
            self._adapt(personal, alpha)
        return common + personal

    def _at_mixed_parameters(self, alpha: Tensor, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of the personal learner with mixed parameters; only v and alpha get gradients."""
        with silenced(self.personal):
            loss = call_with(self._mixture(alpha, "learner."), Step(self.personal), batch, batch_idx)
        return self.penalized(loss, self.personal)

    def _mixture(self, alpha: Tensor, prefix: str = "") -> dict[str, Tensor]:
        w = dict(self.learner.named_parameters())
        return {
            prefix + name: alpha * v + (1 - alpha) * w[name].detach() for name, v in self.personal.named_parameters()
        }

    def _watched(self, outputs: list[Tensor]) -> AbstractContextManager[None]:
        """Keep what the common learner's ``forward`` returns."""
        if self.mixing == "parameters":
            return nullcontext()

        def watched(output: Any, *args: Any, **kwargs: Any) -> Any:
            outputs.append(output)
            return output

        return forward_changed(self.learner, watched)

    def _mixed_outputs(self, alpha: Tensor, common: Iterator[Tensor]) -> AbstractContextManager[None]:
        """Let the personal learner's ``forward`` return the mixture of its own output and the common learner's."""

        def mixed(output: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return alpha * output + (1 - alpha) * next(common).detach()

        return forward_changed(self.personal, mixed)

    def _check_outputs(self, outputs: list[Tensor]) -> None:
        if not outputs or not all(isinstance(output, Tensor) for output in outputs):
            raise ConfigError(
                "model.mixing=logits mixes the tensors that forward returns, and the steps of "
                f"{type(self.learner).__name__} do not call it, or get something else; use model.mixing=parameters."
            )

    def _adapt(self, loss: Tensor, alpha: Tensor) -> None:
        [gradient] = torch.autograd.grad(loss, alpha, retain_graph=True)
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        with torch.no_grad():
            self.alpha.sub_(rate * gradient).clamp_(0, 1)
        self._adapts = False

    def standalone(self) -> nn.Module:
        if self.mixing == "parameters":
            return super().standalone()
        return Mixture(network_of(self.personal), network_of(self.learner), self.alpha)

    @contextmanager
    def personalized(self) -> Iterator[L.LightningModule]:
        """Put the mixture in the personal learner's place."""
        if self.mixing == "parameters":
            with torch.no_grad():
                mixture = self._mixture(self.alpha)
            with holding(self.personal, mixture):
                yield self.personal
        else:

            def mixed(output: Tensor, *args: Any, **kwargs: Any) -> Tensor:
                self._check_outputs([output])
                return self.alpha * output + (1 - self.alpha) * self.learner(*args, **kwargs)

            with evaluating(self.learner), forward_changed(self.personal, mixed):
                yield self.personal
