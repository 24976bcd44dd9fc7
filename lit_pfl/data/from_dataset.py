"""Any PyTorch dataset, assigned to clients."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, default_collate

from lit_pfl.data.batches import labels_in
from lit_pfl.data.datamodule import PartitionedDataModule
from lit_pfl.data.fixed import FixedDraws
from lit_pfl.data.loaders import example_of, in_order
from lit_pfl.data.partition import Partition, Uniform
from lit_pfl.data.resident import SampleSet, TensorLoader, leaves_one_out, relabelled
from lit_pfl.errors import ConfigError
from lit_pfl.randomness import random_state, same_state
from lit_pfl_callbacks.batches import LABELS
from lit_pfl_callbacks.generators import OwnGenerators

#: how something is found of every sample: a column, an attribute or a key, a function of a sample, or a sequence
Lookup = str | Sequence[Any] | Callable[[Any], Any]  # in the order in which the command line tries them
#: of how many classes a sample is looked at, whether it ends with its label; and how many of a named class
LOOKED_AT = 5
#: how many samples are read twice, to see whether reading them draws random numbers
READ_TWICE = 16


class FromDataset(PartitionedDataModule):
    """Divides a map-style dataset of any samples among clients, by a partition or by natural groups.

    The dataset is one of PyTorch, or a ``datasets.Dataset`` of Hugging Face, whose samples become tensors
    (``with_format("torch")``) unless it has a format of its own. Samples are tuples, dicts, or whatever ``collate_fn``
    makes batches of.

    Samples that are numbers and tensors of equal shapes are read once and held in memory, unless reading them draws
    random numbers, as random transforms do: from PyTorch, NumPy or Python, from a generator that the dataset or a
    transform has, or from anything that changes one of the first 16 samples. Others are read again for every batch, by
    a PyTorch DataLoader without workers; what they draw is resampled for training, by every client for itself, and is
    the same every time for validation and testing. A last training batch of
    a single sample is left out either way, see :class:`~lit_pfl.data.ResidentLoader`.

    Args:
        dataset: the dataset, or a function that makes it.
        partition: how training samples are split among clients; by default all get equally many.
        labels: the class of every sample, for partitions that need it: whole numbers from 0, or names, which decide who
            gets what and stay in batches as they are. A column of a
            Hugging Face dataset, an attribute of the dataset such as ``targets``, a key of samples that are dicts, a
            function of a sample, or a sequence.
        groups: what every sample is of: a writer, a hospital, a play. Given likewise. Every group is then a client,
            its samples are divided into training, test and validation data, and ``partition`` and ``num_clients`` are
            not used.
        collate_fn: makes a batch of a list of samples, as a DataLoader's; samples are then not held in memory.
        in_memory: false if there is not enough of it, or if a transform seldom draws, unseen as in a library in C:
            this is only noticed within the first 16 samples.
        kwargs: see :class:`~lit_pfl.data.PartitionedDataModule`. ``permute_labels`` needs samples that end with their
            label, or dicts and ``labels`` as their key.

    Attributes:
        names: the group of every client by its id, where there are groups; in ascending order, after :meth:`setup`.

    Raises:
        ConfigError: when labels or groups do not suit the dataset.

    Example::

        FromDataset(EMNIST(...), Dirichlet(alpha=0.1), labels="targets", num_clients=100)
        FromDataset(load_dataset("my_letters", split="train"), groups="writer", labels="letter")
    """

    def __init__(
        self,
        dataset: Dataset | Callable[[], Any],
        partition: Partition | None = None,
        labels: Lookup | None = None,
        groups: Lookup | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        in_memory: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(partition=partition or Uniform(), **kwargs)
        makes = isinstance(dataset, type) or (callable(dataset) and not hasattr(dataset, "__getitem__"))
        dataset = _in_tensors(dataset() if makes else dataset)  # type: ignore[operator]
        if isinstance(dataset, Mapping):
            raise ConfigError(f"data.dataset: this {type(dataset).__name__} holds {list(dataset)}; give one of them.")
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ConfigError(
                f"data.dataset: {type(dataset).__name__} cannot be split over clients; "
                "give a map-style Dataset, with __len__ and __getitem__."
            )
        if self.permute_labels and labels is None:
            raise ConfigError("data.permute_labels=true: say with data.labels which classes the samples are of.")
        self.dataset: Any = dataset
        self.labels = labels
        self.group_of = groups
        self.collate_fn = collate_fn
        self.in_memory = in_memory
        self.names: list[Any] = []
        self._label_key: str | None = None

    def load(self) -> SampleSet:
        n = len(self.dataset)
        if not n:
            raise ConfigError(f"data.dataset: this {type(self.dataset).__name__} is empty.")
        labels, num_classes, groups, names = torch.zeros(n, dtype=torch.int64), None, None, None
        if self.labels is not None:
            labels, num_classes, names = self._classes(self._found(self.labels, "labels"))
            self._check_that_all_read(self._key())
        if self.group_of is not None:
            self.names, groups = _numbered(self._found(self.group_of, "groups"), "groups")
        samples = self.dataset
        if option := self._renumbers(num_classes, groups):
            self._label_key = self._key()
            self._check_that_samples_have(labels, option)
            everybody_s = torch.zeros(num_classes or 1, dtype=torch.int64)
            samples = _Relabelled(samples, everybody_s, self._label_key)
        try:
            self._example = example_of(DataLoader(samples, 1, collate_fn=self.collate_fn))
        except TypeError as error:
            if "default_collate" not in str(error):
                raise
            raise ConfigError(
                f"data.dataset: no batches can be made of samples of {type(self.dataset).__name__}; give it a "
                f"transform to tensors (such as torchvision's ToTensor), or set data.collate_fn. {error}."
            ) from error
        names = names and self._in_own_order(names, labels)
        return SampleSet(self._content(), labels, num_classes, groups, names)

    def _found(self, lookup: Lookup, option: str) -> np.ndarray:
        """Return the label or group of every sample."""
        if isinstance(lookup, str):
            lookup = self._named(lookup, option)
        if callable(lookup):
            with OwnGenerators(self.dataset).kept():
                lookup = [lookup(self.dataset[i]) for i in range(len(self.dataset))]
        found = np.asarray(lookup)
        if found.shape != (len(self.dataset),):
            raise ConfigError(
                f"data.{option}: there must be one for each of the {len(self.dataset)} samples, "
                f"not an array of shape {found.shape}."
            )
        return found

    def _named(self, name: str, option: str) -> Any:
        """Return the column, the attribute or the entries of samples that have a name."""
        columns = _columns(self.dataset)
        if name in columns:
            return np.asarray(self.dataset[name])
        if hasattr(self.dataset, name):
            return getattr(self.dataset, name)
        first = FixedDraws(self.dataset)[0]
        keys = columns or (list(first) if isinstance(first, Mapping) else [])
        if name in keys:
            return lambda sample: sample[name]
        with suppress(Exception):  # a function, as the command line names it
            if "." in name and callable(function := resolve_name(name)):
                return function
        there = f"it has {', '.join(map(str, keys))}" if keys else "give one, a function of a sample, or a sequence"
        kind = type(self.dataset).__name__
        raise ConfigError(f"data.{option}={name!r}: {kind} has no such column, attribute or key; {there}.")

    def _key(self) -> str | None:
        """Return where samples that are dicts have their class; None for others."""
        sample = FixedDraws(self.dataset)[0]
        named = isinstance(self.labels, str) and isinstance(sample, Mapping) and self.labels in sample
        return self.labels if named else None  # type: ignore[return-value]

    def _check_that_all_read(self, key: str | None) -> None:
        """See that networks and methods find in batches the classes that samples are dealt by."""
        read = key and next((name for name in LABELS if name in FixedDraws(self.dataset)[0]), key)
        if read != key and self.collate_fn is None:
            raise ConfigError(
                f"data.labels={key!r}: the samples also have {read!r}, which networks and methods take for the class; "
                f"leave one of the two out of the dataset, or, if only the partition is to follow {key!r}, give labels "
                "as a function of a sample."
            )

    @staticmethod
    def _classes(found: np.ndarray) -> tuple[Tensor, int, tuple[str, ...] | None]:
        if np.issubdtype(found.dtype, np.integer):
            found = found.astype(np.int64)  # where -1 is a number, and the number of classes too
        else:
            if np.issubdtype(found.dtype, np.floating):
                raise ConfigError("data.labels: classes are whole numbers from 0 or names, not fractions.")
            names, codes = _numbered(found, "labels")
            return codes, len(names), tuple(map(str, names))
        if len(found) and found.min() < 0:
            raise ConfigError(f"data.labels: classes are numbered from 0; there is a {found.min()}.")
        return torch.from_numpy(found), int(found.max(initial=-1)) + 1, None

    def _in_own_order(self, names: tuple[str, ...], labels: Tensor) -> tuple[str, ...] | None:
        """Return the names in the order of the numbers that batches have; None if those number something else."""
        samples, collate = FixedDraws(self.dataset), self.collate_fn or default_collate
        own: list[int] = []
        for members in (np.flatnonzero(labels == c) for c in range(len(names))):
            try:
                own += {int(labels_in(collate([samples[int(i)]]))) for i in members[:LOOKED_AT]}
            except (ConfigError, TypeError):
                return names  # there are none, and the module numbers the classes itself
        return tuple(names[c] for c in np.argsort(own)) if sorted(own) == list(range(len(names))) else None

    def _renumbers(self, num_classes: int | None, groups: Tensor | None) -> str:
        """Return the option for which clients number classes in their own way; empty if none does."""
        if self.permute_labels:
            return "permute_labels=true"
        if num_classes is None or groups is not None:
            return ""
        return "" if self.partition.domains(num_classes) == [list(range(num_classes))] else "partition"

    def _check_that_samples_have(self, labels: Tensor, option: str) -> None:
        """See that samples hold their class where a client's own label takes its place."""
        key = self._label_key
        for first in np.unique(labels, return_index=True)[1][:LOOKED_AT].tolist():
            sample = FixedDraws(self.dataset)[first]
            last = sample[-1] if isinstance(sample, list | tuple) and len(sample) > 1 else None
            own = last if key is None else sample[key]
            if not isinstance(own, int | np.integer | Tensor) or not np.array_equal(own, labels[first]):
                raise ConfigError(
                    f"data.{option}: samples must end with their label, a number, and the dataset's first sample of "
                    f"class {int(labels[first])} ends with {last!r}."
                    if key is None
                    else f"data.{option}: samples must have their label, a number, under {key!r}, and the dataset's "
                    f"first sample of class {int(labels[first])} has {own!r} there."
                )

    def _content(self) -> Any:
        """Return the samples stacked, or None where they cannot be."""
        if not self.in_memory or self.collate_fn is not None or not _stacks(FixedDraws(self.dataset)[0]):
            return None
        before, own = random_state(), OwnGenerators(self.dataset)
        with own.kept():
            samples = [self.dataset[i] for i in range(len(self.dataset))]
            # a dataset may also draw where nobody sees it, as in a library in C
            again = [self.dataset[i] for i in range(min(len(samples), READ_TWICE))]
            if own.have_drawn or not same_state(before, random_state()):
                return None
        try:
            content = default_collate(samples)
            return content if _same(samples[: len(again)], again) else None
        except (RuntimeError, TypeError, KeyError, ValueError):  # of different shapes
            return None

    def batches(self, client_id: int, part: str, label_map: Tensor | None) -> TensorLoader | DataLoader:
        assert self.data is not None, "setup() comes first"
        own, train = self.indices[part][client_id], part == "train"
        batch_size = self.batch_size if train else self.eval_batch_size
        if self.data.content is not None:
            indices = torch.from_numpy(own).to(self.device)
            return TensorLoader(self.data.content, indices, batch_size, label_map, train, self._label_key)
        samples: Any = Subset(self.dataset, own.tolist())
        if label_map is not None:
            samples = _Relabelled(samples, label_map.cpu(), self._label_key)
        if not train:
            return in_order(DataLoader(samples, batch_size, collate_fn=self.collate_fn))
        alone = leaves_one_out(len(own), batch_size)
        return DataLoader(samples, batch_size, shuffle=len(own) > 0, collate_fn=self.collate_fn, drop_last=alone)

    def example(self) -> Any:
        return self._example


class _Relabelled(Dataset):
    """Samples with a client's labels."""

    def __init__(self, samples: Any, label_map: Tensor, key: str | None) -> None:
        self.samples = samples
        self.label_map = label_map
        self.key = key

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> Any:
        return relabelled(self.samples[i], self.label_map, self.key)


def _columns(dataset: Any) -> list[str]:
    """Return the columns of a Hugging Face dataset; none of others."""
    return list(getattr(dataset, "column_names", ())) if hasattr(dataset, "with_format") else []


def _in_tensors(dataset: Any) -> Any:
    """Return a dataset whose samples are tensors where one of Hugging Face would give plain Python values."""
    form = getattr(dataset, "format", None) if _columns(dataset) else None
    return dataset.with_format("torch") if form and form["type"] is None else dataset


def _numbered(found: np.ndarray, option: str) -> tuple[list[Any], Tensor]:
    """Return the different values in ascending order, and the number of everyone's among them."""
    try:
        names, codes = np.unique(found, return_inverse=True)
    except TypeError as error:
        raise ConfigError(f"data.{option}: they have no order ({error}); give numbers or names.") from None
    return names.tolist(), torch.from_numpy(codes.astype(np.int64))


def _same(first: Any, second: Any) -> bool:
    """Say whether samples that stack have the same values."""
    leaves = ([torch.as_tensor(leaf) for leaf in tree_leaves(samples)] for samples in (first, second))
    return all(a.shape == b.shape and bool(((a == b) | (a != a)).all()) for a, b in zip(*leaves, strict=True))


def _stacks(sample: Any) -> bool:
    """Say whether a sample is made of numbers and tensors alone."""
    if isinstance(sample, dict):
        return all(map(_stacks, sample.values()))
    if isinstance(sample, list | tuple):
        return all(map(_stacks, sample))
    return isinstance(sample, Tensor | np.ndarray | np.generic | int | float) and not isinstance(sample, np.str_)
