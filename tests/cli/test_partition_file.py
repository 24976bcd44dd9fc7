"""A run keeps who has which data."""

from pathlib import Path

import numpy as np
import sklearn.datasets

from cli.typed import TINY, rows, typed
from lit_pfl.cli.record import _write_partition
from lit_pfl.data import Digits, Table
from lit_pfl.data.partition import Dirichlet

FILE = Path("runs/SimFed-Digits/version_0/partition.csv")


def test_the_file_counts_every_sample_once(capsys):
    typed(capsys, "fit", *TINY, "--trainer.max_epochs=1", "--data.partition=Dirichlet", "--data.partition.alpha=0.5")
    data = Digits(num_clients=3, partition=Dirichlet(alpha=0.5))
    data.setup()
    labels = sklearn.datasets.load_digits().target
    found = rows(FILE)
    for part in ("train", "val", "test"):
        counts = np.zeros((3, 10), dtype=int)
        for row in found:
            if row["split"] == part:
                counts[int(row["client"]), int(row["class"])] += int(row["count"])
        plain = [[sum(labels[i] == c for i in data.indices[part][k]) for c in range(10)] for k in range(3)]
        assert counts.tolist() == plain
    assert all(int(row["count"]) > 0 for row in found)


def test_labels_of_their_own_do_not_matter():
    counts = []
    for permute in (False, True):
        data = Digits(num_clients=3, permute_labels=permute)
        data.setup()
        counts.append(data.class_counts("train"))
    np.testing.assert_array_equal(*counts)


def test_data_without_classes_have_no_such_file(tmp_path):
    data = Table("diabetes")
    data.setup()
    assert data.class_counts("train") is None
    _write_partition(tmp_path / "partition.csv", data)
    assert not (tmp_path / "partition.csv").exists()
