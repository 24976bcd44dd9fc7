"""FLUTE: a common body, and heads that client and server hold near a simplex of the client's classes."""

from collections.abc import Mapping
from typing import Any

import torch
from jsonargparse.typing import NonNegativeFloat, PositiveInt
from torch import Tensor

from lit_pfl.core.averaging import weighted_mean
from lit_pfl.core.classifying import Classifying
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo, Server, Weighting
from lit_pfl.core.sharing import EVERYTHING
from lit_pfl.errors import ConfigError
from lit_pfl.learners import linear_layers
from lit_pfl.methods.partial.phases import Phases, check_epochs

PRESENT = "present_classes"


class FLUTE(Classifying):
    """The body is averaged, each client has a head of its own, and both client and server shape the heads.

    With W the head's weight, (C, d), and m the client's classes, 1 or 0, heads are held near a simplex by
    ``R(W) = |W W^T / |W W^T| - (I - 1 1^T / C) * m m^T / sqrt(C - 1)|``, with Frobenius norms and ``*`` entry by entry.
    A round's first local epochs train the head alone, its last ``body_epochs`` both, on the loss plus ``lam1 R(W) +
    lam2 |W|^2``, and while the body trains ``lam3 |h|^2``, of the features h of the batch. The server takes the mean of
    the bodies, and of the K participants' heads a step against the gradient of ``(1 / K) sum_i R(W_i)``, and sends each
    its own. Where labels differ from client to client, heads are kept local, and there is no such step. The authors'
    script trains every client's head for ten more epochs after the last round; here nothing trains after it. It tests
    the averaged body with heads as they were before the server's step; here with those after it.

    Args:
        body_epochs: how many of a round's local epochs train the body too.
        lam1: strength of R at the client.
        lam2: strength of the head's norm.
        lam3: strength of the features' norm.
        server_lr: learning rate of the server's step; 0 leaves heads as they are.
        weighting: the mean of the bodies: ``uniform``, as in the authors' code, or by numbers of ``samples``, as in
            FedAvg.
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: when the learner has no head module whose last layer has a weight of its own, the data no class
            labels, or a round no epoch for the head.

    Source:
        Liu, Shen and Yang 2024, FLUTE* for classification, with the weights of the authors' code.
    """

    needs_automatic = "freezes the body in a round's first epochs"
    needs_labels = "reads which classes a client has"
    may_unfreeze = False

    shares = EVERYTHING
    reserved = (PRESENT,)

    def __init__(
        self,
        body_epochs: PositiveInt = 1,
        lam1: NonNegativeFloat = 0.25,
        lam2: NonNegativeFloat = 0.0025,
        lam3: NonNegativeFloat = 0.0005,
        server_lr: NonNegativeFloat = 0.5,
        weighting: Weighting = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.body_epochs, self.server_lr, self.weighting = body_epochs, server_lr, weighting
        self.lam1, self.lam2, self.lam3 = lam1, lam2, lam3
        self.min_local_epochs = body_epochs + 1
        self._trains_body = False

    def configure_state(self) -> None:
        self._check(self.spec.local_epochs)
        self.phases = Phases(self.learner, self.head_names, "FLUTE")
        self.num_logits  # noqa: B018  # refuses a head without a linear layer
        last = linear_layers(self.head_module)[-1]
        named = {id(weight): name for name, weight in self.learner.named_parameters()}
        self.weight_name = named.get(id(getattr(last, "weight", None)), "")
        if not self.weight_name or self.learner.get_parameter(self.weight_name).dim() != 2:
            raise ConfigError("model.head: FLUTE shapes the weight of the head's last layer, and this one has none.")

    def _check(self, local_epochs: int | None) -> None:
        check_epochs(local_epochs, self.body_epochs, "model.body_epochs", "head alone")

    def configure_server(self) -> "FLUTEServer":
        head = frozenset(self.shared_parameters()) & self.head_names
        return FLUTEServer(head, self.weight_name, self.server_lr)

    @property
    def present(self) -> Tensor:
        """(C,) int64, 1 for the classes that the client has training samples of."""
        return (self.class_counts > 0).to(torch.int64).to(self.device)

    def upload(self) -> Payload:
        """Return the weights, and which classes the client has."""
        return super().upload().with_({PRESENT: self.present})

    def begin_epoch(self, epoch: int, local_epochs: int) -> None:
        self._check(local_epochs)
        self._trains_body = epoch >= local_epochs - self.body_epochs
        self.phases.train("head", *(["body"] if self._trains_body else []))

    def objective(self, batch: Any, batch_idx: int) -> Tensor:
        with self.at_head() as seen:
            loss = super().objective(batch, batch_idx)
        weight = self.learner.get_parameter(self.weight_name)
        if self.lam1:
            loss = loss + self.lam1 * away_from_simplex(weight, self.present)
        if self.lam2:
            loss = loss + self.lam2 * weight.square().sum()
        if self.lam3 and self._trains_body:
            loss = loss + self.lam3 * seen.features.square().sum()
        return loss

    def end_round(self) -> None:
        self.phases.train("head", "body")


class FLUTEServer(Server):
    """Averages bodies, and takes a step of each participant's head towards a simplex.

    Args:
        head: names of the head's tensors in an upload; none where heads are kept local.
        weight: the name of its last weight.
        lr: learning rate.

    Attributes:
        heads: the head of every client that has taken part, by id.
    """

    one_model = False

    kept = ("heads",)

    heads: dict[int, Payload]

    def __init__(self, head: frozenset[str], weight: str, lr: float) -> None:
        self.head, self.weight, self.lr = head, weight, lr

    def start(self, clients: Mapping[int, ClientInfo]) -> None:
        super().start(clients)
        first = clients[min(clients)].initial
        self.heads = {}
        self.first_head = {name: first[name].clone() for name in first if name in self.head}

    def is_averaged(self, name: str) -> bool:
        return name not in self.head and name != PRESENT

    def aggregate(self, round: int, uploads: Mapping[int, Payload]) -> None:
        names = [name for name in self.model if self.is_averaged(name)]
        self.model = weighted_mean(list(uploads.values()), self.averaging_weights(round, uploads), names)
        for client, upload in uploads.items():
            head = {name: upload[name].clone() for name in upload if name in self.head}
            if self.lr and self.weight in head:
                head[self.weight] = stepped(head[self.weight], upload[PRESENT], self.lr / len(uploads))
            self.heads[client] = Payload(head)

    def reply(self, client: int) -> Payload:
        return self.model.with_(self.heads.get(client, self.first_head))


def away_from_simplex(weight: Tensor, present: Tensor) -> Tensor:
    """Return R(W), how far a head's rows are from a simplex; see :class:`FLUTE`.

    Args:
        weight: (C, d).
        present: (C,), 1 for the client's classes, 0 for others.
    """
    classes = len(weight)
    products = weight @ weight.T
    there = present.to(weight)
    simplex = (torch.eye(classes).to(weight) - 1 / classes) * torch.outer(there, there) / max(1, classes - 1) ** 0.5
    return (products / products.norm().clamp_min(torch.finfo(weight.dtype).tiny) - simplex).norm()


def stepped(weight: Tensor, present: Tensor, lr: float) -> Tensor:
    """Return a head's weight after a step against the gradient of R."""
    with torch.inference_mode(False), torch.enable_grad():
        at = weight.detach().clone().requires_grad_()
        [gradient] = torch.autograd.grad(away_from_simplex(at, present), at)
    return weight - lr * gradient
