"""FedDyn: dynamic regularization, under which the clients' optima agree with the global one."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from jsonargparse.typing import PositiveFloat
from torch import Tensor

from lit_pfl.core import Client
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo, UniformServer
from lit_pfl.core.sharing import EVERYTHING
from lit_pfl.errors import ConfigError
from lit_pfl.nn import Memory
from lit_pfl.ops import squared_distance

ALPHA = "alpha"


class FedDyn(Client):
    """Clients minimize their loss plus ``alpha / 2 ||w - w_t + h_i||^2``, where h_i sums up how far they went before.

    w_t is the global model that a round begins with; after training, a client adds ``w - w_t`` to its h_i. The server
    takes the plain mean of the participants' models and adds the mean of all clients' h_i, each as it was when its
    client last took part. Where this comes to rest, ``-alpha h_i`` is the gradient of client i's loss, and these sum
    to zero. PFLlib's code does not square the norm.

    With ``federation.evaluate=after``, what is evaluated is that sum, the model that the next round begins with, or
    the participants' mean alone (``scored_model``).

    Args:
        alpha: how strongly clients are held; 0.01 is of the authors' runs on CIFAR, 0.1 of FedSLR's comparison.
        by_samples: let clients count by their numbers of samples n, as the authors' code does: client i is held by
            ``alpha mean(n) / n_i``, which the server sends.
        scored_model: which model of the server is evaluated: the one that the ``next`` round begins with, or the
            ``mean`` of the participants' models, as trained ("cld" and "sel" of the authors' code).
        kwargs: see :class:`~lit_pfl.Client`. The authors clip gradients to a norm of 10:
            ``--federation.client_trainer.gradient_clip_val 10``.

    Raises:
        ConfigError: when alpha is not above 0.

    Source:
        Acar et al. 2021, Algorithm 1, where the gradient of L_i that a client keeps is ``-alpha h_i``.
    """

    needs_full_steps = "adds its whole step to h_i"
    needs_automatic = "adds a penalty to the loss"
    may_unfreeze = False
    remembers = True

    shares = EVERYTHING
    reserved = (ALPHA,)

    deviation: Memory

    def __init__(
        self,
        alpha: PositiveFloat = 0.01,
        by_samples: bool = False,
        scored_model: Literal["next", "mean"] = "next",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not alpha > 0:
            raise ConfigError(f"model.alpha={alpha}: FedDyn needs a number above 0; without one, use FedAvg.")
        self.alpha, self.by_samples, self.scored_model = alpha, by_samples, scored_model
        self._own_alpha = alpha

    def configure_state(self) -> None:
        self.deviation = Memory(self.shared_weights()).zero_()

    def configure_server(self) -> "FedDynServer":
        alpha = self.alpha if self.by_samples else None
        return FedDynServer(frozenset(self.shared_weights()), alpha, self.scored_model == "mean")

    def download(self, reply: Mapping[str, Tensor]) -> None:
        self._own_alpha = float(reply.get(ALPHA, self.alpha))
        super().download({name: tensor for name, tensor in reply.items() if name != ALPHA})

    def begin_round(self) -> None:
        """Move what was received to ``w_t - h_i``, by which the penalty is measured."""
        for name, centre in self.received.items():
            centre.sub_(self.deviation[name])

    def objective(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss, with ``alpha (w - w_t + h_i)`` added to its gradient."""
        penalty = self._own_alpha / 2 * squared_distance(self.shared_weights(), self.received)
        # Only the gradient counts: the value, about ||gradient||^2 / (2 alpha), would drown the loss that is reported.
        return super().objective(batch, batch_idx) + (penalty - penalty.detach())

    @torch.no_grad()
    def end_round(self) -> None:
        """Add how far this round went to h_i."""
        # Of a mu, what is below the threshold is sent some day: h of both sides are apart by no more than that.
        weights = self.shared_weights()
        deviation = {name: weights[name] - centre for name, centre in self.received.items()}  # h_i + w - w_t
        # A client whose training ran away is refused by the server, which knows of no deviation; nor may the client.
        if all(tensor.isfinite().all() for tensor in deviation.values()):
            self.deviation.copy_(deviation)


class FedDynServer(UniformServer):
    """Averages models and continues from the mean of all clients' deviations.

    Args:
        weights: names of the trained parameters among what is uploaded; all else is averaged only.
        alpha: sent to every client as ``alpha mean(n) / n_i``; None: not sent.
        shows_mean: whether what is evaluated is the mean that the next round's model is made of.

    Attributes:
        deviation: mean of h_i over all clients, by name.
    """

    kept = ("deviation",)
    averages = means_only = True

    deviation: dict[str, Tensor]

    def __init__(self, weights: frozenset[str], alpha: float | None = None, shows_mean: bool = False) -> None:
        self.weights, self.alpha, self.shows_mean = weights, alpha, shows_mean

    def start(self, clients: Mapping[int, ClientInfo]) -> None:
        super().start(clients)
        self.deviation = {name: torch.zeros_like(self.model[name]) for name in self.model if name in self.weights}

    def aggregate(self, round: int, uploads: Mapping[int, Payload]) -> None:
        before, everybody = self.model, len(self.num_samples)
        super().aggregate(round, uploads)
        moved: dict[str, Tensor] = {}
        for name, deviation in self.deviation.items():
            mean = self.model[name]
            went = mean - before[name]
            self.deviation[name] = deviation + self.how_many(uploads) / everybody * went
            moved[name] = mean + self.deviation[name]
        self.model = self.model.with_(moved)

    def reply(self, client: int) -> Payload:
        if self.alpha is None:
            return self.model
        mean = sum(self.num_samples.values()) / len(self.num_samples)
        alpha = torch.tensor(self.alpha * mean / self.num_samples[client])
        return self.model.with_({ALPHA: alpha})

    def evaluation_reply(self, client: int) -> Payload:
        return self.global_model() if self.shows_mean else super().evaluation_reply(client)

    def global_model(self) -> Payload:
        if not self.shows_mean:
            return self.model
        return self.model.with_({name: self.model[name] - deviation for name, deviation in self.deviation.items()})
