"""What a client minimises, and when its rounds begin and end."""

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lit_pfl.errors import ConfigError
from lit_pfl.learners import SkipBatch, call_step, set_schedules_to, size_of, training_outputs
from lit_pfl.learners.scoring import mean_loss
from lit_pfl.lightning_internals import QuickModule
from lit_pfl.nn.factorization import Factorization


class Training(QuickModule):
    """The part of a client that trains: a method says what is minimised, and what happens between rounds."""

    learner: L.LightningModule
    data: Any
    factorization: Factorization | None
    reset_optimizer: bool
    scheduler_counts: str
    frozen: dict[str, nn.Parameter]
    notice_unfrozen: Callable[[], None]

    def __init__(self) -> None:
        super().__init__()
        self.completed_rounds = 0  # of the federation, which keeps it up to date
        self.epoch_ended = False
        self.alone = False  # whether a Trainer is given this client by itself
        self._losses: list[tuple[Tensor, int]] = []
        self._outputs: Mapping[str, Any] = {}  # of the training_step of the batch, if it is a dict
        self._known: frozenset[str] = frozenset()  # the learner's tensors when it was settled what travels

    @property
    def min_local_epochs(self) -> int:
        """The fewest local epochs that a round of this method has room for; the federation's default."""
        return 1

    def training_data(self) -> Any:
        """Return the batches to train on; a method may hold some of its training data back."""
        if self.data is not None:
            return self.data.train
        if self.trainer.sanity_checking:  # before a Trainer of one's own has made its loader
            self.trainer.fit_loop.setup_data()
        return self.trainer.train_dataloader

    def start_epoch(self, epoch: int, local_epochs: int) -> None:
        """Call :meth:`begin_round` at the first of a round's local epochs, and :meth:`begin_epoch` at each.

        :class:`~lit_pfl_callbacks.FederatedLoop` calls this, which knows where rounds begin.
        """
        self.epoch_ended = False
        if epoch == 0:
            self._refuse_new_tensors()
            if self.reset_optimizer:
                for optimizer in self.trainer.optimizers:
                    optimizer.state.clear()
            if self.scheduler_counts == "rounds":
                set_schedules_to(self.completed_rounds, local_epochs, self.trainer)
            self.begin_round()
        self.begin_epoch(epoch, local_epochs)

    def _refuse_new_tensors(self) -> None:
        """Refuse what the learner has made in its ``setup``, once: it would stay at home without a word."""
        made = self.learner.state_dict().keys() - self._known if self._known else ()
        if made:
            raise ConfigError(
                f"model.learner: {type(self.learner).__name__} makes {min(made)!r} in setup(), after it is settled "
                "what travels; make its layers in __init__ or configure_model."
            )
        self._known = frozenset()

    def end_epoch(self, epoch: int, local_epochs: int) -> None:
        """Call the learner's ``on_train_epoch_end``, and :meth:`end_round` at the last of a round's local epochs.

        A Trainer of one's own calls that hook after those of its callbacks, and so after the upload. But what is
        uploaded, and what is scored and saved while the client sleeps, has to be of an epoch that is over.
        """
        self.on_train_epoch_end()
        self.epoch_ended = True
        if epoch == local_epochs - 1:
            self.end_round()

    def begin_round(self) -> None:
        """Prepare for a round's training; the reply is loaded."""

    def begin_epoch(self, epoch: int, local_epochs: int) -> None:
        """Prepare for a local epoch, counted from 0 in every round of ``local_epochs``."""

    def end_round(self) -> None:
        """Finish a round's training; :meth:`upload` comes next."""

    def loss(self, learner: L.LightningModule, batch: Any, batch_idx: int) -> Tensor:
        """Return what a learner minimises by itself: its own training loss, and ``l1 * sum |mu|`` if it is factorized.

        Raises:
            SkipBatch: when its ``training_step`` returns None.
        """
        loss, outputs = training_outputs(learner, batch, batch_idx)
        if outputs and (learner is self.learner or not self._outputs):
            self._outputs = outputs
        return self.penalized(loss, learner)

    def penalized(self, loss: Tensor, learner: nn.Module) -> Tensor:
        """Return a loss with the L1 norm of a learner's masks, if it is factorized."""
        f = self.factorization
        return loss + f.penalty(learner) if f is not None and f.penalizes else loss

    def objective(self, batch: Any, batch_idx: int) -> Tensor:
        """Return what is minimised on a batch; a method adds to it."""
        return self.loss(self.learner, batch, batch_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | dict[str, Any] | None:
        """Return the objective of a batch, beside what else the learner returns, or None where it skips the batch."""
        if self.frozen:
            self.notice_unfrozen()
        if not self.automatic_optimization:
            return self._manual_step(batch, batch_idx)
        try:
            loss = self.objective(batch, batch_idx)
        except SkipBatch:
            self._outputs = {}
            return None
        if not self.alone:  # a federation collects them, nobody else does
            self.note_loss(loss.detach(), size_of(batch))
        if not self._outputs:
            return loss
        outputs, self._outputs = self._outputs, {}
        return {**outputs, "loss": loss}

    def _manual_step(self, batch: Any, batch_idx: int) -> Any:
        """Let the learner take its steps itself, and take note of the loss that it returns, if it does."""
        outputs = call_step(self.learner, "training_step", batch, batch_idx)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not self.alone and isinstance(loss, Tensor) and loss.numel() == 1:
            self.note_loss(loss.detach().reshape(()), size_of(batch))
        return outputs

    def note_loss(self, loss: Tensor, size: int) -> None:
        """Take note of the loss of a batch of so many samples."""
        # Kept here, on the device: one self.log costs as much as a small network's step.
        self._losses.append((loss, size))

    def release_round_state(self) -> tuple[float, int]:
        """Drop what the next round does not need; the upload is handed over.

        Returns:
            The sum of the training loss over the samples of this round, and their number.
        """
        for parameter in self.parameters():
            parameter.grad = None
        if not self._losses:
            return 0.0, 0
        losses = torch.stack([loss for loss, _ in self._losses]).tolist()
        sizes = [size for _, size in self._losses]
        self._losses.clear()
        return sum(loss * size for loss, size in zip(losses, sizes, strict=True)), sum(sizes)

    def require_loss(self) -> None:
        """See that a learner with manual optimization returns a loss, for a method that compares losses.

        Raises:
            ConfigError: when it returns none.
        """
        if self.automatic_optimization or mean_loss(self.learner, islice(self.training_data(), 1))[0]:
            return
        raise ConfigError(
            f"model.learner: training_step of {type(self.learner).__name__} returns no loss, and "
            f"{type(self).__name__} compares losses; let it return one."
        )

    def mean_loss(self, batches: Any) -> float:
        """Return the learner's mean training loss on batches, in evaluation mode, as it is now."""
        return mean_loss(self.learner, batches)[1]
