"""A Trainer for clients that have none yet."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import lightning as L
import torch
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.nn.parameter import is_lazy

from lit_pfl.core import Client
from lit_pfl.engines.frozen import share_frozen
from lit_pfl.engines.greenlets import LocalHub
from lit_pfl.engines.trainers import AlreadyJoined, client_trainer
from lit_pfl.errors import ConfigError
from lit_pfl.learners import call_hook
from lit_pfl.learners.scoring import STAGES, score
from lit_pfl.learners.trying import on_first, try_step
from lit_pfl.learners.unchanged import put_back
from lit_pfl.lightning_internals import (
    LateLoader,
    MemoryCheckpointIO,
    forget_scores,
    lend_data,
    lend_training,
    lent_trainer,
    show_progress,
)
from lit_pfl.randomness import random_state_kept

if TYPE_CHECKING:
    from lit_pfl.engines.work import Work

NOTHING: Mapping[str, Any] = MappingProxyType({})
#: a learner's hooks at the start of a fit, with what they are given
STARTS: dict[str, dict[str, str]] = {"setup": {"stage": "fit"}, "on_fit_start": {}, "on_train_start": {}}
#: those of them that come before a client joins
BEFORE = ("setup", "on_fit_start")


class Visitors:
    """Lends clients that have not trained a Trainer like their own, one after another: learners ask it how things are.

    It has been at the start of a fit, of a client that never trains: it has that one's optimizers, schedules and data.

    Args:
        work: how clients and their Trainers are made.

    Attributes:
        sets: whether learners set tensors before a fit begins, of which some may be a client's own; None at first.
    """

    def __init__(self, work: "Work") -> None:
        self._work = work
        self._trainer: L.Trainer | None = None
        self._twin: Client | None = None
        self._begun: WeakSet[Client] = WeakSet()
        self._set_up: WeakSet[Client] = WeakSet()
        self._needs_start: bool | None = None  # not known yet
        self.sets: bool | None = None

    @contextmanager
    def lent(self, client: Client, state: Mapping[str, Any] = NOTHING, joins: bool = False) -> Iterator[None]:
        """Let a client have a Trainer for a while: its own if it has one.

        Args:
            client: the client.
            state: its last checkpoint, if it has trained.
            joins: whether it is asked what it sends on joining; nothing is logged then. Otherwise it is scored.
        """
        if client._trainer is not None:
            yield
            return
        if self._trainer is None:
            with as_at_first(self._work.trainer):
                self._trainer = self._started(client)
        assert client.data is not None
        trainer, outer = self._trainer, self._work.trainer
        show_progress(trainer, state, self._groups)
        trainer.strategy.connect(client)
        lend_data(trainer, client.data.module)
        if not joins:  # who joins without a look at its data is like others
            with suppress(ConfigError):  # data that a method cannot do with is refused where it needs them
                lend_training(trainer, LateLoader(client.training_data()))
        with lent_trainer(client, trainer):
            self._begin(client, trainer)
            forget_scores(trainer)
            if joins:
                trainer.state.fn, trainer.state.stage = TrainerFn.FITTING, RunningStage.TRAINING
            else:
                trainer.state.fn = TrainerFn.VALIDATING
                trainer.state.stage = outer.state.stage if outer.sanity_checking else None
            for logger in trainer.loggers:
                logger.__dict__.update(client=client, muted=joins)
            yield

    def _begin(self, client: Client, trainer: L.Trainer) -> None:
        """Tell a client once that its fit starts, if it is of a kind whose steps fail without that."""
        if self._needs_start is False or client in self._begun:
            return
        self._begun.add(client)
        trainer.state.fn, trainer.state.stage = TrainerFn.FITTING, RunningStage.TRAINING
        for logger in trainer.loggers:
            logger.__dict__.update(client=client, muted=True)
        with as_at_first(self._work.trainer):
            if self._needs_start is None:
                self._needs_start = _needs_start(client)
            if self._needs_start:
                _tell_of_start(client, STARTS, lambda learner: put_back(learner, _tensors(learner)))

    def set_up(self, client: Client) -> bool:
        """Let a client have the tensors that its learner sets before a fit begins, such as pretrained weights.

        It has a Trainer (:meth:`lent`). Its own fit will call the hooks again, as every fit does.

        Returns:
            Whether there are such tensors.
        """
        if self.sets is None:
            twin, hooks = self._twin, any(is_overridden(hook, client.learner) for hook in BEFORE)
            self.sets = hooks and twin is not None and _differ(_tensors(twin.learner), _tensors(client.learner))
        if self.sets and client not in self._set_up:
            self._set_up.add(client)
            with as_at_first(self._work.trainer):
                _tell_of_start(client, BEFORE, lambda learner: nullcontext())
        return self.sets

    def _started(self, client: Client) -> L.Trainer:
        """Start the fit of a client like one that is there, and end it before its first batch.

        Where that fails, whatever is wrong is said where it matters: on joining, or in the client's own fit.
        """
        work, number = self._work, client.spec.client_id
        data = work.data.client(number)
        twin = self._twin = work.fresh(number, data)
        self.share_frozen(client)
        hub = LocalHub(work.seed)
        loop = AlreadyJoined(hub.link, work.local_epochs, set())
        options = {**work.options, "callbacks": None}
        trainer = client_trainer(twin, work.trainer, options, loop, MemoryCheckpointIO(), work.planned or 1, work.seed)
        for logger in trainer.loggers:
            logger.__dict__["muted"] = True
        with suppress(Exception):
            batches = LateLoader(twin.training_data())
            hub.stream(number).own = data.generators
            hub.add(number, lambda: trainer.fit(twin, batches))
            hub.start(number)
        hub.abort()
        self._groups = [[{**group} for group in optimizer.param_groups] for optimizer in trainer.optimizers]
        trainer.state.status = TrainerStatus.RUNNING
        return trainer

    def share_frozen(self, client: Client) -> None:
        """Hold no second copy of what a client has frozen."""
        if self._twin is not None:
            share_frozen(self._twin, client)


def _needs_start(client: Client) -> bool:
    """Say whether a learner has hooks at the start of a fit without which its steps fail."""
    learner, data = client.learner, client.data
    if data is None or not any(is_overridden(hook, learner) for hook in STARTS):
        return False
    try:
        try_step(learner, data.to_try())
        for split, stage in STAGES.items():
            if is_overridden(f"{stage}_step", learner):
                on_first(learner, data.to_try(), lambda batch, split=split: score(learner, [batch], split))  # type: ignore[misc]
    except Exception:
        return True
    return False


def _tell_of_start(
    client: Client, hooks: Iterable[str], kept: Callable[[L.LightningModule], AbstractContextManager[None]]
) -> None:
    """Let learners set what they set at the start of a fit, and read in their steps.

    Where that fails, their own fit will say so.

    Args:
        client: the client.
        hooks: which of :data:`STARTS`.
        kept: what is put back of a learner after each.
    """
    for hook in hooks:
        for learner in client.learners.values():
            if is_overridden(hook, learner):
                trained = [(weight, weight.requires_grad) for weight in learner.parameters()]
                with suppress(Exception), kept(learner):
                    call_hook(learner, hook, muted=True, **STARTS[hook])
                for weight, trains in trained:
                    weight.requires_grad_(trains)


def _tensors(learner: L.LightningModule) -> dict[str, torch.Tensor]:
    """Return a learner's parameters and buffers by name, as far as they have shapes."""
    tensors = {**dict(learner.named_parameters()), **dict(learner.named_buffers())}
    return {name: x.detach() for name, x in tensors.items() if not is_lazy(x)}


def _differ(before: Mapping[str, torch.Tensor], now: Mapping[str, torch.Tensor]) -> bool:
    return before.keys() != now.keys() or not all(
        torch.equal(x.to(now[name].device), now[name]) for name, x in before.items()
    )


@contextmanager
def as_at_first(trainer: L.Trainer) -> Iterator[None]:
    """Make clients in the modes of the start, wherever they are needed: in an evaluation gradients are off."""
    device = trainer.strategy.root_device.type
    modes = torch.inference_mode(False), torch.enable_grad(), torch.autocast(device, enabled=False, cache_enabled=False)
    with random_state_kept(), modes[0], modes[1], modes[2]:
        yield
