"""FedLC: logits calibrated by each client's class counts while it trains."""

from typing import Any

import torch
from jsonargparse.typing import NonNegativeFloat
from torch import Tensor

from lit_pfl.core.classifying import Classifying
from lit_pfl.core.sharing import EVERYTHING
from lit_pfl.methods.partial.fedrod import ABSENT


class FedLC(Classifying):
    """Federated averaging of clients that train on logits ``z_c - tau * n_c ** (-1/4)``.

    n_c is the client's own number of training samples of class c, so that rare classes get a larger margin. A class
    without samples gets no probability, and no gradient. What is evaluated is the model without calibration. The loss
    is the learner's own, of the changed logits. A loss whose sum leaves the sample's own class out, as some read the
    paper, has no lower bound; here it is the cross entropy. PFLlib takes n_c of all clients together.

    Args:
        tau: strength; 0 is FedAvg.
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: when the learner has no head module, or the data no class labels.

    Source:
        Zhang et al. 2022. The authors published no code.
    """

    needs_automatic = "changes the logits of the loss"
    needs_labels = "counts the samples of every class"

    shares = EVERYTHING

    def __init__(self, tau: NonNegativeFloat = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tau = tau

    def objective(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.tau:
            return super().objective(batch, batch_idx)
        margin = calibration(self.class_counts, self.tau).to(self.device)
        with self.at_head(logits=lambda h, z: z + margin.to(z.dtype)):
            return super().objective(batch, batch_idx)


def calibration(counts: Tensor, tau: float) -> Tensor:
    """Return ``-tau * n_c ** (-1/4)``, (C,), at least ``ABSENT``, as of classes without samples."""
    return (-tau * counts.to(torch.float32).pow(-0.25)).clamp_min(ABSENT)
