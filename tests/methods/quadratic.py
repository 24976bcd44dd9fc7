"""Local problems that can be worked out by hand: quadratics that ignore the images, and softmax regression on digits.

Both give ``loss(k, w)`` and ``gradient(k, w)`` of client k in NumPy, at all the weights as one (d,) vector.
"""

from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn

from lit_pfl import Client, Federation
from lit_pfl.core import ClientSpec
from lit_pfl.data import BatchLoader, Digits, Dirichlet, Uniform
from lit_pfl.learners import OptimizerCallable, SchedulerCallable
from tiny import Parts, client, digits


class Quadratics:
    """``f_k(w) = 1/2 (w - b_k)^T A_k (w - b_k)``, of another shape at every client.

    Args:
        a: (K, d, d) symmetric and positive definite.
        b: (K, d).
    """

    def __init__(self, a: np.ndarray, b: np.ndarray) -> None:
        self.a, self.b = a, b
        self.start = np.linspace(-1.0, 1.0, b.shape[1])

    @classmethod
    def random(cls, num_clients: int = 4, dim: int = 3, seed: int = 0) -> "Quadratics":
        rng = np.random.default_rng(seed)
        turns = np.linalg.qr(rng.normal(size=(num_clients, dim, dim))).Q
        curvatures = rng.uniform(0.3, 3.0, size=(num_clients, 1, dim))
        return cls(turns * curvatures @ turns.transpose(0, 2, 1), 2 * rng.normal(size=(num_clients, dim)))

    def loss(self, k: int, w: Any) -> Any:
        return (w - self.b[k]) @ self.a[k] @ (w - self.b[k]) / 2

    def gradient(self, k: int, w: np.ndarray) -> np.ndarray:
        return self.a[k] @ (w - self.b[k])

    def optimum(self, shares: Any) -> np.ndarray:
        """The minimum of the mean of all losses."""
        return np.linalg.solve(np.einsum("k,kij->ij", shares, self.a), np.einsum("k,kij,kj->i", shares, self.a, self.b))

    def fixed_point_of_averaging(self, shares: Any, lr: float, steps: int) -> np.ndarray:
        """Where averaging after some local steps ends: each maps w to ``b + (I - lr A)^steps (w - b)``."""
        eye = np.eye(self.b.shape[1])
        left = eye - np.stack([np.linalg.matrix_power(eye - lr * a, steps) for a in self.a])
        return np.linalg.solve(np.einsum("k,kij->ij", shares, left), np.einsum("k,kij,kj->i", shares, left, self.b))


class Point(nn.Module):
    """A point in two tensors, so that one taken for the other shows."""

    def __init__(self, start: np.ndarray) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.tensor(part)) for part in np.split(start, [1]))

    def forward(self) -> Tensor:
        return torch.cat([self.first, self.second])


class QuadraticLearner(L.LightningModule):
    """A learner whose training loss is its client's quadratic, whatever the batch, and by which it is scored too."""

    client_id: int

    def __init__(self, problem: Quadratics, optimizer: OptimizerCallable, scheduler: SchedulerCallable | None) -> None:
        super().__init__()
        self.problem, self.make_optimizer, self.make_scheduler = problem, optimizer, scheduler
        self.backbone = Point(problem.start)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        away = self.backbone() - torch.tensor(self.problem.b[self.client_id])
        return away @ torch.tensor(self.problem.a[self.client_id]) @ away / 2

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        return optimizer if self.make_scheduler is None else ([optimizer], [self.make_scheduler(optimizer)])


class QuadraticClient(Client):
    """What lies below a method: it tells its learner which quadratic is the client's."""

    def configure(self, spec: ClientSpec, alone: bool = False) -> None:
        self.learner.client_id = spec.client_id
        super().configure(spec, alone)


def sgd(lr: float, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, **options)


class OnceBroken(QuadraticClient):
    """Client 2 gets lost in round 2."""

    def objective(self, batch, batch_idx):
        lost = self.spec.client_id == 2 and self.current_epoch == 1
        return super().objective(batch, batch_idx) * (float("nan") if lost else 1.0)


def quadratic(
    method: type[Client],
    problem: Quadratics,
    lr: float = 0.1,
    optimizer: OptimizerCallable | None = None,
    scheduler: SchedulerCallable | None = None,
    **options: Any,
) -> Client:
    """Return a client of a method whose loss is a quadratic, in double precision."""
    # by another name: the command line would no longer know which of two methods is meant
    kind: Any = type(f"_Quadratic{method.__name__}", (method, QuadraticClient), {"__module__": __name__})
    return kind(learner=QuadraticLearner(problem, optimizer or sgd(lr), scheduler), **options)


def softmax_regression(method: type[Client], lr: float = 0.1, **options: Any) -> Client:
    """Return a client of a method with a linear classifier."""
    own: dict[str, Any] = {"optimizer": sgd(lr), "scheduler": None, **options}
    return client(method, backbone=lambda channels, classes: Parts(nn.Flatten(), nn.Linear(64, classes)), **own)


class SoftmaxRegression:
    """The losses of a federation of :func:`softmax_regression`; w is the (classes, 64) weight, then the bias."""

    def __init__(self, federation: Federation) -> None:
        self.data = []
        for k in federation.clients:
            train = federation.data.client(k).train
            [(images, labels)] = BatchLoader(train.data, train.dataset, len(train.dataset), train.label_map)
            self.data.append((images.flatten(1).double().numpy(), np.eye(10)[labels.numpy()]))
        with federation.draws.default_generators("weights"):
            self.start = flat(federation.prototype.build(federation.clients[0].spec).learner.state_dict())

    def _log_probabilities(self, k: int, w: np.ndarray) -> np.ndarray:
        logits = self.data[k][0] @ w[:640].reshape(10, 64).T + w[640:]
        return logits - np.log(np.exp(logits).sum(1, keepdims=True))

    def loss(self, k: int, w: np.ndarray) -> float:
        return float(-(self._log_probabilities(k, w) * self.data[k][1]).sum(1).mean())

    def gradient(self, k: int, w: np.ndarray) -> np.ndarray:
        images, targets = self.data[k]
        by_logit = (np.exp(self._log_probabilities(k, w)) - targets) / len(images)
        return np.concatenate([(by_logit.T @ images).ravel(), by_logit.sum(0)])


def flat(tensors: Mapping[str, Tensor], prefix: str = "backbone.") -> np.ndarray:
    """Return the tensors of a name as one vector in double precision, in their order."""
    return np.concatenate([t.detach().double().numpy().ravel() for n, t in tensors.items() if n.startswith(prefix)])


def equal(num_clients: int = 2, batches: int = 1) -> Digits:
    """Return 2 or 4 clients with equally many images (or one more), in so many batches."""
    return digits(num_clients, batch_size=1438 // num_clients // batches + 1, partition=Uniform())


def unequal(num_clients: int = 4, batch_size: int = 2000) -> Digits:
    """Return clients with different numbers of images, by default in one batch each."""
    return digits(num_clients, batch_size=batch_size, partition=Dirichlet(alpha=1.0))


def sizes(federation: Federation) -> np.ndarray:
    """Return the clients' numbers of training samples."""
    return np.array([len(federation.data.client(k).train.dataset) for k in federation.clients])


def chosen(federation: Federation, rounds: int) -> list[list[int]]:
    """Return who took part, round by round."""
    return [federation.participants(completed) for completed in range(rounds)]
