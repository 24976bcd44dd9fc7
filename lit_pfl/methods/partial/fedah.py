"""FedAH: heads aggregated element by element, by weights that each client learns."""

from collections.abc import Mapping
from typing import Any

import torch
from jsonargparse.typing import NonNegativeFloat, PositiveInt
from torch import Tensor

from lit_pfl.core import Client
from lit_pfl.core.sharing import EVERYTHING, needs_head
from lit_pfl.data.loaders import in_order
from lit_pfl.learners.scoring import gradients_at
from lit_pfl.methods.partial.phases import Phases, check_epochs
from lit_pfl.nn import Memory


class FedAH(Client):
    """Everything is averaged, but a client's head moves only part of the way to the averaged one, entry by entry.

    On receipt the body is the averaged one. The head is ``H_i + (H_g - H_i) * W``, with H_i the client's own, H_g the
    averaged one, and W in [0, 1] for every entry, which starts at 1 and is kept. Before that, on every batch of the
    client's training data, in order and in evaluation mode, ``W <- clip(W - eta * grad f * (H_g - H_i), 0, 1)``, with
    the gradient at the head as W makes it. Then a round's first ``head_epochs`` train the head, the others the body;
    what does not train is frozen. In the released code clients that do not take part in a round learn W in it too.

    Args:
        eta: step size of W; 0 leaves it at 1, with which the head is the averaged one.
        weight_epochs: passes over the training data for W.
        head_epochs: how many of a round's local epochs train the head.
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: when labels differ from client to client, the head or the body is not known or has no weights, or
            a round has no epoch left for the body.

    Source:
        FedAH (arXiv 2412.01295), as in its released code.
    """

    needs_automatic = "freezes head and body in turn"
    needs_common_labels = "averages heads"
    may_unfreeze = False

    shares = EVERYTHING

    share: Memory

    def __init__(
        self,
        eta: NonNegativeFloat = 1.0,
        weight_epochs: PositiveInt = 1,
        head_epochs: PositiveInt = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.eta, self.weight_epochs, self.head_epochs = eta, weight_epochs, head_epochs
        self.min_local_epochs = head_epochs + 1

    def configure_state(self) -> None:
        check_epochs(self.spec.local_epochs, self.head_epochs, "model.head_epochs")
        needs_head(self.learner, self.head_names, "FedAH")
        self.phases = Phases(self.learner, self.head_names, "FedAH")
        heads = {name: weight for name, weight in self.shared_weights().items() if name in self.head_names}
        self.share = Memory({name: torch.ones_like(weight) for name, weight in heads.items()})

    def download(self, reply: Mapping[str, Tensor]) -> None:
        super().download({name: tensor for name, tensor in reply.items() if name not in self.share.names})
        with torch.inference_mode(False), torch.enable_grad():
            own = {name: self.learner.get_parameter(name).detach().clone() for name in self.share}
            common = {name: reply[name].to(tensor).detach().clone() for name, tensor in own.items()}
            if self.eta and any(not torch.equal(own[name], common[name]) for name in own):
                for _ in range(self.weight_epochs):
                    self._learn_shares(own, common)
            super().download(self._mixed(own, common))

    def _mixed(self, own: Mapping[str, Tensor], common: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: torch.lerp(own[name], common[name], share) for name, share in self.share.items()}

    def _learn_shares(self, own: Mapping[str, Tensor], common: Mapping[str, Tensor]) -> None:
        batches = in_order(self.training_data())
        for _, gradients in gradients_at(self.learner, self.loss, lambda: self._mixed(own, common), batches):
            for name, share in self.share.items():
                step = self.eta * gradients[name] * (common[name] - own[name])
                share.copy_((share - step).clamp(0, 1))

    def begin_epoch(self, epoch: int, local_epochs: int) -> None:
        check_epochs(local_epochs, self.head_epochs, "model.head_epochs")
        self.phases.train("head" if epoch < self.head_epochs else "body")

    def end_round(self) -> None:
        self.phases.train("head", "body")
