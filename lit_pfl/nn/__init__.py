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
from lit_pfl.nn.grouped import (
    Grouped,
    GroupedBatchNorm,
    GroupedConv2d,
    GroupedLinear,
    GroupedLogits,
    GroupedNorm,
    GroupSlice,
    class_groups,
    grouped_layers,
    row_groups,
    trim,
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
from lit_pfl.nn.replace import CHANNELWISE, check_plain, places_of_weights

__all__ = [
    "CHANNELWISE",
    "ComposedConv2d",
    "ComposedLinear",
    "FactorizedConv2d",
    "FactorizedLinear",
    "Form",
    "GroupSlice",
    "Grouped",
    "GroupedBatchNorm",
    "GroupedConv2d",
    "GroupedLinear",
    "GroupedLogits",
    "GroupedNorm",
    "HadamardConv2d",
    "HadamardLinear",
    "Memory",
    "Pi",
    "RankRule",
    "Start",
    "check_plain",
    "class_groups",
    "factorize",
    "factorized_layers",
    "geometry",
    "grouped_layers",
    "hadamard",
    "hadamard_layers",
    "l1_norm_of_masks",
    "places_of_weights",
    "rank_for_gamma",
    "rank_for_ratio",
    "row_groups",
    "trim",
]
