"""FedALA: every client learns how much of the global model's last layers it takes."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, PositiveInt
from torch import Tensor

from lit_pfl.core import Client
from lit_pfl.core.payload import Payload
from lit_pfl.core.sharing import EVERYTHING
from lit_pfl.data.loaders import in_order, needed, num_samples, part_of
from lit_pfl.errors import ConfigError
from lit_pfl.learners.scoring import gradients_at
from lit_pfl.nn import Memory


class FedALA(Client):
    """FedAvg in which a client mixes the last layers of what it receives with its own, element by element.

    Of the last tensors, with w_i the client's own and w the received one, ``v = w_i + (w - w_i) * W``. Before a client
    trains from v it learns W, from 0 to 1 and 1 at first, on a part of its training data:
    ``W <- clip(W - eta * grad_v f(v) * (w - w_i), 0, 1)`` on each batch. The first time it goes through them until the
    losses of the last ``window`` passes differ by less than ``threshold``, later once. Of all other tensors it takes
    what it receives. W is never sent. Where nothing has been trained since, the two models are equal and nothing is
    learned. With ``eta=0`` this is FedAvg, bit for bit. In the authors' code clients that do not take part mix and
    learn W in every round too.

    The losses are taken as the model is tested, without augmentation, dropout or a change of running statistics; the
    part of the data is a window of random samples that follow one another, resampled each time.

    Args:
        eta: how fast W is learned.
        share: share of the training data on which it is.
        layers: the last tensors: how many of those that are sent, 2 being weight and bias of a linear classifier; or
            regular expressions, for all weights in whose name one is found.
        threshold: the standard deviation below which the losses stay as they are.
        window: number of losses that it is of.
        max_passes: after how many passes the first time ends in any case; the authors' code never stops.
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: when fewer tensors are sent, or none of such a name.

    Source:
        Zhang et al. 2023, Algorithm 1 and Eq. 4 to 6.
    """

    needs_automatic = "learns its weights by gradients of one loss"
    may_unfreeze = False

    shares = EVERYTHING

    mixed: Memory
    begun: Tensor

    def __init__(
        self,
        eta: NonNegativeFloat = 1.0,
        share: ClosedUnitInterval = 0.8,
        layers: PositiveInt | list[str] = 2,
        threshold: NonNegativeFloat = 0.1,
        window: PositiveInt = 10,
        max_passes: PositiveInt = 100,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.eta, self.share, self.layers = eta, share, layers
        self.threshold, self.window, self.max_passes = threshold, window, max_passes

    def configure_state(self) -> None:
        weights = self.shared_weights()
        if isinstance(self.layers, int):
            if self.layers > len(weights):
                raise ConfigError(
                    f"model.layers={self.layers}: there are {len(weights)} shared weights; set at most as many."
                )
            names = list(weights)[-self.layers :]
        else:
            names = [name for name in weights if any(re.search(pattern, name) for pattern in self.layers)]
            if not names:
                raise ConfigError(f"model.layers={self.layers}: no shared weight matches a pattern.")
        self.mixed = Memory({name: torch.ones_like(weights[name]) for name in names})
        self.register_buffer("begun", torch.tensor(False))

    def initial(self) -> Payload:
        """Return what is sent on joining, if a part of the training data can be chosen."""
        if self.data is not None and self.eta and self.share < 1:
            with needed(f"Client {self.spec.client_id}", "FedALA learns on some of its training samples"):
                self._batches()
        return super().initial()

    def _batches(self) -> Any:
        """Return the batches on which W is learned."""
        data = self.training_data()
        n = num_samples(data)
        size = max(1, int(self.share * n))
        if size == n:
            return in_order(data)
        start = int(torch.randint(n - size + 1, ()))
        return in_order(part_of(data, torch.arange(start, start + size)))

    def download(self, reply: Mapping[str, Tensor]) -> None:
        """Take the last layers as W says, after learning it, and all else as it comes."""
        weights = self.shared_weights()
        own = {name: weights[name].detach().clone() for name in self.mixed}
        super().download(reply)
        received = {name: weights[name].detach().clone() for name in own}
        if all(torch.equal(own[name], received[name]) for name in own):
            return
        if self.eta:
            self._learn(own, received)
        with torch.no_grad():
            for name, mixture in self._mixture(own, received).items():
                weights[name].copy_(mixture)

    def _mixture(self, own: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: torch.lerp(own[name], received[name], w) for name, w in self.mixed.items()}

    def _learn(self, own: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> None:
        batches, losses = self._batches(), []
        for _ in range(1 if self.begun else self.max_passes):
            losses.append(self._one_pass(own, received, batches))
            last = torch.tensor(losses[-self.window :], dtype=torch.float64)
            if len(losses) > self.window and float(last.std(correction=0)) < self.threshold:
                break
        self.begun.fill_(True)

    def _one_pass(self, own: Mapping[str, Tensor], received: Mapping[str, Tensor], batches: Any) -> float:
        """Learn W in one pass; return the loss of the last batch."""
        last = float("nan")
        for loss, gradients in gradients_at(self.learner, self.loss, lambda: self._mixture(own, received), batches):
            with torch.no_grad():
                for name, w in self.mixed.items():
                    w.sub_(self.eta * gradients[name] * (received[name] - own[name])).clamp_(0, 1)
            last = float(loss)
        return last
