"""Clustered federated learning: a cluster whose clients pull in different directions is split in two."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor

from lit_pfl.core import Client
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo, Server
from lit_pfl.core.sharing import EVERYTHING
from lit_pfl.errors import ConfigError
from lit_pfl.ops import Linkage, bipartition, cosine_similarity_matrix


class ClusteredFL(Client):
    """One model for every cluster of clients; clusters are found by splitting.

    The server begins with a single cluster. When the mean of a cluster's updates has become small while some client's
    own update is still large, the cluster's model is near a compromise that suits nobody, and the cluster is divided
    in two by the cosine of the clients' updates. Never split, this is FedAvg with equal weights.

    Args:
        eps1: a cluster may split only if the norm of its mean update is below this.
        eps2: and the largest norm of one client's update is above this.
        min_size: smallest number of clients, of those that trained in the round, in a cluster that is split.
        start_round: clusters split only after this round.
        thresholds: norms grow with the learning rate and the number of steps. ``absolute``: ``eps1`` and ``eps2`` are
            norms; ``relative``: they are shares of the largest norm of an update in the first round.
        linkage: how clients are divided: ``complete`` linkage, as in the released code, or ``single``, which is
            Algorithm 1 of the paper.
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: when relative thresholds are so high that hardly any update could pass them.

    Source:
        Sattler et al. 2020, Algorithms 1 to 3; the thresholds are those of their released code.
    """

    may_unfreeze = False

    shares = EVERYTHING

    def __init__(
        self,
        eps1: NonNegativeFloat = 0.4,
        eps2: NonNegativeFloat = 1.6,
        min_size: PositiveInt = 3,
        start_round: NonNegativeInt = 20,
        thresholds: Literal["absolute", "relative"] = "absolute",
        linkage: Linkage = "complete",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if thresholds == "relative" and eps2 >= 1:
            raise ConfigError(
                f"model.eps2={eps2}: with model.thresholds=relative it is a share of the largest norm of an update in "
                "the first round; give less than 1."
            )
        self.rule = SplitRule(eps1, eps2, min_size, start_round, thresholds == "relative", linkage)

    def configure_server(self) -> "ClusteredFLServer":
        return ClusteredFLServer(self.rule, tuple(self.shared_weights()))


@dataclass(frozen=True)
class SplitRule:
    """Says when a cluster is split, and how; see :class:`ClusteredFL` for the options."""

    eps1: float
    eps2: float
    min_size: int
    start_round: int
    relative: bool
    linkage: Linkage

    def applies(self, updates: Tensor, scale: float) -> bool:
        """Say whether a cluster of these updates, (J, d), is split; ``scale`` is the unit of the thresholds."""
        mean = float(updates.mean(0, dtype=torch.float64).norm())
        return mean < self.eps1 * scale and largest_norm(updates) > self.eps2 * scale


class Fork(NamedTuple):
    """Where a cluster was split.

    Args:
        children: the clusters that it was split into.
        updates: (J, d) updates it was split by.
        second: (J,) bool; which of them went to the second child.
    """

    children: tuple[int, int]
    updates: Tensor
    second: Tensor

    def way(self, update: Tensor) -> int:
        """Return the child with the most similar update to a (d,) one."""
        similarity = torch.nn.functional.cosine_similarity(self.updates, update, dim=1)
        return self.children[int(similarity[self.second].max() > similarity[~self.second].max())]


class ClusteredFLServer(Server):
    """Averages within clusters, and splits them.

    Clients that did not train in the round in which their cluster was split stay at the fork, as newcomers do in the
    paper: they are sent the model from before the split, and their next update, which is then not averaged, is compared
    with those that the cluster was split by.

    Args:
        rule: when and how clusters are split.
        names: the tensors whose updates are compared: trained weights only.

    Attributes:
        models: every cluster's model. Clusters are numbered from 0 in the order in which they came to be.
        place: every client's cluster.
    """

    one_model = False

    kept = ("place", "scale", "models")
    averages = True

    models: dict[int, Payload]
    place: dict[int, int]

    def __init__(self, rule: SplitRule, names: Sequence[str]) -> None:
        self.rule, self.names = rule, names

    def start(self, clients: Mapping[int, ClientInfo]) -> None:
        super().start(clients)
        self.models = {0: self.model}
        self.place = dict.fromkeys(self.num_samples, 0)
        self.forks: dict[int, Fork] = {}
        self.scale = 0.0 if self.rule.relative else 1.0

    def add(self, client: int, info: ClientInfo) -> None:
        """Put the client where all began: it gets the model from before the first split."""
        self.place = {**self.place, client: 0}

    @property
    def clusters(self) -> list[list[int]]:
        """The clients of every cluster, and those at every fork."""
        return [[c for c, node in self.place.items() if node == cluster] for cluster in sorted({*self.place.values()})]

    def mixing(self) -> tuple[list[int], Tensor]:
        """Return equal weights of all in a client's cluster."""
        places = torch.tensor(list(self.place.values()))
        together = (places[:, None] == places).double()
        return list(self.place), together / together.sum(1, keepdim=True)

    def aggregate(self, round: int, uploads: Mapping[int, Payload]) -> None:
        if not self.scale:
            self.scale = largest_norm(self._updates(list(uploads), uploads))
        members: dict[int, list[int]] = {}
        for client in uploads:
            members.setdefault(self.place[client], []).append(client)
        for cluster, clients in sorted(members.items()):
            if cluster in self.forks:
                updates = self._updates(clients, uploads)
                self.place |= {c: self.forks[cluster].way(u) for c, u in zip(clients, updates, strict=True)}
                continue
            for part, group in self._split(round, cluster, clients, uploads).items():
                equal = [1 / len(group)] * len(group)
                own = {client: uploads[client] for client in group}
                self.models[part] = self.average(own, equal, list(self.model), self.models[cluster])
        self._forget()

    def _updates(self, clients: list[int], uploads: Mapping[int, Payload]) -> Tensor:
        """Return each client's upload less what it was sent, as (J, d)."""

        def update(client: int) -> Tensor:
            before = self.models[self.place[client]]
            return torch.cat([(uploads[client][name] - before[name]).flatten() for name in self.names])

        return torch.stack([update(client) for client in clients])

    def _split(
        self, round: int, cluster: int, clients: list[int], uploads: Mapping[int, Payload]
    ) -> dict[int, list[int]]:
        """Split a cluster if it is time; return who trained in each part."""
        if round <= self.rule.start_round or len(clients) < max(2, self.rule.min_size):
            return {cluster: clients}
        updates = self._updates(clients, uploads)
        if not self.rule.applies(updates, self.scale):
            return {cluster: clients}
        second = bipartition(cosine_similarity_matrix(updates), self.rule.linkage)
        children = (max(self.models) + 1, max(self.models) + 2)
        self.forks[cluster] = Fork(children, updates, second)
        self.place |= {client: children[side] for client, side in zip(clients, second.tolist(), strict=True)}
        return {child: [client for client in clients if self.place[client] == child] for child in children}

    def _forget(self) -> None:
        """Forget the forks at which nobody waits, and on nobody's way."""
        ahead, used = list(self.place.values()), set()
        while ahead:
            cluster = ahead.pop()
            used.add(cluster)
            ahead += self.forks[cluster].children if cluster in self.forks else ()
        # the first one is for clients that join later
        self.models = {cluster: model for cluster, model in self.models.items() if cluster in used | {0}}
        self.forks = {cluster: fork for cluster, fork in self.forks.items() if cluster in used}

    def reply(self, client: int) -> Payload:
        return self.models[self.place[client]]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "forks": {cluster: fork._asdict() for cluster, fork in self.forks.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.forks = {cluster: Fork(**fork) for cluster, fork in state["forks"].items()}


def largest_norm(updates: Tensor) -> float:
    """Return the largest norm of the rows of a (J, d) tensor."""
    return float(torch.linalg.vector_norm(updates, dim=1, dtype=torch.float64).max())
