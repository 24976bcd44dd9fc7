"""Callbacks that look at what a classifier's layers make of its input."""

from lit_pfl_callbacks.features.alignment import FeatureAlignment
from lit_pfl_callbacks.features.map import FeatureMap

__all__ = ["FeatureAlignment", "FeatureMap"]
