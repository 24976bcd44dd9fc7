"""A project of somebody else on the command line: its dataset, its scores, its own mistakes."""

import pytest

from cli.typed import rows, typed

PROJECT = """
import lightning as L
import torch
from torch.utils.data import TensorDataset


def samples():
    x = torch.rand(60, 3, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, torch.arange(60) % 3)


def word(sample):
    return ("zebra", "cat", "dog")[int(sample[1])]


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(3, 4), torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.body(x))

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("mae", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Faulty(Net):
    def test_step(self, batch, batch_idx):
        raise RuntimeError("a mistake of their own")
"""


@pytest.fixture
def fit(monkeypatch, tmp_path, capsys):
    (tmp_path / "their_project.py").write_text(PROJECT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)

    def fit(learner: str, *words: str):
        return typed(capsys, "fit", "--model", "FedAvg", "--model.learner", f"their_project.{learner}",
                     "--data", "FromDataset", "--data.dataset", "their_project.samples",
                     "--data.labels", "their_project.word", "--data.num_clients", "2",
                     "--trainer.max_epochs", "1", "--folder", "one", *words)  # fmt: skip

    return fit


@pytest.mark.seconds
def test_a_run_repeats_from_its_own_configuration(fit, tmp_path, capsys):
    """Also where ``data.labels`` is a name, and no score is called accuracy."""
    assert fit("Net").code == 0
    assert typed(capsys, "fit", "--config", "one/config.yaml", "--folder", "again").code == 0
    assert rows(tmp_path / "one/clients.csv") == rows(tmp_path / "again/clients.csv")
    common = ["--config", "again/config.yaml", "--ckpt_path", "again/checkpoints/last.ckpt"]
    assert typed(capsys, "predict", *common).code == 0
    assert {row["label"] for row in rows(tmp_path / "again/predictions.csv")} <= {"zebra", "cat", "dog", "0", "1", "2"}


def test_their_own_mistake_is_what_is_said(fit):
    with pytest.raises(RuntimeError, match="a mistake of their own"):
        fit("Faulty")
