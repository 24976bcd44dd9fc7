"""Where clients run: an :class:`Engine` makes them, lets them train, and asks them."""

from lit_pfl.engines.engine import Engine, Trained
from lit_pfl.engines.local import Local
from lit_pfl.engines.ray import Ray
from lit_pfl.engines.stacked import Stacked
from lit_pfl.engines.work import Work

__all__ = ["Engine", "Local", "Ray", "Stacked", "Trained", "Work"]
