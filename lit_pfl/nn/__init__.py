"""Layers."""

from lit_pfl.nn.composed import ComposedConv2d, ComposedLinear, geometry
from lit_pfl.nn.factorized import (
    FactorizedConv2d,
    FactorizedLinear,
    Form,
    Pi,
    Start,
    factorize,
    factorized_layers,
    l1_norm_of_masks,
)
from lit_pfl.nn.hadamard import (
    HadamardConv2d,
    HadamardLinear,
    RankRule,
    hadamard,
    hadamard_layers,
    rank_for_gamma,
    rank_for_ratio,
)
from lit_pfl.nn.memory import Memory

__all__ = [
    "ComposedConv2d",
    "ComposedLinear",
    "FactorizedConv2d",
    "FactorizedLinear",
    "Form",
    "HadamardConv2d",
    "HadamardLinear",
    "Memory",
    "Pi",
    "RankRule",
    "Start",
    "factorize",
    "factorized_layers",
    "geometry",
    "hadamard",
    "hadamard_layers",
    "l1_norm_of_masks",
    "rank_for_gamma",
    "rank_for_ratio",
]
