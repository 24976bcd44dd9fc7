"""scikit-learn's tables, dealt to clients."""

from itertools import pairwise

import lightning as L
import numpy as np
import pytest
import sklearn.datasets
import torch
from torch import nn
from torchmetrics.functional import r2_score

from lit_pfl.data import ClassShards, Dirichlet, Table, in_order, labels_of
from lit_pfl.errors import ConfigError
from tiny import trainer

SHAPES = {"breast_cancer": (569, 30, 2), "iris": (150, 4, 3), "wine": (178, 13, 3), "diabetes": (442, 10, None)}


def ready(name="breast_cancer", **options) -> Table:
    data = Table(name, **options)
    data.setup()
    return data


def raw(name):
    options = {"scaled": False} if name == "diabetes" else {}
    table = getattr(sklearn.datasets, f"load_{name}")(**options)
    return table.data, table.target


def rows(loader) -> tuple[np.ndarray, np.ndarray]:
    x, y = (torch.cat(part) for part in zip(*in_order(loader), strict=True))
    return x.numpy(), y.numpy()


@pytest.mark.parametrize("name", SHAPES)
def test_tables(name):
    n, features, classes = SHAPES[name]
    data = ready(name, num_clients=3)
    assert data.num_features == features
    assert raw(name)[0].shape == (n, features)
    client = data.client(0)
    assert client.num_classes == classes
    x, y = next(iter(client.train))
    assert (x.shape, x.dtype) == ((16, features), torch.float32)
    assert (y.shape, y.dtype) == ((16,), torch.float32 if classes is None else torch.int64)
    assert client.example[0].shape == (1, features)
    assert client.example[1].dtype == y.dtype
    if classes:
        assert set(labels_of(client.train).tolist()) == set(range(classes))


@pytest.mark.parametrize("statistics", ["own", "all"])
@pytest.mark.parametrize("name", ["diabetes", "wine"])
def test_rows_are_standardised_by_training_rows_alone(name, statistics):
    data = ready(name, statistics=statistics, num_clients=3)
    features, targets = raw(name)
    for k in range(3):
        train = data.indices["train"][k] if statistics == "own" else np.concatenate(data.indices["train"])
        mean = [sum(features[i][f] for i in train) / len(train) for f in range(data.num_features)]
        variance = [sum((features[i][f] - m) ** 2 for i in train) / len(train) for f, m in enumerate(mean)]
        for part in ("train", "val", "test"):
            own = data.indices[part][k]
            x, y = rows(getattr(data.client(k), part))
            np.testing.assert_allclose(x, (features[own] - mean) / np.sqrt(variance), rtol=1e-4, atol=1e-5)
            if name == "diabetes":
                np.testing.assert_allclose(y, (targets[own] - targets[train].mean()) / targets[train].std(), rtol=1e-4)
            else:
                assert y.tolist() == targets[own].tolist()


def test_a_feature_that_is_the_same_in_all_training_rows_is_zero():
    data = ready("diabetes", group_by="sex", num_clients=2)
    for k in range(2):
        for part in ("train", "test"):
            x, _ = rows(getattr(data.client(k), part))
            assert np.isfinite(x).all()
            assert not x[:, 1].any()


def test_clients_by_ranges_of_a_feature():
    data = ready("diabetes", group_by="age", num_clients=5)
    features, _ = raw("diabetes")
    ages = [np.concatenate([features[data.indices[part][k], 0] for part in ("train", "val", "test")]) for k in range(5)]
    assert sum(map(len, ages)) == 442
    for younger, older in pairwise(ages):
        assert younger.max() < older.min()
    assert min(map(len, ages)) > 60
    assert data.clients == list(range(5))


def test_clients_by_the_values_of_a_feature():
    data = ready("diabetes", group_by="sex", num_clients=2)
    features, _ = raw("diabetes")
    assert [set(features[data.indices["train"][k], 1]) for k in range(2)] == [{1.0}, {2.0}]


def test_the_statistics_of_all_differ_from_a_clients_own_where_groups_do():
    own, both = (ready("diabetes", group_by="age", num_clients=4, statistics=s).client(0) for s in ("own", "all"))
    assert abs(rows(own.train)[0][:, 0].mean()) < 1e-6
    assert rows(both.train)[0][:, 0].mean() < -1


def test_partitions_by_class():
    data = ready("wine", partition=ClassShards(1), num_clients=3)
    assert [len(set(labels_of(data.client(k).train).tolist())) for k in range(3)] == [1, 1, 1]
    permuted = ready("wine", permute_labels=True)
    assert not permuted.client(0).labels_agree
    assert any(
        not torch.equal(labels_of(permuted.client(k).train), labels_of(ready("wine").client(k).train)) for k in range(4)
    )


def test_all_rows_of_a_table_without_classes_are_used():
    data = ready("diabetes", num_clients=5)
    assert len(set(np.concatenate(data.indices["train"]))) == round(0.8 * 442)


class Regression(L.LightningModule):
    """Somebody's regression."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x):
        return self.net(x)[:, 0]

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def test_a_regression_learns_the_progression_of_diabetes():
    client, module = ready("diabetes", num_clients=2).client(0), Regression()
    trainer(20).fit(module, client.train)
    x, y = map(torch.from_numpy, rows(client.test))
    with torch.no_grad():
        assert r2_score(module(x), y) > 0.2


def test_loaders_are_the_same_at_every_call():
    data = ready("iris")
    for _ in range(2):
        torch.manual_seed(0)
        epoch = [y.tolist() for _, y in data.client(1).train]
        torch.manual_seed(0)
        assert epoch == [y.tolist() for _, y in data.client(1).train]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "diabetes", "partition": Dirichlet(0.5)}, "Dirichlet deals by class labels, and this Table has none"),
        ({"name": "diabetes", "permute_labels": True}, "data.permute_labels=true: this Table has no class labels"),
        ({"name": "diabetes", "group_by": "weight"}, "data.group_by='weight': diabetes has age, sex, bmi"),
        ({"name": "diabetes", "group_by": "sex", "num_clients": 3}, "'sex' of diabetes has too few different values"),
        ({"name": "iris", "num_clients": 121}, "more than the 120 training samples of Table; choose at most 120"),
    ],
)  # fmt: skip
def test_bad_options_are_one_line(options, message):
    with pytest.raises(ConfigError, match=message) as error:
        ready(**options)
    assert "\n" not in str(error.value)
