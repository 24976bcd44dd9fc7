"""Personalized federated learning as a PyTorch Lightning plugin suite."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_pfl.core import (
        BODY,
        EVERYTHING,
        Classifying,
        Client,
        ClientInfo,
        MixingServer,
        Payload,
        Server,
        TrainedServer,
        averaging,
        weighted_mean,
    )
    from lit_pfl.federation import Federation

__all__ = [
    "BODY",
    "EVERYTHING",
    "Classifying",
    "Client",
    "ClientInfo",
    "Federation",
    "MixingServer",
    "Payload",
    "Server",
    "TrainedServer",
    "averaging",
    "weighted_mean",
]


def __getattr__(name: str) -> Any:
    """Import a class when it is first asked for: Lightning takes seconds, and the command line's help does without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("lit_pfl.federation" if name == "Federation" else "lit_pfl.core"), name)
