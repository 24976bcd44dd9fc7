"""Tables of numbers that come with scikit-learn: no download."""

from typing import Any, Literal

import numpy as np
import torch
from jsonargparse.typing import PositiveInt
from torch import Tensor

from lit_pfl.data.datamodule import PartitionedDataModule
from lit_pfl.data.partition import Partition, Uniform
from lit_pfl.data.resident import SampleSet, TensorLoader
from lit_pfl.errors import ConfigError

#: the tables to tell classes apart in
CLASSIFICATION = ("breast_cancer", "iris", "wine")


class Table(PartitionedDataModule):
    """A small table: rows of F numbers, and what to predict.

    A sample is a float32 tensor (F,) and its class, or in ``diabetes`` a number, float32. Every feature, and that
    number, has mean 0 and standard deviation 1 over the training rows that ``statistics`` names; one that is the same
    in all of them is 0.

    Args:
        name: ``breast_cancer`` (569 rows, F = 30, 2 classes), ``iris`` (150, 4, 3), ``wine`` (178, 13, 3), or
            ``diabetes`` (442, 10, a number: the disease's progression).
        group_by: a feature, such as ``age`` in ``diabetes``: the clients are then not a partition, but the values of
            this feature or, where there are more values than ``num_clients``, equally large ranges of them.
        statistics: ``own``: every client knows its own training rows only. ``all``: those of all clients together,
            which sites can work out from their sums, not counted as communication. Then a feature means the same at
            every client, which models in common may need where clients differ.
        num_clients: number of clients K.
        partition: how training rows are split among clients; :class:`IID` by default, :class:`Uniform` without classes.
        batch_size: rows in a training batch.
        kwargs: see :class:`~lit_pfl.data.PartitionedDataModule`.

    Attributes:
        num_features: F, there after :meth:`setup`.

    Raises:
        ConfigError: when there is no such feature, or it has too few values.
    """

    num_features: int

    def __init__(
        self,
        name: Literal["breast_cancer", "diabetes", "iris", "wine"] = "breast_cancer",
        group_by: str | None = None,
        statistics: Literal["own", "all"] = "own",
        num_clients: PositiveInt = 4,
        partition: Partition | None = None,
        batch_size: PositiveInt = 16,
        **kwargs: Any,
    ) -> None:
        if partition is None and name not in CLASSIFICATION:
            partition = Uniform()
        super().__init__(num_clients=num_clients, partition=partition, batch_size=batch_size, **kwargs)
        self.name = name
        self.group_by = group_by
        self.statistics = statistics

    def load(self) -> SampleSet:
        import sklearn.datasets

        load = getattr(sklearn.datasets, f"load_{self.name}")
        # not as scikit-learn scales this one: by statistics of all rows, those to be tested on among them
        table = load(scaled=False) if self.name == "diabetes" else load()
        self.num_features = table.data.shape[1]
        groups = None if self.group_by is None else self._groups(table.data, list(table.feature_names))
        if self.name in CLASSIFICATION:
            labels = torch.from_numpy(table.target).long()
            names = tuple(map(str, table.target_names))
            return SampleSet((table.data, table.target), labels, len(names), groups, names)
        return SampleSet((table.data, table.target), torch.zeros(len(table.data), dtype=torch.int64), groups=groups)

    def _groups(self, features: np.ndarray, names: list[str]) -> Tensor:
        if self.group_by not in names:
            raise ConfigError(f"data.group_by={self.group_by!r}: {self.name} has {', '.join(names)}.")
        values = features[:, names.index(self.group_by)]
        edges = np.quantile(values, np.arange(1, self.num_clients) / self.num_clients)
        groups = np.searchsorted(edges, values)  # equal values are of one group
        if len(np.unique(groups)) < self.num_clients:
            raise ConfigError(
                f"data.num_clients={self.num_clients}: {self.group_by!r} of {self.name} has too few different values; "
                f"give at most {len(np.unique(groups))}."
            )
        return torch.from_numpy(groups)

    def batches(self, client_id: int, part: str, label_map: Tensor | None) -> TensorLoader:
        assert self.data is not None, "setup() comes first"
        features, targets = self.data.content
        train, own = self.indices["train"], self.indices[part][client_id]
        known = train[client_id] if self.statistics == "own" else np.concatenate(train)
        x = torch.from_numpy(_standardised(features, known)).float().to(self.device)
        if self.data.num_classes is None:
            y = torch.from_numpy(_standardised(targets, known)).float().to(self.device)
        else:
            y = torch.from_numpy(targets).long().to(self.device)
        rows = torch.from_numpy(own).to(self.device)
        if part == "train":
            return TensorLoader((x, y), rows, self.batch_size, label_map, shuffle=True)
        return TensorLoader((x, y), rows, self.eval_batch_size, label_map)

    def example(self) -> tuple[Tensor, Tensor]:
        assert self.data is not None, "setup() comes first"
        label = torch.zeros(1, dtype=torch.float32 if self.data.num_classes is None else torch.int64)
        return torch.zeros(1, self.num_features), label


def _standardised(values: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Return (N, ...) values by mean and standard deviation of some; zeros where those are all the same."""
    scale = np.where(np.ptp(values[known], axis=0) > 0, values[known].std(axis=0), np.inf)
    return (values - values[known].mean(axis=0)) / scale
