"""What methods have in common whose clients train a second, personal model next to the common one."""

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lit_pfl.core import Client
from lit_pfl.core.sharing import EVERYTHING
from lit_pfl.learners import call_hook, extend, silenced, single_optimizer, without_gradients
from lit_pfl.lightning_internals import own_copy


class TwoModels(Client):
    """A client with two learners: ``learner``, which is averaged as in FedAvg, and ``personal``, which is never sent.

    ``personal`` starts as a copy of the learner and is what is evaluated. One optimizer steps on one loss, the sum of
    both learners' losses on the same batch, so that every step of the Trainer is one step of each. What is done to one
    must not be felt by the other: a subclass detaches where the losses meet; gradients are clipped for each alone;
    and both see the same random numbers (``torch_state_kept``), those that either would see alone. Then ``learner`` is
    that of FedAvg with the same weighting bit for bit, with every optimizer that treats parameters one by one.

    The training loss that is reported is the sum. What the personal learner logs in training is not shown.
    """

    shares = EVERYTHING

    personal: L.LightningModule

    def configure_state(self) -> None:
        self.personal = own_copy(self.learner)

    @property
    def learners(self) -> dict[str, L.LightningModule]:
        return {"learner": self.learner, "personal": self.personal}

    @property
    def scored(self) -> L.LightningModule:
        return self.personal

    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        names = {id(weight): name for name, weight in self.learner.named_parameters()}
        extend(single_optimizer(configured), lambda weight: self.personal.get_parameter(names[id(weight)]))
        return configured

    @abstractmethod
    def objective(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the sum of both learners' losses on a batch; here only that of the common one."""
        return super().objective(batch, batch_idx)

    def personal_loss(self, batch: Any, batch_idx: int) -> Tensor:
        """Return what the personal learner minimizes on its own, see :meth:`Client.loss`."""
        with silenced(self.personal):
            return self.loss(self.personal, batch, batch_idx)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip each learner's gradients by themselves, as if it were trained alone: as it says itself, if it does."""
        own = is_overridden("configure_gradient_clipping", self.learner)
        if not own and not gradient_clip_val:
            return
        clip = nn.utils.clip_grad_value_ if gradient_clip_algorithm == "value" else nn.utils.clip_grad_norm_
        trained = [weight for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None]
        for name, weights in self._by_learner(trained).items():
            if not own:
                clip(weights, gradient_clip_val)  # type: ignore[arg-type]
                continue
            with without_gradients(set(trained).difference(weights)):  # which are in the optimizer too
                call_hook(
                    self.learners.get(name, self.learner),
                    "configure_gradient_clipping",
                    optimizer,
                    gradient_clip_val=gradient_clip_val,
                    gradient_clip_algorithm=gradient_clip_algorithm,
                    muted=name != "learner",
                )

    def _by_learner(self, weights: Iterable[Tensor]) -> dict[str, list[Tensor]]:
        """Return weights by the name of their learner, under an empty name what is of neither."""
        owner = {weight: name for name, learner in self.learners.items() for weight in learner.parameters()}
        found: dict[str, list[Tensor]] = {}
        for weight in weights:
            found.setdefault(owner.get(weight, ""), []).append(weight)  # type: ignore[call-overload]
        return found
