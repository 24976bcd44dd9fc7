"""Agnostic federated learning: the model that is best for the worst mixture of clients."""

from collections.abc import Mapping
from typing import Any

import torch
from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat

from lit_pfl.core import Client
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo, Server
from lit_pfl.core.sharing import EVERYTHING
from lit_pfl.data.loaders import in_order
from lit_pfl.learners.scoring import mean_loss, needs_loss
from lit_pfl.ops import project_onto_simplex

LOSS = "loss"


class AgnosticFL(Client):
    """Clients are averaged by weights lambda that grow where the global model's loss is large.

    The server looks for ``min over w, max over lambda, of sum_i lambda_i f_i(w)``. Before it trains, a client takes the
    loss of the global model on its training data, in evaluation mode and without augmentation, and sends it along. The
    server averages the models by lambda, then goes up the losses and back onto the simplex: ``lambda <- projection of
    (lambda + step loss)``.

    With partial participation, only the participants' weights lambda change: their models are averaged with lambda
    scaled to sum to 1, then their total lambda is redistributed among them. Absent clients keep their lambda.

    What is evaluated is the last model. Stochastic-AFL returns the mean over its steps.

    Args:
        step: how far lambda goes up the losses; 0 leaves it at the shares of samples, which is FedAvg.
        decay: what the step is multiplied by after every round.
        kwargs: see :class:`~lit_pfl.Client`.

    Source:
        Mohri et al. 2019, Stochastic-AFL, with a round of local epochs instead of its single stochastic steps.
    """

    shares = EVERYTHING
    reserved = (LOSS,)

    def __init__(self, step: NonNegativeFloat = 0.1, decay: ClosedUnitInterval = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.step, self.decay = step, decay
        self._loss = float("nan")

    def configure_server(self) -> "AgnosticFLServer":
        return AgnosticFLServer(self.step, self.decay)

    def begin_round(self) -> None:
        needs_loss(self.learner, self.training_data(), "AgnosticFL")
        # neither shuffled nor augmented: it draws no random numbers
        _, self._loss = mean_loss(self.learner, in_order(self.training_data()))

    def upload(self) -> Payload:
        """Return the weights, and the loss of those that the round began with."""
        return super().upload().with_({LOSS: torch.tensor(self._loss)})


class AgnosticFLServer(Server):
    """Averages by weights that it sets by the clients' losses.

    Args:
        step: see :class:`AgnosticFL`.
        decay: see :class:`AgnosticFL`.

    Attributes:
        lambdas: every client's weight, by id; they sum to 1.
    """

    kept = ("lambdas",)
    averages = True

    lambdas: dict[int, float]

    def __init__(self, step: float = 0.1, decay: float = 1.0) -> None:
        self.step, self.decay = step, decay

    def start(self, clients: Mapping[int, ClientInfo]) -> None:
        super().start(clients)
        total = sum(self.num_samples.values())
        self.lambdas = {client: n / total for client, n in self.num_samples.items()}

    def is_averaged(self, name: str) -> bool:
        return name != LOSS

    def averaging_weights(self, round: int, uploads: Mapping[int, Payload]) -> list[float]:
        held = sum(self.lambdas[client] for client in uploads)
        return [self.lambdas[client] / held for client in uploads]

    def aggregate(self, round: int, uploads: Mapping[int, Payload]) -> None:
        held = sum(self.lambdas[client] for client in uploads)
        if not held:  # nobody who took part counts
            return
        super().aggregate(round, uploads)
        if step := self.step * self.decay ** (round - 1):
            ascended = [self.lambdas[client] + step * float(upload[LOSS]) for client, upload in uploads.items()]
            projected = project_onto_simplex(torch.tensor(ascended, dtype=torch.float64), held)
            self.lambdas |= dict(zip(uploads, projected.tolist(), strict=True))
