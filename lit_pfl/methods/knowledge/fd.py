"""FD: federated distillation by the mean predictions of every class."""

from typing import Any, Literal

from jsonargparse.typing import NonNegativeFloat
from torch import Tensor, nn

from lit_pfl.methods.knowledge.fedproto import COUNTS, PROTOTYPES, ClassMeans, FedProtoServer


class FD(ClassMeans):
    """Every client trains a network of its own, whose predictions stay near all clients' mean of the sample's class.

    With logits z, a client minimizes its loss plus ``lam * CE(z, g_y)``, where g_y are the mean probabilities of all
    clients that have the sample's class; classes without one have no such term. After training it sends the mean
    softmax of its logits for every class over its training data, (C, C), in evaluation mode; the server takes the plain
    mean over the clients that have the class. Also known as FedDistill.

    In the paper predictions are collected from the batches of training, and a client's own are left out of the mean
    that it gets back; here, as in PFLlib, the mean is the same for all. PFLlib averages logits, and takes the softmax
    of their mean, which is sharper: ``averages="logits"``.

    Args:
        lam: strength of the term; 0 is Stand-Alone.
        averages: what the means are of: ``probabilities``, as in the paper, or ``logits``, as in PFLlib.
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: when labels differ from client to client, the learner has no head module with a linear layer, or
            the data no class labels.

    Source:
        Jeong et al. 2018, Algorithm 1.
    """

    needs_automatic = "distils other clients' predictions"
    needs_labels = "takes the mean prediction of every class"
    needs_common_labels = "averages predictions of classes"

    shares = frozenset()

    def __init__(
        self,
        lam: NonNegativeFloat = 1.0,
        averages: Literal["probabilities", "logits"] = "probabilities",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.lam, self.averages, self.means_of = lam, averages, averages

    def configure_server(self) -> FedProtoServer:
        return FedProtoServer()

    def objective(self, batch: Any, batch_idx: int) -> Tensor:
        with self.at_head() as seen:
            loss = super().objective(batch, batch_idx)
        if not self.lam or not self.common[COUNTS].any():
            return loss
        labels = self.targets(batch)
        teacher = self.common[PROTOTYPES][labels].to(seen.logits)
        teacher = teacher.softmax(1) if self.averages == "logits" else teacher
        by_sample = nn.functional.cross_entropy(seen.logits, teacher, reduction="none")
        return loss + self.lam * (by_sample * (self.common[COUNTS][labels] > 0)).mean()
