"""Images of classes, held in memory."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from lit_pfl.data.augment import Augment
from lit_pfl.data.datamodule import PartitionedDataModule
from lit_pfl.data.resident import ResidentLoader


@dataclass(frozen=True)
class ImageSet:
    """All images of a data set, held once for all clients.

    Args:
        images: (N, C, H, W) uint8. Grey images may be held with C = 1 and used as color ones, see ``channels``.
        labels: (N,) int64.
        num_classes: number of classes.
        mean: of each of the ``channels`` channels, for values from 0 to 1.
        std: likewise.
        channels: number of channels a model sees.
        groups: (N,) int64 natural group of every image, such as its writer, if every group is to have a client.
        num_train: how many of the first are the source's own training data, the others its test data; None where it
            does not say.
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


class BatchLoader(ResidentLoader):
    """Batches of one client: (B, C, H, W) float32 images, normalized and augmented, and (B,) int64 labels.

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

    def in_order(self, batch_size: int | None = None) -> Self:
        return super().in_order(batch_size)._with(augment=None)

    def identity(self) -> bytes:
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


class ImageDataModule(PartitionedDataModule):
    """Images of classes, split among clients. A new source overrides :meth:`load` only.

    Args:
        args: see :class:`PartitionedDataModule`.
        augment: random changes of training images.
        kwargs: see :class:`PartitionedDataModule`.
    """

    def __init__(self, *args: Any, augment: Augment | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.augment = augment

    @abstractmethod
    def load(self) -> ImageSet:
        """Read all images, the official training data first."""

    def batches(self, client_id: int, part: str, label_map: Tensor | None) -> BatchLoader:
        indices = torch.from_numpy(self.indices[part][client_id]).to(self.device)
        if part == "train":
            return BatchLoader(self.data, indices, self.batch_size, label_map, shuffle=True, augment=self.augment)
        return BatchLoader(self.data, indices, self.eval_batch_size, label_map)

    def everything(self, part: Literal["val", "test"]) -> BatchLoader:
        return BatchLoader(self.data, torch.from_numpy(self.whole[part]).to(self.device), self.eval_batch_size)

    def example(self) -> tuple[Tensor, Tensor]:
        data = self.data
        return torch.zeros(1, data.channels, *data.images.shape[2:]), torch.zeros(1, dtype=torch.int64)
