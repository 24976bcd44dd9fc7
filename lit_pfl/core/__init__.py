"""What a method is made of: a client is a learner under a method, a server takes what clients upload."""

from lit_pfl.core.averaging import mean_of_rows, weighted_mean
from lit_pfl.core.classifying import Classifying
from lit_pfl.core.client import Client
from lit_pfl.core.mixing import MixingServer
from lit_pfl.core.payload import Payload, as_payload
from lit_pfl.core.server import ClientInfo, Server, UniformServer, Weighting
from lit_pfl.core.server_optimizer import (
    ServerAdagrad,
    ServerAdam,
    ServerExtrapolation,
    ServerMomentum,
    ServerOptimizer,
    ServerYogi,
)
from lit_pfl.core.sharing import BODY, EVERYTHING, Role, needs_head
from lit_pfl.core.spec import ClientSpec
from lit_pfl.core.trained_server import TrainedServer

__all__ = [
    "BODY",
    "EVERYTHING",
    "Classifying",
    "Client",
    "ClientInfo",
    "ClientSpec",
    "MixingServer",
    "Payload",
    "Role",
    "Server",
    "ServerAdagrad",
    "ServerAdam",
    "ServerExtrapolation",
    "ServerMomentum",
    "ServerOptimizer",
    "ServerYogi",
    "TrainedServer",
    "UniformServer",
    "Weighting",
    "as_payload",
    "mean_of_rows",
    "needs_head",
    "weighted_mean",
]
