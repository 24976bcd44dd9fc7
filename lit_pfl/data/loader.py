"""A data set in memory, and batches cut from it."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

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
        groups: (N,) int64 natural group of every image, such as its writer, if every group is to have a client.
        num_train: the first so many are the source's own training data, the others its test data; None where it does
            not say.
        class_names: what the classes are called; None where they have numbers only.
    """

    images: Tensor
    labels: Tensor
    num_classes: int
    mean: Tensor
    std: Tensor
    channels: int
    groups: Tensor | None = None
    num_train: int | None = None
    class_names: tuple[str, ...] | None = None

    def to(self, device: torch.device) -> "ImageSet":
        """Return the same on another device."""
        if self.images.device == device:
            return self
        tensors = {name: getattr(self, name).to(device) for name in ("images", "labels", "mean", "std")}
        return replace(self, **tensors)


def leaves_one_out(n: int, batch_size: int) -> bool:
    """Say whether the last of n samples in batches would be alone although there are other batches."""
    return 1 < batch_size < n and n % batch_size == 1


class ResidentLoader(ABC):
    """Batches of one client, cut from samples that are held in memory once for all clients.

    A last training batch of a single sample is left out when there are others, since batch norm cannot train on one;
    it comes in the next epoch's order. No other sample is left out, unless ``drop_last`` says so.

    Args:
        indices: (n,) positions of this client's samples.
        batch_size: samples a batch.
        shuffle: whether every epoch has another order, from PyTorch's default generator; for training.
        drop_last: whether a last batch that is not full is left out when there are others.
    """

    def __init__(self, indices: Tensor, batch_size: int, shuffle: bool = False, drop_last: bool = False) -> None:
        self.dataset = indices
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last

    @abstractmethod
    def batch(self, indices: Tensor) -> Any:
        """Return the batch of some samples, by their positions among those of all clients."""

    def __len__(self) -> int:
        return -(-(len(self.dataset) - self._left_out()) // self.batch_size)

    def _left_out(self) -> int:
        """Return how many samples an epoch leaves out."""
        if self.drop_last and len(self.dataset) > self.batch_size:
            return len(self.dataset) % self.batch_size
        return int(self.shuffle and leaves_one_out(len(self.dataset), self.batch_size))

    def __iter__(self) -> Iterator[Any]:
        order = self.dataset
        if self.shuffle:
            order = order[torch.randperm(len(order)).to(order.device)]
        order = order[: len(order) - self._left_out()]
        for indices in order.split(self.batch_size) if len(order) else ():
            yield self.batch(indices)

    # What methods ask, through lit_pfl.data.loaders, which says what these mean.

    @property
    def num_samples(self) -> int:  # noqa: D102
        return len(self.dataset)

    def in_order(self, batch_size: int | None = None) -> Self:  # noqa: D102
        return self._with(shuffle=False, drop_last=False, batch_size=batch_size or self.batch_size)

    def part_of(self, positions: Tensor) -> Self:  # noqa: D102
        return self._with(dataset=self.dataset[positions.to(self.dataset.device)])

    def in_batches_of(self, batch_size: int) -> Self:  # noqa: D102
        return self._with(batch_size=batch_size)

    def identity(self) -> bytes:  # noqa: D102
        return len(self.dataset).to_bytes(8, "big") + self.dataset.cpu().numpy().tobytes()

    def samples_of(self) -> Tensor:  # noqa: D102
        return self.dataset

    def _with(self, **changes: Any) -> Self:
        other = copy.copy(self)
        vars(other).update(changes)
        return other


class BatchLoader(ResidentLoader):
    """Batches of one client: (B, C, H, W) float32 images, normalised and augmented, and (B,) int64 labels.

    Args:
        data: where the images are.
        indices: (n,) positions of this client's images.
        batch_size: images a batch.
        label_map: (num_classes,) this client's label of every class, or None.
        shuffle: see :class:`ResidentLoader`, also for what is left out.
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
        super().__init__(indices, batch_size, shuffle)
        self.data = data
        self.label_map = label_map
        self.augment = augment

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return (B, C, H, W) images and (B,) labels."""
        labels = self.data.labels.index_select(0, indices)
        return self._images(indices), labels if self.label_map is None else self.label_map[labels]

    @property
    def labels(self) -> Tensor:
        """(n,) this client's labels, in the order of its indices."""
        labels = self.data.labels[self.dataset]
        return labels if self.label_map is None else self.label_map[labels]

    def in_order(self, batch_size: int | None = None) -> Self:  # noqa: D102
        return super().in_order(batch_size)._with(augment=None)

    def identity(self) -> bytes:  # noqa: D102
        kind = repr((self.data.channels, self.data.images.shape[1:])).encode()
        return kind + super().identity() + self.labels.cpu().numpy().tobytes()

    def _images(self, batch: Tensor) -> Tensor:
        data = self.data
        images = data.images.index_select(0, batch).float().div_(255)
        if images.shape[1] != data.channels:
            images = images.expand(-1, data.channels, -1, -1)
        if self.augment is not None and not self.augment.on_normalized:
            images = self.augment(images)
        images = (images - data.mean.view(-1, 1, 1)).div_(data.std.view(-1, 1, 1))
        if self.augment is not None and self.augment.on_normalized:
            images = self.augment(images)
        return images
