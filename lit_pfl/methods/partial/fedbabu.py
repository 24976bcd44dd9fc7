"""FedBABU: a common body under a head that does not train until clients make the model their own."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import lightning as L
import torch
from jsonargparse.typing import ClosedUnitInterval, NonNegativeInt, PositiveFloat
from torch import Tensor, nn

from lit_pfl.core import Client
from lit_pfl.core.server import Weighting
from lit_pfl.core.sharing import BODY, needs_head
from lit_pfl.data.loaders import in_order
from lit_pfl.errors import ConfigError
from lit_pfl.learners.scoring import gradients_at


class FedBABU(Client):
    """The body is averaged under a head that keeps its first weights; what is evaluated is fine-tuned by each client.

    The head is frozen, so no momentum and no weight decay moves it; it is the same at all clients: a client that joins
    with another one is refused. For evaluation a client takes ``finetune_epochs`` of SGD on its own training data; the
    weights are put back afterwards. That goes through the data in order, without augmentation, dropout or a change of
    running statistics, so it draws nothing; the authors' code trains as ever there.

    Args:
        finetune_epochs: epochs of fine-tuning before an evaluation; 0 evaluates the body under the first head.
        finetune_lr: its learning rate.
        finetune: what it trains: ``all`` weights, the ``head`` or the ``body``.
        weighting: the mean of the bodies: ``uniform``, as in the authors' code, or by numbers of ``samples``, as in
            FedAvg.
        finetune_momentum: momentum of fine-tuning.
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: for a learner whose head is not known, or whose body has no weights.

    Source:
        Oh et al. 2022, Algorithm 1 and Section 5.
    """

    needs_automatic = "fine-tunes by gradients of one loss"

    shares = BODY

    def __init__(
        self,
        finetune_epochs: NonNegativeInt = 5,
        finetune_lr: PositiveFloat = 1e-3,
        finetune: Literal["all", "head", "body"] = "all",
        weighting: Weighting = "uniform",
        finetune_momentum: ClosedUnitInterval = 0.9,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.finetune_epochs, self.finetune = finetune_epochs, finetune
        self.finetune_lr, self.finetune_momentum = finetune_lr, finetune_momentum
        self.weighting = weighting

    def configure_learner(self) -> None:
        super().configure_learner()
        head = self.head_names
        needs_head(self.learner, head, "FedBABU")
        trained = {name: weight for name, weight in self.learner.named_parameters() if weight.requires_grad}
        self._tuned = [
            name for name in trained if self.finetune == "all" or (name in head) == (self.finetune == "head")
        ]
        if not trained.keys() - head:
            raise ConfigError("model.backbone: FedBABU trains a body, and this one has no weights.")
        for name in trained.keys() & head:
            trained[name].requires_grad_(False)

    @contextmanager
    def personalized(self) -> Iterator[L.LightningModule]:
        """Fine-tune on the client's own training data; put the model back afterwards."""
        parameters = {name: self.learner.get_parameter(name) for name in self._tuned}
        tuned = self._fine_tuned(parameters)
        own = {name: parameter.data for name, parameter in parameters.items()}
        try:
            # other memory, as that of a frozen head may be all clients'
            for name, parameter in parameters.items():
                parameter.data = tuned[name]
            yield self.learner
        finally:
            for name, parameter in parameters.items():
                parameter.data = own[name]

    def _fine_tuned(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        batches = in_order(self.training_data()) if self.finetune_epochs else []
        with torch.inference_mode(False):
            weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
            optimizer = torch.optim.SGD(weights.values(), self.finetune_lr, self.finetune_momentum)
        steps = gradients_at(self.learner, self.loss, lambda: weights, batches, self.finetune_epochs)
        for _, gradients in steps:
            for name, weight in weights.items():
                weight.grad = gradients[name]
            optimizer.step()
        return weights
