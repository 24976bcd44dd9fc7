"""Whether a checkpoint is of this run: who made it, on whose data, with which networks."""

import hashlib
from collections.abc import Mapping
from typing import Any

from lit_pfl.data import ClientData, identity_of
from lit_pfl.errors import ConfigError


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
        if saved[name] != own[name]:
            option = "model" if name == "method" else f"federation.{name}"
            raise ConfigError(f"{option}: the checkpoint is of a run with {saved[name]}, not {own[name]}.")
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
