"""Pure tensor functions: no state, no modules."""

from lit_pfl.ops.low_rank import low_rank_factors
from lit_pfl.ops.matching import (
    Matching,
    assignment_gains,
    gather_inputs,
    match_units,
    merge_units,
    nearest_units,
    spread_inputs,
    unit_matrix,
)
from lit_pfl.ops.similarity import (
    Linkage,
    bipartition,
    cosine_similarity_matrix,
    cosines,
    least_similar,
    most_similar,
    one_after_another,
    random_others,
    softmax_over,
    squared_distance,
    squared_distances,
)
from lit_pfl.ops.simplex import project_onto_simplex, smallest_on_simplex
from lit_pfl.ops.singular_values import Factors, threshold_singular_values
from lit_pfl.ops.sparsity import erk_densities, pack_bits, prune_and_regrow, random_mask, soft_threshold, unpack_bits

__all__ = [
    "Factors",
    "Linkage",
    "Matching",
    "assignment_gains",
    "bipartition",
    "cosine_similarity_matrix",
    "cosines",
    "erk_densities",
    "gather_inputs",
    "least_similar",
    "low_rank_factors",
    "match_units",
    "merge_units",
    "most_similar",
    "nearest_units",
    "one_after_another",
    "pack_bits",
    "project_onto_simplex",
    "prune_and_regrow",
    "random_mask",
    "random_others",
    "smallest_on_simplex",
    "soft_threshold",
    "softmax_over",
    "spread_inputs",
    "squared_distance",
    "squared_distances",
    "threshold_singular_values",
    "unit_matrix",
    "unpack_bits",
]
