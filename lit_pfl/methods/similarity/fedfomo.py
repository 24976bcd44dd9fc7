"""FedFOMO: every client weighs other clients' models by how much they help it."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor

from lit_pfl.core import Client
from lit_pfl.core.averaging import weighted_mean
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo, Server
from lit_pfl.core.sharing import EVERYTHING
from lit_pfl.data.loaders import in_order, needed, num_samples, part_of
from lit_pfl.errors import ConfigError
from lit_pfl.learners.scoring import mean_loss, needs_loss
from lit_pfl.methods.similarity.ifca import by_number, numbered
from lit_pfl.nn import Memory
from lit_pfl.randomness import fixed_order
from lit_pfl_callbacks.tensors import load_tensors, tensors_of

AFFINITY = "affinity"


class FedFOMO(Client):
    """Clients download each other's models and mix those that lower their own validation loss.

    A client holds back some of its training data. With the models of others that the server sends it, and with the one
    it has just trained itself, it compares the model that it started its last round from: a model counts by how much
    lower its loss is, per unit of distance, and for nothing if it is not lower. If none is, the client goes back to
    where it started from. What is not sent (the head where labels differ, running statistics) is its own in every
    comparison.

    The server chooses the models: those that have helped that client most so far, and sometimes others, among
    those that every client sent last. A client that has not trained yet is sent none. In the released code all clients
    train in the first round, the models are those of the last round's participants, and means of clusters of clients
    are among them.

    Args:
        num_models: number of models M that a client is sent in a round; Factorized-FL compares with 10.
        epsilon: probability that one of them is chosen at random.
        epsilon_decay: how much less that becomes with every round.
        norm: how the distance of two models is measured. The paper has ``l2``, the released code by default ``l1``,
            and its ``l2`` is squared.
        val_fraction: share of the training data that is held back.
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: when ``val_fraction`` leaves nothing to train or to validate on.

    Source:
        Zhang et al. 2021 (FedFomo), Eq. 3 and 4 and Section 3.2; epsilon and how P is kept are those of their released
        code.
    """

    may_unfreeze = False

    shares = EVERYTHING
    reserved = (AFFINITY,)

    affinity: Tensor
    base: Memory

    def __init__(
        self,
        num_models: PositiveInt = 5,
        epsilon: NonNegativeFloat = 0.3,
        epsilon_decay: NonNegativeFloat = 0.05,
        norm: Literal["l2", "l1"] = "l2",
        val_fraction: float = 0.2,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not 0 < val_fraction < 1:
            raise ConfigError(f"model.val_fraction={val_fraction}: give a share above 0 and below 1.")
        self.num_models, self.epsilon, self.epsilon_decay = num_models, epsilon, epsilon_decay
        self.norm, self.val_fraction = norm, val_fraction

    def configure_state(self) -> None:
        self.base = Memory(tensors_of(self.learner))
        self.register_buffer(AFFINITY, torch.zeros(self.num_models))

    def _parts(self) -> tuple[Tensor, Tensor]:
        """Return which samples are trained on and which are held back: the same at any time, and in a resumed run."""
        n = num_samples(super().training_data())
        if n == 1:
            return torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        order = fixed_order(n, self.spec.client_id)
        held = min(max(1, round(self.val_fraction * n)), n - 1)
        return order[held:], order[:held]

    def initial(self) -> Payload:
        """Return what is sent on joining, if a part of the training data can be held back."""
        if self.data is not None:
            with needed(f"Client {self.spec.client_id}", "FedFOMO holds back some of its training samples"):
                self.training_data()
        return super().initial()

    def training_data(self) -> Any:
        """Return the batches of what is not held back."""
        return part_of(super().training_data(), self._parts()[0])

    def held_back(self) -> Any:
        """Return the batches of what is held back; of a client under a Trainer of its own, the validation data."""
        if self.data is None:
            if self.trainer.val_dataloaders is None:
                raise ConfigError(
                    "FedFOMO weighs models by their loss on data held back: give the Trainer a validation loader."
                )
            return in_order(self.trainer.val_dataloaders)
        return in_order(part_of(super().training_data(), self._parts()[1]))

    def begin_round(self) -> None:
        needs_loss(self.learner, self.training_data(), "FedFOMO")
        self.base.copy_(tensors_of(self.learner))

    def upload(self) -> Payload:
        """Return what is shared, and how this round's models have helped: (M,), in the order of their clients' ids."""
        return super().upload().with_({AFFINITY: self.affinity})

    @torch.no_grad()
    def download(self, reply: Mapping[str, Tensor]) -> None:
        """Mix the models of a reply, named ``<client>/<tensor>``, with the own one; without any keep that as it is."""
        self.affinity.zero_()
        models = by_number(reply)
        if not models:
            return
        trained = {name: tensor.clone() for name, tensor in tensors_of(self.learner).items()}
        base = dict(self.base.items())
        held_back = self.held_back()

        load_tensors(self.learner, base)
        _, start = mean_loss(self.learner, held_back)
        load_tensors(self.learner, trained)
        sent = super().upload().clone()
        candidates = [*models.values(), {name: sent[name] for name in self.shared_parameters()}]
        losses = []
        for candidate in candidates:
            load_tensors(self.learner, candidate)
            losses.append(mean_loss(self.learner, held_back)[1])

        gains = gains_per_distance(start, losses, [self._distance(base, candidate) for candidate in candidates])
        self.affinity[: len(models)] = (gains / max(abs(float(gains.sum())), 1e-9))[:-1]
        weights = gains.clamp(min=0)
        if weights.any():
            # The weights sum to 1, so base + sum w (theta - base) is the mean of the candidates.
            mixture = weighted_mean(
                [Payload(candidate) for candidate in candidates], (weights / weights.sum()).tolist()
            )
            load_tensors(self.learner, trained)
            super().download(mixture)  # which adds what was not sent
        else:
            load_tensors(self.learner, base)

    def _distance(self, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
        order = {"l1": 1, "l2": 2}[self.norm]
        parts = [torch.linalg.vector_norm(a[name] - b[name], order) for name in self.shared_weights()]
        return float(torch.linalg.vector_norm(torch.stack(parts), order))

    def configure_server(self) -> "FedFOMOServer":
        return FedFOMOServer(self.num_models, self.epsilon, self.epsilon_decay, seed=int(torch.randint(2**31, ())))


class FedFOMOServer(Server):
    """Sends every client the models that have helped it most.

    Args:
        num_models: see :class:`FedFOMO`.
        epsilon: see :class:`FedFOMO`.
        epsilon_decay: see :class:`FedFOMO`.
        seed: of what is chosen at random.

    Attributes:
        affinity: (K, K); row i says how much everybody's models have helped client i so far (P in the paper).
        latest: the latest model of each of the clients seen so far, by id, in increasing order.
    """

    one_model = False

    kept = (AFFINITY, "round", "latest")

    affinity: Tensor
    latest: dict[int, Payload]

    def __init__(self, num_models: int, epsilon: float, epsilon_decay: float, seed: NonNegativeInt = 0) -> None:
        self.num_models, self.epsilon, self.epsilon_decay, self.seed = num_models, epsilon, epsilon_decay, seed

    def start(self, clients: Mapping[int, ClientInfo]) -> None:
        super().start(clients)
        self.row = {client: i for i, client in enumerate(self.num_samples)}
        self.affinity = torch.zeros(len(self.row), len(self.row), dtype=torch.float64)
        self.latest = {}
        self.round = 0

    def is_averaged(self, name: str) -> bool:
        return name != AFFINITY

    def chosen(self, client: int) -> list[int]:
        """Return whose models a client is sent until the next round ends, in increasing order: none before its first.

        Each is either the one with the highest affinity that is left, of equal ones any, or with probability
        ``epsilon - rounds * epsilon_decay`` any that is left.
        """
        others = [other for other in self.latest if other != client]
        if client not in self.latest:
            return []
        # Drawn from the round's number, not kept: the same whenever it is asked for in this round.
        rng = np.random.default_rng([self.seed, self.round, client])
        affinity = self.affinity[self.row[client], [self.row[other] for other in others]].numpy()
        ranked = [others[i] for i in np.lexsort((rng.random(len(others)), -affinity))]
        explore = self.epsilon - self.round * self.epsilon_decay
        chosen = []
        for _ in range(min(self.num_models, len(others))):
            at_random = rng.random() < explore
            chosen.append(ranked.pop(int(rng.integers(len(ranked))) if at_random else 0))
        return sorted(chosen)

    def center(self, client: int, upload: Payload) -> Mapping[str, Tensor]:
        """Return the client's latest model: its reply holds models of others only. How these helped is no model."""
        return self.latest.get(client, self.model)

    def mixing(self) -> tuple[list[int], Tensor] | None:
        """Return equal weights of a client's own model and of those that it is sent; it weighs them itself."""
        if not self.latest:
            return None
        ids = list(self.latest)
        sent = torch.eye(len(ids))
        for i, client in enumerate(ids):
            sent[i, [ids.index(other) for other in self.chosen(client)]] = 1
        return ids, sent / sent.sum(1, keepdim=True)

    def aggregate(self, round: int, uploads: Mapping[int, Payload]) -> None:
        for client, upload in uploads.items():
            columns = [self.row[other] for other in self.chosen(client)]
            self.affinity[self.row[client], columns] += upload[AFFINITY][: len(columns)].double().cpu()
        # Copies, because an upload of this process is the client's own memory and changes when it trains on.
        models = {
            client: Payload({name: upload[name] for name in self.model}, upload.sparse).clone()
            for client, upload in uploads.items()
        }
        self.latest = dict(sorted((self.latest | models).items()))
        self.round = round

    def reply(self, client: int) -> Payload:
        """Return the chosen models, each tensor named ``<client>/<tensor>``."""
        return numbered({other: self.latest[other] for other in self.chosen(client)})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.affinity = self.affinity.cpu()  # which a few numbers are looked up in


def gains_per_distance(start: float, losses: list[float], distances: list[float]) -> Tensor:
    """Return how much each model would gain: ``(start - loss) / distance``, unclipped, as (J,) double.

    A model that is where the client started, or whose loss is not finite, has nothing to give: 0.

    Source:
        Zhang et al. 2021, Eq. 4 before clipping.
    """
    gains = (start - torch.tensor(losses, dtype=torch.float64)) / torch.tensor(distances, dtype=torch.float64)
    return gains.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
