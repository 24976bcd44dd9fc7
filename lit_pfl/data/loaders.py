"""What methods ask of a client's batches, whoever makes them.

Everything here takes a loader of this package, a PyTorch DataLoader, or another iterable of batches that begins again
whenever it is iterated over. Where a DataLoader chooses samples of a map-style ``Dataset`` by number, they are seen one
by one: positions are those of the loader's own samples, from 0. Of all others the batches are seen as they come, and
what needs single samples raises a ConfigError.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from torch import Tensor

from lit_pfl.data.batches import labels_in, plain, target_in
from lit_pfl.data.resident import ResidentLoader
from lit_pfl.data.several import loaders_in
from lit_pfl.data.torch_loaders import Kind, kind_of
from lit_pfl.errors import ConfigError
from lit_pfl_callbacks.loader_state import has_state


def num_samples(loader: Any) -> int:
    """Return how many samples a loader has, whether or not all of them come in every epoch.

    Where only batches are seen, that is the attribute ``num_samples`` of the loader or of its ``IterableDataset``;
    otherwise the number that a sampler chooses for an epoch; otherwise a pass over all batches counts them, once: a
    batch has as many samples as its first tensor has rows.
    """
    return _of(loader).num_samples


def batch_size_of(loader: Any) -> int:
    """Return how many samples are in a batch, where that can be changed by :func:`in_batches_of`."""
    return _of(loader).batch_size


def in_order(loader: Any, batch_size: int | None = None) -> Any:
    """Return a loader of the same samples, all of them, in their order.

    It neither shuffles nor augments, and leaves all generators of random numbers as they are. What a ``Dataset`` draws
    on its own, as in a random transform, is drawn from seeds of its own: the same at every iteration. Batches of a
    stream, and those of places that a sampler draws, are the ones of such an epoch.

    Args:
        loader: the loader.
        batch_size: samples a batch, where batches are not made by the dataset; by default the loader's own.
    """
    return _of(loader).in_order(batch_size)


def part_of(loader: Any, positions: Tensor) -> Any:
    """Return a loader of some of the samples, shuffled, augmented and put into batches as before.

    Args:
        loader: the loader.
        positions: (m,) int64 of samples.
    """
    return _of(loader).part_of(positions)


def in_batches_of(loader: Any, batch_size: int) -> Any:
    """Return a loader of the same samples in batches of another size.

    Args:
        loader: the loader, which stays as it is.
        batch_size: samples a batch.
    """
    return _of(loader).in_batches_of(batch_size)


def samples_of(loader: Any) -> Tensor:
    """Return the (n,) int64 places of the samples in the data set they are of, of several loaders in turn."""
    return torch.cat([_of(one).samples_of() for one in loaders_in(loader)])


def labels_of(loader: Any) -> Tensor:
    """Return the (n,) int64 class labels of the samples, in their order, as this client numbers the classes.

    Labels are the last part of a batch, or what it names ``label``, ``labels``, ``target``, ``targets`` or ``y``.
    """
    labels = [labels_in(batch) for batch in in_order(loader)]
    return torch.cat(labels) if labels else torch.empty(0, dtype=torch.int64)


def targets_of(loader: Any) -> Tensor | None:
    """Return the (n,) numbers that are to be predicted, classes or others, in the order of the samples; or None.

    There are none where batches do not end with one number a sample, and where they cannot be had in order.
    """
    targets = []
    with suppress(ConfigError):
        for batch in in_order(loader):
            target = target_in(batch)
            if not isinstance(target, Tensor) or target.dim() not in (1, 2) or target.numel() != len(target):
                return None
            targets.append(plain(target).flatten())
    return torch.cat(targets) if targets else None


def identity_of(loader: Any) -> bytes:
    """Return bytes that identify the samples of a loader: of a DataLoader their number and some of them."""
    return b"" if isinstance(loader, tuple | list) and not loader else _of(loader).identity()


def example_of(loader: Any) -> Any:
    """Return a batch of the first sample; the first batch where batches come whole.

    Raises:
        ConfigError: when there is none, as where the samples of a stream are used up once they are counted.
    """
    for batch in in_order(loader, 1):
        return batch
    advice = "a dataset that begins again whenever it is iterated over"
    if has_state(loader):
        advice = "a plain DataLoader, since the state of this one, put back after a look, leaves it at its end"
    raise ConfigError(f"the training loader makes no batch a second time; give {advice}.")


def has_batches(loader: Any) -> bool:
    """Say whether a loader makes batches, as far as can be said without making one."""
    return sized_len(loader) != 0


def goes_on(loader: Any) -> bool:
    """Say whether a loader without a state may begin where a look at its batches has ended, as a stream may."""
    return any(getattr(_of(one), "goes_on", False) for one in loaders_in(loader) if has_batches(one))


@contextmanager
def needed(who: str, what: str) -> Iterator[None]:
    """Say who needs what of the data, wherever it refuses that.

    Args:
        who: whose data they are: a client.
        what: the method, and what it does with the data.

    Raises:
        ConfigError: that of the data, with this before it.
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{who}: {what}, which its data does not allow: {error}") from None


def _of(loader: Any) -> ResidentLoader | Kind:
    """Return what does the work for a kind of loader."""
    if isinstance(loader, ResidentLoader):
        return loader
    several = isinstance(loader, list | tuple | Mapping | str) or hasattr(
        loader, "__next__"
    )  # Lightning's CombinedLoader
    if several or not hasattr(loader, "__iter__"):
        raise ConfigError(
            f"Training data of type {type(loader).__name__} does not keep its samples apart; "
            "give a torch.utils.data.DataLoader over a map-style Dataset."
        )
    return kind_of(loader)
