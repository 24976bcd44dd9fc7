"""Callbacks for federated learning with Lightning. They need nothing else of lit-pfl."""

from lit_pfl_callbacks.clients import ClientsTable
from lit_pfl_callbacks.feature_alignment import FeatureAlignment
from lit_pfl_callbacks.federated_loop import FederatedLoop, JoinInfo, Link
from lit_pfl_callbacks.predictions import Predictions
from lit_pfl_callbacks.progress import RoundProgress
from lit_pfl_callbacks.run_folder import RunLogger, latest_config, resume_command, run_folder
from lit_pfl_callbacks.similarity import Similarity

__all__ = [
    "ClientsTable",
    "FeatureAlignment",
    "FederatedLoop",
    "JoinInfo",
    "Link",
    "Predictions",
    "RoundProgress",
    "RunLogger",
    "Similarity",
    "latest_config",
    "resume_command",
    "run_folder",
]
