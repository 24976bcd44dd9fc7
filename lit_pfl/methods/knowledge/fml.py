"""FML: a common and a personal model that learn from each other."""

from typing import Any

import torch
from jsonargparse.typing import ClosedUnitInterval
from torch import Tensor, nn

from lit_pfl.core.classifying import Classifying
from lit_pfl.core.server import Weighting
from lit_pfl.learners import HeadCall, at_head, find_head
from lit_pfl.methods.two_models.base import TwoModels
from lit_pfl_callbacks.random_state import torch_state_kept


class Mutual(TwoModels, Classifying):
    """A client whose two models see each other's features and logits."""

    needs_automatic = "steps two models on one loss"
    needs_labels = "compares class probabilities"
    labels_in_steps_only = True

    def both(self, batch: Any, batch_idx: int) -> tuple[Tensor, HeadCall, Tensor, HeadCall]:
        """Return the loss of the global model and what its head was called with, and both of the personal one."""
        with torch_state_kept(), self.at_head() as common:
            loss = super().objective(batch, batch_idx)
        head = find_head(self.personal, self.head_names, self.head is not None, type(self).__name__)
        with at_head(head) as personal:
            own = self.personal_loss(batch, batch_idx)
        return loss, common, own, personal


class FML(Mutual):
    """Next to the averaged model w, every client trains a model v of its own; each also learns from the other's output.

    On every batch v minimizes ``alpha * f(v) + (1 - alpha) * KL(p_w || p_v)`` and w ``beta * f(w) + (1 - beta) * KL(p_v
    || p_w)``, where p are the probabilities of the classes. The teacher's are constants in either. What is evaluated is
    v. With ``alpha=beta=1`` v is Stand-Alone's model and w the one of FedAvg with the same weighting, bit for bit.

    v starts as a copy of w; in the paper it may be another network. The authors' code makes a new optimizer for w in
    every round; here both keep their optimizers, unless ``reset_optimizer``. In PFLlib's code gradients go through the
    teachers too, and a divergence is divided by the number of classes.

    Args:
        alpha: how much v's own loss counts, next to what w teaches it.
        beta: how much w's own loss counts, next to what v teaches it.
        weighting: the mean of the global models: ``uniform``, or by numbers of ``samples``.
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: when the learner has no head module, or the data no class labels.

    Source:
        Shen et al. 2020, Algorithm 1.
    """

    def __init__(
        self,
        alpha: ClosedUnitInterval = 0.5,
        beta: ClosedUnitInterval = 0.5,
        weighting: Weighting = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.alpha, self.beta, self.weighting = alpha, beta, weighting

    def objective(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the sum of what both minimize."""
        common, w, personal, v = self.both(batch, batch_idx)
        losses = [
            loss if share == 1 else share * loss + (1 - share) * divergence(teacher.logits, student.logits)
            for share, loss, teacher, student in ((self.alpha, personal, w, v), (self.beta, common, v, w))
        ]
        return torch.stack(losses).sum()


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """Return ``KL(softmax teacher || softmax student)``, the mean over the batch; the teacher gets no gradient.

    Args:
        teacher: (B, C) logits.
        student: (B, C) logits.
    """
    target = teacher.detach().log_softmax(1)
    return nn.functional.kl_div(student.log_softmax(1), target, reduction="batchmean", log_target=True)
