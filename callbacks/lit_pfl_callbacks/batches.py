"""What is in a batch: inputs, labels, and the ids of its samples."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

INPUTS = ("image", "images", "img", "x", "input", "inputs", "pixel_values", "input_ids", "data")
LABELS = ("label", "labels", "target", "targets", "y")
IDS = ("id", "ids", "sample_id", "sample_ids", "index", "indices", "idx")


def entry(batch: Any, names: Iterable[str], place: int) -> Any:
    """Return an entry of a batch: of a dict the first of some names, of a list or tuple by its place; None without.

    Example:
        >>> entry({"image": 1, "label": 2}, LABELS, 1), entry([1, 2], LABELS, 1), entry([1], LABELS, 1)
        (2, 2, None)
    """
    if isinstance(batch, Mapping):
        return next((batch[name] for name in names if name in batch), None)
    return batch[place] if isinstance(batch, list | tuple) and len(batch) > place else None


def labels_of(batch: Any) -> Tensor | None:
    """Return a batch's labels, if it has a tensor of them."""
    found = entry(batch, LABELS, 1)
    return found if isinstance(found, Tensor) else None


def ids_of(batch: Any) -> list[Any] | None:
    """Return the ids of a batch's samples, where the batch is a dict that has them."""
    found = entry(batch, IDS, 0) if isinstance(batch, Mapping) else None
    if isinstance(found, Tensor):
        return found.tolist() if found.dim() == 1 else None
    return list(found) if isinstance(found, Sequence) and not isinstance(found, str) else None


def logits_in(output: Any) -> Any:
    """Return the logits of a forward's output: what it has under this name, as Hugging Face's models, or itself."""
    return output["logits"] if isinstance(output, Mapping) and "logits" in output else getattr(output, "logits", output)


def some_names(batch: Any) -> str:
    """Say what a batch is, for a message."""
    if isinstance(batch, Mapping):
        return f"a dict of {', '.join(map(repr, list(batch)[:6]))}"
    if isinstance(batch, list | tuple):
        return f"a {type(batch).__name__} of {', '.join(type(part).__name__ for part in batch[:6])}"
    return f"a {type(batch).__name__}"
