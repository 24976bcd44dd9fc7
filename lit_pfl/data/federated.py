"""What a federation asks of its data: one part for every client."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import lightning as L
import numpy as np
import torch

from lit_pfl.data.fixed import without_persistent_workers
from lit_pfl.data.loaders import in_order, num_samples
from lit_pfl.errors import ConfigError
from lit_pfl_callbacks.generators import OwnGenerators
from lit_pfl_callbacks.loader_state import has_state, load_loader_state, loader_state


@dataclass(frozen=True)
class ClientData:
    """One client's data.

    Args:
        train: batches for training, new ones at every iteration: a loader of this package such as
            :class:`~lit_pfl.data.BatchLoader`, a PyTorch DataLoader, or another iterable of batches, see
            :mod:`lit_pfl.data.loaders`.
        val: batches of validation data; ``()`` for none.
        test: batches of test data; ``()`` for none.
        example: a batch of one sample or a few, made without random numbers, from which networks learn the shapes of
            what they will see.
        num_classes: number of classes this client distinguishes; None where its task is not a classification.
        labels_agree: whether label c means the same at every client, so that heads may be shared.
        module: the client's own data module, where it has one: its Trainer's ``datamodule``, whose hooks its
            batches pass, see :mod:`lit_pfl.learners.scoring`.
    """

    train: Any
    val: Any
    test: Any
    example: Any
    num_classes: int | None = None
    labels_agree: bool = True
    module: L.LightningDataModule | None = None
    #: those of the training batches, with their states before anybody has trained
    generators: OwnGenerators = field(init=False, compare=False, repr=False)
    #: those of the batches for validation and testing, which are the same at every scoring
    scored_with: OwnGenerators = field(init=False, compare=False, repr=False)

    _first_state: dict[str, Any] | None = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for part in ("train", "val", "test"):
            object.__setattr__(self, part, without_persistent_workers(getattr(self, part)))
        object.__setattr__(self, "generators", OwnGenerators(self.train))
        object.__setattr__(self, "scored_with", OwnGenerators((self.val, self.test)))

    def begin(self) -> None:
        """Let a training loader that has a state begin as it did in the first fit of all."""
        if not has_state(self.train):
            return
        if self._first_state is None:
            object.__setattr__(self, "_first_state", loader_state(self.train))
        else:
            load_loader_state(self.train, self._first_state)

    @property
    def num_samples(self) -> int:
        """Number of training samples."""
        return num_samples(self.train)

    def to_try(self) -> Iterator[Any]:
        """Yield the example, and then the first batch, for learners that cannot do with one sample."""
        yield self.example
        yield from islice(in_order(self.train), 1)


class FederatedDataModule(L.LightningDataModule, ABC):
    """Data split among clients. A new kind overrides :attr:`clients`, :meth:`client` and Lightning's own hooks."""

    @property
    @abstractmethod
    def clients(self) -> list[int]:
        """Ids of the clients that take part: those with training data that are not held out; after :meth:`setup`."""

    @property
    def held_out(self) -> list[int]:
        """Ids of the clients that take no part in training: a test scores them as clients that join after it."""
        return []

    @abstractmethod
    def client(self, client_id: int) -> ClientData:
        """Return a client's data.

        Args:
            client_id: its id, from 0.

        Raises:
            ConfigError: when there is no such client.
        """

    def class_counts(self, part: Literal["train", "val", "test"]) -> np.ndarray | None:
        """Return how many samples of every class every client has, (clients, classes), under the data set's own labels.

        None where there are no classes, or nobody knows.
        """
        return None

    def label_names(self, client_id: int) -> list[str] | None:
        """Return what a client's labels 0, 1, ... are called; None where its task is not a classification.

        Raises:
            ConfigError: when there is no such client.
        """
        num_classes = self.client(client_id).num_classes
        return None if num_classes is None else [str(label) for label in range(num_classes)]

    def everything(self, part: Literal["val", "test"]) -> Any:
        """Return batches of all validation or test data, whosever they are, under the data set's own labels.

        Raises:
            ConfigError: when this kind of data has no such thing.
        """
        raise ConfigError(f"federation.evaluate=global: {type(self).__name__} has no data of all; use before or after.")

    def move_to(self, device: torch.device) -> None:
        """Hold the data on a device, if this kind holds data at all; otherwise batches are moved one by one."""

    #: names of attributes whose tensors are only read, so that the processes of a machine may have them in common
    only_read: tuple[str, ...] = ()

    # A federation chooses who trains in a round, and who is scored on validation data; an engine may want
    # them all at once.
    all_at_once = False
    participants: Callable[[int], list[int]] | None = None
    as_many_each_round = True  # or fewer in one round than in another
    validated: Callable[[], list[int]] | None = None

    def train_dataloader(self) -> "ClientSets":
        """Return the sets of clients that train in a round."""
        lists = None if self.as_many_each_round else 1 if self.all_at_once else min(LISTS, len(self.clients))
        return ClientSets(self.participants or (lambda completed: self.clients), self.all_at_once, lists)

    def val_dataloader(self) -> "ClientSets":
        """Return the clients that are scored on validation data."""
        return ClientSets(lambda completed: self.validated() if self.validated else self.clients, self.all_at_once)

    def test_dataloader(self) -> "ClientSets":
        """Return all clients."""
        return ClientSets(lambda completed: self.clients, self.all_at_once)

    predict_dataloader = test_dataloader


def held_out(new_clients: int | Sequence[int], clients: Sequence[int], seed: int = 0) -> list[int]:
    """Return which clients are held out of training, in increasing order.

    Args:
        new_clients: their ids, or their number; they are drawn then.
        clients: ids of all clients with training data.
        seed: of the draw.

    Raises:
        ConfigError: when there are no such clients, or nobody would be left.
    """
    if isinstance(new_clients, int):
        if new_clients < 0:
            raise ConfigError(f"data.new_clients={new_clients}: give how many clients, or which.")
        left = len(clients) - new_clients
        chosen = np.random.default_rng([seed, 2]).permutation(clients)[:new_clients].tolist()
    else:
        if unknown := set(new_clients) - {*clients}:
            raise ConfigError(f"data.new_clients: there is no client {min(unknown)} with training data.")
        chosen, left = list(new_clients), len({*clients} - {*new_clients})
    if left < 1:
        raise ConfigError(f"data.new_clients={new_clients} leaves none of the {len(clients)} clients to train.")
    return sorted({*chosen})


#: lists of clients a round: a Trainer's hooks at each take as long as checking what a small client uploads
LISTS = 10


class ClientSets:
    """What a federation's Trainer iterates over: lists of client ids.

    Args:
        choose: returns the clients of a round, by the number of rounds before it. Their number is always the same,
            unless ``lists`` is given.
        all_at_once: whether there is one list of all of them, or as many lists as a Trainer's hooks are worth: one a
            client, but at most ``LISTS``.
        lists: number of lists in every round, of which some may be empty: a Trainer counts batches once.
    """

    def __init__(self, choose: Callable[[int], list[int]], all_at_once: bool = False, lists: int | None = None) -> None:
        self.choose = choose
        self.all_at_once = all_at_once
        self.lists = lists
        self.set_epoch(0)
        self.sampler = self.batch_sampler = self  # where a Trainer looks for someone to tell the epoch

    def set_epoch(self, epoch: int) -> None:
        """Take note of the number of rounds completed; a Trainer calls this before every epoch."""
        self.clients = self.choose(epoch)

    def __len__(self) -> int:
        return self.lists or -(-len(self.clients) // self._each())

    def __iter__(self) -> Iterator[list[int]]:
        # A generator, so that the clients are looked up at the first step: a resumed Trainer asks for the iterator
        # before it tells the epoch.
        for i in range(len(self)):
            yield self.clients[slice(*self._place(i))]

    def _place(self, i: int) -> tuple[int, int]:
        """Return where a list begins and ends."""
        if self.lists:
            return i * len(self.clients) // self.lists, (i + 1) * len(self.clients) // self.lists
        return i * self._each(), (i + 1) * self._each()

    def _each(self) -> int:
        """Return how many clients are in a list."""
        return max(1, len(self.clients) if self.all_at_once else -(-len(self.clients) // LISTS))
