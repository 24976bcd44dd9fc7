"""How uploads travel. All links speak the same two sentences: join and exchange."""

from lit_pfl.links.local import LocalHub, LocalLink

__all__ = ["LocalHub", "LocalLink"]
