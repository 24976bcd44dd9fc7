"""Personalized federated learning as a PyTorch Lightning plugin suite."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_pfl.client import Client
    from lit_pfl.federation import Federation
    from lit_pfl.payload import Payload
    from lit_pfl.server import Server

__all__ = ["Client", "Federation", "Payload", "Server"]


def __getattr__(name: str) -> Any:
    """Import a class when it is first asked for: Lightning takes seconds, and the command line's help does without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{name.lower()}"), name)
