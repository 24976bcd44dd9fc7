"""Batches of samples that are held in memory once for all clients."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor


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
        for indices in order.split(min(self.batch_size, len(order))) if len(order) else ():
            yield self.batch(indices)

    # What methods ask, through lit_pfl.data.loaders, which says what these mean.

    @property
    def num_samples(self) -> int:
        """Number of its samples."""
        return len(self.dataset)

    def in_order(self, batch_size: int | None = None) -> Self:
        """Return a loader of the same samples, in their order."""
        return self._with(shuffle=False, drop_last=False, batch_size=batch_size or self.batch_size)

    def part_of(self, positions: Tensor) -> Self:
        """Return a loader of the samples at (m,) places among its own."""
        return self._with(dataset=self.dataset[positions.to(self.dataset.device)])

    def in_batches_of(self, batch_size: int) -> Self:
        """Return a loader of the same samples in batches of another size."""
        return self._with(batch_size=batch_size)

    def identity(self) -> bytes:
        """Return bytes by which its samples are known again."""
        return len(self.dataset).to_bytes(8, "big") + self.dataset.cpu().numpy().tobytes()

    def samples_of(self) -> Tensor:
        """Return the (n,) places of its samples in the data set."""
        return self.dataset

    def _with(self, **changes: Any) -> Self:
        other = copy.copy(self)
        vars(other).update(changes)
        return other


@dataclass(frozen=True)
class SampleSet:
    """All samples of a data set, and what a split needs to know of them.

    Args:
        content: the samples, stacked: a tensor (N, ...), or lists, tuples and dicts of some; None where they are not
            held in memory.
        labels: (N,) int64 class of every sample; zeros where there are no classes.
        num_classes: number of classes; None where there are none.
        groups: (N,) int64 natural group of every sample, or None.
        class_names: what the classes are called; None where they have numbers only.
    """

    content: Any
    labels: Tensor
    num_classes: int | None = None
    groups: Tensor | None = None
    class_names: tuple[str, ...] | None = None

    def to(self, device: torch.device) -> "SampleSet":
        """Return the same with stacked samples on another device."""
        return replace(self, content=apply_to_collection(self.content, Tensor, lambda tensor: tensor.to(device)))


class TensorLoader(ResidentLoader):
    """Batches of one client, cut from stacked samples.

    Args:
        samples: the samples of all clients, see :class:`SampleSet`.
        indices: (n,) positions of this client's samples.
        batch_size: samples a batch.
        label_map: (num_classes,) this client's label of every class, for batches that end with the labels; or None.
        shuffle: see :class:`~lit_pfl.data.ResidentLoader`.
        key: where the labels are in batches that are dicts.
    """

    def __init__(
        self,
        samples: Any,
        indices: Tensor,
        batch_size: int,
        label_map: Tensor | None = None,
        shuffle: bool = False,
        key: str | None = None,
    ) -> None:
        super().__init__(indices, batch_size, shuffle)
        self.samples = samples
        self.label_map = label_map
        self.key = key

    def batch(self, indices: Tensor) -> Any:
        """Return the samples, of the same structure."""
        batch = apply_to_collection(self.samples, Tensor, lambda tensor: tensor[indices])
        return batch if self.label_map is None else relabelled(batch, self.label_map, self.key)


def relabelled(batch: Any, label_map: Tensor, key: str | None = None) -> Any:
    """Return a batch, or a sample, with this client's labels instead of the classes: of its last part, or of an entry.

    Args:
        batch: a sequence, or a mapping.
        label_map: (num_classes,) the client's label of every class.
        key: the entry of a mapping that holds the classes; None for a sequence.
    """
    if key is not None:
        return {**batch, key: _mapped(batch[key], label_map)}
    *inputs, labels = batch
    own = _mapped(labels, label_map)
    return batch._replace(**{batch._fields[-1]: own}) if hasattr(batch, "_replace") else (*inputs, own)


def _mapped(classes: Any, label_map: Tensor) -> Tensor:
    return label_map[torch.as_tensor(classes).long()]  # bytes would choose as a mask does
