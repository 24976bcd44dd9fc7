"""What PyTorch's loaders, and iterables like them, can do of what :mod:`lit_pfl.data.loaders` asks."""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import suppress
from functools import cached_property
from itertools import islice
from typing import Any, NoReturn

import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)

from lit_pfl.data.batches import size_of, tensors_in
from lit_pfl.data.fixed import FixedCall, FixedDraws, FixedIteration, Look, PositionKept
from lit_pfl.data.resident import leaves_one_out
from lit_pfl.errors import ConfigError
from lit_pfl.randomness import fixed_draws
from lit_pfl_callbacks.generators import OwnGenerators
from lit_pfl_callbacks.loader_state import has_state
from lit_pfl_callbacks.tensors import bytes_of

#: samplers that choose samples by number, which need not be tried
NUMBERING = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
#: after how many batches somebody is told that they are being counted
MANY_BATCHES = 10_000


class _Batches:
    """Sees an iterable as the batches that it makes.

    Its number of samples is its attribute ``num_samples``. Where it has none, a pass over the batches counts them, and
    the number is kept there.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.source = loader.dataset if isinstance(loader, DataLoader) else loader

    @property
    def num_samples(self) -> int:
        known = getattr(self.loader, "num_samples", None)
        if not isinstance(known, int):
            known = self._count()
            with suppress(AttributeError):
                self.loader.num_samples = known
        return known

    @property
    def goes_on(self) -> bool:
        """Whether an iteration may begin where the last one has ended, and nothing puts that back."""
        return not has_state(self.loader)

    def _count(self) -> int:
        n = 0
        for index, batch in enumerate(self.in_order()):
            n += size_of(batch)
            if index == MANY_BATCHES:
                warnings.warn(
                    f"{type(self.source).__name__}: its samples are being counted, {n} so far; set its attribute "
                    "num_samples, above all if it never ends.",
                    stacklevel=2,
                )
        return n

    def in_order(self, batch_size: int | None = None) -> Any:
        return FixedIteration(self.loader)

    def identity(self) -> bytes:
        # of a loader with a state the first batch depends on how far it is
        first = () if has_state(self.loader) else next(iter(self.in_order()), ())
        return b"|".join([str(self.num_samples).encode(), *map(bytes_of, tensors_in(first))])

    def part_of(self, positions: Tensor) -> Any:
        self._refuse()

    def in_batches_of(self, batch_size: int) -> Any:
        self._refuse()

    @property
    def batch_size(self) -> int:
        self._refuse()

    def samples_of(self) -> Tensor:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ConfigError(
            f"{type(self.source).__name__} {self._makes()}, whose samples are not separate; give a "
            "torch.utils.data.DataLoader with a batch_size over a map-style Dataset."
        )

    def _makes(self) -> str:
        return "makes whole batches"


class _ReadyBatches(_Batches):
    """Sees a DataLoader as the batches that its map-style dataset has, one under each number."""

    goes_on = False

    def in_order(self, batch_size: int | None = None) -> Any:
        batches = FixedDraws(_chosen(self.loader.dataset, self.loader.sampler))
        return Look(batches, batch_size=None, collate_fn=_fixed(self.loader), generator=torch.Generator())

    def _makes(self) -> str:
        return "makes whole batches (batch_size=None)"


class _Stream(_Batches):
    """Sees a DataLoader over an ``IterableDataset`` as its batches.

    Its number of samples may also be the dataset's ``num_samples``; or its length, where the DataLoader makes batches.
    """

    @property
    def num_samples(self) -> int:
        known = getattr(self.source, "num_samples", None)
        if known is None and self.loader.batch_size is not None:
            known = sized_len(self.source)
        return known if isinstance(known, int) else super().num_samples

    def in_order(self, batch_size: int | None = None) -> Any:
        resized = batch_size is not None and self.loader.batch_size is not None
        return FixedIteration(self.in_batches_of(batch_size) if resized else self.loader, self.loader)  # type: ignore[arg-type]

    def in_batches_of(self, batch_size: int) -> Any:
        assert self.batch_size
        return DataLoader(self.source, batch_size, drop_last=self.loader.drop_last, **_settings(self.loader))

    @property
    def batch_size(self) -> int:
        return super().batch_size if self.loader.batch_size is None else self.loader.batch_size

    def _makes(self) -> str:
        return "is a stream (IterableDataset)"


class _Places(_Batches):
    """Sees a DataLoader whose sampler chooses samples by something else than numbers, as by places on a map.

    Its samples are those that the sampler chooses for an epoch.
    """

    goes_on = False

    def __init__(self, loader: DataLoader) -> None:
        super().__init__(loader)
        batches = loader.batch_sampler
        self.source = batches.sampler if type(batches) is BatchSampler else batches

    def _count(self) -> int:
        return sum(map(len, self._chosen()))

    def _chosen(self) -> list[Any]:
        """Return what the sampler chooses for an epoch, the same every time, batch by batch."""
        with fixed_draws(0), OwnGenerators(self.loader).kept():
            return list(_looked_at(self.loader.batch_sampler))

    def in_order(self, batch_size: int | None = None) -> Any:
        batches = self._chosen()
        if batch_size is not None:
            batches = list(BatchSampler([one for batch in batches for one in batch], batch_size, drop_last=False))
        return FixedIteration(DataLoader(self.loader.dataset, batch_sampler=batches, **_settings(self.loader)))

    def in_batches_of(self, batch_size: int) -> Any:
        assert self.batch_size
        return _remade(self.loader, self.loader.dataset, self.source, batch_size)

    @property
    def batch_size(self) -> int:
        return _batch_size(self.loader)

    def _makes(self) -> str:
        return "does not choose samples by their numbers"


class _Samples:
    """Sees a DataLoader as samples and their batches.

    Its samples are those of its dataset, or those that its sampler chooses from. A shuffled loader made here
    leaves a last batch of a single sample out, as :class:`~lit_pfl.data.BatchLoader` does.
    """

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader
        self.sampler = getattr(_batches_of(loader), "sampler", None)

    @cached_property
    def samples(self) -> Dataset:
        return _chosen(
            self.loader.dataset, self.sampler if isinstance(self.sampler, NUMBERING) else _batches_of(self.loader)
        )

    @property
    def num_samples(self) -> int:
        return len(self.samples)  # type: ignore[arg-type]

    def in_order(self, batch_size: int | None = None) -> DataLoader:
        own = getattr(_batches_of(self.loader), "batch_size", None)
        return self._ordered(self.samples, batch_size or (own if isinstance(own, int) else 1))

    def _ordered(self, samples: Dataset, batch_size: int, kind: type[DataLoader] = Look) -> DataLoader:
        # A DataLoader draws a seed for its workers even if it has none, so it gets a generator of its own.
        settings = {"collate_fn": _fixed(self.loader), "generator": torch.Generator()}
        fixed: Any = FixedDraws(samples)
        return _made(self.loader, fixed, SequentialSampler(fixed), batch_size, False, settings, kind)

    def part_of(self, positions: Tensor) -> DataLoader:
        sampler, batch_size = self.sampler, self.batch_size
        whole = isinstance(sampler, SequentialSampler | SubsetRandomSampler) or (
            isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == self.num_samples
        )
        if not whole:
            raise ConfigError(
                f"A part of the training data cannot be taken through a {type(sampler).__name__}; "
                "give the DataLoader a Dataset with shuffle=True."
            )
        part: Any = Subset(self.samples, positions.tolist())
        shuffled = not isinstance(sampler, SequentialSampler) and len(part) > 0  # PyTorch shuffles not nothing
        order = RandomSampler(part, generator=self.loader.generator) if shuffled else SequentialSampler(part)
        return _remade(self.loader, part, order, batch_size)

    def in_batches_of(self, batch_size: int) -> DataLoader:
        assert self.batch_size
        return _remade(self.loader, self.loader.dataset, self.sampler, batch_size)

    @property
    def batch_size(self) -> int:
        return _batch_size(self.loader)

    def identity(self) -> bytes:
        n = self.num_samples
        some = Subset(self.samples, sorted({0, n // 2, n - 1}) if n else [])

        def read() -> list[bytes | memoryview]:
            return [bytes_of(part) for batch in self._ordered(some, 1, DataLoader) for part in tensors_in(batch)]

        with PositionKept(some) as position:
            known = read()
            if position.has_moved() and known != read():
                known = []  # they depend on how far it is
        return b"|".join([str(n).encode(), *known])

    def samples_of(self) -> Tensor:
        samples: Any = self.samples
        return torch.tensor(samples.indices if isinstance(samples, Subset) else range(self.num_samples))


Kind = _Samples | _Batches


def kind_of(loader: Any) -> Kind:
    """Return what a loader is seen as: its samples if a DataLoader chooses them by number, otherwise its batches."""
    if not isinstance(loader, DataLoader):
        return _Batches(loader)
    if isinstance(loader.dataset, IterableDataset):
        return _Stream(loader)
    if not hasattr(loader.dataset, "__getitem__"):  # another loader, of which a class of its own makes the batches
        return _Batches(loader)
    collates, order = loader.batch_sampler is not None, _batches_of(loader)
    in_lists, numbers = _chooses(order, collates)
    numbers = numbers and isinstance(loader.dataset, Sized)
    if in_lists and numbers:
        return _Samples(loader)
    if collates:
        return _Places(loader)
    return _ReadyBatches(loader) if numbers else _Batches(loader)


def _chooses(sampler: Any, collates: bool) -> tuple[bool, bool]:
    """Return whether a sampler gives what is in a batch, in lists, and whether samples have numbers there."""
    if isinstance(sampler, BatchSampler) and isinstance(sampler.sampler, NUMBERING):
        return True, True
    if isinstance(sampler, NUMBERING):
        return False, True
    with fixed_draws(0), OwnGenerators(sampler).kept():
        first: Any = next(iter(_looked_at(sampler)), [])
    in_lists = collates or isinstance(first, list | np.ndarray)
    return in_lists, isinstance(next(iter(first), 0) if in_lists else first, int | np.integer)


def _looked_at(sampler: Any) -> Any:
    """Return a sampler to look at: one that goes on where it ended last shall not be further on for that."""
    try:
        other = copy.copy(sampler)
    except TypeError:  # a generator
        return sampler
    with suppress(AttributeError, TypeError):  # it has none, or lets nobody set it
        other.sampler = copy.copy(other.sampler)
    return other


def _batches_of(loader: DataLoader) -> Any:
    """Return what chooses the samples of batches: of a dataset that makes them itself too, if it is given lists."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _chosen(dataset: Dataset, sampler: Any) -> Dataset:
    """Return the part of a dataset that a sampler chooses from: clients may share a dataset, each with its sampler."""
    if isinstance(sampler, SubsetRandomSampler):
        return Subset(dataset, list(sampler.indices))
    size = len(dataset)  # type: ignore[arg-type]
    if isinstance(sampler, SequentialSampler | RandomSampler):
        there = len(sampler.data_source)
        return dataset if there >= size else Subset(dataset, range(there))
    if any(isinstance(one, Iterator) for one in (sampler, getattr(sampler, "sampler", None))):
        return dataset  # an iterator can be looked through once
    if isinstance(sampler, WeightedRandomSampler):
        numbers: Any = sampler.weights.nonzero().flatten().tolist()
    else:
        numbers = _numbers(sampler, 0, size)
        if len(numbers) < size and numbers != _numbers(sampler, 1, size):  # an epoch has a part of the samples
            return dataset
    return dataset if len(numbers) in (0, size) else Subset(dataset, sorted(numbers))


def _numbers(sampler: Any, epoch: int, size: int) -> set[int]:
    """Return the numbers that a sampler chooses in an epoch; of one without a length the first ones."""
    sampler = _looked_at(sampler)
    for one in (sampler, getattr(sampler, "sampler", None)):
        if (counts := getattr(one, "set_epoch", None)) is not None:
            counts(epoch)
    with fixed_draws(epoch), OwnGenerators(sampler).kept():
        chosen = islice(sampler, size if (length := sized_len(sampler)) is None else length)
        return {
            int(number)
            for one in chosen
            for number in (one if isinstance(one, Iterable) and not isinstance(one, Tensor) else [one])
        }


def _fixed(loader: DataLoader) -> Callable[[Any], Any] | None:
    """Return what makes batches in a DataLoader, drawing the same every time."""
    collate = loader.collate_fn
    return collate if collate in (None, default_collate, default_convert) else FixedCall(collate)


def _batch_size(loader: DataLoader) -> int:
    batches = _batches_of(loader)
    if type(batches) is not BatchSampler:
        raise ConfigError(
            f"Batches of another size or of other samples cannot be made with a {type(batches).__name__}; "
            "give the DataLoader a batch_size."
        )
    return batches.batch_size


def _remade(old: DataLoader, dataset: Dataset, order: Any, batch_size: int) -> DataLoader:
    """Return a DataLoader like another one, of other samples or batches."""
    alone = not isinstance(order, SequentialSampler) and leaves_one_out(sized_len(order) or 0, batch_size)
    return _made(old, dataset, order, batch_size, _batches_of(old).drop_last or alone, _settings(old))


def _made(
    like: DataLoader,
    dataset: Dataset,
    order: Sampler,
    batch_size: int,
    drop_last: bool,
    settings: dict[str, Any],
    kind: type[DataLoader] = DataLoader,
) -> DataLoader:
    """Return a DataLoader whose batches are made by whoever makes another one's: the DataLoader or the dataset."""
    if like.batch_sampler is not None:
        return kind(dataset, batch_size, sampler=order, drop_last=drop_last, **settings)
    return kind(dataset, None, sampler=BatchSampler(order, batch_size, drop_last), **settings)


def _settings(loader: DataLoader) -> dict[str, Any]:
    """Return what a DataLoader has besides its samples and their order."""
    names = (
        *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
        *("generator", "prefetch_factor", "persistent_workers"),
    )
    return {name: getattr(loader, name) for name in names}
