"""Samples of any kind that are held in memory, and batches cut from them."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lit_pfl.data.resident import ResidentLoader


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
    """

    def __init__(
        self,
        samples: Any,
        indices: Tensor,
        batch_size: int,
        label_map: Tensor | None = None,
        shuffle: bool = False,
    ) -> None:
        super().__init__(indices, batch_size, shuffle)
        self.samples = samples
        self.label_map = label_map

    def batch(self, indices: Tensor) -> Any:
        """Return the samples, of the same structure."""
        batch = apply_to_collection(self.samples, Tensor, lambda tensor: tensor[indices])
        return batch if self.label_map is None else relabelled(batch, self.label_map)


def relabelled(batch: Any, label_map: Tensor) -> tuple[Any, ...]:
    """Return a batch, or a sample, with this client's labels in place of its last part, the classes."""
    *inputs, labels = batch
    return *inputs, label_map[torch.as_tensor(labels)]
