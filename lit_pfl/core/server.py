"""The server's side of a method. It sees payloads only: never a client's data, module or Trainer."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lit_pfl.core.averaging import weighted_mean
from lit_pfl.core.payload import Payload, as_payload
from lit_pfl.core.payload_state import payload_from, payload_state, restored, saved
from lit_pfl.core.robust import RobustMean
from lit_pfl.core.server_optimizer import ServerOptimizer
from lit_pfl.errors import ConfigError

#: how much an upload counts in a mean: as any other, or by its client's number of samples
Weighting = Literal["uniform", "samples"]


@dataclass(frozen=True)
class ClientInfo:
    """What the server knows of a client from its joining.

    Args:
        num_samples: number of training samples.
        initial: what the client shares, before training.
    """

    num_samples: int
    initial: Payload


class Server:
    """Plain averaging (FedAvg): one model for all, the mean of the uploads weighted by numbers of samples.

    A method with another server step overrides :meth:`aggregate` and :meth:`reply`. Both run between rounds, when every
    upload of a round has arrived and before any client trains again, so all replies of a round are computed from the
    uploads as they arrived.

    Source:
        McMahan et al. 2017, Algorithm 1.
    """

    #: attributes that a checkpoint holds beside the model, the seed and what base classes keep: tensors, plain values,
    #: payloads, and dicts and lists of them
    kept: ClassVar[tuple[str, ...]] = ()
    #: how much an upload counts, see :meth:`averaging_weights`; ``uniform`` where the method's ``weighting`` is
    weighting: Weighting = "samples"
    #: takes the step from the model to the mean of a round; without one, the mean is the new model
    server_optimizer: ServerOptimizer | None = None
    optimized: frozenset[str] = frozenset()
    #: takes the place of :attr:`mean` in :meth:`average`, if one is given to the method
    robust: RobustMean | None = None
    #: whether models are made by :meth:`average`; a class with its own ``aggregate`` or ``averaged`` says so again
    averages: bool = True
    #: whether uploads are used in that average and nowhere else, not for its weights either; said again likewise, and
    #: by a class with its own ``averaging_weights``
    means_only: bool = True
    #: whether :meth:`global_model` gives the server's model; a server of several models has none
    one_model: ClassVar[bool] = True
    #: names of tensors of an upload that count samples or steps: a negative count, or an absurd one, is refused
    count_tensors: ClassVar[tuple[str, ...]] = ()
    #: how many participants a mean stands for, where that is not the number of uploads, see :meth:`how_many`
    mean_of: float | None = None
    #: every client's number of training samples, by id
    num_samples: dict[int, int]
    _model: Payload | None = None
    seed: int = 0  # of whatever is drawn; from the federation's, so a resumed server draws on

    @property
    def model(self) -> Payload:
        """What clients are sent, by name. A plain dict of tensors may be put in its place."""
        if self._model is None:
            raise ConfigError(f"{type(self).__name__} has no model; its start(clients) must call that of Server.")
        return self._model

    @model.setter
    def model(self, tensors: Mapping[str, Tensor]) -> None:
        self._model = as_payload(tensors)

    def start(self, clients: Mapping[int, ClientInfo]) -> None:
        """Take note of the clients, by id, before round 1. The first one's tensors become everybody's initial ones."""
        self.num_samples = {client: info.num_samples for client, info in sorted(clients.items())}
        first = clients[min(clients)].initial
        self.model = Payload({name: first[name] for name in first if self.is_averaged(name)}, first.sparse).clone()

    def add(self, client: int, info: ClientInfo) -> None:
        """Take note of a client that joins after the training, so that there is a :meth:`reply` to it.

        A copy of the server is asked, and what it holds is not copied: give attributes other values, change none.
        """

    def is_averaged(self, name: str) -> bool:
        """Say whether this tensor of an upload is averaged and sent back."""
        return True

    def layout(self, client: int) -> Mapping[str, tuple[torch.Size, torch.dtype]] | None:
        """Return names, shapes and types of this client's next upload; None: as when it joined."""
        return None

    def averaging_weights(self, round: int, uploads: Mapping[int, Payload]) -> list[float]:
        """Return each upload's weight in the mean; they sum to 1."""
        if self.weighting == "uniform":
            return [1 / len(uploads)] * len(uploads)
        sizes = torch.tensor([self.num_samples[client] for client in uploads], dtype=torch.float64)
        return (sizes / sizes.sum()).tolist()

    def aggregate(self, round: int, uploads: Mapping[int, Payload]) -> None:
        """Use the uploads of one round.

        Args:
            round: the round's number, from 1.
            uploads: by client id, in increasing order; checked: the names, shapes and types of the first round, finite.
                Their memory is the clients' own, which changes when these train on: clone what is to be kept as it is.
        """
        weights = self.averaging_weights(round, uploads)
        mean = self.averaged(uploads, weights)
        if self.server_optimizer is not None:
            before = {name: tensor for name, tensor in self.model.items() if name in self.optimized}
            own = {name: mean[name] for name in before}
            moved = self.server_optimizer.step(before, own, list(uploads.values()), weights)
            mean = mean.with_(moved)
        self.model = mean

    def averaged(self, uploads: Mapping[int, Payload], weights: list[float]) -> Payload:
        """Return the mean of a round's uploads by these weights, from which the server's optimizer steps."""
        return self.average(uploads, weights, self._averaged(uploads))

    def average(
        self,
        uploads: Mapping[int, Payload],
        weights: Sequence[float],
        names: Sequence[str],
        center: Mapping[str, Tensor] | None = None,
    ) -> Payload:
        """Average uploads: their weighted mean, or the robust mean that the method was given.

        Args:
            uploads: by client id.
            weights: as many numbers, whose sum the mean is multiplied by if it is not 1.
            names: tensors to average.
            center: what these clients trained from; by default :meth:`center` of the first.
        """
        if self.robust is None:
            return weighted_mean(list(uploads.values()), weights, names)
        center = self.center(*next(iter(uploads.items()))) if center is None else center
        return self.robust(uploads, weights, names, center)

    def center(self, client: int, upload: Payload) -> Mapping[str, Tensor]:
        """Return what this client's upload is measured from: by default its reply, from which it trains.

        Tensors of an upload that are not in it are updates already. It is asked for before :meth:`aggregate`.
        """
        return self.reply(client)

    def how_many(self, uploads: Mapping[int, Payload]) -> float:
        """Return how many participants the mean of a round stands for, for sums over clients.

        Central privacy divides by the expected number, and must not reveal the true one.
        """
        return len(uploads) if self.mean_of is None else self.mean_of

    def step_by(self, optimizer: ServerOptimizer, weights: Iterable[str]) -> None:
        """Take the server's steps by an optimizer.

        Args:
            optimizer: a fresh one, of this server alone.
            weights: names of trained parameters: what it moves of what is averaged.

        Raises:
            ConfigError: when this server has a step of its own.
        """
        if type(self).aggregate is not Server.aggregate:
            raise ConfigError(
                f"model.server_optimizer: {type(self).__name__} has a step of its own; server optimizers go with "
                "methods whose server averages, such as FedAvg and FedProx."
            )
        self.server_optimizer, self.optimized = optimizer, frozenset(weights)

    def average_by(self, mean: RobustMean) -> None:
        """Average by a robust mean instead of the weighted one.

        Raises:
            ConfigError: when this server does not average, or has an ``aggregate`` or ``averaged`` that does not say
                so, or steps by an optimizer that looks at single uploads.
        """
        if not isinstance(mean, RobustMean):
            raise ConfigError(f"model.mean={mean!r}: give a robust mean, such as lit_pfl.core.robust.TrimmedMean(0.2).")
        if not self.declares("averages"):
            raise ConfigError(
                f"model.mean={type(mean).__name__}: {type(self).__name__} does not average uploads by Server.average, "
                "whose place a robust mean takes; leave it out, or use a method that averages, such as FedAvg or "
                "Ditto. (A server of your own that calls self.average in aggregate sets averages = True.)"
            )
        if self.server_optimizer is not None and not self.server_optimizer.means_only:
            raise ConfigError(
                f"model.mean={type(mean).__name__}: {type(self.server_optimizer).__name__} steps by single uploads as "
                "well, from which a robust mean does not protect; leave one of the two out."
            )
        self.robust = mean

    def sees_uploads(self) -> str:
        """Return what uses single uploads, for a message: this server, or the optimizer that it was given."""
        optimizer = self.server_optimizer
        if optimizer is not None and not optimizer.means_only:
            return f"{type(self).__name__} with {type(optimizer).__name__}"
        return type(self).__name__

    def declares(self, what: Literal["averages", "means_only"]) -> bool:
        """Say whether this server declares one of these.

        A class with an ``aggregate`` or ``averaged`` of its own has to do so again, and so has a server's optimizer; a
        class with its own ``averaging_weights`` has to say again that uploads are used in the average alone.
        """
        own = {"aggregate", "averaged"} | ({"averaging_weights"} if what == "means_only" else set())
        if what == "means_only" and self.server_optimizer is not None and not self.server_optimizer.means_only:
            return False
        for place in (self, *type(self).__mro__):
            if what in vars(place):
                return bool(vars(place)[what])
            if own & vars(place).keys():
                break
        return False

    def _averaged(self, uploads: Mapping[int, Payload]) -> list[str]:
        """Return the names of what is averaged: what clients are sent, and what some of them have just unfrozen."""
        model = self.model
        more = (name for upload in uploads.values() for name in upload if name not in model)
        return [*model, *dict.fromkeys(name for name in more if self.is_averaged(name))]

    def reply(self, client: int) -> Payload:
        """Return what this client loads before it trains again. Called any number of times, changing nothing."""
        return self.model

    def evaluation_reply(self, client: int) -> Payload:
        """Return what this client loads before it is evaluated as aggregated: its reply, if a method has no other."""
        return (
            self.reply(client) if self.server_optimizer is None else self.server_optimizer.evaluated(self.reply(client))
        )

    def mixing(self) -> tuple[list[int], Tensor] | None:
        """Return clients' ids, and (J, J) weights of everybody's latest tensors in each one's next reply.

        None where clients are not distinguished, and before the first round.
        """

    def global_model(self) -> Payload | None:
        """Return the global model: None if the method has none, empty if it is not there yet."""
        if not self.one_model:
            return None
        model = self.model if self.server_optimizer is None else self.server_optimizer.evaluated(self.model)
        return model or None

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed server needs, as tensors and plain values."""
        optimizer = {} if self.server_optimizer is None else {"server_optimizer": self.server_optimizer.state_dict()}
        kept = {name: saved(getattr(self, name), f"{type(self).__name__}.{name}") for name in self._all_kept()}
        return {"model": payload_state(self.model), "seed": self.seed, **optimizer, **kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state of :meth:`state_dict`. :meth:`start` comes first."""
        self.model, self.seed = payload_from(state["model"]), state["seed"]
        if self.server_optimizer is not None:
            self.server_optimizer.load_state_dict(state["server_optimizer"])
        for name in self._all_kept():
            setattr(self, name, restored(state[name]))

    def _all_kept(self) -> list[str]:
        """Return the names of what is kept, by this class and its base classes."""
        own = (vars(one).get("kept", ()) for one in (*reversed(type(self).__mro__), self))
        return list(dict.fromkeys(chain.from_iterable(own)))


class UniformServer(Server):
    """Plain averaging in which every upload counts the same."""

    weighting = "uniform"
