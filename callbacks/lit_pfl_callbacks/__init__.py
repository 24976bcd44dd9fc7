"""Callbacks for federated learning with Lightning. They need nothing else of lit-pfl."""

from lit_pfl_callbacks.clients import ClientsTable
from lit_pfl_callbacks.communication import CommunicationLedger
from lit_pfl_callbacks.embedding_map import EmbeddingMap
from lit_pfl_callbacks.features.alignment import FeatureAlignment
from lit_pfl_callbacks.features.map import FeatureMap
from lit_pfl_callbacks.federated_loop import FederatedLoop, JoinInfo, Link
from lit_pfl_callbacks.models import PersonalizedModels
from lit_pfl_callbacks.predictions import Predictions
from lit_pfl_callbacks.progress import RoundProgress
from lit_pfl_callbacks.refused import RefusedUploads
from lit_pfl_callbacks.round_timer import RoundTimer
from lit_pfl_callbacks.run_folder import RunLogger, latest_config, resume_command, run_folder
from lit_pfl_callbacks.similarity import Similarity
from lit_pfl_callbacks.sparsity import SparsityMonitor

__all__ = [
    "ClientsTable",
    "CommunicationLedger",
    "EmbeddingMap",
    "FeatureAlignment",
    "FeatureMap",
    "FederatedLoop",
    "JoinInfo",
    "Link",
    "PersonalizedModels",
    "Predictions",
    "RefusedUploads",
    "RoundProgress",
    "RoundTimer",
    "RunLogger",
    "Similarity",
    "SparsityMonitor",
    "latest_config",
    "resume_command",
    "run_folder",
]
