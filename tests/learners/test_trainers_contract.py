"""What a learner finds in its Trainer: loggers, data, scores; and what monitors a score of its own."""

import csv
from typing import ClassVar

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_pfl import Federation
from lit_pfl.data import PerClient
from lit_pfl.engines.client_logger import _Named
from lit_pfl.errors import ConfigError
from lit_pfl.lightning_internals import LastCheckpoint
from lit_pfl.methods import Ditto, FedAvg, StandAlone
from lit_pfl_callbacks import RunLogger
from tiny import assert_equal, trainer, weights


def data(client, val=True):
    draws = torch.Generator().manual_seed(client)
    x = torch.randn(12, 3, generator=draws)
    samples = TensorDataset(x, (x.sum(1, keepdim=True) + client).float())

    class Data(L.LightningDataModule):
        def __init__(self):
            super().__init__()
            self.save_hyperparameters({"site": client})
            self.calls = []

        def setup(self, stage):
            self.calls.append(f"setup {stage}")

        def teardown(self, stage):
            self.calls.append(f"teardown {stage}")

        def train_dataloader(self):
            return DataLoader(samples, 4, shuffle=True)

        def test_dataloader(self):
            return DataLoader(samples, 4)

        if val:

            def val_dataloader(self):
                return DataLoader(samples, 4)

    return Data()


class Regressor(L.LightningModule):
    """Asks its Trainer for everything."""

    seen: ClassVar = []  # of the class: what a module's own lists get while it is scored is undone

    def __init__(self, monitor=None, width=1):
        super().__init__()
        torch.manual_seed(0)
        self.save_hyperparameters()
        self.head = nn.Linear(3, width)
        self.monitor, self.sites = monitor, set()

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.head(x), y)
        self.log("train_loss", loss)
        return loss

    def on_train_epoch_end(self):
        self.sites.add(self.trainer.datamodule.hparams["site"])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self.head(batch[0]), batch[1]), on_step=True, on_epoch=True)

    def on_validation_epoch_end(self):
        self.seen.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})
        if self.logger is not None:
            self.logger.experiment.add_histogram("weights", self.head.weight, self.current_epoch)
            self.logger.log_image(key="picture", images=[])
            self.logger.log_metrics({"norm": float(self.head.weight.norm())})

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if self.monitor is None:
            return optimizer
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": self.monitor}}


def fit(method, rounds=3, val=True, local_epochs=2, ckpt_path=None, fitting=None, **options):
    federation = Federation(method, seed=1, threads=1, local_epochs=local_epochs, **options)
    fitting = fitting or trainer(rounds)
    fitting.fit(federation, datamodule=PerClient([data(k, val) for k in range(2)]), ckpt_path=ckpt_path)
    return federation


def best(federation):
    return [float(member.trainer.lr_scheduler_configs[0].scheduler.best) for member in federation.clients.values()]


@pytest.mark.seconds
@pytest.mark.parametrize("method", [FedAvg, Ditto])
@pytest.mark.parametrize("monitor", ["val_loss", "val_loss_epoch", "train_loss"])
def test_a_schedule_is_stepped_by_the_clients_own_score_and_a_resumed_run_is_the_same(method, monitor, tmp_path):
    def run(folder, rounds, ckpt_path=None):
        saving = trainer(rounds, callbacks=[LastCheckpoint(tmp_path / folder)], enable_checkpointing=True)
        return fit(method(learner=Regressor(monitor)), rounds, ckpt_path=ckpt_path, fitting=saving)

    whole = run("whole", 3)
    run("cut", 1)
    resumed = run("cut", 3, tmp_path / "cut" / "last.ckpt")
    assert_equal(weights(whole), weights(resumed))
    assert best(whole) == best(resumed)
    rates = [member.trainer.optimizers[0].param_groups[0]["lr"] for member in whole.clients.values()]
    assert all(rate < 0.1 for rate in rates)  # halved where a score is not ten times better
    assert best(whole)[0] != best(whole)[1]  # everybody's own


def test_scores_of_a_validation_that_nobody_needs_cost_nothing():
    for monitor, times in ((None, 0), ("train_loss", 0), ("val_loss", 2 * 2 * 2)):
        Regressor.seen.clear()
        fit(FedAvg(learner=Regressor(monitor)), fitting=trainer(2, limit_val_batches=0, limit_test_batches=0))
        assert len(Regressor.seen) == times  # clients x rounds x local epochs
        assert all(found["val_loss"] == found["val_loss_epoch"] for found in Regressor.seen)


def test_what_cannot_be_monitored_is_said_in_one_line():
    with pytest.raises(ConfigError, match=r"^Client 0: ReduceLROnPlateau monitors 'val_loss', and this client has no"):
        fit(FedAvg(learner=Regressor("val_loss")), val=False)


def test_own_scores_are_among_the_callback_metrics():
    federation = fit(StandAlone(learner=Regressor()), rounds=1)
    for client, member in federation.clients.items():
        [score] = [row.scores["loss"] for row in federation.rows if row.client == client]
        found = member.trainer.callback_metrics
        assert float(found["val_loss"]) == float(found["val_loss_epoch"]) == pytest.approx(score)
        assert "train_loss" in found


def test_data_modules_are_found_and_neither_set_up_again_nor_torn_down():
    modules = [data(k) for k in range(2)]
    federation = Federation(FedAvg(learner=Regressor()), seed=1, threads=1)
    trainer(2).fit(federation, datamodule=PerClient(modules))
    assert [module.calls for module in modules] == [["setup fit", "setup test"]] * 2
    for client, member in federation.clients.items():
        assert member.trainer.datamodule is modules[client]
        assert modules[client].trainer is member.trainer
        assert member.learner.sites == {client}


class Noted(TensorBoardLogger):
    """Keeps what is written."""

    def __init__(self, folder):
        super().__init__(folder)
        self.written = []

    @property
    def experiment(self):
        return self

    def flush(self):
        pass

    def add_histogram(self, tag, values, step):
        self.written.append(tag)

    def log_metrics(self, metrics, step=None):
        self.written += list(metrics)

    def log_image(self, key, images, **kwargs):
        self.written.append(key)


@pytest.mark.parametrize("others", [[], ["run"]])
def test_what_a_learner_writes_to_its_logger_is_named_by_its_client(tmp_path, others):
    logger = Noted(tmp_path)
    loggers = [RunLogger(str(tmp_path)) for _ in others] + [logger]
    federation = fit(FedAvg(learner=Regressor()), rounds=1, fitting=trainer(1, logger=loggers))
    own = {name for name in logger.written if name.startswith("client_")}
    assert own == {f"client_{client}/{name}" for client in range(2) for name in ("weights", "picture", "norm")}
    seen = federation.clients[0].learner.logger
    assert isinstance(seen, TensorBoardLogger)
    assert isinstance(seen, Logger)
    assert "train_loss" not in logger.written  # a Trainer of a client writes nothing by itself


class Writes:
    """An experiment with what loggers of others have: of MLflow, of W&B and of TensorBoard."""

    def log_metric(self, run_id, key, value):
        return run_id, key, value

    def log_artifact(self, artifact_or_path, name=None):
        return artifact_or_path, name

    def log(self, data, step=None):
        return data

    def add_scalars(self, main_tag, tag_scalar_dict):
        return main_tag, tag_scalar_dict

    def log_artifacts(self, run_id, local_dir, artifact_path=None):
        return run_id, local_dir, artifact_path

    def log_values(self, values, step=None):
        return values

    def log_any(self, *args, **kwargs):
        return args, kwargs


def test_clients_names_are_put_before_names_alone():
    writes = _Named(Writes(), "Logger", "client_3/")
    assert writes.log_metric("a run's id", "norm", 1.0) == ("a run's id", "client_3/norm", 1.0)
    assert writes.log_artifact("/data/model.ckpt") == ("/data/model.ckpt", None)
    assert writes.log_artifact("/data/model.ckpt", "model") == ("/data/model.ckpt", "client_3/model")
    assert writes.log({"norm": 1.0}) == writes.log(data={"norm": 1.0}) == {"client_3/norm": 1.0}
    assert writes.add_scalars("norms", {"a": 1.0}) == ("client_3/norms", {"a": 1.0})
    assert writes.log_artifacts("a run's id", "/data") == ("a run's id", "/data", None)
    assert writes.log_artifacts("a run's id", "/data", "model") == ("a run's id", "/data", "client_3/model")
    assert writes.log_values({"norm": 1.0}) == {"client_3/norm": 1.0}
    assert writes.log_any({"norm": 1.0}, name="n") == (({"client_3/norm": 1.0},), {"name": "client_3/n"})


@pytest.mark.parametrize("kind", [RunLogger, CSVLogger])
def test_what_a_logger_cannot_take_is_left_out_with_one_warning(tmp_path, kind, recwarn):
    fit(FedAvg(learner=Regressor()), rounds=2, fitting=trainer(2, logger=kind(str(tmp_path), name="")))
    told = [str(one.message) for one in recwarn if "add_histogram" in str(one.message)]
    assert len(told) <= 1  # once a process
    if kind is RunLogger:
        rows = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()
        assert len(rows) == 3
        assert "client_1/norm" in rows[0]


def test_without_a_logger_there_is_none():
    assert fit(FedAvg(learner=Regressor()), rounds=1).clients[0].learner.logger is None


@pytest.mark.parametrize("at_epoch_end", [None, True, False])
def test_early_stopping_ends_one_clients_training_and_a_resumed_run_is_the_same(tmp_path, at_epoch_end):
    """A client that is no better than before takes no further part; its model is scored as ever."""

    def run(folder, rounds, ckpt_path=None):
        # a client whose data are easy stops first
        stopping = EarlyStopping("val_loss", stopping_threshold=1.5, check_on_train_epoch_end=at_epoch_end)
        saving = trainer(rounds, callbacks=[LastCheckpoint(tmp_path / folder)], enable_checkpointing=True)
        options = {"client_trainer": {"callbacks": [stopping]}, "ckpt_path": ckpt_path, "fitting": saving}
        return fit(StandAlone(learner=Regressor()), rounds, local_epochs=1, **options)

    whole = run("whole", 6)
    assert 0 < len(whole.engine.left) <= 2
    epochs = {k: member.trainer.current_epoch for k, member in whole.clients.items()}
    assert min(epochs.values()) < max(epochs.values()) or len(whole.engine.left) == 2
    run("cut", 2)
    resumed = run("cut", 6, tmp_path / "cut" / "last.ckpt")
    assert resumed.engine.left == whole.engine.left
    assert_equal(weights(whole), weights(resumed))


class Ends(L.Callback):
    """Ends the training of some clients with their first round."""

    def __init__(self, clients):
        self.clients = clients

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop |= pl_module.spec.client_id in self.clients


def test_rounds_in_which_nobody_trains_any_more_count(tmp_path):
    options = {"participation": 0.5, "local_epochs": 1, "client_trainer": {"callbacks": [Ends({0})]}}
    logger = CSVLogger(str(tmp_path), name="", version="run")
    federation = fit(FedAvg(learner=Regressor()), 8, fitting=trainer(8, logger=logger), **options)
    rows = list(csv.DictReader((tmp_path / "run" / "metrics.csv").open()))
    rounds = [row for row in rows if row["comm/up_bytes"]]
    assert [float(row["round"]) for row in rounds] == [*range(1, 9)]
    assert federation.coordinator.round == 8
    per_round = [float(row["comm/up_bytes"]) + float(row["comm/down_bytes"]) for row in rounds]
    assert 0 in per_round
    assert sum(per_round) == federation.traffic.total


def test_a_run_whose_clients_have_all_ended_does_not_go_on(tmp_path):
    def run(ckpt_path=None):
        saving = trainer(5, callbacks=[LastCheckpoint(tmp_path)], enable_checkpointing=True)
        options = {"client_trainer": {"callbacks": [Ends({0, 1})]}, "ckpt_path": ckpt_path, "fitting": saving}
        return fit(StandAlone(learner=Regressor()), 5, local_epochs=1, **options)

    whole, resumed = run(), run(tmp_path / "last.ckpt")
    assert whole.trainer.current_epoch == resumed.trainer.current_epoch == 1
    assert whole.coordinator.round == resumed.coordinator.round == 1


def test_a_client_keeps_its_best_model_in_a_folder_of_its_own(tmp_path):
    keeping = ModelCheckpoint(monitor="val_loss", filename="best")
    logger = CSVLogger(str(tmp_path), name="", version="run")
    options = {"client_trainer": {"callbacks": [keeping]}, "fitting": trainer(2, logger=logger)}
    federation = fit(FedAvg(learner=Regressor()), **options)
    folder = tmp_path / "run" / "checkpoints"
    for client in range(2):
        [path] = (folder / f"client_{client}").glob("best*.ckpt")
        saved = torch.load(path, weights_only=False)
        assert saved["state_dict"].keys() == federation.clients[client].state_dict().keys()


class BringsCallbacks(Regressor):
    def configure_callbacks(self):
        return [ModelCheckpoint(monitor="val_loss", filename="best"), EarlyStopping("val_loss", patience=9)]


def test_callbacks_that_a_learner_brings_monitor_its_score_too(tmp_path):
    logger = CSVLogger(str(tmp_path), name="", version="run")
    fit(FedAvg(learner=BringsCallbacks()), fitting=trainer(2, logger=logger))
    folder = tmp_path / "run" / "checkpoints"
    assert {str(path.relative_to(folder)) for path in folder.rglob("best*")} == {
        "client_0/best.ckpt", "client_1/best.ckpt",
    }  # fmt: skip


class WholeCheckpoint(Regressor):
    """Adds to what Lightning has put into a checkpoint, as pytorch-forecasting's networks do."""

    def on_save_checkpoint(self, checkpoint):
        assert {"epoch", "global_step", "loops", "pytorch-lightning_version", "state_dict"} <= checkpoint.keys()
        checkpoint["hyper_parameters"].update(norm=float(self.head.weight.norm()))

    def on_load_checkpoint(self, checkpoint):
        self.found = checkpoint["hyper_parameters"]


@pytest.mark.parametrize("method", [FedAvg, Ditto])
def test_checkpoint_hooks_see_a_whole_checkpoint(tmp_path, method):
    def run(rounds, ckpt_path=None):
        saving = trainer(rounds, callbacks=[LastCheckpoint(tmp_path)], enable_checkpointing=True)
        return fit(method(learner=WholeCheckpoint()), rounds, ckpt_path=ckpt_path, fitting=saving)

    first = run(1)
    saved = {client: float(member.learner.head.weight.norm()) for client, member in first.clients.items()}
    resumed = run(2, tmp_path / "last.ckpt")
    for client, member in resumed.clients.items():
        for learner in member.learners.values():
            assert learner.found["width"] == 1
        assert member.learner.found["norm"] == pytest.approx(saved[client])
