"""Clients with several loaders for validation and tests are scored on each, as by a Trainer."""

import csv
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lit_pfl import Federation
from lit_pfl.data import PerClient, labels_of
from lit_pfl.engines import Local
from lit_pfl.errors import ConfigError
from lit_pfl.methods import FedAvg, KNNPer
from lit_pfl_callbacks import ClientsTable, Predictions
from tiny import Learner, assert_equal, trainer

GIVEN = {
    "list": lambda loaders: loaders,
    "dict": lambda loaders: dict(zip("ab", loaders, strict=True)),
    "lists in a dict": lambda loaders: {"a": loaders[:1], "b": loaders[1:]},
    "combined": lambda loaders: CombinedLoader(loaders, "sequential"),
}


class Data(L.LightningDataModule):
    """Eight samples in batches of four and six in batches of two, next to those for training."""

    def __init__(self, client: int, given: Any = GIVEN["list"]) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(client)
        self.x, self.y = torch.randn(30, 6, generator=draw), torch.randint(0, 3, (30,), generator=draw)
        self.given = given

    def _loader(self, first: int, last: int, size: int) -> DataLoader:
        return DataLoader(TensorDataset(self.x[first:last], self.y[first:last]), size)

    def train_dataloader(self) -> DataLoader:
        return self._loader(0, 16, 4)

    def val_dataloader(self) -> Any:
        return self.given([self._loader(16, 24, 4), self._loader(24, 30, 2)])

    test_dataloader = val_dataloader


class OnTwo(Learner):
    seen: ClassVar[list[tuple[int, int]]] = []

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(6, 5), nn.ReLU()), nn.Linear(5, 3))
        self.accuracies = nn.ModuleList(MulticlassAccuracy(3, average="micro") for _ in range(2))

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append((batch_idx, dataloader_idx))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.evaluating:
            assert len(batch[0]) == 4 - 2 * dataloader_idx
        return batch

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        assert len(self.trainer.val_dataloaders or self.trainer.test_dataloaders) == 2
        logits = self(batch[0])
        self.accuracies[dataloader_idx](logits, batch[1])
        self.log("val_acc", self.accuracies[dataloader_idx])
        self.log("val_loss", nn.functional.cross_entropy(logits, batch[1]), on_step=True, on_epoch=True)
        if dataloader_idx:
            self.log("second", 1.0, add_dataloader_idx=False)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
        assert len(batch[0]) == 4 - 2 * dataloader_idx
        return self(batch[0])


def fit(given: Any = GIVEN["list"], learner: Any = None, method: Any = FedAvg, **options: Any) -> Federation:
    torch.manual_seed(0)
    own = {name: options.pop(name) for name in ("callbacks", "default_root_dir") if name in options}
    federation = Federation(method(learner=learner or OnTwo()), seed=0, threads=1, **options)
    trainer(2, **own).fit(federation, datamodule=PerClient([Data(k, given) for k in range(2)], num_classes=3))
    return federation


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN.keys())
def test_a_client_is_scored_on_each_as_by_a_trainer(given):
    federation = fit(given)
    client = federation.clients[1]
    shown, seen = client.trainer.callback_metrics, OnTwo.seen[-5:]
    alone = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    with client.personalized() as learner:
        alone.validate(learner, Data(1), verbose=False)
    known = {name: float(value) for name, value in alone.callback_metrics.items()}
    assert seen == OnTwo.seen[-5:] == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 1)]
    assert known.keys() == {
        *(f"{name}/dataloader_idx_{i}" for name in ("val_acc", "val_loss", "val_loss_epoch") for i in (0, 1)), "second",
    }  # fmt: skip
    assert {name: float(shown[name]) for name in known} == pytest.approx(known)


def test_scores_are_named_by_loader(tmp_path):
    federation = fit()
    names = federation.trainer.callback_metrics.keys()
    assert {"val/acc/loader_0", "val/acc/loader_1_std", "val/acc/loader_1_worst10", "val/loss/loader_0"} <= names
    assert "val/second" in names
    [scores] = trainer(2).test(federation, datamodule=PerClient([Data(0), Data(1)], num_classes=3), verbose=False)
    assert 0 <= scores["test/acc/loader_1"] <= 1
    assert "test/aggregated/loss/loader_0" in scores


def test_the_table_in_a_file_has_room_for_whole_names(tmp_path, capsys):
    fit(callbacks=[ClientsTable()], default_root_dir=tmp_path)
    title, _, headings, *_ = capsys.readouterr().out.partition("Personalized models")[2].splitlines()
    assert "after round 2" in title
    assert [f"acc/loader_{i} as {state}" in headings for i in (0, 1) for state in ("trained", "aggregated")] == [
        True
    ] * 4


def test_clients_that_sleep_have_the_same_scores():
    one, other = (fit(engine=Local(awake=awake)).trainer.callback_metrics for awake in (None, 1))
    assert_equal(one, other)


def test_predictions_are_of_all_of_them(tmp_path):
    federation = fit()
    predicts = trainer(2, callbacks=[Predictions()], default_root_dir=tmp_path)
    predicts.predict(federation, datamodule=PerClient([Data(0), Data(1)], num_classes=3))
    rows = list(csv.DictReader((tmp_path / "predictions.csv").open()))
    assert [int(row["sample"]) for row in rows] == [*range(8), *range(6)] * 2
    assert [int(row["label"]) for row in rows] == [*Data(0).y[16:].tolist(), *Data(1).y[16:].tolist()]


def test_a_schedule_waits_for_one_of_them():
    class Waits(OnTwo):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            options = {"patience": 0, "threshold": 1e6, "threshold_mode": "abs"}
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, **options)
            return [optimizer], [{"scheduler": plateau, "monitor": "val_loss/dataloader_idx_1"}]

    federation = fit(learner=Waits())
    assert [o.param_groups[0]["lr"] for o in federation.clients[0].trainer.optimizers] == [0.05]


def test_a_module_without_steps_for_them_is_scored_by_its_loss_on_all():
    federation = fit(learner=Learner(nn.Sequential(nn.Linear(6, 5), nn.ReLU()), nn.Linear(5, 3)))
    with federation.clients[0].personalized() as learner, torch.no_grad():
        data = Data(0)
        loss = nn.functional.cross_entropy(learner(data.x[16:]), data.y[16:])
    assert federation.rows[0].scores["loss"] == pytest.approx(float(loss))


def test_a_method_that_looks_at_validation_data_sees_all_of_them():
    data = fit(method=KNNPer).data.client(0)
    assert labels_of(data.val).tolist() == Data(0).y[16:].tolist()


@pytest.mark.parametrize("other", [None, 3, "ab", iter([])])
def test_what_is_no_loader_is_refused(other):
    kind = type(other).__name__
    with pytest.raises(ConfigError, match=rf"Data: its val_dataloader returns a {kind} among its loaders; give DataL"):
        fit(lambda loaders: [loaders[0], other])


def test_other_ways_to_combine_loaders_are_refused():
    with pytest.raises(ConfigError, match=r"data\.modules\[0\], Data: its val_dataloader returns a CombinedLoader"):
        fit(lambda loaders: CombinedLoader(loaders, "max_size"))
