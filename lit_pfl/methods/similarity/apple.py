"""APPLE: every client's model is a sum of all clients' core models, whose weights it learns."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import lightning as L
import torch
from jsonargparse.typing import NonNegativeFloat, PositiveInt
from torch import Tensor, nn

from lit_pfl.core import Client
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo, Server
from lit_pfl.core.sharing import EVERYTHING
from lit_pfl.errors import ConfigError
from lit_pfl.learners import Step, call_with, holding, refuse_scaled_gradients, single_optimizer
from lit_pfl.nn import Memory

RELATIONS, PRIOR, PULL, OWN, OTHERS = "relations", "prior", "pull", "own/", "others/"
Schedule = Literal["exponential", "cosine"]


class APPLE(Client):
    """A client trains its core model and how much it takes of everybody's, through the sum that is its own model.

    Client i's model is ``w_i = sum_j p_ij c_j`` over all clients' core models c, entry by entry. On each batch it
    minimizes ``f(w_i) + lambda_r mu |p_i - p_0|^2`` by c_i, with the learner's optimizer, and by p_i, with plain SGD;
    the other c_j stay as received. p_i begins at p_0, the clients' shares of samples. ``lambda_r`` falls from 1 to 0
    in the first ``prior_rounds`` rounds r = 0, 1, ...: as ``0.001^(r / prior_rounds)`` or as half a cosine. c_i is
    sent and everybody gets all c_j. Weights that are kept local, as heads where labels differ, are no sums. With p_i
    fixed at 1 for the own model and 0 for all others this is StandAlone, bit for bit.

    A client receives as many models as there are others: the authors' choice of a few of them, for little bandwidth,
    is not here. The server keeps p_i for the client. The authors step p_i with the network's momentum too, and each
    core model begins with weights of its own; here all begin equal. The step of c_i is p_ii times that of a model
    trained alone, so learning rates are to be larger.

    Args:
        mu: strength of the pull to p_0.
        prior_rounds: after how many rounds it ends; a tenth of all rounds in the authors' code, which runs 160.
        schedule: how it falls.
        relation_lr: learning rate of p_i.
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: with ``trainer.precision=16-mixed``.

    Source:
        Luo and Wu 2022, as in the authors' code.
    """

    needs_automatic = "takes gradients by the weights of a sum of models"
    needs_one_process = "takes gradients of its own by the weights of a sum of models"
    may_unfreeze = False

    shares = EVERYTHING
    reserved = (RELATIONS, PRIOR, PULL)

    mixture: Memory

    def __init__(
        self,
        mu: NonNegativeFloat = 0.1,
        prior_rounds: PositiveInt = 16,
        schedule: Schedule = "exponential",
        relation_lr: NonNegativeFloat = 0.001,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.mu, self.prior_rounds, self.schedule, self.relation_lr = mu, prior_rounds, schedule, relation_lr
        self._relations = torch.zeros(1)  # of this client first, then of the others in the order of their ids
        self._prior = torch.zeros(1)
        self._pull = 0.0  # lambda_r mu
        self._cores: dict[str, list[Tensor]] = {}  # of every weight those of the others: the server's memory
        self._others: dict[str, Tensor] = {}  # the same as (K - 1, ...) while the client trains

    def configure_state(self) -> None:
        tables = (m for m in self.learner.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
        if any(table.sparse for table in tables):
            raise ConfigError("model.learner: APPLE needs gradients that are dense; give its embeddings sparse=False.")
        self.mixture = Memory(self.shared_weights())

    def configure_server(self) -> "APPLEServer":
        return APPLEServer(frozenset(self.shared_weights()), self.mu, self.prior_rounds, self.schedule)

    def configure_optimizers(self) -> Any:
        refuse_scaled_gradients(self.trainer, "APPLE")
        configured = super().configure_optimizers()
        single_optimizer(configured).register_step_post_hook(lambda *_: self._step_relations())
        return configured

    def upload(self) -> Payload:
        """Return the core model, and p_i."""
        return super().upload().with_({RELATIONS: self._relations.detach()})

    def download(self, reply: Mapping[str, Tensor]) -> None:
        """Take note of p_i and of the others' core models; the own one comes before the first upload only."""
        super().download({name.removeprefix(OWN): own for name, own in reply.items() if name.startswith(OWN)})
        self._relations, self._prior = (reply[name].to(self.device).clone() for name in (RELATIONS, PRIOR))
        self._pull = float(reply[PULL])
        self._cores = {name: [] for name in self.shared_weights()}
        for name, tensor in reply.items():
            if name.startswith(OTHERS):
                self._cores[name.split("/", 2)[2]].append(tensor)
        self._note_mixture(self._stacked())

    def _stacked(self) -> dict[str, Tensor]:
        """Return of every weight the others' as one (K - 1, ...) tensor."""
        own = self.shared_weights()
        return {
            name: torch.stack(cores).to(own[name]) if cores else own[name].new_zeros((0, *own[name].shape))
            for name, cores in self._cores.items()
        }

    def begin_round(self) -> None:
        self._relations.requires_grad_()
        self._others = self._stacked()

    def objective(self, batch: Any, batch_idx: int) -> Tensor:
        mixed = {f"learner.{name}": tensor for name, tensor in self._mixed(self._others).items()}
        loss: Tensor = call_with(mixed, Step(self.learner, self.loss), batch, batch_idx)
        if not self._pull:
            return loss
        return loss + self._pull * (self._relations - self._prior).square().sum()

    def _mixed(self, others: Mapping[str, Tensor]) -> dict[str, Tensor]:
        p = self._relations
        with torch.autocast(self.device.type, enabled=False):  # weights are summed as precisely as they are
            return {
                name: p[0].to(core) * core + torch.tensordot(p[1:].to(core), others[name], 1)
                for name, core in self.shared_weights().items()
            }

    @torch.no_grad()
    def _note_mixture(self, others: Mapping[str, Tensor]) -> None:
        self.mixture.copy_(self._mixed(others))

    @torch.no_grad()
    def _step_relations(self) -> None:
        if self._relations.grad is not None:  # else a batch was skipped
            self._relations.sub_(self.relation_lr * self._relations.grad)
            self._relations.grad = None

    def end_round(self) -> None:
        """Keep the sum as it is now; a sleeping client keeps no copies of others."""
        self._relations = self._relations.detach()
        self._note_mixture(self._others)
        self._cores, self._others = {}, {}

    @contextmanager
    def personalized(self) -> Iterator[L.LightningModule]:
        """Make the learner the sum of core models; put the own one back afterwards."""
        with holding(self.learner, dict(self.mixture.items())):
            yield self.learner


def prior_strength(schedule: Schedule, round: int, prior_rounds: int) -> float:
    """Return lambda of a round, counted from 0.

    Source:
        Luo and Wu 2022, as in the authors' code (``get_reg_coef``).
    """
    if round >= prior_rounds:
        return 0.0
    progress = round / prior_rounds
    return 0.001**progress if schedule == "exponential" else (math.cos(math.pi * progress) + 1) / 2


class APPLEServer(Server):
    """Hands every client's core model to all others.

    Args:
        weights: names of the trained parameters among what is uploaded; only these are handed on.
        mu: see :class:`APPLE`.
        prior_rounds: see :class:`APPLE`.
        schedule: see :class:`APPLE`.

    Attributes:
        cores: the latest core model of every client that has taken part, by id; that of others is :attr:`model`.
        relations: p_i by client: its own share first, then those of the others in the order of their ids.
    """

    one_model = False

    kept = ("relations", "round", "cores")

    cores: dict[int, Payload]
    relations: dict[int, Tensor]

    def __init__(self, weights: frozenset[str], mu: float, prior_rounds: int, schedule: Schedule) -> None:
        self.weights, self.mu, self.prior_rounds, self.schedule = weights, mu, prior_rounds, schedule

    def start(self, clients: Mapping[int, ClientInfo]) -> None:
        super().start(clients)
        total = sum(self.num_samples.values())
        shares = {client: n / total for client, n in self.num_samples.items()}
        self.priors = {
            client: torch.tensor([shares[other] for other in (client, *self.others_of(client))]) for client in shares
        }
        self.relations = {client: prior.clone() for client, prior in self.priors.items()}
        self.cores = {}
        self.round = 0
        self.layouts = {client: dict(info.initial.layout) for client, info in clients.items()}

    def others_of(self, client: int) -> list[int]:
        """Return the ids of all other clients, in increasing order."""
        return [other for other in self.num_samples if other != client]

    def is_averaged(self, name: str) -> bool:
        return name != RELATIONS

    def layout(self, client: int) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        """Return the layout on joining, with as many relations as there are clients."""
        prior = self.priors[client]
        return {**self.layouts[client], RELATIONS: (prior.shape, prior.dtype)}

    def aggregate(self, round: int, uploads: Mapping[int, Payload]) -> None:
        # Copies, because an upload of this process is the client's own memory and changes when it trains on.
        for client, upload in uploads.items():
            self.relations[client] = upload[RELATIONS].clone()
            self.cores[client] = Payload({name: upload[name].clone() for name in self.model}, upload.sparse)
        self.cores = dict(sorted(self.cores.items()))
        self.round = round

    def reply(self, client: int) -> Payload:
        """Return p_i, p_0, lambda_r mu, and all others' core models, a tensor's name being ``others/<client>/...``."""
        pull = self.mu * prior_strength(self.schedule, self.round, self.prior_rounds)
        tensors = {RELATIONS: self.relations[client], PRIOR: self.priors[client], PULL: torch.tensor(pull)}
        if client not in self.cores:
            tensors |= {OWN + name: tensor for name, tensor in self.model.items()}
        for other in self.others_of(client):
            core = self.cores.get(other, self.model)
            tensors |= {f"{OTHERS}{other}/{name}": core[name] for name in core if name in self.weights}
        return Payload(tensors)

    def center(self, client: int, upload: Payload) -> Mapping[str, Tensor]:
        """Return the client's latest core model and p_i: it is not sent its own core again."""
        return {**self.cores.get(client, self.model), RELATIONS: self.relations[client]}

    def mixing(self) -> tuple[list[int], Tensor] | None:
        """Return everybody's p_i; its entries may be below 0, and need not sum to 1."""
        if not self.cores:
            return None
        ids = list(self.num_samples)
        rows = torch.zeros(len(ids), len(ids))
        for i, client in enumerate(ids):
            rows[i, [i, *(j for j in range(len(ids)) if j != i)]] = self.relations[client].cpu()
        return ids, rows
