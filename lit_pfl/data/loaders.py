"""What methods ask of a client's batches, whoever makes them.

Everything here takes a loader of this package or a PyTorch DataLoader over a map-style ``Dataset``; positions are those
of the loader's own samples, from 0. Where a loader cannot do what is asked, a ConfigError names what it lacks.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import singledispatch
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)

from lit_pfl.data.randomness import fixed_draws
from lit_pfl.data.resident import ResidentLoader, leaves_one_out
from lit_pfl.errors import ConfigError

#: under which a batch that is a dict may hold its class labels
LABELS = ("labels", "label", "targets", "target", "y")


class Loader(Protocol):
    """What every kind of loader can do; see the functions of these names."""

    @property
    def num_samples(self) -> int: ...  # noqa: D102

    def in_order(self, batch_size: int | None = None) -> Any: ...  # noqa: D102

    def part_of(self, positions: Tensor) -> Any: ...  # noqa: D102

    def in_batches_of(self, batch_size: int) -> Any: ...  # noqa: D102

    def identity(self) -> bytes: ...  # noqa: D102

    def samples_of(self) -> Tensor: ...  # noqa: D102


def num_samples(loader: Any) -> int:
    """Return how many samples a loader has, whether or not all of them come in every epoch."""
    return _of(loader).num_samples


def in_order(loader: Any, batch_size: int | None = None) -> Any:
    """Return a loader of the same samples, all of them, in their order.

    It neither shuffles nor augments, and leaves all generators of random numbers as they are. What a ``Dataset`` draws
    by itself, as in a random transform, is drawn from seeds of its own: the same at every iteration.

    Args:
        loader: the loader.
        batch_size: samples a batch; by default the loader's own.
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
    """Return a loader of the same samples in batches of another size."""
    return _of(loader).in_batches_of(batch_size)


def samples_of(loader: Any) -> Tensor:
    """Return the (n,) int64 places of the samples in the data set they are of."""
    return _of(loader).samples_of()


def labels_of(loader: Any) -> Tensor:
    """Return the (n,) int64 class labels of the samples, in their order, as this client numbers the classes.

    Labels are the last part of a batch, or its entry ``labels``, ``label``, ``targets``, ``target`` or ``y``.
    """
    labels = [_labels_in(batch) for batch in in_order(loader)]
    return torch.cat(labels) if labels else torch.empty(0, dtype=torch.int64)


def identity_of(loader: Any) -> bytes:
    """Return bytes that tell the samples of a loader from others: of a DataLoader its number of them and some."""
    return b"" if isinstance(loader, tuple | list) and not loader else _of(loader).identity()


def example_of(loader: Any) -> Any:
    """Return a batch of the first sample."""
    return next(iter(in_order(loader, 1)))


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield a batch's tensors in their order, whatever holds them: sequences, mappings, dataclasses, nested.

    Nothing is put together again, which not every holder lets one do: a ``PackedSequence`` wants its own types back.
    """
    if isinstance(batch, Tensor):
        yield batch
        return
    for part in parts_of(batch):
        yield from tensors_in(part)


def parts_of(batch: Any) -> Collection[Any]:
    """Return what a batch, or a part of one, is looked through for."""
    if isinstance(batch, Mapping):
        return batch.values()
    if is_dataclass(batch):
        return [getattr(batch, field.name) for field in fields(batch)]
    return batch if isinstance(batch, Sequence) and not isinstance(batch, str | bytes) else ()


def _labels_in(batch: Any) -> Tensor:
    labels = batch[-1] if isinstance(batch, list | tuple) else None
    if isinstance(batch, Mapping):
        labels = next((batch[name] for name in LABELS if name in batch), None)
    if not isinstance(labels, Tensor) or labels.dim() != 1 or labels.is_floating_point() or labels.is_complex():
        raise ConfigError(
            "The training data has no class labels: batches must end with an integer tensor (B,), "
            f"or be dicts with one under {', '.join(LABELS)}."
        )
    return labels.long()


@singledispatch
def _of(loader: Any) -> Loader:
    """Return what does the work for a kind of loader; a new kind registers here."""
    raise ConfigError(
        f"Training data of type {type(loader).__name__} does not tell its samples apart; "
        "give a torch.utils.data.DataLoader over a map-style Dataset."
    )


@_of.register
def _(loader: ResidentLoader) -> Loader:
    return loader


@_of.register
def _(loader: DataLoader) -> Loader:
    return _OfDataLoader(loader)


class _OfDataLoader:
    """Sees a DataLoader as samples and their batches.

    Its samples are those of its dataset, or those that its SubsetRandomSampler may choose. A shuffled loader made here
    leaves a last batch of a single sample out, as :class:`~lit_pfl.data.BatchLoader` does.
    """

    def __init__(self, loader: DataLoader) -> None:
        dataset = loader.dataset
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ConfigError(
                f"{type(dataset).__name__} does not tell its samples apart: the DataLoader needs a map-style Dataset, "
                "with __len__ and __getitem__."
            )
        if loader.batch_size is None and loader.batch_sampler is None:
            raise ConfigError(
                f"{type(dataset).__name__} makes whole batches (batch_size=None), so its samples cannot be told apart; "
                "give the DataLoader a batch_size."
            )
        self.loader = loader
        self.samples: Dataset = dataset
        if isinstance(loader.sampler, SubsetRandomSampler):
            self.samples = Subset(dataset, list(loader.sampler.indices))

    @property
    def num_samples(self) -> int:
        return len(self.samples)  # type: ignore[arg-type]

    def in_order(self, batch_size: int | None = None) -> DataLoader:
        # A DataLoader draws a seed for its workers even if it has none, so it gets a generator of its own.
        return DataLoader(
            FixedDraws(self.samples),
            batch_size or self.loader.batch_size or 1,
            collate_fn=self.loader.collate_fn,
            generator=torch.Generator(),
        )

    def part_of(self, positions: Tensor) -> DataLoader:
        sampler = self.loader.sampler
        whole = isinstance(sampler, SequentialSampler | SubsetRandomSampler) or (
            isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == self.num_samples
        )
        if not whole:
            raise ConfigError(
                f"A part of the training data cannot be taken through a {type(sampler).__name__}; "
                "give the DataLoader a Dataset with shuffle=True."
            )
        shuffle = not isinstance(sampler, SequentialSampler) and len(positions) > 0  # PyTorch shuffles not nothing
        return self._loader(Subset(self.samples, positions.tolist()), self._batch_size(), shuffle=shuffle)

    def in_batches_of(self, batch_size: int) -> DataLoader:
        self._batch_size()
        return self._loader(self.loader.dataset, batch_size, sampler=self.loader.sampler)

    def identity(self) -> bytes:
        n = self.num_samples
        some = Subset(self.samples, sorted({0, n // 2, n - 1}) if n else [])
        known = [str(n).encode()]
        for batch in DataLoader(FixedDraws(some), 1, collate_fn=self.loader.collate_fn, generator=torch.Generator()):
            known += map(_bytes_of, tensors_in(batch))
        return b"|".join(known)

    def samples_of(self) -> Tensor:
        samples: Any = self.samples
        return torch.tensor(samples.indices if isinstance(samples, Subset) else range(self.num_samples))

    def _batch_size(self) -> int:
        if self.loader.batch_size is None or type(self.loader.batch_sampler) is not BatchSampler:
            raise ConfigError(
                f"Batches of another size or of other samples cannot be made with a "
                f"{type(self.loader.batch_sampler).__name__}; give the DataLoader a batch_size."
            )
        return self.loader.batch_size

    def _loader(self, dataset: Dataset, batch_size: int, **order: Any) -> DataLoader:
        old = self.loader
        size = len(order.get("sampler", dataset))
        shuffled = order.get("shuffle", not isinstance(old.sampler, SequentialSampler))
        return DataLoader(
            dataset,
            batch_size,
            **order,
            num_workers=old.num_workers,
            collate_fn=old.collate_fn,
            pin_memory=old.pin_memory,
            drop_last=old.drop_last or (shuffled and leaves_one_out(size, batch_size)),
            timeout=old.timeout,
            worker_init_fn=old.worker_init_fn,
            multiprocessing_context=old.multiprocessing_context,
            generator=old.generator,
            prefetch_factor=old.prefetch_factor,
            persistent_workers=old.persistent_workers,
        )


class LateLoader:
    """A loader that begins an epoch when the first batch is asked for.

    A Trainer makes the iterator of a fit's first epoch before the fit begins, and those of later epochs as they come. A
    DataLoader's iterator draws a seed when it is made, so a fit that is resumed at a later epoch would draw one number
    fewer than one that was never interrupted.

    Args:
        loader: the loader, whose attributes are this one's too.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # of a copy that is still being made
            raise AttributeError(name)
        return getattr(self.loader, name)


class FixedDraws(Dataset):
    """A dataset whose sample i is the same every time, whatever the dataset draws at random to make it."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, position: int) -> Any:
        with fixed_draws(position):
            return self.dataset[position]


def _bytes_of(tensor: Tensor) -> bytes:
    """Return a tensor's own bytes, of types that numpy does not know too."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
