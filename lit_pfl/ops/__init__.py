"""Pure tensor functions: no state, no modules."""

from lit_pfl.ops.averaging import weighted_mean
from lit_pfl.ops.similarity import cosine_similarity_matrix, matching_weights

__all__ = ["cosine_similarity_matrix", "matching_weights", "weighted_mean"]
