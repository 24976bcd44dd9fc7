"""pFedHN: a hypernetwork at the server makes every client's weights."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jsonargparse.typing import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn

from lit_pfl.core import Client
from lit_pfl.core.averaging import weighted_mean
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo
from lit_pfl.core.sharing import EVERYTHING, Role, needs_head
from lit_pfl.core.trained_server import TrainedServer
from lit_pfl.errors import ConfigError
from lit_pfl.learners import OptimizerCallable

#: weights that a hypernetwork may have: 800 MB in single precision
MOST_WEIGHTS = 200_000_000


class PFedHN(Client):
    """Clients train weights that the server's hypernetwork makes from an embedding of each client.

    The hypernetwork is a multilayer perceptron, with a linear layer for every tensor of the learner that is trained and
    shared. A client trains its weights theta_i for a round, with a fresh optimizer, and sends the result theta~_i. The
    server takes ``(d theta_i / d phi)^T (theta_i - theta~_i)`` as gradient of embeddings and network, the mean over the
    round's participants, clips it and takes one step of SGD. What is kept local, as running statistics, is not made.

    The authors' code has one client a round (``federation.participation=2`` is the smallest number), and evaluates what
    the hypernetwork makes, without local training: ``federation.evaluate=after``.

    Args:
        personal_head: keep heads local, and make the rest: pFedHN-PC. In the authors' code heads keep their momentum
            over rounds and are not clipped.
        embedding_dim: size of the embeddings; by default ``int(1 + clients / 4)``.
        hidden_dim: width of the hypernetwork.
        hidden_layers: hidden layers after the first.
        server_lr: learning rate of the server's step; 0.05 in the authors' pFedHN-PC.
        server_momentum: its momentum.
        server_weight_decay: its weight decay.
        server_clip: the norm that its gradient is clipped to.
        optimizer: the clients' optimizer. The authors clip gradients to a norm of 50:
            ``--federation.client_trainer.gradient_clip_val 50``.
        reset_optimizer: whether the clients' optimizer is a fresh one in every round.
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: when the hypernetwork would have more than 200 million weights, or heads are to be kept local and
            are not known.

    Source:
        Shamsian et al. 2021, Algorithm 1.
    """

    needs_automatic = "restarts its one optimizer in every round"
    may_unfreeze = False

    shares = EVERYTHING

    def __init__(
        self,
        personal_head: bool = False,
        embedding_dim: PositiveInt | None = None,
        hidden_dim: PositiveInt = 100,
        hidden_layers: PositiveInt = 3,
        server_lr: PositiveFloat = 0.01,
        server_momentum: NonNegativeFloat = 0.9,
        server_weight_decay: NonNegativeFloat = 1e-3,
        server_clip: PositiveFloat = 50.0,
        optimizer: OptimizerCallable = lambda parameters: torch.optim.SGD(
            parameters, lr=5e-3, momentum=0.9, weight_decay=5e-5
        ),
        reset_optimizer: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(optimizer=optimizer, reset_optimizer=reset_optimizer, **kwargs)
        self.personal_head = personal_head
        self.embedding_dim, self.hidden_dim, self.hidden_layers = embedding_dim, hidden_dim, hidden_layers
        self.server_lr, self.server_momentum = server_lr, server_momentum
        self.server_weight_decay, self.server_clip = server_weight_decay, server_clip

    def configure_learner(self) -> None:
        super().configure_learner()
        if self.personal_head:
            needs_head(self.learner, self.head_names, "PFedHN with model.personal_head=true")

    def is_shared(self, name: str, role: Role) -> bool:
        return super().is_shared(name, role) and not (self.personal_head and role == "head")

    def configure_server(self) -> "PFedHNServer":
        weights = self.shared_weights()
        size = self.hidden_dim * sum(weight.numel() for weight in weights.values())
        if size > MOST_WEIGHTS:
            raise ConfigError(
                f"model.hidden_dim={self.hidden_dim}: the hypernetwork would have {size:,} weights, more than "
                f"{MOST_WEIGHTS:,}; use a smaller network, a smaller hidden_dim, or share less (model.shares)."
            )
        return PFedHNServer(frozenset(weights), self, seed=int(torch.randint(2**31, ())))


class PFedHNServer(TrainedServer):
    """Makes weights, and takes how far clients went from them as gradients.

    Args:
        weights: names of the tensors that are made; others are averaged.
        options: those of the method.
        seed: of the hypernetwork's first weights.
    """

    one_model = False

    def __init__(self, weights: frozenset[str], options: PFedHN, seed: int = 0) -> None:
        super().__init__(seed)
        self.weights = weights
        self.embedding_dim, self.hidden_dim = options.embedding_dim, options.hidden_dim
        self.hidden_layers, self.clip = options.hidden_layers, options.server_clip
        self.sgd = {
            "lr": options.server_lr,
            "momentum": options.server_momentum,
            "weight_decay": options.server_weight_decay,
        }

    def start(self, clients: Mapping[int, ClientInfo]) -> None:
        self.places = {client: place for place, client in enumerate(sorted(clients))}
        super().start(clients)

    def make(self, clients: Mapping[int, ClientInfo]) -> tuple[nn.Module, torch.optim.Optimizer]:
        first = clients[min(clients)].initial
        shapes = {name: tensor.shape for name, tensor in first.items() if name in self.weights}
        size = self.embedding_dim or int(1 + len(clients) / 4)
        module: nn.Module = HyperNetwork(len(clients), size, self.hidden_dim, self.hidden_layers, shapes)
        return module, torch.optim.SGD(module.parameters(), **self.sgd)

    def aggregate(self, round: int, uploads: Mapping[int, Payload]) -> None:
        others = [name for name in self.model if name not in self.weights]
        mean = weighted_mean(list(uploads.values()), self.averaging_weights(round, uploads), others)
        self.model = self.model.with_(mean)
        parameters = list(self.module.parameters())
        with self.training(round):
            gradients = [torch.zeros_like(parameter) for parameter in parameters]
            for client, upload in uploads.items():
                made = self.module(self.places[client])
                away = [tensor.detach() - upload[name].cpu() for name, tensor in made.items()]
                parts = torch.autograd.grad(list(made.values()), parameters, away, materialize_grads=True)
                for gradient, part in zip(gradients, parts, strict=True):
                    gradient += part / len(uploads)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            nn.utils.clip_grad_norm_(parameters, self.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()

    @torch.no_grad()
    def reply(self, client: int) -> Payload:
        made = self.module(self.places[client])
        return Payload({name: made[name].to(x) if name in made else x for name, x in self.model.items()})


class HyperNetwork(nn.Module):
    """Makes named tensors from an embedding.

    Args:
        clients: number of embeddings.
        embedding_dim: their size.
        hidden_dim: width.
        hidden_layers: hidden layers after the first.
        shapes: of the tensors, by name.
    """

    def __init__(
        self, clients: int, embedding_dim: int, hidden_dim: int, hidden_layers: int, shapes: Mapping[str, Sequence[int]]
    ) -> None:
        super().__init__()
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.embeddings = nn.Embedding(clients, embedding_dim)
        layers: list[nn.Module] = [nn.Linear(embedding_dim, hidden_dim)]
        for _ in range(hidden_layers):
            layers += [nn.ReLU(), nn.Linear(hidden_dim, hidden_dim)]
        self.body = nn.Sequential(*layers)
        sizes = [torch.Size(shape).numel() for shape in self.shapes.values()]
        self.heads = nn.ModuleList(nn.Linear(hidden_dim, size) for size in sizes)

    def forward(self, place: int) -> dict[str, Tensor]:
        """Return the tensors of one client."""
        hidden = self.body(self.embeddings.weight[place])
        pairs = zip(self.shapes.items(), self.heads, strict=True)
        return {name: head(hidden).view(shape) for (name, shape), head in pairs}
