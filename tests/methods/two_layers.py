"""Federated averaging in NumPy, of a network of two layers, on the very batches that a run has trained on."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lit_pfl import Client, Federation
from lit_pfl.data import Dirichlet
from lit_pfl.models import Backbone
from tiny import client, digits, run, weights

Arrays = dict[str, np.ndarray]
Batch = tuple[np.ndarray, np.ndarray]
BODY = ("body.1.weight", "body.1.bias")
HEAD = ("head.weight", "head.bias")
ALL = (*BODY, *HEAD)


class TwoLayers(Backbone):
    """A hidden layer and a classifier, without anything random."""

    def __init__(self, channels: int = 1, classes: int = 10) -> None:
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh()), nn.Linear(6, classes))


# ------------------------------------------------------------------------------------------------------- the formulas


def logits(w: Arrays, images: np.ndarray) -> np.ndarray:
    hidden = np.tanh(images @ w["body.1.weight"].T + w["body.1.bias"])
    return hidden @ w["head.weight"].T + w["head.bias"]


def by_logits(z: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The gradient of the mean cross entropy."""
    p = np.exp(z - z.max(1, keepdims=True))
    return (p / p.sum(1, keepdims=True) - np.eye(z.shape[1])[labels]) / len(z)


def backward(w: Arrays, images: np.ndarray, g: np.ndarray) -> Arrays:
    """The gradient by the weights, given that by the logits."""
    hidden = np.tanh(images @ w["body.1.weight"].T + w["body.1.bias"])
    below = (g @ w["head.weight"]) * (1 - hidden**2)
    return {
        "body.1.weight": below.T @ images,
        "body.1.bias": below.sum(0),
        "head.weight": g.T @ hidden,
        "head.bias": g.sum(0),
    }


def gradient(w: Arrays, batch: Batch) -> Arrays:
    images, labels = batch
    return backward(w, images, by_logits(logits(w, images), labels))


def combine(a: float, x: Arrays, b: float, y: Arrays) -> Arrays:
    return {name: a * x[name] + b * y[name] for name in x}


def dot(x: Arrays, y: Arrays) -> float:
    return float(sum((x[name] * y[name]).sum() for name in x))


class SGD:
    """SGD with momentum and weight decay; ``step`` changes w, and of it only what has a gradient."""

    def __init__(self, lr: float = 0.1, momentum: float = 0.9, decay: float = 0.01) -> None:
        self.lr, self.momentum, self.decay = lr, momentum, decay
        self.buffers: Arrays = {}

    def step(self, w: Arrays, g: Arrays) -> None:
        for name in g:
            self.buffers[name] = self.momentum * self.buffers.get(name, 0.0) + g[name] + self.decay * w[name]
            w[name] = w[name] - self.lr * self.buffers[name]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


# ----------------------------------------------------------------------------------------------------------- the runs


class Recorded:
    """A run of a method on two layers, every batch of which was noted.

    Args:
        method: what to run.
        local_epochs: epochs a round.
        rounds: number of rounds.
        options: of the method.
    """

    def __init__(self, method: type[Client], local_epochs: int = 2, rounds: int = 2, **options: Any) -> None:
        batches: dict[int, list[Batch]] = {}

        class Recording(method):  # type: ignore[misc, valid-type]
            def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
                images, labels = batch
                noted = images.flatten(1).double().numpy(), labels.numpy()
                batches.setdefault(self.spec.client_id, []).append(noted)
                return super().training_step(batch, batch_idx)

        pattern = client(Recording, **{"backbone": TwoLayers, "optimizer": sgd, "scheduler": None, **options})
        data = digits(3, batch_size=200, partition=Dirichlet(alpha=1.0))
        self.federation = run(pattern, data, rounds=rounds, local_epochs=local_epochs)
        self.local_epochs, self.rounds, self.batches = local_epochs, rounds, batches
        self.members = self.federation.clients
        self.sizes = np.array([len(data.client(k).train.dataset) for k in self.members])
        assert len(set(self.sizes)) > 1

    def start(self) -> Arrays:
        with self.federation.draws.default_generators("weights"):
            return arrays(self.federation.prototype.build(self.members[0].spec).backbone)

    def averaged(
        self, train: Callable[[int, int, Arrays, list[Batch]], None], shared: tuple[str, ...], uniform: bool = False
    ) -> list[Arrays]:
        """Return every client's weights after the last round's training, before aggregation.

        Args:
            train: of a client, an epoch of the round, the client's weights, which it changes, and batches.
            shared: names of what is averaged after every round.
            uniform: whether every client counts the same.
        """
        states = [self.start() for _ in self.members]
        counts = np.ones(len(states)) if uniform else self.sizes
        left: list[Iterator[Batch]] = [iter(self.batches[k]) for k in self.members]
        server = {name: states[0][name] for name in shared}
        for _ in range(self.rounds):
            for k, state in enumerate(states):
                state.update(server)
                for epoch in range(self.local_epochs):
                    train(k, epoch, state, [next(left[k]) for _ in range(len(self.members[k].training_data()))])
            server = {
                name: sum(n * state[name] for n, state in zip(counts, states, strict=True)) / counts.sum()
                for name in shared
            }
        assert all(next(rest, None) is None for rest in left)
        return states


def arrays(network: nn.Module) -> Arrays:
    return {name: weight.detach().double().numpy().copy() for name, weight in network.named_parameters()}


def assert_close(ours: nn.Module, formulas: Arrays, atol: float = 2e-5) -> None:
    for name, weight in arrays(ours).items():
        np.testing.assert_allclose(weight, formulas[name], atol=atol, err_msg=name)


def network(federation: Federation, name: str) -> dict[int, dict[str, Tensor]]:
    """Return the tensors of one of the clients' networks, as ``backbone`` or ``personal``."""
    return {
        k: {n.removeprefix(name + "."): tensor for n, tensor in state.items() if n.startswith(name + ".")}
        for k, state in weights(federation).items()
    }


def scores(federation: Federation) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in federation.rows]
