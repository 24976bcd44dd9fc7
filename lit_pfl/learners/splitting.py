"""A batch divided into samples."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lit_pfl.data.batches import parts_of, tensors_in
from lit_pfl.errors import ConfigError


def _lengths(part: Any) -> Iterator[int]:
    """Return the lengths of all tensors in a part of a batch, but of those without dimensions."""
    return (len(tensor) for tensor in tensors_in(part) if tensor.dim())


def split_batch(batch: Any, parts: int) -> list[Any]:
    """Divide a batch into consecutive parts of equal size, up to one sample; one too small serves as all of them.

    Args:
        batch: tensors, in whatever they are held, that have its samples along their first dimension; lists of as many
            things without a length, such as names, are divided too. A tensor without dimensions goes with every part.
        parts: how many; each has at least two samples.

    Raises:
        ConfigError: when it holds what cannot be divided so.
    """
    lengths = dict.fromkeys(_lengths(batch))
    size = next(iter(lengths), 1)
    _check_divides(batch, size)
    if len(lengths) > 1:
        raise ConfigError(
            f"A batch has tensors of {' and '.join(map(str, lengths))} rows, and this method divides batches into "
            "samples: give every tensor one row a sample."
        )
    if size < 2 * parts:
        return [batch] * parts
    places = [places.tolist() for places in torch.arange(size).tensor_split(parts)]

    def part(index: int) -> Any:
        def cut(x: Tensor | list[Any]) -> Any:
            if isinstance(x, Tensor):
                return x.tensor_split(parts)[index] if x.dim() else x
            if _is_of_samples(x, size):
                return [x[place] for place in places[index]]
            return [apply_to_collection(inside, (Tensor, list), cut) for inside in x]

        return apply_to_collection(batch, (Tensor, list), cut)

    return [part(index) for index in range(parts)]


def _is_of_samples(part: Any, size: int) -> bool:
    """Say whether a part of a batch is a list with something for each sample."""
    return isinstance(part, list) and len(part) == size and next(_lengths(part), None) is None


def _check_divides(part: Any, size: int) -> None:
    """Refuse what has samples, or may have them, in an order that nobody here knows."""
    if isinstance(part, Tensor) or _is_of_samples(part, size):
        return
    if isinstance(part, PackedSequence) or _is_closed(part):
        raise ConfigError(
            f"A batch has a {type(part).__name__} in it, and this method divides batches into samples: give the "
            "tensors that it is made of, with one row a sample, and make it in the learner's steps."
        )
    for inside in parts_of(part):
        _check_divides(inside, size)


def _is_closed(part: Any) -> bool:
    """Say whether something may hold samples where batches are not looked through: an array, a set, a graph."""
    if isinstance(part, str | bytes | Mapping | tuple | list) or is_dataclass(part):
        return False
    tensors = any(isinstance(value, Tensor) for value in getattr(part, "__dict__", {}).values())
    return tensors or hasattr(part, "to") or isinstance(part, Collection)
