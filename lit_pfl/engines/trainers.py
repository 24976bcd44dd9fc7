"""The Trainers of a federation: what may be asked of the outer one, and how a client's is made."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_pfl.core import Client
from lit_pfl.engines.client_logger import client_loggers
from lit_pfl.engines.made_with import continued, made_with
from lit_pfl.engines.validation import OwnValidation
from lit_pfl.errors import ConfigError, refuse_other_lightning
from lit_pfl.learners import check_callbacks, place_checkpoints
from lit_pfl.lightning_internals import (
    NoProfiler,
    leave_jobs_alone,
    log_nothing,
    looked_up_once,
    make_endless,
    undisturbed,
)
from lit_pfl_callbacks import FederatedLoop, run_folder
from lit_pfl_callbacks.federated_loop import JoinInfo, Link

#: what clients' weights may be trained in: they stay in 32 bits, as they are averaged and sent
PRECISIONS = ("32-true", "16-mixed", "bf16-mixed")

_SCORED = "every client is scored on all its data, when trainer's own options say"
_ROUNDS = "a client trains federation.local_epochs epochs in each of trainer.max_epochs rounds"
_DEVICE = "clients train where trainer.accelerator and trainer.devices say"
#: what a federation decides for its clients' Trainers, and where it is said instead
OWNED = {
    **dict.fromkeys(("max_epochs", "min_epochs", "max_steps", "min_steps", "max_time", "fast_dev_run"), _ROUNDS),
    **dict.fromkeys(("accelerator", "devices", "num_nodes", "strategy"), _DEVICE),
    **dict.fromkeys(
        ("limit_val_batches", "limit_test_batches", "limit_predict_batches", "num_sanity_val_steps"), _SCORED
    ),
    **dict.fromkeys(("check_val_every_n_epoch", "val_check_interval"), _SCORED),
    "reload_dataloaders_every_n_epochs": "a client has one loader for all rounds",
    "enable_checkpointing": "the checkpoint of trainer holds all clients",
    "logger": "trainer.logger is where a federation logs, for all of its clients",
    "enable_progress_bar": "live bars of several Trainers do not share a screen; the federation shows one",
    "barebones": "a client's Trainer needs the callback that joins it to the federation",
}


def _number(value: Any, kinds: type | tuple[type, ...] = (int, float)) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


#: which values Lightning takes without a word and trains wrongly with, or not at all
ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "accumulate_grad_batches": (lambda x: _number(x, int) and x >= 1, "1 or more batches"),
    "gradient_clip_val": (lambda x: x is None or (_number(x) and x >= 0), "a number, 0 or more"),
    "limit_train_batches": (
        lambda x: x is None or (_number(x) and x > 0),
        "a share of the batches, above 0 and up to 1.0, or their number",
    ),
    "detect_anomaly": (lambda x: isinstance(x, bool), "true or false"),
    "deterministic": (lambda x: x is None or isinstance(x, bool) or x == "warn", "true, false or warn"),
}


class AlreadyJoined(FederatedLoop):
    """The loop of a client whose server has what it sends on joining, from before it had a Trainer.

    Args:
        link: see :class:`~lit_pfl_callbacks.FederatedLoop`.
        every_n_epochs: likewise.
        said: what clients have said of the optimizers that they continue with; it is added to.
    """

    def __init__(self, link: Link, every_n_epochs: int, said: set[str]) -> None:
        super().__init__(link, every_n_epochs)
        self._said = said
        self._made_with: dict[str, str] = {}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Look at the optimizers, which are made and not restored yet."""
        self._made_with = continued(self._made_with, made_with(trainer), self._said)

    def state_dict(self) -> dict[str, Any]:
        """Return also what optimizers were made with."""
        return {**super().state_dict(), "made_with": self._made_with}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take that, too."""
        state = {**state_dict}
        self._made_with = state.pop("made_with", {})
        super().load_state_dict(state)

    def _join_info(self, trainer: L.Trainer, pl_module: L.LightningModule) -> JoinInfo:
        return JoinInfo(0, {})

    def _keep(self, pl_module: L.LightningModule, loader: Any) -> None:
        """Keep nothing: such a client is saved while it waits for a reply."""


def check_client_options(options: Mapping[str, Any]) -> None:
    """See that ``federation.client_trainer`` holds nothing that is the federation's to decide."""
    for name in options:
        if name in OWNED:
            raise ConfigError(f"federation.client_trainer.{name}: the federation decides this: {OWNED[name]}.")
    for name, (allowed, what) in ALLOWED.items():
        if name in options and not allowed(value := options[name]):
            raise ConfigError(f"federation.client_trainer.{name}={value}: give {what}.")
    for callback in several(options.get("callbacks")):
        if not isinstance(callback, L.Callback):
            refuse_other_lightning("federation.client_trainer.callbacks", callback, "Callback")
            raise ConfigError(
                f"federation.client_trainer.callbacks={options['callbacks']}: give Callback objects, as a script can, "
                "or let a learner of your own make them, in its configure_callbacks."
            )
    check_callbacks(several(options.get("callbacks")), "federation.client_trainer.callbacks")


def check_precision(option: str, trainer: L.Trainer) -> None:
    """See that clients' weights stay in 32 bits."""
    if trainer.precision not in PRECISIONS:
        raise ConfigError(
            f"{option}={trainer.precision}: clients' weights stay in 32 bits, as which they are averaged and sent; "
            f"choose {', '.join(PRECISIONS)}."
        )


def client_trainer(
    client: Client,
    outer: L.Trainer,
    options: Mapping[str, Any],
    loop: FederatedLoop,
    memory: CheckpointIO,
    rounds: int,
    seed: int,
) -> L.Trainer:
    """Return the Trainer of one client. Its ``max_epochs`` is a plan: the epochs of a client that is in every round.

    Args:
        client: the client.
        outer: the Trainer whose device, precision and loggers it takes; in the root of its files a client has a folder.
        options: ``federation.client_trainer``; callbacks are copied, so that every client has its own.
        loop: the callback that joins the client to the federation.
        memory: where its checkpoints go.
        rounds: number of rounds that are planned, or -1.
        seed: the federation's seed.

    Raises:
        ConfigError: for options that a Trainer does not have, and callbacks that cannot be copied.
    """
    device = outer.strategy.root_device
    arguments: dict[str, Any] = {
        "accelerator": {"cuda": "gpu"}.get(device.type, device.type),
        "devices": [device.index] if device.type == "cuda" else 1,
        "precision": outer.precision,
        "default_root_dir": f"{outer.default_root_dir}/client_{client.spec.client_id}",
        "deterministic": _deterministic(),
        "max_epochs": -1 if rounds == -1 else rounds * loop.every_n_epochs,
        "profiler": NoProfiler(),
        "logger": client_loggers(outer.loggers, client) or False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **options,
    }
    own = _own(arguments.get("callbacks"))
    client.checkpoint_folder = lambda: run_folder(outer) / "checkpoints" / f"client_{client.spec.client_id}"
    place_checkpoints(own, client.checkpoint_folder)
    arguments["callbacks"] = [*own, loop]
    arguments["enable_checkpointing"] = any(isinstance(callback, Checkpoint) for callback in own)
    # Whatever started this process, a client's Trainer is none of several.
    arguments["plugins"] = [*several(arguments.get("plugins")), memory, LightningEnvironment()]
    try:
        with undisturbed(), looked_up_once():
            trainer = L.Trainer(**arguments)
    except (TypeError, ValueError, MisconfigurationException) as error:
        raise ConfigError(f"federation.client_trainer: {error}") from None
    check_precision("federation.client_trainer.precision", trainer)
    if trainer.overfit_batches:  # type: ignore[attr-defined]
        raise ConfigError(
            "federation.client_trainer.overfit_batches: clients' batches come in their own order; for fewer of them "
            "give federation.client_trainer.limit_train_batches."
        )
    log_nothing(trainer)
    leave_jobs_alone(trainer)  # its checkpoint is of all clients
    if outer.sanity_checking:
        trainer.state.stage = outer.state.stage
    epochs = loop.every_n_epochs
    make_endless(trainer, loop, OwnValidation(client, seed), lambda: (trainer.current_epoch + 1) % epochs == 0)
    return trainer


def _deterministic() -> bool | Literal["warn"] | None:
    """Return what this process's Trainer was told of deterministic algorithms."""
    if not torch.are_deterministic_algorithms_enabled():
        return None
    return "warn" if torch.is_deterministic_algorithms_warn_only_enabled() else True


def planned_rounds(outer: L.Trainer) -> int:
    """Return the number of rounds that a federation's Trainer is to run, -1 for no end; a step of it is a round too."""
    return min((limit for limit in (outer.max_epochs, outer.max_steps) if limit not in (None, -1)), default=-1)


def _own(callbacks: Sequence[L.Callback] | L.Callback | None) -> list[L.Callback]:
    """Return copies of callbacks: they may keep what they know of one client's training."""
    try:
        return copy.deepcopy(several(callbacks))
    except (TypeError, RuntimeError) as error:
        raise ConfigError(
            "federation.client_trainer.callbacks: every client has callbacks of its own, and one of these cannot be "
            f"copied: {error}."
        ) from None


def several(callbacks: Any) -> list[Any]:
    """Return what a Trainer takes as callbacks or plugins, one or some or None, as a list."""
    return list(callbacks) if isinstance(callbacks, Sequence) else [] if callbacks is None else [callbacks]
