"""FedAS: the received body is fitted to the own features, and bodies are averaged by how much their clients learned."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from jsonargparse.typing import NonNegativeFloat, PositiveInt
from torch import Tensor

from lit_pfl.core.classifying import Classifying
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import Server
from lit_pfl.core.sharing import BODY
from lit_pfl.data.loaders import in_order
from lit_pfl.learners import SkipBatch, Step, call_with, training_loss, without_trace
from lit_pfl.learners.scoring import transferred
from lit_pfl_callbacks.tensors import load_tensors

FISHER = "fisher"


class FedAS(Classifying):
    """The body is averaged, heads are each client's own, and a body is aligned before it takes the place of the last.

    On receipt a client takes the mean features m_c of every class of its training data, with the body that it trained
    last. Then it trains the received body by plain SGD on the sum over a batch's classes c of ``MSE(h, m_c)``, h the
    features of the samples of c. Head and body then train together. Afterwards a client takes ``F_i``, the sum over
    its batches of the squared norm of the gradient of the loss at all weights, and the server averages bodies with the
    weights ``F_i / sum F``. With ``align_lr=0`` and equal F_i this is FedPer with equal weights, bit for bit.

    Alignment and F_i are in evaluation mode, on the samples in their order and without augmentation. In a client's
    first round m_c is of the received body. F_i grows with the loss, so a client that fits its data badly in evaluation
    mode may have nearly all of the weight. The authors shuffle, send heads too, which nobody uses, and take F_i of
    clients that do not take part. In the authors' code one client after another aligns one and the same body; here each
    aligns a copy of its own.

    The alignment suits networks without norm layers. It sees the received body under the running statistics that the
    client had before; in the authors' code all clients have those of the first participant there. Training then uses
    those of batches. With the default ResNet-9, ``align_lr=0`` is better by far, and with group norm too. The weights
    are not the reason: with equal ones it has 58.1 / 24.0, with an alignment in training mode 74.8 / 74.6. Accuracy as
    trained / as aggregated in the setting of the expected result, seed 1:

    =====================================  ===========  ================
    network                                aligned      ``align_lr=0``
    =====================================  ===========  ================
    ResNet-9, batch norm                   52.9 / 28.0  80.4 / 82.6
    the same, ``norm_stats="averaged"``    71.7 / 52.1  not measured
    ResNet-9, group norm                   39.8 / 33.0  52.7 / 64.8
    CNN without norm layers                53.5 / 58.3  53.3 / 59.4
    =====================================  ===========  ================

    Args:
        align_lr: learning rate of the alignment; 0 leaves it out, which suits networks with norm layers.
        align_epochs: passes over the training data for it.
        align_batch_size: samples a batch in it.
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: when the learner has no head module, or the data no class labels.

    Source:
        Yang et al. 2024, as in the authors' code.
    """

    needs_automatic = "aligns features by gradients"
    needs_labels = "takes the mean features of every class"

    shares = BODY
    reserved = (FISHER,)

    fisher: Tensor
    trained: Tensor

    def __init__(
        self,
        align_lr: NonNegativeFloat = 0.01,
        align_epochs: PositiveInt = 1,
        align_batch_size: PositiveInt = 16,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.align_lr, self.align_epochs, self.align_batch_size = align_lr, align_epochs, align_batch_size

    def configure_state(self) -> None:
        self.register_buffer(FISHER, torch.zeros(()))
        self.register_buffer("trained", torch.tensor(False))

    def configure_server(self) -> "FedASServer":
        return FedASServer()

    def upload(self) -> Payload:
        """Return the body, and F_i."""
        return super().upload().with_({FISHER: self.fisher})

    def download(self, reply: Mapping[str, Tensor]) -> None:
        """Load the body, aligned to the features of the last one."""
        means = self.class_means()[0] if self.align_lr and self.trained else None
        super().download(reply)
        if self.align_lr:
            self._align(self.class_means()[0] if means is None else means)

    def _align(self, means: Tensor) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            body = {name: w.detach().clone().requires_grad_() for name, w in self.shared_weights().items()}
            named = {f"learner.{name}": tensor for name, tensor in body.items()}
            with without_trace(self.learner):
                for _ in range(self.align_epochs):
                    for index, batch in enumerate(in_order(self.training_data(), self.align_batch_size)):
                        batch = transferred(self.learner, batch)
                        with suppress(SkipBatch), self.at_head() as seen:
                            call_with(named, Step(self.learner), batch, index)
                            self._step(body, distance_to_means(seen.features, self.targets(batch), means))
            load_tensors(self.learner, body)

    def _step(self, body: Mapping[str, Tensor], distance: Tensor) -> None:
        if not distance.requires_grad:  # nothing of the body trains
            return
        gradients = torch.autograd.grad(distance, list(body.values()), materialize_grads=True)
        with torch.no_grad():
            for weight, gradient in zip(body.values(), gradients, strict=True):
                weight.sub_(self.align_lr * gradient)

    def end_round(self) -> None:
        self.fisher.fill_(self._squared_gradients())
        self.trained.fill_(True)

    def _squared_gradients(self) -> float:
        weights = [weight for weight in self.learner.parameters() if weight.requires_grad]
        total = 0.0
        with torch.enable_grad(), without_trace(self.learner):
            for index, batch in enumerate(in_order(self.training_data())):
                with suppress(SkipBatch):
                    loss = training_loss(self.learner, transferred(self.learner, batch), index)
                    gradients = torch.autograd.grad(loss, weights, materialize_grads=True)
                    total += float(torch.stack([gradient.square().sum() for gradient in gradients]).sum())
        return total


def distance_to_means(features: Tensor, labels: Tensor, means: Tensor) -> Tensor:
    """Return the sum over the classes of a batch of the mean squared difference of its features to the class mean.

    Args:
        features: (B, d).
        labels: (B,) int64.
        means: (C, d).
    """
    squares = (features - means.to(features)[labels]).square().mean(1)
    return (squares / torch.bincount(labels)[labels]).sum()


class FedASServer(Server):
    """Averages with weights in proportion to F_i, which clients send; with equal ones where none is above 0."""

    means_only = False

    def is_averaged(self, name: str) -> bool:
        return name != FISHER

    def averaging_weights(self, round: int, uploads: Mapping[int, Payload]) -> list[float]:
        fisher = torch.tensor([float(upload[FISHER]) for upload in uploads.values()], dtype=torch.float64).clamp_min(0)
        if not fisher.any():
            return [1 / len(uploads)] * len(uploads)
        return (fisher / fisher.sum()).tolist()
