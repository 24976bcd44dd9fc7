"""Images of classes, held in memory."""

from abc import abstractmethod
from typing import Any, Literal

import torch

from lit_pfl.data.augment import Augment
from lit_pfl.data.datamodule import PartitionedDataModule
from lit_pfl.data.loader import BatchLoader, ImageSet


class ImageDataModule(PartitionedDataModule):
    """Images of classes, dealt to clients. A new source overrides :meth:`load` only.

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

    def batches(self, client_id: int, part: str, label_map: torch.Tensor | None) -> BatchLoader:  # noqa: D102
        indices = torch.from_numpy(self.indices[part][client_id]).to(self.device)
        if part == "train":
            return BatchLoader(self.data, indices, self.batch_size, label_map, shuffle=True, augment=self.augment)
        return BatchLoader(self.data, indices, self.eval_batch_size, label_map)

    def everything(self, part: Literal["val", "test"]) -> BatchLoader:  # noqa: D102
        return BatchLoader(self.data, torch.from_numpy(self.whole[part]).to(self.device), self.eval_batch_size)

    def example(self) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: D102
        data = self.data
        return torch.zeros(1, data.channels, *data.images.shape[2:]), torch.zeros(1, dtype=torch.int64)
