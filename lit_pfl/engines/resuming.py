"""Which states clients can continue from."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lit_pfl.errors import ConfigError


def refuse_another_network(
    client: int, saved: Mapping[str, Any], own: Mapping[str, Any], resizes: bool = False
) -> None:
    """Compare the state of a client in a checkpoint and in a run.

    Args:
        client: its id.
        saved: the checkpoint's.
        own: the run's.
        resizes: whether training changes their shapes, so that only numbers of dimensions must agree.

    Raises:
        ConfigError: at the first that has another shape, or is in one of them only.
    """

    def shape(value: object) -> object:
        if not isinstance(value, Tensor):
            return "no tensor"
        return f"of {value.dim()} dimensions" if resizes else tuple(value.shape)

    for name in {**own, **saved}:
        before, now = (shape(tensors[name]) if name in tensors else "not there" for tensors in (saved, own))
        if before != now:
            raise ConfigError(
                f"model: the checkpoint is of another network: client {client}'s tensor {name!r} is {before}, where "
                f"this model's is {now}."
            )
