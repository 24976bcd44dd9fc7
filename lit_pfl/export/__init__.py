"""A personalized model as a file, and in a folder with all that it takes to use it elsewhere."""

from lit_pfl.export.network import (
    load_mixed,
    load_model,
    low_rank_weights,
    save_mixed,
    save_model,
    save_program,
    to_dense,
    to_factors,
)

__all__ = [
    "load_mixed",
    "load_model",
    "low_rank_weights",
    "save_mixed",
    "save_model",
    "save_program",
    "to_dense",
    "to_factors",
]
