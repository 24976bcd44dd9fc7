"""FedPAC: features aligned by class, and heads combined for each client."""

from collections.abc import Mapping
from typing import Any

import torch
from jsonargparse.typing import NonNegativeFloat, PositiveFloat
from torch import Tensor, nn

from lit_pfl.core.averaging import weighted_mean
from lit_pfl.core.classifying import Classifying
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo, Server
from lit_pfl.core.sharing import EVERYTHING
from lit_pfl.methods.knowledge.fedproto import COUNTS, PROTOTYPES, mean_prototypes
from lit_pfl.methods.partial.phases import Phases, check_epochs
from lit_pfl.nn import Memory
from lit_pfl.ops import smallest_on_simplex

VARIANCE, MEANS = "variance", "class_means"
STATISTICS = (PROTOTYPES, COUNTS, VARIANCE, MEANS)


class FedPAC(Classifying):
    """The body is averaged, and its features stay near common class means; each client gets its own mixture of heads.

    A round: with the received body a client takes statistics of its training data's features h: class means mu_k, class
    shares p_k, ``h_k = p_k mu_k`` and ``V = (sum_k p_k E_k|h|^2 - sum_k p_k^2 |mu_k|^2) / n``. The first local epoch
    trains the head alone. The others train the body alone, on the loss plus ``lam * MSE(h, t_y)``, where t_y is the
    global prototype of the sample's class, or mu_y where there is none; before the first are known there is no term.
    Then it sends the weights, V, h and the prototypes: class means under the trained body.

    The server averages the body by samples and prototypes by class counts. The head of client i is ``sum_j a_j H_j``
    over the participants, with a on the simplex that minimizes ``a^T (diag(V) + D) a``, ``D_jl = sum_k <h_ik - h_jk,
    h_ik - h_lk>``. Weights of at most 0.001 are set to 0. Who does not take part keeps its head. PFLlib averages
    prototypes without weights, does not divide what is left of a by its sum, and mixes heads that are mixed already.

    Args:
        lam: strength of the term.
        head_rate: how many times larger the head's learning rate is than the body's; gradients are scaled, which is the
            same for SGD without weight decay. 0.1 and 0.01 in the authors' runs (0.02 on CIFAR-10).
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: when labels differ from client to client, the learner has no head module, the data no class
            labels, or a round fewer than two local epochs.

    Source:
        Xu et al. 2023, Algorithm 1; statistics as in the authors' code.
    """

    needs_automatic = "freezes head and body in turn"
    needs_labels = "takes the mean features of every class"
    needs_common_labels = "averages prototypes of classes and mixes heads"
    min_local_epochs = 2
    may_unfreeze = False

    shares = EVERYTHING
    reserved = STATISTICS

    own: Memory
    common: Memory

    def __init__(self, lam: NonNegativeFloat = 1.0, head_rate: PositiveFloat = 10.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.lam, self.head_rate = lam, head_rate
        self._targets: Tensor | None = None
        self._trains_head = False

    def configure_state(self) -> None:
        check_epochs(self.spec.local_epochs, 1, "FedPAC's one epoch of the head")
        self.phases = Phases(self.learner, self.head_names, "FedPAC")
        table = torch.zeros(self.num_logits, self.num_features)
        prototypes = {PROTOTYPES: table, COUNTS: torch.zeros(self.num_logits, dtype=torch.int64)}
        self.own = Memory({**prototypes, VARIANCE: torch.zeros(()), MEANS: table})
        self.common = Memory(prototypes)

    def configure_server(self) -> "FedPACServer":
        return FedPACServer(frozenset(self.shared_parameters()) & self.head_names)

    def upload(self) -> Payload:
        """Return the weights, the prototypes and the statistics under the body that the round began with."""
        return super().upload().with_(dict(self.own.items()))

    def download(self, reply: Mapping[str, Tensor]) -> None:
        self.common.copy_(reply)
        super().download({name: tensor for name, tensor in reply.items() if name not in STATISTICS})

    def begin_round(self) -> None:
        means, squares, counts = self.class_moments()
        variance, weighted = statistics(means, squares, counts)
        self.own.copy_({**dict(self.own.items()), VARIANCE: variance, MEANS: weighted})
        known = self.common[COUNTS] > 0
        self._targets = torch.where(known[:, None], self.common[PROTOTYPES], means.float()) if known.any() else None

    def begin_epoch(self, epoch: int, local_epochs: int) -> None:
        check_epochs(local_epochs, 1, "FedPAC's one epoch of the head")
        self._trains_head = epoch == 0
        self.phases.train("head" if self._trains_head else "body")

    def objective(self, batch: Any, batch_idx: int) -> Tensor:
        with self.at_head() as seen:
            loss = super().objective(batch, batch_idx)
        if self._trains_head:
            return loss if self.head_rate == 1 else loss + (self.head_rate - 1) * (loss - loss.detach())
        if not self.lam or self._targets is None:
            return loss
        return loss + self.lam * nn.functional.mse_loss(seen.features, self._targets[self.targets(batch)])

    def end_round(self) -> None:
        self.phases.train("head", "body")
        prototypes, counts = self.class_means()
        self.own.copy_({**dict(self.own.items()), PROTOTYPES: prototypes, COUNTS: counts})
        self._targets = None


def statistics(means: Tensor, squares: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return V, a scalar, and h, (C, d), of a client's features.

    Args:
        means: (C, d) mean features of every class.
        squares: (C,) mean squared norms.
        counts: (C,) numbers of samples.
    """
    n = counts.sum()
    shares = counts.double() / n
    spread = (shares * squares).sum() - (shares.square() * means.double().square().sum(1)).sum()
    return (spread / n).float(), (shares[:, None] * means.double()).float()


def head_weights(variances: Tensor, means: Tensor) -> Tensor:
    """Return (K, K) weights: row i holds those of everybody's head in client i's, and sums to 1.

    Args:
        variances: (K,) V of every client, not negative.
        means: (K, C, d) h of every client.
    """
    columns, deviations = means.double().flatten(1).T, torch.diag(variances.double().sqrt())
    if len(columns) > len(variances):  # as many numbers as clients have the same distances
        columns = torch.linalg.qr(columns).R
    own = columns.split(1, dim=1)
    weights = torch.stack([smallest_on_simplex(torch.cat([h - columns, deviations])) for h in own])
    large = torch.where(weights > 1e-3, weights, torch.zeros_like(weights))
    weights = torch.where(large.any(1, keepdim=True), large, weights)  # of 1,000 equal clients none is large
    return weights / weights.sum(1, keepdim=True)


class FedPACServer(Server):
    """Averages bodies and prototypes, and combines heads.

    Args:
        head: names of the head's tensors in an upload.

    Attributes:
        heads: the combined head of every client that has taken part, by id.
    """

    one_model = False

    count_tensors = (COUNTS,)

    kept = ("heads",)

    heads: dict[int, Payload]

    def __init__(self, head: frozenset[str]) -> None:
        self.head = head

    def start(self, clients: Mapping[int, ClientInfo]) -> None:
        super().start(clients)
        first = clients[min(clients)].initial
        self.heads = {}
        self.first_head = Payload({name: first[name].clone() for name in first if name in self.head})
        self.model = Payload({**self.model, **{name: first[name].clone() for name in (PROTOTYPES, COUNTS)}})

    def is_averaged(self, name: str) -> bool:
        return name not in self.head and name not in STATISTICS

    def aggregate(self, round: int, uploads: Mapping[int, Payload]) -> None:
        sent = list(uploads.values())
        names = [name for name in self.model if self.is_averaged(name)]
        body = weighted_mean(sent, self.averaging_weights(round, uploads), names)
        counts = torch.stack([upload[COUNTS] for upload in sent])
        prototypes = mean_prototypes(torch.stack([upload[PROTOTYPES] for upload in sent]), counts.double())
        self.model = Payload({**body, PROTOTYPES: prototypes, COUNTS: counts.sum(0)})
        for client, row in zip(uploads, self.weights_of_heads(sent), strict=True):
            self.heads[client] = weighted_mean(sent, row, [name for name in sent[0] if name in self.head])

    def weights_of_heads(self, uploads: list[Payload]) -> list[list[float]]:
        """Return the weights of everybody's head in each one's, row by row."""
        variances, means = (torch.stack([upload[name] for upload in uploads]).cpu() for name in (VARIANCE, MEANS))
        return head_weights(variances.clamp_min(0), means).tolist()

    def reply(self, client: int) -> Payload:
        return Payload({**self.model, **self.heads.get(client, self.first_head)})
