"""Separate institutions: a ServerApp and a ClientApp of Flower for any method and any learner.

Clients stay in their SuperNodes, with their data and all that is personal. What a method shares is sent through the
SuperLink, encrypted, as Flower's arrays. The numbers are those of a :class:`~lit_pfl.Federation` in one process.
"""

try:
    import flwr  # noqa: F401
except ImportError as error:
    raise ImportError("lit_pfl.links.flower needs Flower: pip install 'lit-pfl[flower]'") from error

from lit_pfl.links.flower.clients import client_app
from lit_pfl.links.flower.server import server_app

__all__ = ["client_app", "server_app"]
