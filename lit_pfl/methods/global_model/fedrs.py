"""FedRS: restricted softmax, in which classes that a client does not have count less."""

from typing import Any, Literal

from jsonargparse.typing import ClosedUnitInterval
from torch import Tensor

from lit_pfl.core.classifying import Classifying
from lit_pfl.core.sharing import EVERYTHING
from lit_pfl.learners import linear_layers


class FedRS(Classifying):
    """Federated averaging of clients that train on scaled logits: ``s_c * w_c h`` with s_c = alpha for missing classes.

    So the classifier's weights of classes that a client does not have are pushed away less. A bias of the head's last
    layer is not scaled (the paper's classifier has none). What is evaluated is the model without scaling. In the
    authors' code each step scales by what the step before has made of the scale, so that it comes near 1 in a round.

    Args:
        alpha: scale of the logits of missing classes; 1 is FedAvg.
        scale: ``present``: alpha for classes without samples and 1 for all others, as in the paper; ``counts``: ``alpha
            + (1 - alpha) * n_c / max n``, as in the authors' code.
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: when the learner has no head module with a linear layer, or the data no class labels.

    Source:
        Li and Zhan 2021.
    """

    needs_automatic = "changes the logits of the loss"
    needs_labels = "counts the samples of every class"

    shares = EVERYTHING

    def __init__(
        self, alpha: ClosedUnitInterval = 0.5, scale: Literal["present", "counts"] = "present", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.alpha, self.scale = alpha, scale

    def objective(self, batch: Any, batch_idx: int) -> Tensor:
        counts = self.class_counts.to(self.device)
        have = (counts > 0).float() if self.scale == "present" else counts / counts.max()
        less = (1 - self.alpha) * (have - 1)  # s - 1, exactly 0 for classes that count in full
        bias = getattr(linear_layers(self.head_module)[-1], "bias", None)

        def scaled(features: Tensor, logits: Tensor) -> Tensor:
            return logits + less.to(logits.dtype) * (logits if not isinstance(bias, Tensor) else logits - bias)

        with self.at_head(logits=scaled):
            return super().objective(batch, batch_idx)
