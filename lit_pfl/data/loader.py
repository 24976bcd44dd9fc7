"""A data set in memory, and batches cut from it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lit_pfl.data.augment import Augment


@dataclass(frozen=True)
class ImageSet:
    """All images of a data set, held once for all clients.

    Args:
        images: (N, C, H, W) uint8. Grey images may be held with C = 1 and used as colour ones, see ``channels``.
        labels: (N,) int64.
        num_classes: number of classes.
        mean: of each of the ``channels`` channels, for values from 0 to 1.
        std: likewise.
        channels: number of channels a model sees.
    """

    images: Tensor
    labels: Tensor
    num_classes: int
    mean: Tensor
    std: Tensor
    channels: int

    def to(self, device: torch.device) -> "ImageSet":
        """Return the same on another device."""
        if self.images.device == device:
            return self
        tensors = {name: getattr(self, name).to(device) for name in ("images", "labels", "mean", "std")}
        return replace(self, **tensors)


class BatchLoader:
    """Batches of one client: (B, C, H, W) float32 images, normalised and augmented, and (B,) int64 labels.

    A last batch of a single image is left out when there are others, since batch norm cannot train on one; it comes in
    the next epoch's order. No other image is left out.

    Args:
        data: where the images are.
        indices: (n,) positions of this client's images.
        batch_size: images a batch.
        label_map: (num_classes,) this client's label of every class, or None.
        shuffle: whether every epoch has another order, from PyTorch's default generator; for training.
        augment: changes training images.
    """

    def __init__(
        self,
        data: ImageSet,
        indices: Tensor,
        batch_size: int,
        label_map: Tensor | None = None,
        shuffle: bool = False,
        augment: Augment | None = None,
    ) -> None:
        self.data = data
        self.dataset = indices
        self.batch_size = batch_size
        self.label_map = label_map
        self.shuffle = shuffle
        self.augment = augment

    @property
    def labels(self) -> Tensor:
        """(n,) this client's labels, in the order of its indices."""
        labels = self.data.labels[self.dataset]
        return labels if self.label_map is None else self.label_map[labels]

    def __len__(self) -> int:
        batches = -(-len(self.dataset) // self.batch_size)
        return batches - 1 if self._leaves_one_out() else batches

    def _leaves_one_out(self) -> bool:
        return self.shuffle and 1 < self.batch_size < len(self.dataset) and len(self.dataset) % self.batch_size == 1

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = self.dataset
        if self.shuffle:
            order = order[torch.randperm(len(order)).to(order.device)]
        if self._leaves_one_out():
            order = order[:-1]
        for batch in order.split(self.batch_size) if len(order) else ():
            labels = self.data.labels[batch]
            yield self._images(batch), labels if self.label_map is None else self.label_map[labels]

    def _images(self, batch: Tensor) -> Tensor:
        data = self.data
        images = data.images[batch].float().div_(255)
        if images.shape[1] != data.channels:
            images = images.expand(-1, data.channels, -1, -1)
        if self.augment is not None and not self.augment.on_normalized:
            images = self.augment(images)
        images = (images - data.mean.view(-1, 1, 1)).div_(data.std.view(-1, 1, 1))
        if self.augment is not None and self.augment.on_normalized:
            images = self.augment(images)
        return images
