"""A LightningModule around another one, the learner: a Trainer trains both as it would the learner alone."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lit_pfl.data import ClientData
from lit_pfl.errors import ConfigError
from lit_pfl.learners import (
    ImageClassifier,
    LossTally,
    SkipBatch,
    call_hook,
    call_step,
    check_callbacks,
    hand_on,
    hand_on_evaluation,
    place_checkpoints,
    size_of,
    taken_out,
    training_outputs,
)
from lit_pfl.lightning_internals import QuickModule, hand_down_trainer, hand_up_hparams, lend_data, name_metrics


def one_process(module: L.LightningModule, why: str) -> str:
    """Return the words that a module cannot be trained by several processes."""
    return (
        f"{type(module).__name__} {why}, and each of this Trainer's {module.trainer.world_size} processes has a part "
        "of the data; give Trainer(devices=1)."
    )


class LearnerModule(QuickModule, ABC):
    """Trains a learner by an objective, on data of its own if it is given any.

    Attributes:
        learner: what is trained.
        data: the data; None where the Trainer has the loaders.
        alone: whether a Trainer is given this module without a federation around it: nobody collects its losses.
        loss_tally: the losses of the batches so far.
        checkpoint_folder: where the learner's own callbacks write checkpoints; None: where they say.
    """

    learner: L.LightningModule
    data: ClientData | None

    def __init__(self) -> None:
        super().__init__()
        self.data = None
        self.alone = False
        self.loss_tally = LossTally()
        self.checkpoint_folder: Callable[[], Path] | None = None
        self._outputs: Mapping[str, Any] = {}  # of the training_step of the batch, if it is a dict

    # ------------------------------------------------------------------------------------- what a method may override

    @property
    def learners(self) -> dict[str, L.LightningModule]:
        """The learners by name: ``learner``, whose tensors may be sent, and others that a method adds."""
        return {"learner": self.learner}

    def training_data(self) -> Any:
        """Return the batches to train on; a method may hold some of them back.

        Raises:
            ConfigError: at a site of several processes, each of which has a part of them.
        """
        if self.data is not None:
            return self.data.train
        if self.trainer.world_size > 1:
            raise ConfigError(one_process(self, "looks at all of its training data"))
        if self.trainer.sanity_checking:  # before a Trainer of one's own has made its loader
            self.trainer.fit_loop.setup_data()
        return self.trainer.train_dataloader

    def objective(self, batch: Any, batch_idx: int) -> Tensor:
        """Return what is minimized on a batch; by default the learner's loss."""
        return self.loss(self.learner, batch, batch_idx)

    def loss(self, learner: L.LightningModule, batch: Any, batch_idx: int) -> Tensor:
        """Return what a learner minimizes on its own: its own training loss, :meth:`penalized`.

        Raises:
            SkipBatch: when its ``training_step`` returns None.
        """
        # a method with an objective of its own may call further learners on the batch, or look at it itself
        keep = type(self).objective is not LearnerModule.objective
        loss, outputs = training_outputs(learner, batch, batch_idx, keep)
        if outputs and (learner is self.learner or not self._outputs):
            self._outputs = outputs
        return self.penalized(loss, learner)

    def penalized(self, loss: Tensor, learner: nn.Module) -> Tensor:
        """Return a learner's loss with what is added for its weights; by default nothing is."""
        return loss

    @property
    def scored(self) -> L.LightningModule:
        """The learner that is the personalized model, inside of :meth:`personalized`."""
        return self.learner

    @contextmanager
    def personalized(self) -> Iterator[L.LightningModule]:
        """Make ``scored`` the personalized model; put it back afterwards. By default it is at any time."""
        yield self.scored

    # --------------------------------------------------------------------------------------------------------- training

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the objective of a batch, next to what else the learner returns, or None where it skips the batch.

        A learner that steps its optimizers itself does that here, and returns what it returns.
        """
        size = size_of(batch)  # before a step that takes the batch apart
        if not self.automatic_optimization:
            outputs = call_step(self.learner, "training_step", batch, batch_idx)
            self.note_loss(outputs.get("loss") if isinstance(outputs, Mapping) else outputs, size)
            return outputs
        try:
            loss = self.objective(batch, batch_idx)
        except SkipBatch:
            self._outputs = {}
            return None
        if loss is None:
            raise ConfigError(f"{type(self).__name__}.objective returns None; it must return the loss of the batch.")
        self.note_loss(loss, size)
        outputs, self._outputs = self._outputs, {}
        return {**outputs, "loss": loss} if outputs else loss

    def note_loss(self, loss: Any, size: int) -> None:
        """Take note of the loss of a batch of this many samples, if it is one."""
        if not self.alone:  # a federation collects them, nobody else does
            self.loss_tally.note(loss, size)

    # ------------------------------------------------------------------------------------------------- under a Trainer

    @abstractmethod
    def configure_model(self) -> None:
        """Get ready for a Trainer: see that there is a learner, and call :meth:`wire_hooks`."""

    def wire_hooks(self) -> None:
        """Hand what a Trainer asks of this module on to the learners. All of them are there."""
        hand_down_trainer(self)
        for name, learner in self.learners.items():
            name_metrics(learner, f"{name}.")
        hand_on(self, self.learners, self.scored, LearnerModule, self.alone)
        if self.alone:
            hand_up_hparams(self.learner, self)
            hand_on_evaluation(self, self.scored, self.personalized)

    def configure_callbacks(self) -> Any:
        """Get ready for a Trainer, of all hooks in the one before Lightning looks which steps there are."""
        self.configure_model()
        callbacks = call_hook(self.learner, "configure_callbacks")
        several = callbacks if isinstance(callbacks, Sequence) else [callbacks]
        if not self.alone:
            check_callbacks(several, f"model.learner: {type(self.learner).__name__}.configure_callbacks")
        if self.checkpoint_folder is not None:
            place_checkpoints(several, self.checkpoint_folder)
        return callbacks

    def setup(self, stage: str) -> None:
        """Let the learner find the client's own data module where it has one: ``self.trainer.datamodule``."""
        # Not before: a Trainer that is given one prepares it and sets it up, as has been done.
        self._lend_data()

    def on_fit_end(self) -> None:
        """Take the data module away from the Trainer, which would tear it down."""
        if self.data is not None and self.data.module is not None:
            lend_data(self.trainer, None)

    def teardown(self, stage: str) -> None:
        """Let the learner find the client's own data module again: it may be scored further."""
        self._lend_data()

    def _lend_data(self) -> None:
        if self.data is not None and self.data.module is not None:
            lend_data(self.trainer, self.data.module)

    @L.LightningModule.strict_loading.getter  # type: ignore[attr-defined]
    def strict_loading(self) -> bool:
        """Whether a checkpoint has to hold every tensor, and no other; the learner may say that it need not."""
        return super().strict_loading and (self.learner is None or self.learner.strict_loading)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load tensors; the learners load theirs as without a method around them, under their own names.

        Some have a ``load_state_dict`` of their own, or modules with whole names in ``_load_from_state_dict``.
        """
        made = {name: learner for name, learner in self.learners.items() if learner is not None}
        own = {name: learner for name, learner in made.items() if learner is self._modules.get(name)}
        rest, metadata = OrderedDict(state_dict), getattr(state_dict, "_metadata", {})
        rest._metadata = metadata  # type: ignore[attr-defined]
        missing: list[str] = []
        unexpected: list[str] = []
        for name, learner in own.items():
            prefix = f"{name}."
            theirs = OrderedDict(taken_out(rest, name))
            theirs._metadata = {  # type: ignore[attr-defined]
                key.removeprefix(name).removeprefix("."): value
                for key, value in metadata.items()
                if key == name or key.startswith(prefix)
            }
            found = learner.load_state_dict(theirs, strict, **({"assign": True} if assign else {}))
            if found is not None:  # as from one of somebody's own
                missing += [prefix + key for key in found.missing_keys]
                unexpected += [prefix + key for key in found.unexpected_keys]
        modules = self._modules
        self._modules = {name: part for name, part in modules.items() if name not in own}
        try:
            found = super().load_state_dict(rest, strict, assign)
        finally:
            self._modules = modules
        return type(found)(missing + found.missing_keys, unexpected + found.unexpected_keys)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the learner."""
        return self.scored(*args, **kwargs)

    def place_on(self, device: torch.device) -> None:
        """Move to a device, and take the memory layout that suits it."""
        self.to(device)
        for learner in self.learners.values():
            if isinstance(learner, ImageClassifier):
                learner.lay_out()
