"""What a federation adds to a checkpoint, and which ones it takes: who made it, on whose data, with which networks."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_pfl.core.coordinator import Coordinator
from lit_pfl.data import ClientData, identity_of
from lit_pfl.engines import Engine
from lit_pfl.errors import ConfigError
from lit_pfl.lightning_internals import SavedStates

#: what only the checkpoints of some runs hold
OPTIONAL = ("deadline", "asynchronous")


def saved(identity: Mapping[str, Any], coordinator: Coordinator, engine: Engine) -> dict[str, Any]:
    """Return the whole federation: clients with optimizers, schedulers and random streams, server, byte counts.

    Args:
        identity: what a checkpoint must agree in, see :func:`resume`; ``data`` may be :func:`as_text`.
        coordinator: the server's side.
        engine: where the clients live.
    """
    if coordinator.under_way:
        rank_zero_warn(f"A checkpoint in the middle of round {coordinator.round + 1}: no run can continue from it.")
    state = {
        "under_way": coordinator.under_way,
        **identity,
        "coordinator": coordinator.state_dict(),
        **engine.state_dict(),
    }
    if engine.files is not None:
        state["coordinator"]["ledger"]["clients"] = as_text(state["coordinator"]["ledger"]["clients"])
    return state


def as_text(table: Mapping[int, Any]) -> str:
    """Return a table by client id as text: of many thousand clients, tables take longer to save than all the rest."""
    return json.dumps(table)


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
    except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise ConfigError(f"The checkpoint is not a federation's, or not whole: {error!r}.") from error


def trained_in(state: Mapping[str, Any]) -> set[int]:
    """Return the ids of the clients that have trained in a state of :func:`saved`: their own Trainers are in it."""
    clients = state["clients"]
    if isinstance(clients, SavedStates):  # which need not be read for that
        return {client for client, file in clients.files.items() if file.trained}
    return {client for client, own in clients.items() if len(own) > 1}


def fingerprint(data: ClientData) -> str:
    """Return a hash of which samples a client trains on and is scored on, under which labels, and of their kind."""
    digest = hashlib.sha256(repr((data.num_classes, data.labels_agree)).encode())
    for batches in (data.train, data.val, data.test):
        digest.update(identity_of(batches))
    return digest.hexdigest()


def refuse_another_run(saved: Mapping[str, Any], own: Mapping[str, Any], names: list[str]) -> None:
    """Compare what a checkpoint and a run say of themselves.

    Args:
        saved: the checkpoint's ``method`` and so on.
        own: the run's.
        names: what must agree.

    Raises:
        ConfigError: at the first that does not.
    """
    for name in names:
        before, now = (identity.get(name, "none") if name in OPTIONAL else identity[name] for identity in (saved, own))
        if before != now:
            option = "model" if name == "method" else f"federation.{name}"
            raise ConfigError(f"{option}: the checkpoint is of a run with {before}, not {now}.")
    if saved["data"].keys() != own["data"].keys():
        raise ConfigError(
            f"data: the checkpoint holds {len(saved['data'])} clients and the data has {len(own['data'])}; "
            "give the options of the run that wrote it."
        )
    for client, samples in own["data"].items():
        if saved["data"][client] != samples:
            raise ConfigError(
                f"data: client {client} had other samples, or other labels, in the run that wrote the checkpoint; "
                "give its data.seed, data.partition and so on."
            )
