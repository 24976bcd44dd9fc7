"""A federation of clients under a stock Trainer."""

from lit_pfl.federation.federation import Federation

__all__ = ["Federation"]
