"""What a federation adds to a checkpoint, and which ones it takes: who made it, on whose data, with which networks."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from inspect import signature
from itertools import chain
from typing import Any, Literal

import lightning as L
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_pfl.core import Client
from lit_pfl.core.coordinator import Coordinator
from lit_pfl.data import ClientData, has_batches, identity_of, samples_of
from lit_pfl.data.several import loaders_in
from lit_pfl.engines import Engine
from lit_pfl.engines.work import HasData
from lit_pfl.errors import ConfigError
from lit_pfl.lightning_internals import AtomicCheckpointIO, SavedStates, StateFiles
from lit_pfl_callbacks.tensors import bytes_of

#: what only the checkpoints of some runs hold
OPTIONAL = ("deadline", "asynchronous", "privacy")
#: how often samples that differ from a checkpoint's are read again, to see whether they always do
READ_AGAIN = 4
#: how far down the parts of a method have options
DEPTH = 2


def save_whole(trainer: L.Trainer, if_not_saved: Literal["stop", "continue"], states: StateFiles | None) -> None:
    """Let a Trainer write a checkpoint whole or not at all, unless it was given a way of its own.

    Raises:
        ConfigError: when checkpoints refer to files (``states``), and the Trainer's own way does not know of them.
    """
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = AtomicCheckpointIO(if_not_saved)
    if isinstance(own := trainer.strategy.checkpoint_io, AtomicCheckpointIO):
        own.states = states
    elif states is not None:
        raise ConfigError(
            f"federation.engine.awake: {type(own).__name__} does not handle the files that checkpoints refer to; "
            "leave that plugin out of trainer.plugins."
        )


def saved(identity: Mapping[str, Any], coordinator: Coordinator, engine: Engine) -> dict[str, Any]:
    """Return the whole federation: clients with optimizers, schedulers and random streams, server, byte counts.

    The arguments are those of :func:`resume`.
    """
    if coordinator.under_way:
        rank_zero_warn(f"A checkpoint in the middle of round {coordinator.round + 1}: no run can continue from it.")
    state = {
        "under_way": coordinator.under_way,
        **identity,
        "coordinator": coordinator.state_dict(),
        **engine.state_dict(),
    }
    known: Fingerprints = state["data"]
    if engine.files is None:
        state["data"] = dict(known)
    else:  # of many thousand clients, tables take longer to save than all the rest
        state["data"] = known.text
        state["coordinator"]["ledger"]["clients"] = json.dumps(state["coordinator"]["ledger"]["clients"])
    return state


def _table(value: str | dict[int, Any]) -> dict[int, Any]:
    """Return a table by client id, which may be written as text."""
    return {int(client): one for client, one in json.loads(value).items()} if isinstance(value, str) else value


def resume(
    checkpoint: Mapping[str, Any],
    identity: Mapping[str, Any],
    names: list[str],
    coordinator: Coordinator,
    engine: Engine,
) -> dict[str, Any]:
    """Take over the whole federation; return what :func:`saved` has returned.

    Args:
        checkpoint: it is there under ``federation``.
        identity: what made this run, such as its ``method``, and ``data``: a :func:`fingerprint` by client.
        names: what of it must agree, next to the data.
        coordinator: the server's side.
        engine: where the clients live.

    Raises:
        ConfigError: when the checkpoint is of another run, or not whole. It names the first thing that differs.
    """
    try:
        state = checkpoint["federation"]
        if state.get("under_way"):
            raise ConfigError(
                f"The checkpoint was written in the middle of round {state['coordinator']['round'] + 1}, and no run "
                "can continue from there; give one of a whole round, such as checkpoints/last.ckpt."
            )
        state["data"], ledger = _table(state["data"]), state["coordinator"]["ledger"]
        ledger["clients"] = _table(ledger["clients"])
        refuse_another_run(state, identity, names)
        engine.load_state_dict(state)
        coordinator.load_state_dict(state["coordinator"])
        return state
    except ConfigError:
        raise
    except (KeyError, TypeError, AttributeError, IndexError, RuntimeError, ValueError) as error:
        raise ConfigError(f"The checkpoint is not a federation's, or not whole: {error!r}.") from error


def trained_in(state: Mapping[str, Any]) -> set[int]:
    """Return the ids of the clients that have trained in a state of :func:`saved`: their own Trainers are in it."""
    clients = state["clients"]
    if isinstance(clients, SavedStates):  # which need not be read for that
        return {client for client, file in clients.files.items() if file.trained}
    return {client for client, own in clients.items() if len(own) > 1}


def fingerprint(data: ClientData) -> str:
    """Return hashes of which samples a client trains on and is scored on, under which labels, and of their kind.

    The second one, after a dash, is of their places in the data set alone.
    """
    digest = hashlib.sha256(repr((data.num_classes, data.labels_agree)).encode())
    places = digest.copy()
    for batches in (data.train, *loaders_in(data.val), *loaders_in(data.test)):
        digest.update(identity_of(batches))
        with suppress(ConfigError):  # of a stream they are not known
            places.update(bytes_of(samples_of(batches)) if has_batches(batches) else b"")
    return f"{digest.hexdigest()}-{places.hexdigest()[:16]}"


class Fingerprints(dict[int, str]):
    """The :func:`fingerprint` of every client's data, by id. It does not change, so its text is made once."""

    def __init__(self, data: HasData) -> None:
        super().__init__({client: fingerprint(data.client(client)) for client in data.clients})
        self._data = data

    def tells(self, client: int) -> bool:
        """Say whether it is always the same: not with transforms that draw from generators of their own."""
        return all(fingerprint(self._data.client(client)) == self[client] for _ in range(READ_AGAIN))

    def differs(self, client: int, saved: str) -> bool:
        """Say whether a client's data are not those of a fingerprint in a checkpoint."""
        (samples, _, places), (before, _, places_before) = self[client].partition("-"), saved.partition("-")
        return samples != before and (places != places_before or self.tells(client))

    @cached_property
    def text(self) -> str:
        """The table as JSON."""
        return json.dumps(self)


def refuse_other_data(data: HasData, known: Mapping[int, str]) -> None:
    """See that data are those of the known fingerprints, which clients continue to train and to be scored on."""
    own = Fingerprints(data)
    if own.keys() != known.keys() or any(own.differs(client, known[client]) for client in own):
        raise ConfigError(
            "datamodule: the clients of this federation were made with other data, or other labels; give the "
            "data module that they were made with, or a new Federation."
        )


def sends_of(client: Client) -> dict[str, str | None]:
    """Return which options of a method say what clients and server send, with their values in a run."""
    step = client.server_optimizer
    return {
        "local": client.local,
        "shares": client.only,
        "norm_stats": client.norm_stats,
        "server_optimizer": None if step is None else type(step).__name__,
    }


def options_of(thing: Any, path: str = "") -> dict[str, bool | int | float | str | None]:
    """Return the options of a method that are numbers or words, by name, and those of what it is made of.

    Args:
        thing: the method, as it was made.
        path: what the names begin with.
    """
    found: dict[str, bool | int | float | str | None] = {}
    made = [vars(kind)["__init__"] for kind in type(thing).__mro__ if "__init__" in vars(kind)]
    own = set(chain.from_iterable(signature(make).parameters for make in made))
    for name, value in vars(thing).items():
        if name in own and isinstance(value, bool | str | None):
            found[path + name] = value
        elif name in own and isinstance(value, int | float):  # the command line gives numbers of types of its own
            found[path + name] = int(value) if isinstance(value, int) else float(value)
        elif type(value).__module__.startswith("lit_pfl.") and hasattr(value, "__dict__") and path.count(".") < DEPTH:
            found |= options_of(value, f"{path}{name}.")
    return found


def refuse_another_run(saved: Mapping[str, Any], own: Mapping[str, Any], names: list[str]) -> None:
    """Compare what a checkpoint and a run say of themselves: ``names`` must agree, and the data."""
    for name, now in own["sends"].items():
        if (before := saved.get("sends", {}).get(name, now)) != now:
            raise ConfigError(f"model.{name}: the checkpoint is of a run with {before}, not {now}.")
    for name, now in own["options"].items():
        if (before := saved.get("options", {}).get(name, now)) != now:
            raise ConfigError(f"model: the checkpoint is of a run with {name}={before}, not {now}.")
    for name in names:
        before, now = (identity.get(name, "none") if name in OPTIONAL else identity[name] for identity in (saved, own))
        if before != now:
            option = "model" if name == "method" else f"federation.{name}"
            raise ConfigError(f"{option}: the checkpoint is of a run with {before}, not {now}.")
    if own["keep_trained"] and not saved.get("keep_trained", True):
        raise ConfigError("federation.keep_trained: the checkpoint is of a run with False, not True.")
    if saved["data"].keys() != own["data"].keys():
        raise ConfigError(
            f"data: the checkpoint holds {len(saved['data'])} clients and the data has {len(own['data'])}; "
            "give the options of the run that wrote it."
        )
    for client in own["data"]:
        if own["data"].differs(client, saved["data"][client]):
            raise ConfigError(
                f"data: client {client} had other samples, or other labels, in the run that wrote the checkpoint; "
                "give its data.seed, data.partition and so on, and data that are the same whenever they are read."
            )
