"""pFedLA: hypernetworks at the server weigh the clients' models layer by layer."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from jsonargparse.typing import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn

from lit_pfl.core import Client
from lit_pfl.core.averaging import weighted_mean
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo
from lit_pfl.core.sharing import EVERYTHING
from lit_pfl.core.trained_server import TrainedServer


class PFedLA(Client):
    """Every client gets its own mean of all clients' models, with weights of its own for each layer.

    The server has a hypernetwork for every client i, from an embedding to (K,) weights a_il of each layer l: linear
    layers with ReLU, the last one too, divided by their sum. Client i starts from ``theta_i^l = sum_j a_ilj w_j^l``,
    with w_j the latest model of client j, trains to w_i, and sends it. The server takes ``(d theta_i / d phi_i)^T
    (theta_i - w_i)`` as gradient of its hypernetwork, so that theta_i goes towards w_i, and takes a step of SGD. A
    layer is a module with weights. Before a client's first upload, w_j is what all start with. Where all weights of a
    layer are 0 they are 1 for the client itself.

    There is no code by the authors. FL-bench and KarhouTam/pFedLA step the other way, away from w_i; in FL-bench each
    tensor has weights of its own, and w_i is the former w_i plus what training has changed. HeurpFedLA, whose clients
    keep some layers, is not here.

    Args:
        embedding_dim: size of the embeddings.
        hidden_dim: width of the hypernetworks.
        server_lr: learning rate of the server's step. The default is FL-bench's; on the bundled digits, weights stay
            nearly equal for tens of rounds with it, and follow the clients with 1 to 50.
        server_momentum: its momentum.
        kwargs: see :class:`~lit_pfl.Client`.

    Source:
        Ma et al. 2022, Algorithm 1.
    """

    may_unfreeze = False

    shares = EVERYTHING

    def __init__(
        self,
        embedding_dim: PositiveInt = 100,
        hidden_dim: PositiveInt = 100,
        server_lr: PositiveFloat = 5e-3,
        server_momentum: NonNegativeFloat = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.embedding_dim, self.hidden_dim = embedding_dim, hidden_dim
        self.server_lr, self.server_momentum = server_lr, server_momentum

    def configure_server(self) -> "PFedLAServer":
        return PFedLAServer(frozenset(self.shared_weights()), self, seed=int(torch.randint(2**31, ())))


class PFedLAServer(TrainedServer):
    """Mixes models by layers, and trains the hypernetworks that say how.

    Args:
        weights: names of the tensors that are mixed; others are averaged.
        options: those of the method.
        seed: of the hypernetworks' first weights.

    Attributes:
        latest: the latest upload of each client that has sent one, by id.
    """

    one_model = False

    kept = ("latest",)

    latest: dict[int, Payload]

    def __init__(self, weights: frozenset[str], options: PFedLA, seed: int = 0) -> None:
        super().__init__(seed)
        self.weights = weights
        self.embedding_dim, self.hidden_dim = options.embedding_dim, options.hidden_dim
        self.sgd = {"lr": options.server_lr, "momentum": options.server_momentum}

    def start(self, clients: Mapping[int, ClientInfo]) -> None:
        self.places = {client: place for place, client in enumerate(sorted(clients))}
        first = clients[min(clients)].initial
        self.layers: dict[str, list[str]] = {}
        for name in first:
            if name in self.weights:
                self.layers.setdefault(name.rpartition(".")[0], []).append(name)
        self.latest = {}
        super().start(clients)

    def make(self, clients: Mapping[int, ClientInfo]) -> tuple[nn.Module, torch.optim.Optimizer]:
        sizes = self.embedding_dim, self.hidden_dim, len(clients), len(self.layers)
        module: nn.Module = nn.ModuleList(LayerWeights(*sizes) for _ in clients)
        return module, torch.optim.SGD(module.parameters(), **self.sgd)

    def aggregate(self, round: int, uploads: Mapping[int, Payload]) -> None:
        with self.training(round):
            self.optimizer.zero_grad()
            for client, upload in uploads.items():
                self._step_towards(client, upload)
            self.optimizer.step()
            self.optimizer.zero_grad()
        others = [name for name in self.model if name not in self.weights]
        mean = weighted_mean(list(uploads.values()), self.averaging_weights(round, uploads), others)
        self.model = self.model.with_(mean)
        copies = {client: upload.clone() for client, upload in uploads.items()}
        self.latest = dict(sorted((self.latest | copies).items()))

    def _step_towards(self, client: int, upload: Payload) -> None:
        """Add to the gradients of a client's hypernetwork what takes its mixture towards what it has trained."""
        mixed, models = self._mixed(client), [self.latest.get(k, self.model) for k in self.places]
        a = self.weights_of(client)
        slopes = torch.zeros_like(a)  # by the weights a, (L, K)
        for place, names in enumerate(self.layers.values()):
            for name in names:
                away = (mixed[name] - upload[name]).double()
                slopes[place] += torch.stack([(away * model[name].double()).sum().to(a) for model in models])
        (a * slopes.detach()).sum().backward()

    def weights_of(self, client: int) -> Tensor:
        """Return the weights of everybody's layers in a client's, (L, K); rows sum to 1."""
        place = self.places[client]
        raw = self.module[place]()  # type: ignore[index]
        total = raw.sum(1, keepdim=True)
        own = nn.functional.one_hot(torch.tensor(place), raw.shape[1]).to(raw).expand_as(raw)
        return torch.where(total > 0, raw / total.clamp_min(torch.finfo(raw.dtype).tiny), own)

    @torch.no_grad()
    def _mixed(self, client: int) -> dict[str, Tensor]:
        models = [self.latest.get(k, self.model) for k in self.places]
        mixed: dict[str, Tensor] = {}
        for row, names in zip(self.weights_of(client).tolist(), self.layers.values(), strict=True):
            mixed |= weighted_mean(models, row, names)
        return mixed

    def reply(self, client: int) -> Payload:
        mixed = self._mixed(client)
        return Payload({name: mixed.get(name, tensor) for name, tensor in self.model.items()})


class LayerWeights(nn.Module):
    """A client's hypernetwork: weights of K models for each of L layers.

    Args:
        embedding_dim: size of the client's embedding.
        hidden_dim: width.
        clients: K.
        layers: L.
    """

    def __init__(self, embedding_dim: int, hidden_dim: int, clients: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(embedding_dim))
        sizes = [embedding_dim, hidden_dim, hidden_dim, hidden_dim]
        hidden = [(nn.Linear(i, o), nn.ReLU()) for i, o in pairwise(sizes)]
        self.body = nn.Sequential(*(part for pair in hidden for part in pair))
        self.heads = nn.ModuleList(nn.Linear(hidden_dim, clients) for _ in range(layers))
        for head in self.heads:
            nn.init.uniform_(head.weight)  # type: ignore[arg-type]
            nn.init.zeros_(head.bias)  # type: ignore[arg-type]

    def forward(self) -> Tensor:
        """Return (L, K) weights, none below 0."""
        hidden = self.body(self.embedding)
        return torch.stack([head(hidden) for head in self.heads]).relu()
