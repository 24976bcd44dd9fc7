"""PerFedAvg: a global model that one step adapts to a client."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Literal

import lightning as L
import torch
from jsonargparse.typing import NonNegativeFloat, PositiveFloat
from torch import Tensor

from lit_pfl.core import Client
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import Weighting
from lit_pfl.core.sharing import EVERYTHING
from lit_pfl.data.loaders import batch_size_of, in_batches_of, in_order, needed, num_samples
from lit_pfl.learners import (
    SkipBatch,
    Step,
    call_with,
    holding,
    refuse_scaled_gradients,
    size_of,
    split_batch,
    unseen,
    without_trace,
)
from lit_pfl.learners.scoring import transferred
from lit_pfl_callbacks.random_state import torch_state_kept

Weights = Mapping[str, Tensor]


class PerFedAvg(Client):
    """Model-agnostic meta-learning: clients average the model from which one gradient step takes each to its own.

    A local step at w takes independent batches D1, D2 (and D3): with ``w~ = w - alpha * grad f(w; D1)`` and
    ``g = grad f(w~; D2)``, the optimizer steps from w with the gradient

    * ``g`` (``order="first"``), or
    * ``g - alpha * d``, ``d = [grad f(w + delta g; D3) - grad f(w - delta g; D3)] / (2 delta)``, Hessian times g
      (``order="hessian_free"``), or
    * the same with d the Hessian of ``f(w; D3)`` times g itself, by differentiating twice (``order="exact"``).

    The paper's outer step size beta is the optimizer's learning rate; its momentum and weight decay apply to the outer
    step only, and gradient clipping likewise. The loss that is reported is ``f(w~; D2)``.

    The Trainer's batches are two (three) times ``batch_size`` long and divided, so that D1, D2, D3 are consecutive
    batches of an epoch's order, and an epoch has half (a third of) the steps; the last takes what is left. A batch with
    fewer than two images for each is not divided but serves as all of them.

    What is evaluated is the personalized model: one step of size alpha along the gradient of the loss on all of the
    client's training data, unchanged by augmentation, from the client's model (see ``federation.evaluate``: as trained,
    or as aggregated), which is put back afterwards. That gradient is taken as the model is tested, without dropout and
    with the client's running statistics of batch norm, so it draws nothing, moves no statistics, and does not
    depend on the batch size.

    Args:
        alpha: inner step size.
        order: how the gradient of ``f(w - alpha * grad f(w))`` is taken. ``exact`` needs layers that can be
            differentiated twice.
        delta: the step of the difference, in ``hessian_free``. In half precision 0.001 is too little.
        inner_statistics: whether batch norm counts D1 (and D3) in its running statistics, as the codes of others do;
            if not, only D2 at w~.
        weighting: the mean of the models: ``uniform``, as in the paper, or by numbers of ``samples``, as in FedAvg.
        kwargs: see :class:`~lit_pfl.Client`.

    Source:
        Fallah et al. 2020, Algorithm 1 with its approximations FO and HF; their experiments have alpha = 0.01,
        beta = 0.001.
    """

    needs_automatic = "takes the gradient of the loss after an inner step"

    shares = EVERYTHING

    def __init__(
        self,
        alpha: NonNegativeFloat = 0.01,
        order: Literal["first", "hessian_free", "exact"] = "first",
        delta: PositiveFloat = 1e-3,
        inner_statistics: bool = True,
        weighting: Weighting = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.alpha, self.order, self.delta = alpha, order, delta
        self.inner_statistics, self.weighting = inner_statistics, weighting

    @property
    def parts(self) -> int:
        """Number of independent batches that a step takes."""
        return 2 if self.order == "first" else 3

    def configure_optimizers(self) -> Any:
        refuse_scaled_gradients(self.trainer, "PerFedAvg")
        return super().configure_optimizers()

    def initial(self) -> Payload:
        """Return what is sent on joining, if longer batches can be made."""
        if self.data is not None:
            with needed(f"Client {self.spec.client_id}", f"PerFedAvg divides batches of {self.parts} times the size"):
                self.training_data()
        return super().initial()

    def training_data(self) -> Any:
        """Return batches that divide into ``parts`` of the usual size; a Trainer's own are divided as they come."""
        batches = super().training_data()
        return batches if self.data is None else in_batches_of(batches, batch_size_of(batches) * self.parts)

    # ------------------------------------------------------------------------------------------------------- training

    def objective(self, batch: Any, batch_idx: int) -> Tensor:
        """Return a scalar whose gradient by w is the step's, and whose value is ``f(w~; D2)``."""
        inner, outer, *probe = split_batch(batch, self.parts)
        weights = self._weights()
        with unseen(self.learner):
            gradient = self._gradient(weights, inner, batch_idx)
        stepped = {name: w - self.alpha * gradient[name] for name, w in weights.items()}
        # its gradient by w is the one by w~, since w~ = w - a constant
        loss = self._loss_at(stepped, outer, batch_idx)
        if self.order == "first":
            return loss
        g = _gradients(loss, weights)
        with unseen(self.learner):
            curved = {"hessian_free": self._difference, "exact": self._hessian_times}[self.order]
            d = curved(weights, g, probe[0], batch_idx)
        linear = [((g[name] - self.alpha * d[name]) * (w - w.detach())).sum() for name, w in weights.items()]
        return loss.detach() + sum(linear)

    def _difference(self, weights: Weights, g: Weights, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        # Both sides of the difference see the same dropout, else it would be that of two functions.
        with torch_state_kept():
            above = self._gradient(_moved(weights, g, self.delta), batch, batch_idx)
        below = self._gradient(_moved(weights, g, -self.delta), batch, batch_idx)
        return {name: (above[name] - below[name]) / (2 * self.delta) for name in weights}

    def _hessian_times(self, weights: Weights, g: Weights, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        at = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        gradient = _gradients(self._loss_at(at, batch, batch_idx, self.inner_statistics), at, create_graph=True)
        along = torch.stack([(gradient[name] * g[name]).sum() for name in at]).sum()
        if not along.requires_grad:  # of a loss that is linear in all weights
            return {name: torch.zeros_like(weight) for name, weight in at.items()}
        return _gradients(along, at)

    def _weights(self) -> dict[str, Tensor]:
        return {name: weight for name, weight in self.learner.named_parameters() if weight.requires_grad}

    def _gradient(self, weights: Weights, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Return the gradient of f at given weights, as constants."""
        at = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        return _gradients(self._loss_at(at, batch, batch_idx, self.inner_statistics), at)

    def _loss_at(self, weights: Weights, batch: Any, batch_idx: int, statistics: bool = True) -> Tensor:
        """Return f at given weights; ``statistics``: whether running statistics follow."""
        buffers = {} if statistics else {name: buffer.clone() for name, buffer in self.learner.named_buffers()}
        tensors = {f"learner.{name}": tensor for name, tensor in {**weights, **buffers}.items()}
        return call_with(tensors, Step(self.learner, self.loss), batch, batch_idx)

    # ------------------------------------------------------------------------------------------------------ evaluating

    @contextmanager
    def personalized(self) -> Iterator[L.LightningModule]:
        """Take one inner step on the client's own training data; put the model back afterwards."""
        data, weights = super().training_data(), self._weights()
        batches, n, seen = in_order(data), num_samples(data), 0
        with torch.inference_mode(False), torch.enable_grad():
            gradient = {name: torch.zeros_like(weight) for name, weight in weights.items()}
            with without_trace(self.learner):
                for index, batch in enumerate(batches):
                    batch = transferred(self.learner, batch)
                    with suppress(SkipBatch):
                        for name, part in _gradients(self.loss(self.learner, batch, index), weights).items():
                            gradient[name] += part * (size_of(batch) / n)
                        seen += size_of(batch)
        step = self.alpha * (n / max(seen, 1))  # in this order, so that without skipped batches it is alpha
        with holding(self.learner, {name: weight.detach() - step * gradient[name] for name, weight in weights.items()}):
            yield self.learner


def _moved(weights: Weights, direction: Weights, step: float) -> dict[str, Tensor]:
    return {name: weight + step * direction[name] for name, weight in weights.items()}


def _gradients(loss: Tensor, weights: Weights, create_graph: bool = False) -> dict[str, Tensor]:
    gradients = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True, create_graph=create_graph)
    return dict(zip(weights, gradients, strict=True))
