"""What tests of methods on features, logits and class labels have in common."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_pfl import Federation
from lit_pfl.core.server import Server, UniformServer
from lit_pfl.data import Digits, Dirichlet
from lit_pfl.methods import FedAvg
from tiny import digits, weights


def skewed(num_clients: int = 3, **options: Any) -> Digits:
    """Return clients with few images each, whose classes differ."""
    return digits(num_clients, **{"partition": Dirichlet(alpha=0.3), "train_fraction": 0.1, **options})


def learners(federation: Federation) -> dict[int, dict[str, Tensor]]:
    """Return the states of the clients' learners alone, without what a method keeps beside them."""
    return {k: {n: t for n, t in own.items() if n.startswith("backbone")} for k, own in weights(federation).items()}


def whole_data(federation: Federation, client: int) -> tuple[Tensor, Tensor]:
    """Return all training images and labels of a client, in order."""
    [(images, labels)] = federation.data.client(client).train.in_order(10_000)
    return images, labels


def features(federation: Federation, client: int) -> np.ndarray:
    """Return the (n, d) features of a client's training images, as its network is now, in double precision."""
    network = federation.clients[client].backbone.eval()
    with torch.no_grad():
        return network.body(whole_data(federation, client)[0]).double().numpy()


class Uniform(FedAvg):
    """FedAvg in which all clients count the same."""

    def configure_server(self) -> Server:
        return UniformServer()


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return probabilities, row by row."""
    p = np.exp(logits - logits.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)
