"""Floco: heads from a simplex of common ones, of which each client has a region of its own."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from jsonargparse.typing import PositiveFloat, PositiveInt
from torch import Tensor, nn

from lit_pfl.core.classifying import Classifying
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo, Server
from lit_pfl.core.shared_tensors import EXTRA
from lit_pfl.core.sharing import EVERYTHING, Role
from lit_pfl.errors import ConfigError
from lit_pfl.ops.simplex import rows_onto_simplex

SIMPLEX, CENTER = "simplex", "center"
ENDPOINTS = f"{EXTRA}{SIMPLEX}.endpoints"
#: sums that clients' points are projected to; the one that spreads them most is taken
SUMS = torch.linspace(1e-4, 1, 1000, dtype=torch.float64)


class Floco(Classifying):
    """The head's weight is a mixture of M common ones; every client trains and uses mixtures near its own.

    The head is ``z = h W(a)^T + b`` with ``W(a) = sum_m a_m W_m``. Body, endpoints W_m and b are averaged by samples.
    In the first ``tau`` rounds a client draws a for every batch, uniformly from the simplex. After round tau the server
    takes what each client's last round has changed of the endpoints, and the first M principal components of that, one
    point a client. It projects the points onto simplices of sum s, divides by s, and takes of 1000 sums s in (0, 1] the
    one with the least energy ``sum_{i<j} 1 / |c_i - c_j|^2``. From then on client i draws ``a = c_i + r u`` with r from
    [0, rho] and u from the unit sphere of the L1 norm, divided by its sum; at an edge of the simplex some entries are
    below 0. What is evaluated is ``W(c_i)``, before that the mean of the endpoints. Clients that have not taken part by
    round tau continue as before.

    The first endpoint is the head's own first weight, the others are drawn by Xavier's normal rule, as in the authors'
    code for all. That lets all clients train a further time in round tau. Later versions of the authors' code do not
    divide a drawn mixture by its sum, which is between 1 - rho and 1 + rho. With ``endpoints=1`` this is FedAvg, bit
    for bit. Floco+ is not here.

    Args:
        endpoints: their number, M.
        tau: the round after which clients get regions of their own; half of all rounds in the authors' runs.
        rho: the radius of a region, below 1: of 1 and more, sums of drawn mixtures may be 0.
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: when labels differ from client to client, the head is not one linear layer or is not shared, or
            ``rho`` is too large.

    Source:
        Grinwald, Wiesner and Nakajima 2024, Algorithm 1, with the details of the authors' code.
    """

    needs_automatic = "changes the logits of the loss"
    needs_labels = ""
    needs_common_labels = "averages heads"
    shared_extras = frozenset({SIMPLEX})

    shares = EVERYTHING
    reserved = (CENTER,)

    center: Tensor

    def __init__(
        self, endpoints: PositiveInt = 10, tau: PositiveInt = 10, rho: PositiveFloat = 0.1, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        if not rho < 1:
            raise ConfigError(f"model.rho={rho}: Floco's regions need a radius below 1.")
        self.endpoints, self.tau, self.rho = endpoints, tau, rho

    def configure_learner(self) -> None:
        super().configure_learner()
        if type(self.head_module) is not nn.Linear:
            raise ConfigError(
                "model.head: Floco needs a head with a linear layer and nothing else, to mix its weights; this is a "
                f"{type(self.head_module).__name__}."
            )
        weight = self.head_module.weight
        [self.weight_name] = [name for name, x in self.learner.named_parameters() if x is weight]

    def is_shared(self, name: str, role: Role) -> bool:
        return name != self.weight_name and super().is_shared(name, role)

    def configure_state(self) -> None:
        if self.share_head is False:
            raise ConfigError("model.share_head=false: Floco averages the endpoints of heads; leave it out.")
        head: Any = self.head_module
        self.extra = nn.ModuleDict({SIMPLEX: Endpoints(head.weight, self.endpoints)})
        self.register_buffer(CENTER, torch.zeros(self.endpoints))

    def configure_server(self) -> "FlocoServer":
        return FlocoServer(self.tau)

    def download(self, reply: Mapping[str, Tensor]) -> None:
        self.center.copy_(reply[CENTER])
        super().download({name: tensor for name, tensor in reply.items() if name != CENTER})

    def objective(self, batch: Any, batch_idx: int) -> Tensor:
        with self.at_head(logits=self._head(self._drawn())):
            return super().objective(batch, batch_idx)

    def _drawn(self) -> Tensor:
        """Return an (M,) mixture to train, from the client's region or, as long as it has none, from the simplex."""
        if self.endpoints == 1:
            return torch.ones(1)
        if not self.center.any():
            drawn = -torch.rand(self.endpoints).clamp_min(torch.finfo(torch.float32).tiny).log()
            return drawn / drawn.sum()
        away = torch.rand(self.endpoints) * 2 - 1
        drawn = self.center.cpu() + torch.rand(()) * self.rho * away / away.abs().sum()
        return drawn / drawn.sum()

    @contextmanager
    def personalized(self) -> Iterator[L.LightningModule]:
        """Put the mixture in the middle of the client's region in the place of the head's weight."""
        middle = self.center if self.center.any() else torch.full((self.endpoints,), 1 / self.endpoints)
        with self.at_head(logits=self._head(middle)):
            yield self.learner

    def _head(self, mixture: Tensor) -> "MixedHead":
        head: Any = self.head_module
        simplex: Any = self.extra[SIMPLEX]
        return MixedHead(simplex, mixture, head)


class FlocoServer(Server):
    """Averages bodies and endpoints, and gives every client a region.

    Args:
        tau: the round after which it does.

    Attributes:
        updates: what each client has changed of the endpoints in its last round, flat, until there are regions.
        centers: (M,) of each client's region, by id; none before.
    """

    averages = True
    kept = ("updates", "centers")

    updates: dict[int, Tensor]
    centers: dict[int, Tensor]

    def __init__(self, tau: int) -> None:
        self.tau = tau

    def start(self, clients: Mapping[int, ClientInfo]) -> None:
        super().start(clients)
        self.updates, self.centers = {}, {}

    def aggregate(self, round: int, uploads: Mapping[int, Payload]) -> None:
        before = self.model[ENDPOINTS]
        super().aggregate(round, uploads)
        if self.centers:
            return
        self.updates |= {client: (upload[ENDPOINTS] - before).flatten().cpu() for client, upload in uploads.items()}
        if round >= self.tau:
            ids = sorted(self.updates)
            found = regions(torch.stack([self.updates[client].cpu() for client in ids]), len(before))
            self.updates, self.centers = {}, dict(zip(ids, found, strict=True))

    def reply(self, client: int) -> Payload:
        endpoints = self.model[ENDPOINTS]
        center = self.centers.get(client, torch.zeros(len(endpoints)))
        return self.model.with_({CENTER: center.to(endpoints)})


class Endpoints(nn.Module):
    """The weights that a head is mixed from.

    Args:
        weight: (C, d), the first.
        number: how many, M.
    """

    def __init__(self, weight: Tensor, number: int) -> None:
        super().__init__()
        own = weight.detach().clone()
        drawn = [nn.init.xavier_normal_(torch.empty_like(own)) for _ in range(number - 1)]
        self.endpoints = nn.Parameter(torch.stack([own, *drawn]))


class MixedHead(nn.Module):
    """A linear head with a mixture of weights, in the place of another's logits.

    Args:
        simplex: has the (M, C, d) endpoints.
        mixture: (M,).
        head: has the bias.
    """

    mixture: Tensor

    def __init__(self, simplex: Endpoints, mixture: Tensor, head: nn.Linear) -> None:
        super().__init__()
        self.simplex, self.head = simplex, head
        self.register_buffer("mixture", mixture.detach().to(simplex.endpoints))

    def forward(self, features: Tensor, logits: Tensor) -> Tensor:
        """Return (B, C) logits of (B, d) features."""
        weight = (self.mixture[:, None, None] * self.simplex.endpoints).sum(0)
        return nn.functional.linear(features, weight, self.head.bias)


def regions(updates: Tensor, size: int) -> Tensor:
    """Return points of the simplex, (K, M), that are spread as the clients' updates are; see :class:`Floco`.

    The entry of each principal component that is largest in size is positive.

    Args:
        updates: (K, n).
        size: M.
    """
    centered = updates.double() - updates.double().mean(0)
    # principal components from the products of clients, which are few
    squares, vectors = torch.linalg.eigh(centered @ centered.T)
    points = (vectors * squares.clamp_min(0).sqrt()).flip(1)[:, :size]
    largest = points.gather(0, points.abs().argmax(0, keepdim=True))
    points = points * torch.where(largest < 0, -1.0, 1.0)
    points = nn.functional.pad(points, (0, size - points.shape[1]))
    candidates = rows_onto_simplex((points / SUMS[:, None, None]).flatten(0, 1)).unflatten(0, (len(SUMS), -1))
    energies = torch.stack([energy(candidate) for candidate in candidates])
    return candidates[int(energies.argmin())].float()


def energy(points: Tensor) -> Tensor:
    """Return the Riesz energy of (K, M) points, ``sum_{i<j} 1 / |c_i - c_j|^2``, of distances of at least 1e-4."""
    return nn.functional.pdist(points).clamp_min(1e-4).square().reciprocal().sum()
