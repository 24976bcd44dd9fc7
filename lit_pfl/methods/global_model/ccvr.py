"""CCVR: the averaged model's head is calibrated on features drawn from Gaussians of every class."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from jsonargparse.typing import PositiveFloat, PositiveInt
from torch import Tensor, nn

from lit_pfl.core.classifying import Classifying
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo
from lit_pfl.core.sharing import EVERYTHING
from lit_pfl.core.trained_server import TrainedServer
from lit_pfl.errors import within_memory
from lit_pfl.methods.knowledge.fedproto import COUNTS
from lit_pfl.nn import Memory

MEANS, COVARIANCES = "class_means", "class_covariances"
STATISTICS = (COUNTS, MEANS, COVARIANCES)


class CCVR(Classifying):
    """Clients train as in FedAvg; what is evaluated after aggregation has a head that virtual features have calibrated.

    With the received body, in evaluation mode, client k takes the number n_ck, the mean mu_ck and the covariance S_ck
    (divided by n_ck - 1) of the features of every class c of its training data. The server puts them together::

        mu_c = sum_k n_ck / n_c mu_ck
        S_c  = sum_k (n_ck - 1) / (n_c - 1) S_ck + sum_k n_ck / (n_c - 1) mu_ck mu_ck^T - n_c / (n_c - 1) mu_c mu_c^T

    It draws ``samples_per_class`` features of every class with at least two samples from N(mu_c, S_c), and trains the
    head of the model that the statistics are of on them, by SGD on the cross entropy. That model is evaluated with
    ``federation.evaluate=after``, and as the global model: it is the one that the round began with, while the paper
    calibrates once after the last round, and asks all clients. Of clients that are not in the round their latest
    statistics count, which are of an earlier body. Training continues from the plain mean, so clients are those of
    FedAvg, bit for bit. In FL-bench's code S_ck is divided by n_ck.

    Args:
        samples_per_class: virtual features of every class.
        epochs: how often the head goes through them.
        lr: its learning rate.
        batch_size: virtual features a step.
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: when labels differ from client to client, the learner has no head module, the head is not shared
            or has batch norm, the data has no class labels, or the virtual features do not fit into memory.

    Source:
        Luo et al. 2021, Equations 3 and 4 and Algorithm 1. There is no code by the authors.
    """

    needs_automatic = "reads what goes into the head in one step of the learner"
    needs_labels = "takes the mean features of every class"
    needs_common_labels = "averages heads and features of classes"
    trains_head_on = "drawn features"

    shares = EVERYTHING
    reserved = STATISTICS

    own: Memory

    def __init__(
        self,
        samples_per_class: PositiveInt = 200,
        epochs: PositiveInt = 1,
        lr: PositiveFloat = 0.01,
        batch_size: PositiveInt = 32,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.samples_per_class, self.epochs, self.lr, self.batch_size = samples_per_class, epochs, lr, batch_size

    def configure_state(self) -> None:
        classes, d = self.num_logits, self.num_features
        shapes = {MEANS: (classes, d), COVARIANCES: (classes, d, d)}
        counts = torch.zeros(classes, dtype=torch.int64)
        self.own = Memory({COUNTS: counts, **{name: torch.zeros(shape) for name, shape in shapes.items()}})

    def configure_server(self) -> "CCVRServer":
        return CCVRServer(self, seed=int(torch.randint(2**31, ())))

    def begin_round(self) -> None:
        """Take the statistics of the features under the received body."""
        features, labels = self.all_embedded()
        counts, means, covariances = class_statistics(features, labels, self.num_logits)
        self.own.copy_({COUNTS: counts, MEANS: means, COVARIANCES: covariances})

    def upload(self) -> Payload:
        """Return the weights and the statistics."""
        return super().upload().with_(dict(self.own.items()))


class CCVRServer(TrainedServer):
    """Averages weights, and calibrates the head of the model that the round began with.

    Args:
        method: the prototype, of whose head it holds a copy.
        seed: of what is drawn.

    Attributes:
        calibrated: the model with the calibrated head; empty before round 1.
        statistics: what every client that has taken part sent last, by id.
    """

    count_tensors = (COUNTS,)
    kept = ("calibrated", "statistics")

    calibrated: Payload
    statistics: dict[int, Payload]

    def __init__(self, method: CCVR, seed: int = 0) -> None:
        super().__init__(seed)
        self.head = copy.deepcopy(method.head_module).requires_grad_(True)
        self.leaves = method.shared_head_leaves("calibrates the common head")
        self.samples, self.epochs = method.samples_per_class, method.epochs
        with within_memory(f"model.samples_per_class={self.samples}"):  # now, not after the first round's training
            torch.empty(self.samples, method.num_logits, method.num_features)
        self.lr, self.batch_size = method.lr, method.batch_size

    def start(self, clients: Mapping[int, ClientInfo]) -> None:
        super().start(clients)
        self.calibrated, self.statistics = Payload({}), {}

    def make(self, clients: Mapping[int, ClientInfo]) -> tuple[nn.Module, torch.optim.Optimizer]:
        module = copy.deepcopy(self.head).cpu().train()
        return module, torch.optim.SGD(module.parameters(), lr=self.lr)

    def is_averaged(self, name: str) -> bool:
        return name not in STATISTICS

    def aggregate(self, round: int, uploads: Mapping[int, Payload]) -> None:
        before = self.model
        super().aggregate(round, uploads)
        for client, upload in uploads.items():
            self.statistics[client] = Payload({name: upload[name].cpu() for name in STATISTICS}).clone()
        latest = [own for _, own in sorted(self.statistics.items())]
        counts, means, covariances = global_statistics(*(torch.stack([own[n] for own in latest]) for n in STATISTICS))
        there = (counts > 1).nonzero()[:, 0]
        own = {leaf: before[name].cpu() for name, leaf in self.leaves.items() if name in before}
        self.module.load_state_dict({**self.module.state_dict(), **own})
        with self.training(round):
            drawn = [virtual(means[c], covariances[c], self.samples) for c in there]
            features = torch.cat([torch.empty(0), *drawn]).to(next(self.module.parameters()))
            labels = there.repeat_interleave(self.samples)
            for _ in range(self.epochs):
                for part in torch.randperm(len(labels)).split(self.batch_size) if drawn else ():
                    self.optimizer.zero_grad()
                    nn.functional.cross_entropy(self.module(features[part]), labels[part]).backward()
                    self.optimizer.step()
            self.optimizer.zero_grad()
        trained = self.module.state_dict()
        heads = {name: trained[leaf].clone().to(before[name]) for name, leaf in self.leaves.items() if name in before}
        self.calibrated = Payload({name: heads.get(name, tensor) for name, tensor in before.items()}, before.sparse)

    def evaluation_reply(self, client: int) -> Payload:
        return self.global_model()

    def global_model(self) -> Payload:
        return self.calibrated if len(self.calibrated) else self.model


def class_statistics(features: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (C,) counts, (C, d) means and (C, d, d) covariances of every class, zeros where there is nothing.

    Args:
        features: (n, d).
        labels: (n,).
        classes: C.
    """
    counts = torch.bincount(labels, minlength=classes)
    d = features.shape[1]
    single = features.new_empty(0, dtype=torch.promote_types(features.dtype, torch.float32))
    means, covariances = single.new_zeros(classes, d), single.new_zeros(classes, d, d)
    for c in counts.nonzero()[:, 0].tolist():
        own = features[labels == c].double()
        means[c] = own.mean(0)
        away = own - own.mean(0)
        covariances[c] = away.T @ away / max(1, len(own) - 1)
    return counts, means, covariances


def global_statistics(counts: Tensor, means: Tensor, covariances: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the statistics of all clients' features together, in double precision; see :class:`CCVR`.

    Args:
        counts: (K, C).
        means: (K, C, d).
        covariances: (K, C, d, d).
    """
    n, total = counts.double(), counts.sum(0).double()
    mean = (n[:, :, None] * means.double()).sum(0) / total.clamp_min(1)[:, None]
    within = ((n - 1).clamp_min(0)[:, :, None, None] * covariances.double()).sum(0)
    # around the mean of all: the same as the formula, without the difference of two large numbers
    away = means.double() - mean
    between = (n[:, :, None, None] * away[:, :, :, None] * away[:, :, None]).sum(0)
    return counts.sum(0), mean, (within + between) / (total - 1).clamp_min(1)[:, None, None]


def virtual(mean: Tensor, covariance: Tensor, samples: int) -> Tensor:
    """Return (samples, d) features drawn from a Gaussian, in single precision.

    Args:
        mean: (d,), in double precision.
        covariance: (d, d), positive semidefinite.
        samples: how many.
    """
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp_min(0).sqrt()
    return (mean + torch.randn(samples, len(mean), dtype=mean.dtype) @ root.T).float()
