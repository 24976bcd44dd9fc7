"""What methods have in common whose clients train a second, personal network beside the common one."""

import copy
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lit_pfl.client import Client
from lit_pfl.models import Backbone
from lit_pfl.nn import l1_norm_of_masks


class TwoModels(Client):
    """A client with two networks: ``backbone``, which is averaged as in FedAvg, and ``personal``, which never travels.

    ``personal`` starts as a copy of the backbone and is what is evaluated. One optimizer steps on one loss, the sum of
    both networks' losses on the same batch, so that every step of the Trainer is one step of each. What is done to one
    network must not be felt by the other: a subclass detaches where the losses meet; gradients are clipped for each
    network by itself; and both see the same random numbers (:meth:`same_draws`), those that either would see alone.
    Then ``backbone`` is FedAvg's bit for bit, with every optimizer that treats parameters one by one.

    The training loss that is reported is the sum.
    """

    shares = frozenset({"body", "u", "v", "mu", "norm", "head"})

    personal: Backbone

    def configure_memory(self) -> None:  # noqa: D102
        self.personal = copy.deepcopy(self.backbone)

    def trained_parameters(self) -> Iterable[nn.Parameter]:  # noqa: D102
        return [*self.backbone.parameters(), *self.personal.parameters()]

    @contextmanager
    def same_draws(self) -> Iterator[None]:
        """Put the random state back afterwards, so that what follows draws the same numbers once more."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            yield

    def loss(self, network: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
        """Return what one network minimises: :meth:`Client.objective` for it, given what it makes of a batch.

        Args:
            network: the network, for the L1 norm of its masks.
            logits: (B, classes).
            labels: (B,).
        """
        loss = nn.functional.cross_entropy(logits, labels)
        if self._l1 and self._l1_mode == "subgradient":
            loss = loss + self._l1 * l1_norm_of_masks(network)
        return loss

    @abstractmethod
    def objective(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of both networks' losses on a batch; here only that of the common one."""
        return super().objective(images, labels)

    def personalized(self, images: Tensor) -> Tensor:
        """Map (B, C, H, W) images to the (B, classes) logits of the model that is evaluated."""
        return self.personal(images)

    def predict(self, images: Tensor) -> Tensor:  # noqa: D102
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return self.personalized(images)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip each network's gradients by themselves, as if it were trained alone."""
        if not gradient_clip_val:
            return
        clip = nn.utils.clip_grad_value_ if gradient_clip_algorithm == "value" else nn.utils.clip_grad_norm_
        for network in (self.backbone, self.personal):
            clip(network.parameters(), gradient_clip_val)
