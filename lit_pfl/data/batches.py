"""What is in a batch, whoever made it."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from lit_pfl.errors import ConfigError
from lit_pfl_callbacks.batches import LABELS


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield a batch's tensors in their order, whatever holds them: sequences, mappings, dataclasses, graphs, nested.

    Nothing is put together again, which not every holder lets one do: a ``PackedSequence`` wants its own types back.
    """
    if isinstance(batch, Tensor):
        yield plain(batch)
        return
    for part in parts_of(batch):
        yield from tensors_in(part)


def parts_of(batch: Any) -> Collection[Any]:
    """Return what a batch, or a part of one, is looked through for."""
    if isinstance(batch, Mapping):
        return batch.values()
    if is_dataclass(batch):
        return [getattr(batch, field.name) for field in fields(batch)]
    # A graph of PyTorch Geometric is no mapping, but makes a dict of itself. Of all such objects, batches have a `to`.
    if hasattr(batch, "to") and callable(as_dict := getattr(batch, "to_dict", None)):
        return as_dict().values()
    return batch if isinstance(batch, Sequence) and not isinstance(batch, str | bytes) else ()


def size_of(batch: Any) -> int:
    """Return the number of samples of a batch, counted as Lightning does: the length of its first tensor.

    Tuples, lists, mappings and dataclasses are looked through in their order, and what is not a tensor is passed over:
    names, numbers, None. A tensor without dimensions is one sample; so is a batch without tensors. A batch of another
    kind, such as a graph of graphs, counts what its own ``batch_size`` says, if that is a whole number.
    """
    # The first part of nearly all batches is a tensor, and this is asked of every batch: all else takes its time.
    if type(batch) in (tuple, list) and batch and isinstance(batch[0], Tensor) and batch[0].dim():
        return len(batch[0])
    own = getattr(batch, "batch_size", None)
    if isinstance(own, int):
        return own
    first = next(tensors_in(batch), None)
    return len(first) if first is not None and first.dim() else 1


def labels_in(batch: Any) -> Tensor:
    """Return the (B,) int64 class labels of a batch: its last part, or its part under one of the names in ``LABELS``.

    Raises:
        ConfigError: when there are none.
    """
    labels = target_in(batch)
    if not isinstance(labels, Tensor) or labels.dim() != 1 or labels.is_floating_point() or labels.is_complex():
        raise ConfigError(
            "The training data has no class labels: batches must end with an integer tensor (B,), "
            f"or be dicts, dataclasses or graphs with one under {', '.join(LABELS)}."
        )
    return plain(labels).long()


def target_in(batch: Any) -> Any:
    """Return what a batch says of its samples: its last part, or its part under one of the names in ``LABELS``."""
    if isinstance(batch, list | tuple):
        return batch[-1] if batch else None
    if isinstance(batch, Mapping):
        return next((batch[name] for name in LABELS if name in batch), None)
    return next((getattr(batch, name) for name in LABELS if hasattr(batch, name)), None)


def described(batch: Any) -> str:
    """Return a batch's shapes, for a message."""
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{name}: {described(part)}" for name, part in batch.items()) + "}"
    if isinstance(batch, list | tuple):
        return "(" + ", ".join(map(described, batch)) + ")"
    return type(batch).__name__


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor without what a subclass adds, such as MONAI's ``MetaTensor``, which all results would be of too.

    A kind of tensor that PyTorch itself computes in another way, such as a ``FakeTensor``, stays what it is.
    """
    kind = type(tensor)
    known = kind is Tensor or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
    return tensor if known else tensor.as_subclass(Tensor)
