"""Modules that ask their Trainer, in a training step, what a Trainer knows in a fit."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

import lit_pfl.methods
from lit_pfl import Federation
from lit_pfl.data import PerClient
from lit_pfl.engines import Local
from lit_pfl.errors import ConfigError
from tiny import Learner, Site

METHODS = sorted(lit_pfl.methods.__all__)
FIRST = ["FedAvg", "SimFed", "MOON", "FedEM", "Ditto"]


class Asks(Learner):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(6, 5), nn.ReLU()), nn.Linear(5, 3))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        rate = self.optimizers().param_groups[0]["lr"]
        assert rate == self.trainer.optimizers[0].param_groups[0]["lr"] == self.lr_schedulers().get_last_lr()[0]
        assert self.trainer.num_training_batches == len(self.trainer.train_dataloader) >= 1
        assert 10 <= len(self.trainer.train_dataloader.dataset) <= len(self.trainer.datamodule.samples) == 12
        assert self.trainer.estimated_stepping_batches in (2, 4)
        self.logger.experiment.log_metrics({"rate": rate})
        self.logger.log_metrics({"rate": rate}, step=self.global_step)
        folder = Path(self.trainer.log_dir)
        folder.mkdir(exist_ok=True, parents=True)
        (folder / "seen.txt").write_text(self.logger.log_dir)
        self.print("", end="")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if self.trainer.testing:
            assert self.trainer.num_test_batches == [len(self.trainer.test_dataloaders)] == [2]
        else:
            assert self.trainer.num_val_batches == [len(self.trainer.val_dataloaders)] == [2]
            assert len(self.trainer.val_dataloaders.dataset) == 12
        self.log("acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches in (2, 4)
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def site(seed: int) -> Site:
    draw = torch.Generator().manual_seed(seed)
    return Site([(torch.randn(6, generator=draw), i % 3) for i in range(12)], 6)


def fit(method: str, folder: Any, **options: Any) -> Federation:
    client = getattr(lit_pfl.methods, method)(learner=Asks())
    trainer = L.Trainer(
        max_epochs=2, accelerator="cpu", logger=CSVLogger(folder), enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
    )  # fmt: skip
    federation = Federation(client, seed=0, local_epochs=1, **options)
    trainer.fit(federation, datamodule=PerClient([site(k) for k in range(4)]))
    return federation


@pytest.mark.few(len(FIRST) + 3)
@pytest.mark.parametrize("method", [*FIRST, *(name for name in METHODS if name not in FIRST)])
def test_a_training_step_finds_what_it_finds_in_a_fit(method, tmp_path):
    """Under every method, also those that take a step of it before the first round."""
    try:
        fit(method, tmp_path)
    except ConfigError as error:
        pytest.skip(str(error))


def test_what_is_asked_before_the_first_round_is_not_logged(tmp_path):
    fit("SimFed", tmp_path)
    [path] = tmp_path.rglob("metrics.csv")
    names = path.read_text().splitlines()[0].split(",")
    assert "rate" not in names
    assert {"client_0/rate", "client_3/rate"} <= {*names}


def test_every_client_has_a_folder_of_its_own(tmp_path):
    federation = fit("FedAvg", tmp_path)
    roots = [Path(client.trainer.default_root_dir) for client in federation.clients.values()]
    assert roots == [Path(federation.trainer.default_root_dir) / f"client_{client}" for client in range(4)]
    seen = {path.parent.name: path.read_text() for path in tmp_path.rglob("seen.txt")}
    assert seen.keys() == {f"client_{client}" for client in range(4)}
    assert all(Path(folder).name == client for client, folder in seen.items())


@pytest.mark.parametrize("method", ["FedAvg", "MOON"])
def test_clients_that_sleep_find_it_too(method, tmp_path):
    fit(method, tmp_path, engine=Local(awake=1))


class TestsOnly(Asks):
    """Has weights from elsewhere, and does not train."""

    def configure_optimizers(self) -> Any:
        raise NotImplementedError

    training_step = Learner.training_step
    test_step = Asks.validation_step


def test_what_cannot_start_a_fit_can_be_tested(tmp_path):
    federation = Federation(lit_pfl.methods.FedAvg(learner=TestsOnly()), seed=0, threads=1)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path)
    [scores] = trainer.test(federation, datamodule=PerClient([site(0), site(1)]), verbose=False)
    assert 0 <= scores["test/acc"] <= 1
