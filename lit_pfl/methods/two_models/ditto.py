"""Ditto: personal models held near the global one."""

from typing import Any, Literal

import torch
from jsonargparse.typing import NonNegativeFloat, PositiveInt
from torch import Tensor

from lit_pfl.core.server import Weighting
from lit_pfl.learners import single_optimizer
from lit_pfl.methods.partial.phases import check_epochs
from lit_pfl.methods.two_models.base import TwoModels
from lit_pfl.ops import squared_distance
from lit_pfl_callbacks.random_state import torch_state_kept


class Ditto(TwoModels):
    """Next to FedAvg's model w, every client trains a model v of its own, on its loss and ``lam/2 * |v - w_t|^2``.

    w_t is the global model as the round starts (with the client's own classifier, where it is kept local). On every
    batch w takes FedAvg's step, and v one with the gradient ``grad f(v) + lam * (v - w_t)``. What is evaluated is v.
    With ``lam=0`` it is Stand-Alone's model. Whatever lam, w is that of FedAvg with the same weighting, bit for bit.

    Args:
        lam: how strongly v is drawn to the global model, the paper's lambda (grid 0.05 to 2). FedSLR: 0.1.
        schedule: ``interleaved``: as above. ``separate``, FedSLR's: a round's first local epochs train w alone, its
            last ``personal_epochs`` v alone, and the pull comes after each of v's steps, as a step of its own:
            ``v <- v - lr * lam * (v - w_t)``.
        personal_epochs: how many of a round's local epochs train v, in ``separate``.
        weighting: the mean of the global models: ``uniform``, as in the authors' code, or by numbers of ``samples``, as
            in FedAvg.
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: when a round has no epoch left for w.

    Source:
        Li et al. 2021, Algorithm 1.
    """

    needs_automatic = "steps two models on one loss"

    def __init__(
        self,
        lam: NonNegativeFloat = 1.0,
        schedule: Literal["interleaved", "separate"] = "interleaved",
        personal_epochs: PositiveInt = 1,
        weighting: Weighting = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.lam, self.schedule, self.personal_epochs = lam, schedule, personal_epochs
        self.weighting = weighting
        self._trains_common = self._trains_personal = True

    def configure_state(self) -> None:
        super().configure_state()
        if self.schedule == "separate":
            check_epochs(self.spec.local_epochs, self.personal_epochs, "model.personal_epochs", "global model")

    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        if self.schedule == "separate":
            optimizer = single_optimizer(configured)
            optimizer.register_step_post_hook(lambda optimizer, *_: self._pull(optimizer.param_groups[0]["lr"]))
        return configured

    def begin_round(self) -> None:
        """Note w_t, with what of it is not sent."""
        self.received = {name: weight.detach().clone() for name, weight in self.learner.named_parameters()}

    def begin_epoch(self, epoch: int, local_epochs: int) -> None:
        if self.schedule == "separate":
            check_epochs(local_epochs, self.personal_epochs, "model.personal_epochs", "global model")
            self._trains_personal = epoch >= local_epochs - self.personal_epochs
            self._trains_common = not self._trains_personal

    def objective(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the sum of what the learners minimize that train in this epoch."""
        losses = []
        if self._trains_personal:
            with torch_state_kept():
                losses.append(self.personal_loss(batch, batch_idx))
            if self.lam and self.schedule == "interleaved":
                distance = squared_distance(dict(self.personal.named_parameters()), self.received)
                losses.append(self.lam / 2 * distance)
        if self._trains_common:
            losses.append(super().objective(batch, batch_idx))
        return torch.stack(losses).sum()

    @torch.no_grad()
    def _pull(self, lr: float) -> None:
        stepped = any(v.grad is not None for v in self.personal.parameters())  # not so after a batch that is skipped
        if self._trains_personal and stepped:
            for name, v in self.personal.named_parameters():
                v.sub_(lr * self.lam * (v - self.received[name]))
