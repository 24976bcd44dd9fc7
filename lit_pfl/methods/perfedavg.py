"""Per-FedAvg: a common model that one step makes a client's own."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from jsonargparse.typing import NonNegativeFloat, PositiveFloat
from torch import Tensor, nn
from torch.func import functional_call

from lit_pfl.client import Client, Score, evaluating
from lit_pfl.data import BatchLoader
from lit_pfl.payload import Payload
from lit_pfl.server import Server

Weights = Mapping[str, Tensor]
Batch = tuple[Tensor, Tensor]


class PerFedAvg(Client):
    """Model-agnostic meta-learning: clients average the model from which one gradient step takes each to its own.

    A local step at w takes independent batches D1, D2 (and D3): with ``w~ = w - alpha * grad f(w; D1)`` and
    ``g = grad f(w~; D2)``, the optimizer steps from w with the gradient

    * ``g`` (``order="first"``), or
    * ``g - alpha * d``, ``d = [grad f(w + delta g; D3) - grad f(w - delta g; D3)] / (2 delta)``, Hessian times g
      (``order="hessian_free"``).

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
        order: which approximation of the gradient of ``f(w - alpha * grad f(w))``.
        delta: the step of the difference, in ``hessian_free``. In half precision 0.001 is too little.
        inner_statistics: whether batch norm counts D1 (and D3) in its running statistics, as the codes of others do;
            if not, only D2 at w~.
        weighting: the mean of the models: ``uniform``, as in the paper, or by numbers of ``samples``, as in FedAvg.
        kwargs: see :class:`~lit_pfl.Client`.

    Source:
        Fallah et al. 2020, Algorithm 1 with its approximations FO and HF; their experiments have alpha = 0.01,
        beta = 0.001.
    """

    shares = frozenset({"body", "u", "v", "mu", "norm", "head"})

    def __init__(
        self,
        alpha: NonNegativeFloat = 0.01,
        order: Literal["first", "hessian_free"] = "first",
        delta: PositiveFloat = 1e-3,
        inner_statistics: bool = True,
        weighting: Literal["uniform", "samples"] = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.alpha, self.order, self.delta = alpha, order, delta
        self.inner_statistics, self.weighting = inner_statistics, weighting
        self.is_adapted = False

    @property
    def parts(self) -> int:
        """Number of independent batches that a step takes."""
        return {"first": 2, "hessian_free": 3}[self.order]

    def configure_server(self) -> Server:  # noqa: D102
        return {"uniform": UniformServer, "samples": Server}[self.weighting]()

    def training_data(self) -> BatchLoader:
        """Return batches that can be divided into ``parts`` of the usual size."""
        batches = copy.copy(self.data.train)
        batches.batch_size *= self.parts
        return batches

    # ------------------------------------------------------------------------------------------------------- training

    def plain_objective(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return f on a batch, at the weights that the backbone has now: what FedAvg's clients minimise."""
        return super().objective(images, labels)

    def objective(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return a scalar whose gradient by w is the step's, and whose value is ``f(w~; D2)``."""
        inner, outer, *probe = self._divide(images, labels)
        weights = self._weights()
        gradient = self._gradient(weights, inner)
        stepped = {name: w - self.alpha * gradient[name] for name, w in weights.items()}
        loss = self._objective_at(stepped, outer)  # its gradient by w is the one by w~, since w~ = w - a constant
        if self.order == "first":
            return loss
        g = _gradients(loss, weights)
        # Both sides of the difference see the same dropout, else it would be that of two functions.
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            above = self._gradient({name: w + self.delta * g[name] for name, w in weights.items()}, *probe)
        below = self._gradient({name: w - self.delta * g[name] for name, w in weights.items()}, *probe)
        linear = [
            ((g[name] - self.alpha * (above[name] - below[name]) / (2 * self.delta)) * (w - w.detach())).sum()
            for name, w in weights.items()
        ]
        return loss.detach() + sum(linear)

    def _divide(self, images: Tensor, labels: Tensor) -> list[Batch]:
        if len(labels) < 2 * self.parts:
            return [(images, labels)] * self.parts
        return list(zip(images.tensor_split(self.parts), labels.tensor_split(self.parts), strict=True))

    def _weights(self) -> dict[str, Tensor]:
        return {name: weight for name, weight in self.backbone.named_parameters() if weight.requires_grad}

    def _gradient(self, weights: Weights, batch: Batch) -> dict[str, Tensor]:
        """Return the gradient of f at given weights, as constants."""
        at = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        return _gradients(self._objective_at(at, batch, self.inner_statistics), at)

    def _objective_at(self, weights: Weights, batch: Batch, statistics: bool = True) -> Tensor:
        """Return f at given weights; ``statistics``: whether running statistics follow."""
        buffers = {} if statistics else {name: buffer.clone() for name, buffer in self.backbone.named_buffers()}
        tensors = {f"client.backbone.{name}": tensor for name, tensor in {**weights, **buffers}.items()}
        return functional_call(_Objective(self), tensors, batch)

    # ------------------------------------------------------------------------------------------------------ evaluating

    @contextmanager
    def adapted(self) -> Iterator[None]:
        """Take one inner step on the client's own training data; put the model back afterwards."""
        train, weights = self.data.train, self._weights()
        batches = BatchLoader(train.data, train.dataset, train.batch_size, train.label_map)
        with evaluating(self), torch.inference_mode(False), torch.enable_grad():
            gradient = {name: torch.zeros_like(weight) for name, weight in weights.items()}
            for images, labels in batches:
                if self.channels_last:
                    images = images.contiguous(memory_format=torch.channels_last)
                for name, part in _gradients(self.plain_objective(images, labels), weights).items():
                    gradient[name] += part * (len(labels) / len(train.dataset))
        before = {name: weight.detach().clone() for name, weight in weights.items()}
        self._set({name: weight - self.alpha * gradient[name] for name, weight in before.items()})
        self.is_adapted = True
        try:
            yield
        finally:
            self._set(before)
            self.is_adapted = False

    @torch.no_grad()
    def _set(self, weights: Weights) -> None:
        for name, weight in self._weights().items():
            weight.copy_(weights[name])

    def score(self, batches: Iterable[Batch]) -> Score:  # noqa: D102
        with self.adapted():
            return super().score(batches)

    def predict(self, images: Tensor) -> Tensor:  # noqa: D102
        if self.is_adapted:
            return super().predict(images)
        with self.adapted():
            return super().predict(images)


class UniformServer(Server):
    """Plain averaging in which every upload counts the same."""

    def shares(self, round: int, uploads: Mapping[int, Payload]) -> list[float]:  # noqa: D102
        return [1 / len(uploads)] * len(uploads)


class _Objective(nn.Module):
    """A client's objective as a forward pass, so that it can be had at other weights."""

    def __init__(self, client: PerFedAvg) -> None:
        super().__init__()
        self.client = client

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return self.client.plain_objective(images, labels)


def _gradients(loss: Tensor, weights: Weights) -> dict[str, Tensor]:
    gradients = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
    return dict(zip(weights, gradients, strict=True))
