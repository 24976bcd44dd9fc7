"""A data set as a federation sees it: one part for every client."""

import random
from abc import abstractmethod
from typing import Any, Literal, Protocol, Self

import numpy as np
import torch
from jsonargparse.typing import NonNegativeInt, PositiveInt

from lit_pfl.data.eval_split import alike_samples, check_fractions, matched_split
from lit_pfl.data.federated import ClientData, FederatedDataModule, held_out
from lit_pfl.data.labels import label_permutation
from lit_pfl.data.partition import IID, Partition
from lit_pfl.errors import ConfigError, check_options_of


class Samples(Protocol):
    """What a split needs to know of samples: see :class:`~lit_pfl.data.ImageSet`, one of two kinds that there are."""

    @property
    def labels(self) -> torch.Tensor: ...

    @property
    def num_classes(self) -> int | None: ...

    @property
    def groups(self) -> torch.Tensor | None: ...

    @property
    def class_names(self) -> tuple[str, ...] | None: ...

    def to(self, device: torch.device) -> Self: ...


class PartitionedDataModule(FederatedDataModule):
    """One set of samples, split among clients. A new kind overrides :meth:`load`, :meth:`batches` and :meth:`example`.

    All samples of the source are shuffled and cut into a training, a test and a validation part, or as the source
    itself has it (``split``); the training part is split among the clients by ``partition``. Where the partition has
    several domains, this is done for each of them, with clients of its own. Where the samples are of natural groups,
    every group has a client, and is cut on its own. A Trainer that is given this data module iterates over sets of
    clients; the batches of samples are each client's own, see :meth:`client`.

    Args:
        num_clients: number of clients K.
        partition: how training samples are split among clients.
        permute_labels: whether every client numbers the classes in its own way (label heterogeneity). The classifier
            heads are then never shared.
        seed: seed of the split and of the label permutations (see :func:`~lit_pfl.data.labels.label_permutation`); 1234
            gives the papers'.
        batch_size: samples in a training batch.
        eval_batch_size: samples in a validation or test batch.
        evaluate_on: ``own``: every client is evaluated on a part of the validation and test data with the same share of
            each class as its training data. ``all``: on all of them (all of its domain's, if there are several), under
            its own labels (Factorized-FL's released code). ``alike``: on ``eval_samples`` of them, up to one fewer
            of every class, drawn with the same shares of classes, whatever others have drawn (FedSLR, Appendix B.1).
        split: ``pooled``: the source's own training and test data together are split again. ``official``: the source's
            own test data are for testing, all of them, and its training data are cut into a training part and, below
            a ``train_fraction`` of 1, a validation part. Where there are no validation data, test data are scored every
            round, as such.
        train_fraction: share of the samples to train on; with ``split=official``, of the source's own training data.
        test_fraction: share of the samples to test on. Not for ``split=official``.
        val_fraction: share of the samples for validation, with ``split=official`` of the source's own training data; by
            default all that are left. What is left besides is not used.
        eval_samples: number of samples that a client is evaluated on with ``evaluate_on=alike``.
        new_clients: clients that are held out of training: their number, drawn from ``seed``, or their ids. A test
            scores them as clients that join after it, see :class:`~lit_pfl.Federation`.

    Raises:
        ConfigError: for numbers that do not go together.

    Source:
        Factorized-FL's released generator: all of the official train and test data together, 80/10/10. FedMA, Psi-Net
        and FedSLR: the official split.
    """

    only_read = ("data",)

    def __init__(
        self,
        num_clients: PositiveInt = 20,
        partition: Partition | None = None,
        permute_labels: bool = False,
        seed: NonNegativeInt = 1234,
        batch_size: PositiveInt = 128,
        eval_batch_size: PositiveInt = 512,
        evaluate_on: Literal["own", "all", "alike"] = "own",
        split: Literal["pooled", "official"] = "pooled",
        train_fraction: float = 0.8,
        test_fraction: float = 0.1,
        eval_samples: PositiveInt = 100,
        val_fraction: float | None = None,
        new_clients: int | list[int] = 0,
    ) -> None:
        super().__init__()
        if split == "pooled":
            check_fractions(train_fraction, test_fraction)
        elif not 0 < train_fraction <= 1:
            raise ConfigError(f"data.train_fraction={train_fraction}: give a share above 0 and up to 1.")
        left = 1 - train_fraction - (test_fraction if split == "pooled" else 0)
        if val_fraction is not None and not 0 <= val_fraction <= left + 1e-9:
            raise ConfigError(f"data.val_fraction={val_fraction}: {max(left, 0):.3g} is left for it, or give less.")
        self.num_clients = num_clients
        self.partition = partition or IID()
        self.permute_labels = permute_labels
        self.seed = seed
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.evaluate_on = evaluate_on
        self.split = split
        self.eval_samples = eval_samples
        self.train_fraction = train_fraction
        self.test_fraction = test_fraction
        self.val_fraction = val_fraction
        self.new_clients = new_clients
        self.data: Any = None
        self.device = torch.device("cpu")

    @abstractmethod
    def load(self) -> Samples:
        """Read all samples, the official training data first."""

    @abstractmethod
    def batches(self, client_id: int, part: str, label_map: torch.Tensor | None) -> Any:
        """Return a loader of a client's samples.

        Args:
            client_id: its id, from 0.
            part: ``train``, ``val`` or ``test``; ``self.indices[part][client_id]`` has the positions of the samples.
            label_map: (num_classes,) this client's label of every class, or None.
        """

    @abstractmethod
    def example(self) -> Any:
        """Return a batch of one sample or a few, see :class:`~lit_pfl.data.ClientData`."""

    def setup(self, stage: str | None = None) -> None:
        """Read the data and split it, once.

        Raises:
            ConfigError: when there are more clients than training samples, or when they cannot be divided evenly among
                the domains.
        """
        if self.data is not None:
            return
        check_options_of(self, "data")
        if not isinstance(self.partition, Partition):
            raise ConfigError(f"data.partition={self.partition!r}: give a partition, such as Dirichlet(alpha=0.5).")
        check_options_of(self.partition, "data.partition")
        data = self.load()
        self._check_labels(data)
        labels = data.labels.numpy()
        if self.split == "official" and self._num_train(data) is None:
            raise ConfigError(f"data.split=official: {type(self).__name__} has no test data of its own; leave it out.")
        if data.groups is not None:
            self._deal_groups(data)
            return
        domains = self.partition.domains(data.num_classes or 1)
        each = self._clients_of_a_domain(len(domains))
        parts = [self._split(np.flatnonzero(np.isin(labels, classes)), data) for classes in domains]
        smallest = min(len(train) for train, _, _ in parts)
        if not smallest:
            raise ConfigError(f"data.train_fraction={self.train_fraction}: no training sample is left; give more.")
        if each > smallest:
            where = type(self).__name__ if len(domains) == 1 else f"{len(domains)} domains like the smallest"
            raise ConfigError(
                f"data.num_clients={self.num_clients} is more than the {smallest * len(domains)} training samples of "
                f"{where}; choose at most {smallest * len(domains)}."
            )
        rng = np.random.default_rng(self.seed)
        indices: dict[str, list[np.ndarray]] = {"train": [], "val": [], "test": []}
        for train, val, test in parts:
            own = [train[positions] for positions in self.partition.checked_split(labels[train], each, rng)]
            counts = np.stack([np.bincount(labels[i], minlength=data.num_classes or 1) for i in own])
            indices["train"] += own
            indices["val"] += self._eval_parts(labels, val, counts)
            indices["test"] += self._eval_parts(labels, test, counts)
        self.indices = indices
        self.whole = {name: np.concatenate([part[i] for part in parts]) for name, i in (("val", 1), ("test", 2))}
        self.domains = domains
        self.data = data

    def _deal_groups(self, data: Samples) -> None:
        """Give every natural group a client, and cut each on its own."""
        assert data.groups is not None
        if self.evaluate_on == "alike":
            raise ConfigError(
                f"data.evaluate_on={self.evaluate_on}: groups have evaluation samples of their own; choose own or all."
            )
        groups, num_classes = data.groups.numpy(), data.num_classes or 1
        sizes = np.unique(groups, return_counts=True)[1]
        members = np.split(np.argsort(groups, kind="stable"), np.cumsum(sizes)[:-1])
        train, val, test = (list(part) for part in zip(*(self._split(own, data) for own in members), strict=True))
        self.whole = {"val": np.concatenate(val), "test": np.concatenate(test)}
        if self.evaluate_on == "all":
            val, test = [np.concatenate(val)] * len(sizes), [np.concatenate(test)] * len(sizes)
        self.num_clients = len(sizes)
        self.indices = {"train": train, "val": val, "test": test}
        self.domains = [list(range(num_classes))]
        self.data = data

    def _check_labels(self, data: Samples) -> None:
        if data.num_classes is not None:
            return
        name = type(self).__name__
        if self.partition.needs_labels and data.groups is None:
            raise ConfigError(
                f"data.partition: {type(self.partition).__name__} deals by class labels, and this {name} has none; "
                "choose Uniform or IID."
            )
        if self.permute_labels:
            raise ConfigError(f"data.permute_labels=true: this {name} has no class labels; leave it out.")

    def _clients_of_a_domain(self, num_domains: int) -> int:
        each, rest = divmod(self.num_clients, num_domains)
        if rest:
            fitting = f"{each * num_domains} or {(each + 1) * num_domains}" if each else f"{num_domains}"
            raise ConfigError(
                f"data.num_clients={self.num_clients} cannot be divided evenly among the {num_domains} domains of "
                f"data.partition; give a multiple of {num_domains}, such as {fitting}."
            )
        return each

    def _split(self, members: np.ndarray, data: Samples) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Cut samples into training, validation and test data."""
        if self.split == "official":
            pool, test = (members[rows] for rows in (members < self._num_train(data), members >= self._num_train(data)))
            train, val = np.split(pool[self._order(len(pool))], [round(len(pool) * self.train_fraction)])
            return train, self._some(val, len(pool)), test
        n = len(members)
        num_train, num_test = round(n * self.train_fraction), round(n * self.test_fraction)
        if self.train_fraction + self.test_fraction > 1 - 1e-9:
            num_test = n - num_train  # both may have been rounded down, and nothing is to be left
        train, test, val = np.split(members[self._order(n)], [num_train, num_train + num_test])
        return train, self._some(val, n), test

    def _some(self, val: np.ndarray, n: int) -> np.ndarray:
        """Return what is for validation of the samples that are left of ``n``."""
        return val if self.val_fraction is None else val[: round(n * self.val_fraction)]

    @staticmethod
    def _num_train(data: Any) -> Any:
        """Return how many of the samples, the first ones, are officially for training; None where nobody says so."""
        return getattr(data, "num_train", None)

    def _order(self, n: int) -> list[int]:
        order = list(range(n))
        random.Random(self.seed).shuffle(order)
        return order

    def _eval_parts(self, labels: np.ndarray, part: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
        if self.evaluate_on == "all":
            return [part] * len(counts)
        if self.evaluate_on == "alike":
            rng = np.random.default_rng([self.seed, 1])  # of its own, so that training data are those of any option
            return [part[positions] for positions in alike_samples(labels[part], counts, self.eval_samples, rng)]
        return [part[positions] for positions in matched_split(labels[part], counts.astype(float))]

    def move_to(self, device: torch.device) -> None:
        """Hold the samples on a device, where batches are then made."""
        assert self.data is not None, "setup() comes first"
        self.device = device
        self.data = self.data.to(device)

    def client(self, client_id: int) -> ClientData:
        """Return a client's data.

        Args:
            client_id: its index, from 0.

        Raises:
            ConfigError: when there is no such client.
        """
        data = self.data
        assert data is not None, "setup() comes first"
        if not 0 <= client_id < self.num_clients:
            raise ConfigError(f"There is no client {client_id}; data.num_clients={self.num_clients}.")
        classes = self._classes_of(client_id)
        label_map = self._label_map(client_id, classes, data)
        data_of_client = ClientData(
            self.batches(client_id, "train", label_map),
            self.batches(client_id, "val", label_map),
            self.batches(client_id, "test", label_map),
            example=self.example(),
            num_classes=None if data.num_classes is None else len(classes),
            labels_agree=len(self.domains) == 1 and not self.permute_labels,
        )
        data_of_client.generators.begin_apart(client_id)  # they all have the same dataset
        return data_of_client

    def _classes_of(self, client: int) -> list[int]:
        return self.domains[client * len(self.domains) // self.num_clients]

    def label_names(self, client_id: int) -> list[str] | None:
        if self.client(client_id).num_classes is None:
            return None
        classes, data = self._classes_of(client_id), self.data
        label_map = self._label_map(client_id, classes, data)
        ordered = sorted(classes, key=lambda c: c if label_map is None else int(label_map[c]))
        return [str(c) if data.class_names is None else data.class_names[c] for c in ordered]

    def _label_map(self, client: int, classes: list[int], data: Samples) -> torch.Tensor | None:
        """Return the client's label of every class of the data set, -1 for one not in its domain; None if the same."""
        if data.num_classes is None or (not self.permute_labels and len(classes) == data.num_classes):
            return None
        own = label_permutation(client, len(classes), self.seed) if self.permute_labels else range(len(classes))
        label_map = torch.full((data.num_classes,), -1)
        label_map[classes] = torch.tensor(own)
        return label_map.to(self.device)

    def class_counts(self, part: Literal["train", "val", "test"]) -> np.ndarray | None:
        if self.data is None or self.data.num_classes is None:
            return None
        labels = self.data.labels.cpu().numpy()
        return np.stack([np.bincount(labels[own], minlength=self.data.num_classes) for own in self.indices[part]])

    @property
    def clients(self) -> list[int]:
        """Ids of the clients that take part: all, unless the partition may leave some empty, or some are held out."""
        held = {*self.held_out}
        return [client for client in self._with_data if client not in held]

    @property
    def _with_data(self) -> list[int]:
        return [client for client, indices in enumerate(self.indices["train"]) if len(indices)]

    @property
    def held_out(self) -> list[int]:
        return held_out(self.new_clients, self._with_data, self.seed)
