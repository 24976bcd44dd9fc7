"""What a federation does to the Trainer that runs it: refuses, takes away, adds and says."""

import signal
import threading
from collections.abc import Callable, Collection
from difflib import get_close_matches
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BaseFinetuning, GradientAccumulationScheduler, ModelCheckpoint, ModelSummary
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_pfl.core import Client
from lit_pfl.core.coordinator import Coordinator
from lit_pfl.engines import Engine
from lit_pfl.engines.trainers import check_callbacks, check_precision
from lit_pfl.engines.validation import monitors
from lit_pfl.errors import ConfigError

_GRADIENTS = "is about gradients, which clients have; give it to them, in federation.client_trainer.callbacks"
#: Lightning's callbacks that clients can have, and a federation's own Trainer cannot
OF_CLIENTS = dict.fromkeys((BaseFinetuning, GradientAccumulationScheduler, SpikeDetection), _GRADIENTS)
#: options of a Trainer that are about gradients, where it keeps each, and what that is by default
_OF_GRADIENTS = (
    ("gradient_clip_val", "gradient_clip_val", None),
    ("accumulate_grad_batches", "accumulate_grad_batches", 1),
    ("detect_anomaly", "_detect_anomaly", False),
)
#: held by the thread whose federation trains: all random numbers are drawn from the process's generators
_TRAINING = threading.RLock()


def check_outer(trainer: L.Trainer) -> None:
    """See that a federation's own Trainer has no options that are about batches of images: its batches are clients."""
    check_precision("trainer.precision", trainer)
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    check_callbacks(callbacks, "trainer.callbacks")
    check_callbacks(callbacks, "trainer.callbacks", OF_CLIENTS)
    for callback in callbacks:
        for name in ("every_n_train_steps", "train_time_interval"):
            if isinstance(callback, ModelCheckpoint) and (value := getattr(callback, f"_{name}")):
                raise ConfigError(
                    f"trainer.callbacks: ModelCheckpoint({name}={value}) would save in the middle of a round; give "
                    "every_n_epochs, the rounds from one checkpoint to the next."
                )
    for name, attribute, unset in _OF_GRADIENTS:
        if (value := getattr(trainer, attribute)) and value != unset:
            raise ConfigError(
                f"trainer.{name}={value}: it is clients that have gradients; give federation.client_trainer.{name}."
            )
    if trainer.fast_dev_run:  # type: ignore[attr-defined]  # limits batches, for a first try of everything
        return
    for name, allowed in (("overfit_batches", 0.0), ("limit_train_batches", 1.0)):
        if not _is_share(value := getattr(trainer, name), allowed):
            raise ConfigError(
                f"trainer.{name}={value}: a batch is a client here, and always the same ones would train. For fewer "
                "clients a round give federation.participation, for fewer batches of images "
                "federation.client_trainer.limit_train_batches."
            )
    if not any(_is_share(trainer.limit_val_batches, allowed) for allowed in (0.0, 1.0)):
        raise ConfigError(
            f"trainer.limit_val_batches={trainer.limit_val_batches}: a batch is a client here; to evaluate fewer give "
            "federation.evaluate_clients, and 0 here to evaluate none."
        )
    if not any(_is_share(trainer.limit_test_batches, allowed) for allowed in (0.0, 1.0)):
        raise ConfigError(
            f"trainer.limit_test_batches={trainer.limit_test_batches}: a batch is a client here, and tests are of all "
            "clients; give 0 for no test."
        )
    # of a time, Lightning keeps none before the fit
    interval = getattr(trainer, "val_check_interval", None)
    if trainer.check_val_every_n_epoch is None or interval is None or not _is_share(interval, 1.0):
        given = interval if interval is not None else f"{trainer._val_check_time_interval:g} s"  # type: ignore[attr-defined]
        raise ConfigError(
            f"trainer.val_check_interval={given}: a batch is a client here, and some clients' "
            "round is not over yet; give trainer.check_val_every_n_epoch, the rounds from one validation to the next."
        )
    if trainer.check_val_every_n_epoch < 1:
        raise ConfigError(
            f"trainer.check_val_every_n_epoch={trainer.check_val_every_n_epoch}: give 1 or more rounds, or "
            "trainer.limit_val_batches=0 for no validation."
        )


def refuse_processes(trainer: L.Trainer) -> None:
    """See that a federation's own Trainer has one device and no strategy that is for several.

    An engine runs clients in several processes.
    """
    for name, number in (("devices", trainer.num_devices), ("num_nodes", trainer.num_nodes)):
        if number > 1:
            raise ConfigError(
                f"trainer.{name}={number}: one process runs a federation, so give 1; to train clients in several give "
                f"federation.engine=Ray and federation.engine.workers={trainer.num_devices * trainer.num_nodes}, see "
                "docs/engines.md."
            )
    if TorchElasticEnvironment.detect() and (number := TorchElasticEnvironment().world_size()) > 1:
        raise ConfigError(
            f"torchrun has started {number} processes, each of which would run this federation; start one with python. "
            f"To train clients in several give federation.engine=Ray and federation.engine.workers={number}."
        )
    if isinstance(trainer.strategy, ParallelStrategy):
        raise ConfigError(
            f"trainer.strategy={type(trainer.strategy).__name__}: one process runs a federation, so leave it at its "
            "default, auto; to train clients in several give federation.engine=Ray, see docs/engines.md."
        )


def _is_share(limit: float, share: float) -> bool:
    """Say whether a limit is a share of the batches: 1.0 is all of them, but 1 is one."""
    return limit == share and not (isinstance(limit, int) and limit)


def refuse_misspelt(trainer: L.Trainer, known: Collection[str]) -> None:
    """See that no callback monitors what is nearly the name of a metric, but is none.

    Of other names nobody knows before the first round's end: another callback may log them.
    """
    for name, callback in monitors(trainer).items():
        if name not in known and (near := get_close_matches(name, known, n=1, cutoff=0.7)):
            raise ConfigError(
                f"trainer.callbacks: {callback}(monitor={name}): there is no such metric. Did you mean {near[0]}? "
                f"There are {', '.join(sorted(known))}."
            )


class ServerStep(torch.optim.Optimizer):
    """Runs the closure it is given."""

    def __init__(self) -> None:
        # what Lightning's LearningRateMonitor looks for
        super().__init__([torch.nn.Parameter(torch.zeros(0))], {"lr": 1.0, "weight_decay": 0.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()


def leave_to_clients(trainer: L.Trainer) -> None:
    """Take from a Trainer what clients do themselves.

    Scaling losses in ``16-mixed``: a server's step has none. And inference mode: what is scored may need gradients, as
    a method that adapts to test data does. And Lightning's 50 steps between logs: a round has fewer steps.
    """
    if trainer.log_every_n_steps == 50:  # type: ignore[attr-defined]
        trainer.log_every_n_steps = 1  # type: ignore[attr-defined]
    if isinstance(trainer.precision_plugin, MixedPrecision):
        trainer.precision_plugin.scaler = None
    for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.inference_mode = False


def described(client: Client, of: int) -> str:
    """Return what clients are like, in a line; ``client`` is any of them, ``of`` their number."""
    each, sent = (
        sum(p.numel() for p in parameters) for parameters in (client.parameters(), client.shared_parameters().values())
    )
    return (
        f"{of} clients of {type(client).__name__}; each has {each:,} parameters and shares {sent:,} numbers of its "
        f"{type(client.learner).__name__}."
    )


def summarize(trainer: L.Trainer, line: str) -> None:
    """Say a line instead of a Trainer's summary of layers, if it has one.

    It would show an empty table: a federation has no layers of its own.
    """
    others = [callback for callback in trainer.callbacks if not isinstance(callback, ModelSummary)]  # type: ignore[attr-defined]
    if len(others) == len(trainer.callbacks):  # type: ignore[attr-defined]
        return
    trainer.callbacks = others  # type: ignore[attr-defined]
    rank_zero_info(line)


def end_of_privacy(trainer: L.Trainer, coordinator: Coordinator, begins: bool = False) -> dict[str, float]:
    """Stop a Trainer where another round would exceed the privacy budget; return what is logged.

    Args:
        trainer: the federation's Trainer.
        coordinator: the server's side.
        begins: whether a round is about to begin, and not over.

    Raises:
        ConfigError: when one is about to begin that would exceed the budget.
    """
    privacy, completed = coordinator.privacy, coordinator.round
    if privacy is None:
        return {}
    if privacy.spent(completed):
        budget = f"federation.privacy.budget={privacy.budget:g}"
        if begins:
            raise ConfigError(
                f"{budget}: epsilon is {privacy.epsilon(completed):.4g} after round {completed}, and another round "
                "would exceed the budget; the run is over, or give a larger one."
            )
        rank_zero_info(f"{budget}: another round would exceed it; the federation ends after round {completed}.")
        trainer.should_stop = True
    return {} if begins else privacy.report(completed)


class OneAtATime(L.Callback):
    """Refuses a fit while a federation trains in another thread of the process."""

    def __init__(self) -> None:
        self._held = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Begin to train.

        Raises:
            ConfigError: when another thread's federation trains.
        """
        if stage != "fit":
            return
        self._held = _TRAINING.acquire(blocking=False)
        if not self._held:
            raise ConfigError(
                "Another federation trains in another thread of this process, and both would draw from the same random "
                "numbers; run them one after another, or in processes of their own."
            )

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Let others begin."""
        self._end()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Let others begin."""
        self._end()

    def _end(self) -> None:
        if self._held:
            _TRAINING.release()
        self._held = False


class RequeuesBetweenRounds:
    """Lets a job of SLURM be requeued when the round is over.

    Lightning saves a checkpoint and requeues the job as soon as SLURM's signal comes, and half a round is nothing that
    could be resumed. So this takes the signal in its place.

    Args:
        trainer: the federation's own, which listens to the signal by now.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self._asked: Callable[[], Any] | None = None
        environment = trainer._accelerator_connector.cluster_environment
        if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
            return
        signum = environment.requeue_signal
        handler = signal.getsignal(signum) if signum is not None else None
        if callable(handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signum, lambda *given: setattr(self, "_asked", partial(handler, *given)))  # type: ignore[arg-type]

    def round_is_over(self) -> None:
        """Let Lightning save and requeue, if it was asked to meanwhile."""
        asked, self._asked = self._asked, None
        if asked is not None:
            asked()


class EndsFits(L.Callback):
    """Ends the clients' fits when an error ends the federation's, in training, in validation or in a callback."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """End them, and the engine's processes; after a failed test all may go on."""
        if trainer.state.fn == "fit":
            self.engine.abort()
