"""FedProto: clients exchange the mean features of their classes, and no weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import lightning as L
import torch
from jsonargparse.typing import NonNegativeFloat
from torch import Tensor, nn

from lit_pfl.core.classifying import Classifying, MeansOf
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo, Server, Weighting
from lit_pfl.errors import ConfigError
from lit_pfl.nn import Memory

PROTOTYPES, COUNTS = "prototypes", "counts"


class ClassMeans(Classifying):
    """A client that sends what its network makes of every class, on average, and no weights.

    Attributes:
        own: its means and how many samples of every class they are of.
        common: those of the last reply.
    """

    reserved = (PROTOTYPES, COUNTS)
    #: of what the means are
    means_of: MeansOf

    own: Memory
    common: Memory

    def configure_state(self) -> None:
        width = self.num_features if self.means_of == "features" else self.num_logits
        none = {
            PROTOTYPES: torch.zeros(self.num_logits, width),
            COUNTS: torch.zeros(self.num_logits, dtype=torch.int64),
        }
        self.own, self.common = Memory(none), Memory(none)

    def upload(self) -> Payload:
        """Return the means, and how many samples of every class they are of."""
        return Payload(dict(self.own.items()))

    def download(self, reply: Mapping[str, Tensor]) -> None:
        self.common.copy_(reply)

    def end_round(self) -> None:
        means, counts = self.class_means(self.means_of)
        self.own.copy_({PROTOTYPES: means, COUNTS: counts})


class FedProto(ClassMeans):
    """Every client trains a network of its own, whose features of a class stay near all clients' mean of that class.

    With features h, a client minimizes its loss plus ``lam * MSE(h, g_y)``, the mean over batch and features, where g_y
    is the global prototype of the sample's class; classes without one have no such term. After training it sends its
    prototypes: the mean features of every class over its training data, in evaluation mode and without augmentation.
    The server averages them over the clients that have the class. What is sent is (C, d), whatever the network.

    The authors' code takes prototypes from the batches of the round's last epoch, as the network trains on, and lets
    only those of a client's own classes predict.

    Args:
        lam: strength of the term; 1 on MNIST and FEMNIST, 0.1 on CIFAR-10 in the authors' runs.
        scored: what predicts: the class whose global ``prototypes`` is nearest, as in the paper (the classifier where
            there are none yet, and the client's own prototype of a class that nobody sent in the round), or the
            ``classifier``.
        weighting: the mean over clients: ``uniform``, as in the authors' code, or by numbers of ``samples`` of the
            class.
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: when labels differ from client to client, the learner has no head module, the data no class
            labels, or clients' features are of different sizes.

    Source:
        Tan et al. 2022, Algorithm 1.
    """

    needs_automatic = "draws features towards prototypes"
    needs_labels = "takes the mean features of every class"
    needs_common_labels = "averages prototypes of classes"

    means_of = "features"
    shares = frozenset()

    def __init__(
        self,
        lam: NonNegativeFloat = 1.0,
        scored: Literal["prototypes", "classifier"] = "prototypes",
        weighting: Weighting = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.lam, self.scored_by, self.weighting = lam, scored, weighting

    def configure_server(self) -> "FedProtoServer":
        return FedProtoServer(self.weighting)

    def objective(self, batch: Any, batch_idx: int) -> Tensor:
        with self.at_head() as seen:
            loss = super().objective(batch, batch_idx)
        if not self.lam or not self.common[COUNTS].any():
            return loss
        labels = self.targets(batch)
        known = (self.common[COUNTS][labels] > 0)[:, None]
        features = seen.features
        prototypes = torch.where(known, self.common[PROTOTYPES][labels].to(features), features.detach())
        return loss + self.lam * nn.functional.mse_loss(features, prototypes)

    @contextmanager
    def personalized(self) -> Iterator[L.LightningModule]:
        """Let the nearest prototype predict, if it is to and there are any.

        Where clients take turns, a class of this client may have had no other in the last round: it has its own mean.
        """
        if self.scored_by == "classifier" or not self.common[COUNTS].any():
            yield self.learner
            return
        known, own = self.common[COUNTS] > 0, self.own[COUNTS] > 0
        prototypes = torch.where(known[:, None], self.common[PROTOTYPES], self.own[PROTOTYPES])
        with self.at_head(logits=Nearest(prototypes, known | own)):
            yield self.learner


class Nearest(nn.Module):
    """Gives the negative mean squared distances to prototypes as logits.

    Args:
        prototypes: (C, d).
        known: (C,) which classes have one; the others are never the nearest.
    """

    prototypes: Tensor
    known: Tensor

    def __init__(self, prototypes: Tensor, known: Tensor) -> None:
        super().__init__()
        self.register_buffer("prototypes", prototypes.clone())
        self.register_buffer("known", known)

    def forward(self, features: Tensor, logits: Tensor) -> Tensor:
        """Return (B, C) logits."""
        distances = (features[:, None] - self.prototypes.to(features)).square().mean(2)
        return (-distances).masked_fill(~self.known, torch.finfo(distances.dtype).min)


class FedProtoServer(Server):
    """Averages prototypes class by class. Classes that nobody sends in a round have none in the next.

    Args:
        weighting: see :class:`FedProto`.
    """

    one_model = False

    count_tensors = (COUNTS,)

    def __init__(self, weighting: Weighting = "uniform") -> None:
        self.weighting = weighting

    def start(self, clients: Mapping[int, ClientInfo]) -> None:
        super().start(clients)
        for client, info in clients.items():
            if info.initial[PROTOTYPES].shape != self.model[PROTOTYPES].shape:
                raise ConfigError(
                    f"Client {client}: its prototypes are {tuple(info.initial[PROTOTYPES].shape)} (classes, features), "
                    f"those of others {tuple(self.model[PROTOTYPES].shape)}; features must be of one size."
                )

    def aggregate(self, round: int, uploads: Mapping[int, Payload]) -> None:
        counts = torch.stack([upload[COUNTS] for upload in uploads.values()])
        prototypes = torch.stack([upload[PROTOTYPES] for upload in uploads.values()])
        weights = counts.double() if self.weighting == "samples" else (counts > 0).double()
        self.model = {PROTOTYPES: mean_prototypes(prototypes, weights), COUNTS: counts.sum(0)}


def mean_prototypes(prototypes: Tensor, weights: Tensor) -> Tensor:
    """Return the (C, d) weighted means over clients, zeros where all weights are 0.

    Args:
        prototypes: (K, C, d).
        weights: (K, C), not negative.
    """
    total = weights.sum(0).clamp_min(torch.finfo(weights.dtype).tiny)
    return (prototypes * (weights / total)[:, :, None]).sum(0).to(prototypes.dtype)
