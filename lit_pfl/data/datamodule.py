"""A data set as a federation sees it: one part for every client."""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import lightning as L
import numpy as np
import torch
from jsonargparse.typing import NonNegativeInt, PositiveInt

from lit_pfl.data.augment import Augment
from lit_pfl.data.labels import label_permutation
from lit_pfl.data.loader import BatchLoader, ImageSet
from lit_pfl.data.partition import IID, Partition, matched_split
from lit_pfl.errors import ConfigError


@dataclass(frozen=True)
class ClientData:
    """One client's data.

    Args:
        train: batches for training.
        val: batches of validation data.
        test: batches of test data.
        channels: of an image.
        image_size: height and width of an image in pixels.
        num_classes: number of classes this client tells apart.
        labels_agree: whether label c means the same at every client, so that heads may be shared.
        width: channels after the first layer of a network with which a first try is quick.
    """

    train: BatchLoader
    val: BatchLoader
    test: BatchLoader
    channels: int
    image_size: int
    num_classes: int
    labels_agree: bool
    width: int = 8


class FederatedDataModule(L.LightningDataModule, ABC):
    """A data set split among clients. A new source overrides :meth:`load` only.

    All samples of the source are shuffled and cut into a training, a test and a validation part; the training part is
    dealt to the clients by ``partition``. Where the partition has several domains, this is done for each of them, with
    clients of its own. A Trainer that is given this data module iterates over sets of clients; the batches of images
    are each client's own, see :meth:`client`.

    Args:
        num_clients: number of clients K.
        partition: how training samples are dealt to clients.
        permute_labels: whether every client numbers the classes in its own way (label heterogeneity). The classifier
            heads are then never shared.
        seed: seed of the split and of the label permutations; 1234 gives the papers'.
        batch_size: images in a training batch.
        eval_batch_size: images in a validation or test batch.
        evaluate_on: ``own``: every client is evaluated on a part of the validation and test data with the same share of
            each class as its training data. ``all``: on all of them (all of its domain's, if there are several), under
            its own labels (Factorized-FL, Section 5.1).
        train_fraction: share of the samples to train on.
        test_fraction: share of the samples to test on; the rest is for validation.
        augment: random changes of training images.

    Attributes:
        width: channels after the first layer of the network of clients that are given none. At 8, a first try is quick
            on a CPU; a data set may say otherwise.

    Raises:
        ConfigError: for numbers that do not go together.

    Source:
        Factorized-FL's released generator: all of the official train and test data together, 80/10/10.
    """

    width: ClassVar[int] = 8

    def __init__(
        self,
        num_clients: PositiveInt = 20,
        partition: Partition | None = None,
        permute_labels: bool = False,
        seed: NonNegativeInt = 1234,
        batch_size: PositiveInt = 128,
        eval_batch_size: PositiveInt = 512,
        evaluate_on: Literal["own", "all"] = "own",
        train_fraction: float = 0.8,
        test_fraction: float = 0.1,
        augment: Augment | None = None,
    ) -> None:
        super().__init__()
        if not 0 < train_fraction < 1 or not 0 < test_fraction <= 1 - train_fraction + 1e-9:
            raise ConfigError(
                f"data.train_fraction={train_fraction} and data.test_fraction={test_fraction} must be above 0 "
                "and leave something for each other."
            )
        self.num_clients = num_clients
        self.partition = partition or IID()
        self.permute_labels = permute_labels
        self.seed = seed
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.evaluate_on = evaluate_on
        self.train_fraction = train_fraction
        self.test_fraction = test_fraction
        self.augment = augment
        self.data: ImageSet | None = None

    @abstractmethod
    def load(self) -> ImageSet:
        """Read all samples, the official training data first."""

    def setup(self, stage: str | None = None) -> None:
        """Read the data and split it, once.

        Raises:
            ConfigError: when there are more clients than training samples, or when they cannot be divided evenly among
                the domains.
        """
        if self.data is not None:
            return
        data = self.load()
        labels = data.labels.numpy()
        domains = self.partition.domains(data.num_classes)
        each = self._clients_of_a_domain(len(domains))
        parts = [self._split(np.flatnonzero(np.isin(labels, classes))) for classes in domains]
        smallest = min(len(train) for train, _, _ in parts)
        if each > smallest:
            where = type(self).__name__ if len(domains) == 1 else f"{len(domains)} domains like the smallest"
            raise ConfigError(
                f"data.num_clients={self.num_clients} is more than the {smallest * len(domains)} training samples of "
                f"{where}; choose at most {smallest * len(domains)}."
            )
        rng = np.random.default_rng(self.seed)
        indices: dict[str, list[np.ndarray]] = {"train": [], "val": [], "test": []}
        label_counts = []
        for train, val, test in parts:
            own = [train[positions] for positions in self.partition.split(labels[train], each, rng)]
            counts = np.stack([np.bincount(labels[i], minlength=data.num_classes) for i in own])
            indices["train"] += own
            indices["val"] += self._eval_parts(labels, val, counts)
            indices["test"] += self._eval_parts(labels, test, counts)
            label_counts.append(counts)
        self.indices = indices
        self.label_counts = np.concatenate(label_counts)
        self.domains = domains
        self.data = data

    def _clients_of_a_domain(self, num_domains: int) -> int:
        each, rest = divmod(self.num_clients, num_domains)
        if rest:
            fitting = f"{each * num_domains} or {(each + 1) * num_domains}" if each else f"{num_domains}"
            raise ConfigError(
                f"data.num_clients={self.num_clients} cannot be divided evenly among the {num_domains} domains of "
                f"data.partition; give a multiple of {num_domains}, such as {fitting}."
            )
        return each

    def _split(self, members: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        n = len(members)
        order = list(range(n))
        random.Random(self.seed).shuffle(order)
        num_train, num_test = round(n * self.train_fraction), round(n * self.test_fraction)
        train, test, val = np.split(members[order], [num_train, num_train + num_test])
        return train, val, test

    def _eval_parts(self, labels: np.ndarray, part: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
        if self.evaluate_on == "all":
            return [part] * len(counts)
        return [part[positions] for positions in matched_split(labels[part], counts.astype(float))]

    def move_to(self, device: torch.device) -> None:
        """Hold the images on a device, where batches are then made."""
        assert self.data is not None, "setup() comes first"
        self.data = self.data.to(device)

    def client(self, client: int) -> ClientData:
        """Return a client's data.

        Args:
            client: its index, from 0.

        Raises:
            ConfigError: when there is no such client.
        """
        data = self.data
        assert data is not None, "setup() comes first"
        if not 0 <= client < self.num_clients:
            raise ConfigError(f"There is no client {client}; data.num_clients={self.num_clients}.")
        device = data.images.device
        classes = self.domains[client * len(self.domains) // self.num_clients]
        label_map = self._label_map(client, classes, data)

        def loader(part: str) -> BatchLoader:
            indices = torch.from_numpy(self.indices[part][client]).to(device)
            if part == "train":
                return BatchLoader(data, indices, self.batch_size, label_map, shuffle=True, augment=self.augment)
            return BatchLoader(data, indices, self.eval_batch_size, label_map)

        return ClientData(
            loader("train"),
            loader("val"),
            loader("test"),
            channels=data.channels,
            image_size=data.images.shape[-1],
            num_classes=len(classes),
            labels_agree=len(self.domains) == 1 and not self.permute_labels,
            width=self.width,
        )

    def _label_map(self, client: int, classes: list[int], data: ImageSet) -> torch.Tensor | None:
        """Return the client's label of every class of the data set, -1 for one not in its domain; None if the same."""
        if not self.permute_labels and len(classes) == data.num_classes:
            return None
        own = label_permutation(client, len(classes), self.seed) if self.permute_labels else range(len(classes))
        label_map = torch.full((data.num_classes,), -1)
        label_map[classes] = torch.tensor(own)
        return label_map.to(data.images.device)

    @property
    def clients(self) -> list[int]:
        """Ids of the clients that have training data: all, unless the partition may leave some empty."""
        return [client for client, indices in enumerate(self.indices["train"]) if len(indices)]

    def train_dataloader(self) -> "ClientSets":
        """Return the sets of clients that train in a round."""
        assert self.trainer is not None
        federation: Any = self.trainer.lightning_module
        return ClientSets(federation.participants)

    def val_dataloader(self) -> "ClientSets":
        """Return the clients that are validated."""
        assert self.trainer is not None
        federation: Any = self.trainer.lightning_module
        return ClientSets(lambda round: federation.validated())

    def test_dataloader(self) -> "ClientSets":
        """Return all clients."""
        return ClientSets(lambda round: self.clients)

    predict_dataloader = test_dataloader


class ClientSets:
    """What a federation's Trainer iterates over: lists of client ids, at present one client a list.

    Args:
        choose: returns the clients of a round, by the number of rounds before it. Their number is always the same.
    """

    def __init__(self, choose: Callable[[int], list[int]]) -> None:
        self.choose = choose
        self.set_epoch(0)
        self.sampler = self.batch_sampler = self  # where a Trainer looks for someone to tell the epoch

    def set_epoch(self, epoch: int) -> None:
        """Take note of the number of rounds completed; a Trainer calls this before every epoch."""
        self.clients = self.choose(epoch)

    def __len__(self) -> int:
        return len(self.clients)

    def __iter__(self) -> Iterator[list[int]]:
        # A generator, so that the clients are looked up at the first step: a resumed Trainer asks for the iterator
        # before it tells the epoch.
        for client in self.clients:
            yield [client]
