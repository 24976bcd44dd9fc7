"""What may be asked of a federation's Trainer and of its clients', and the short way through a batch."""

import csv
import sys
import threading
from collections import UserList
from datetime import timedelta
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_pfl import Federation
from lit_pfl.data import PerClient
from lit_pfl.engines.greenlets import LocalHub
from lit_pfl.engines.trainers import OWNED
from lit_pfl.errors import ConfigError
from lit_pfl.lightning_internals import batch_loop, make_endless, make_lean
from lit_pfl.lightning_internals.lean_loop import LeanEpochLoop
from lit_pfl.methods import APFL, FedAvg, PerFedAvg
from lit_pfl_callbacks import FederatedLoop, RunLogger
from tiny import Learner, assert_equal, client, digits, run, spec, trainer, weights


@pytest.mark.parametrize("name", OWNED)
def test_what_the_federation_decides_is_refused_by_name(name):
    with pytest.raises(
        ConfigError, match=rf"^federation\.client_trainer\.{name}: the federation decides this: "
    ) as error:
        Federation(client(FedAvg), client_trainer={name: 2})
    assert "\n" not in str(error.value)


class Ends(L.Callback):
    """Ends a client's fit, as early stopping does."""

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = True


def test_a_client_whose_callback_ends_its_training_takes_no_further_part():
    """Not before its round is over, and its model is scored as ever; without any client left the federation ends."""
    federation = run(client(FedAvg), rounds=3, local_epochs=2, client_trainer={"callbacks": [Ends()]})
    assert federation.engine.left == {0, 1, 2, 3}
    assert federation.coordinator.round == federation.trainer.current_epoch == 1
    assert all(member.trainer.current_epoch == 2 for member in federation.clients.values())
    assert {row.client for row in federation.rows} == {0, 1, 2, 3}


class LogsNothing(Learner):
    """Is trained the short way, and ends its own training in its first epoch."""

    def __init__(self, where):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
        self.where = where

    def training_step(self, batch, batch_idx):
        self.trainer.should_stop |= self.where == "training_step"
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.trainer.should_stop |= self.where == "on_train_epoch_end"


@pytest.mark.parametrize("where", ["training_step", "on_train_epoch_end"])
def test_a_client_that_ends_its_own_training_finishes_the_round(where):
    federation = run(FedAvg(learner=LogsNothing(where)), rounds=3, local_epochs=2)
    assert federation.engine.left == {0, 1, 2, 3}
    assert federation.coordinator.round == 1
    assert all(member.trainer.current_epoch == 2 for member in federation.clients.values())


class Fails(LogsNothing):
    """Fails in validation, or in training after some rounds."""

    def training_step(self, batch, batch_idx):
        assert self.where != "training" or not self.trainer.current_epoch
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        assert self.where != "validation"


@pytest.mark.parametrize("where", ["training", "validation", "a callback"])
def test_an_error_ends_all_fits(where):
    class Callback(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            assert where != "a callback"

    federation = Federation(FedAvg(learner=Fails(where)), threads=1)
    with pytest.raises(AssertionError):
        trainer(3, callbacks=[Callback()]).fit(federation, datamodule=digits())
    assert all(client not in federation.engine.hub for client in federation.client_ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit_train_batches": 2}, r"trainer\.limit_train_batches=2: .*federation\.participation"),
        ({"limit_train_batches": 0.5}, r"trainer\.limit_train_batches=0\.5: .*client_trainer\.limit_train_batches"),
        ({"limit_train_batches": 1}, r"trainer\.limit_train_batches=1: "),  # one, where 1.0 is all
        ({"limit_val_batches": 1}, r"trainer\.limit_val_batches=1: "),
        ({"overfit_batches": 1}, r"trainer\.overfit_batches=1: .*federation\.participation"),
        ({"limit_val_batches": 3}, r"trainer\.limit_val_batches=3: .*federation\.evaluate_clients"),
        ({"limit_test_batches": 1}, r"trainer\.limit_test_batches=1: .*tests are of all clients; give 0"),
        ({"val_check_interval": 1}, r"trainer\.val_check_interval=1: .*trainer\.check_val_every_n_epoch"),
        ({"val_check_interval": 4, "check_val_every_n_epoch": None}, r"trainer\.val_check_interval=4: "),
        ({"val_check_interval": "00:00:00:05"}, r"trainer\.val_check_interval=5 s: .*trainer\.check_val_every_n_epoch"),
        ({"check_val_every_n_epoch": 0}, r"trainer\.check_val_every_n_epoch=0: .*limit_val_batches=0"),
        ({"gradient_clip_val": 10}, r"trainer\.gradient_clip_val=10: .*federation\.client_trainer\.gradient_clip_val"),
        ({"accumulate_grad_batches": 2}, r"accumulate_grad_batches=2: .*client_trainer\.accumulate_grad_batches"),
        ({"detect_anomaly": True}, r"trainer\.detect_anomaly=True: .*federation\.client_trainer\.detect_anomaly"),
        ({"gradient_clip_val": 1.0, "fast_dev_run": True}, r"trainer\.gradient_clip_val=1\.0: it is clients"),
        ({"precision": "bf16-true"}, r"trainer\.precision=bf16-true: .*choose 32-true, 16-mixed, bf16-mixed"),
        ({"precision": "64-true"}, r"trainer\.precision=64-true: "),
    ],
)
def test_options_of_the_outer_trainer_that_are_about_batches_of_images(options, message):
    with pytest.raises(ConfigError, match=message):
        trainer(1, **options).fit(Federation(client(FedAvg), threads=1), datamodule=digits())


@pytest.mark.seconds
def test_no_validation_and_a_first_try_are_all_right():
    trainer(1, limit_val_batches=0).fit(Federation(client(FedAvg), threads=1), datamodule=digits())
    untested = trainer(1, limit_test_batches=0)
    untested.fit(Federation(client(FedAvg), threads=1), datamodule=digits())
    assert "test/acc" not in untested.callback_metrics
    trainer(1, fast_dev_run=True).fit(Federation(client(FedAvg), threads=1), datamodule=digits())


def test_precision_of_clients_alone():
    with pytest.raises(ConfigError, match=r"federation\.client_trainer\.precision=64-true: "):
        run(client(FedAvg), client_trainer={"precision": "64-true"})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"accumulate_grad_batches": -1}, r"\.accumulate_grad_batches=-1: give 1 or more batches"),
        ({"accumulate_grad_batches": 1.5}, r"\.accumulate_grad_batches=1\.5: give 1 or more batches"),
        ({"gradient_clip_val": -1}, r"\.gradient_clip_val=-1: give a number, 0 or more"),
        ({"limit_train_batches": 0}, r"\.limit_train_batches=0: give a share of the batches"),
        ({"limit_train_batches": "nan"}, r"\.limit_train_batches=nan: give a share of the batches"),
        ({"detect_anomaly": "foo"}, r"\.detect_anomaly=foo: give true or false"),
        ({"deterministic": "foo"}, r"\.deterministic=foo: give true, false or warn"),
        ({"precision": "foo"}, ": Precision 'foo' is invalid"),
        ({"plugins": 3}, ": Found invalid type for plugin 3"),
        ({"profiler": "foo"}, ": .*profiler"),
        ({"default_root_dir": 3}, ": expected str, bytes or os.PathLike object"),
    ],
)
def test_what_clients_trainers_cannot_take_is_said(options, said):
    with pytest.raises(ConfigError, match=rf"^federation\.client_trainer{said}"):
        run(client(FedAvg), client_trainer=options)


def test_one_plugin_alone_is_a_clients():
    federation = run(
        client(FedAvg), rounds=1, client_trainer={"plugins": MixedPrecision("bf16-mixed", "cpu"), "precision": None}
    )
    assert all(isinstance(c.trainer.precision_plugin, MixedPrecision) for c in federation.clients.values())


@pytest.mark.seconds
def test_scores_are_in_the_precision_of_training():
    """Whether clients have it by themselves or from the federation's own Trainer."""
    scores = []
    for ours, theirs in (
        ({"precision": "bf16-mixed"}, {}),
        ({}, {"client_trainer": {"precision": "bf16-mixed"}}),
        ({}, {}),
    ):
        fitting = trainer(1, **ours)
        fitting.fit(Federation(client(FedAvg), threads=1, **theirs), datamodule=digits())
        scores.append({name: float(value) for name, value in fitting.callback_metrics.items() if "loss" in name})
    assert {"val/loss", "test/loss", "test/aggregated/loss"} <= scores[0].keys()
    assert scores[0] == scores[1]
    assert scores[0]["val/loss"] != scores[2]["val/loss"]


def test_a_server_s_step_needs_no_scaled_losses(recwarn):
    fitting = trainer(2, plugins=[MixedPrecision("16-mixed", "cpu")])
    fitting.fit(Federation(client(FedAvg), threads=1), datamodule=digits())
    assert float(fitting.callback_metrics["comm/total_bytes"]) > 0
    assert any("bf16-mixed" in str(one.message) for one in recwarn.list)  # in which clients train on a CPU


def test_looking_for_anomalies_ends_with_the_fit():
    federation = Federation(client(FedAvg), threads=1, client_trainer={"detect_anomaly": True})
    trainer(1).fit(federation, datamodule=digits(2))
    assert not torch.is_anomaly_enabled()


def test_clients_do_not_overfit_on_the_same_batches():
    with pytest.raises(ConfigError, match=r"federation\.client_trainer\.overfit_batches: .*limit_train_batches\.$"):
        run(client(FedAvg), client_trainer={"overfit_batches": 2})


@pytest.mark.parametrize("method", [PerFedAvg, lambda **options: APFL(adaptive=True, **options)])
def test_gradients_that_the_trainer_does_not_scale(method):
    member = client(method).build(spec(channels=1, image_size=8))
    member.trainer = L.Trainer(plugins=[MixedPrecision("16-mixed", "cpu")], accelerator="cpu", logger=False)
    with pytest.raises(ConfigError, match=r"trainer\.precision=16-mixed: .*choose bf16-mixed or 32-true"):
        member.configure_optimizers()
    member.trainer = trainer(1, precision="bf16-mixed")
    assert member.configure_optimizers()


def lbfgs(parameters):
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)


class TwoSteps(torch.optim.SGD):
    """An optimizer of somebody's own that calls its closure twice."""

    def step(self, closure=None):
        assert closure is not None
        closure()
        super().step()
        return super().step(closure)


class Listens(L.Callback):
    """A callback of the user's, for whom every hook must be called."""


@pytest.mark.seconds
@pytest.mark.parametrize("optimizer", [lbfgs, lambda parameters: TwoSteps(parameters, lr=0.01)])
def test_optimizers_with_closures_take_the_trainers_own_way(optimizer):
    short = run(client(FedAvg, optimizer=optimizer, scheduler=None))
    own = run(client(FedAvg, optimizer=optimizer, scheduler=None), client_trainer={"callbacks": [Listens()]})
    assert type(own.clients[0].trainer.fit_loop.epoch_loop) is not LeanEpochLoop
    assert_equal(weights(short), weights(own))


class MovesOn(L.Callback):
    """Changes weights by how often it was called, as a moving average or a warm-up does."""

    def __init__(self):
        self.calls = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.calls += 1
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.mul_(1 - 0.01 * self.calls)


def test_every_client_has_callbacks_of_its_own():
    given = MovesOn()
    both = run(client(FedAvg), digits(2), rounds=1, client_trainer={"callbacks": given})
    again = run(client(FedAvg), digits(2), rounds=1, client_trainer={"callbacks": [given]})
    assert given.calls == 0
    assert [each.trainer.callbacks[0].calls for each in both.clients.values()] == [
        len(each.data.train) for each in both.clients.values()
    ]
    assert_equal(weights(both), weights(again))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (EMAWeightAveraging, "EMAWeightAveraging puts averaged weights"),
        (lambda: StochasticWeightAveraging(swa_lrs=0.01), "StochasticWeightAveraging puts averaged weights"),
        (LearningRateFinder, "LearningRateFinder trains before the first round"),
        (BatchSizeFinder, "BatchSizeFinder trains before the first round"),
        (lambda: ModelPruning("l1_unstructured"), "ModelPruning gives the weights that it prunes other names"),
    ],
)
def test_callbacks_that_change_which_weights_are_in_place_are_refused(kind, message):
    """Averages would be in the models after a fit, and in its checkpoint, but not in its scores."""
    for callbacks in (kind(), [Listens(), kind()]):
        with pytest.raises(ConfigError, match=rf"^federation\.client_trainer\.callbacks: {message}"):
            Federation(client(FedAvg), client_trainer={"callbacks": callbacks})

    class Brings(Flat):
        def configure_callbacks(self):
            return [Listens(), kind()]

    with pytest.raises(ConfigError, match=rf"^trainer\.callbacks: {message}"):
        trainer(1, callbacks=[kind()]).fit(Federation(client(FedAvg)), datamodule=digits(2))
    with pytest.raises(ConfigError, match=rf"^model\.learner: Brings\.configure_callbacks: {message}"):
        run(FedAvg(learner=Brings()))


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (BackboneFinetuning(), "BackboneFinetuning is about gradients, which clients have; give it to them, in "),
        (GradientAccumulationScheduler({1: 2}), "GradientAccumulationScheduler is about gradients, which clients have"),
        (ModelCheckpoint(every_n_train_steps=2), r"ModelCheckpoint\(every_n_train_steps=2\) would save in the middle"),
        (
            ModelCheckpoint(train_time_interval=timedelta(minutes=1)),
            r"ModelCheckpoint\(train_time_interval=0:01:00\) would save in the middle of a round; give every_n_epochs",
        ),
    ],
)
def test_callbacks_that_a_federation_s_own_trainer_cannot_have(callback, message):
    fitting = trainer(1, callbacks=[callback], enable_checkpointing=True)
    with pytest.raises(ConfigError, match=rf"^trainer\.callbacks: {message}"):
        fitting.fit(Federation(client(FedAvg)), datamodule=digits(2))


def test_callbacks_in_a_sequence_of_another_kind():
    """As Hydra's lists are."""
    heard: list[int] = []
    callback = L.pytorch.callbacks.LambdaCallback(on_train_epoch_end=lambda *_: heard.append(1))
    run(client(FedAvg), digits(2), rounds=1, client_trainer={"callbacks": UserList([callback])})
    assert len(heard) == 2


def test_a_trainer_used_again_tells_nothing_of_callbacks_that_nobody_gave_it(caplog):
    fitting, federation, data = trainer(1), Federation(client(FedAvg), seed=1), digits(2)
    fitting.fit(federation, datamodule=data)
    with caplog.at_level("INFO"):
        fitting.test(federation, datamodule=data, verbose=False)
    assert "override existing callbacks" not in caplog.text


class Looks(L.Callback):
    """Looks at a round when it is over, as callbacks that report to a search do."""

    def __init__(self):
        self.seen: list[tuple[float, ...]] = []

    def on_train_epoch_end(self, trainer, pl_module):
        names = ("round", "train/loss", "comm/total_bytes", "val/acc")
        self.seen.append(tuple(float(trainer.callback_metrics[name]) for name in names))


def test_a_callback_finds_all_of_the_round_that_is_over(tmp_path):
    looks, logger = Looks(), RunLogger(str(tmp_path), "run")
    fitting = trainer(3, callbacks=[looks], logger=logger)
    fitting.fit(Federation(client(FedAvg), seed=1), datamodule=digits(2))
    lines = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").open()))
    names = ("round", "train/loss", "comm/total_bytes", "val/acc")
    assert looks.seen == [pytest.approx(tuple(float(line[name]) for name in names)) for line in lines]
    assert [seen[0] for seen in looks.seen] == [1, 2, 3]


def test_a_federation_in_another_thread_is_refused():
    """Both would draw from the same generators, and their numbers would depend on which is quicker."""
    went_on, errors = threading.Event(), []

    def other():
        try:
            run(client(FedAvg), digits(2), rounds=1)
        except ConfigError as error:
            errors.append(str(error))

    class Second(Flat):
        def on_train_epoch_end(self):
            if not went_on.is_set():
                went_on.set()
                thread = threading.Thread(target=other)
                thread.start()
                thread.join()

    assert len(run(FedAvg(learner=Second()), digits(2)).rows) == 2, "the first one goes on"
    assert errors == [
        "Another federation trains in another thread of this process, and both would draw from the same random "
        "numbers; run them one after another, or in processes of their own."
    ]
    other()
    assert len(errors) == 1


def test_weights_that_are_pruned_at_a_site_are_told():
    """What is sent would be made anew from the unpruned weights before the next step, whatever has been received."""
    hub = LocalHub(seed=1)

    def site():
        loop = FederatedLoop(hub.link, every_n_epochs=1)
        batches = DataLoader(TensorDataset(torch.randn(8, 1, 8, 8), torch.zeros(8, dtype=torch.int64)), batch_size=8)
        pruning = ModelPruning("l1_unstructured", amount=0.3)
        trainer(2, callbacks=[pruning, loop], num_sanity_val_steps=0).fit(FedAvg(learner=Flat()), batches)

    hub.add(0, site)
    with pytest.raises(ConfigError, match=r"^model\.learner: '.*weight' is made of other tensors since training began"):
        hub.run(FedAvg(learner=Flat()).configure_server())


class Scores(L.Callback):
    """Scores a model by itself, as some libraries do."""

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        raise AssertionError


def test_hooks_of_callbacks_that_are_not_called_are_told():
    with pytest.warns(UserWarning, match=r"Scores\.on_validation_batch_end is not called: a federation scores clients"):
        run(client(FedAvg), digits(2), rounds=1, client_trainer={"callbacks": [Scores()]})


class OpensAFile(L.Callback):
    """A callback of which there can be one only."""

    def __init__(self, path):
        self.file = path.open("w")


def test_a_callback_that_cannot_be_copied_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^federation\.client_trainer\.callbacks: .*cannot be copied: .*TextIO"):
        run(client(FedAvg), client_trainer={"callbacks": [OpensAFile(tmp_path / "x")]})


class Asks(L.LightningModule):
    """A module with a schedule that ends with the training, as its Trainer plans it."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 1)
        self.rates = []

    def training_step(self, batch, batch_idx):
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return self.head(batch[0]).square().mean()

    def configure_optimizers(self):
        self.planned = self.trainer.max_epochs, self.trainer.estimated_stepping_batches
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.planned[1])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize(("limits", "threads"), [({"max_epochs": 3}, 1), ({"max_epochs": -1, "max_steps": 3}, None)])
def test_a_module_may_ask_how_long_it_will_be_trained(limits, threads):
    rows = TensorDataset(torch.randn(10, 3))
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    alone = Asks()
    L.Trainer(max_epochs=6, **quiet).fit(alone, DataLoader(rows, 4))
    federation = Federation(FedAvg(learner=Asks()), local_epochs=2, threads=threads)
    data = PerClient([L.LightningDataModule.from_datasets(rows, batch_size=4)] * 2)
    L.Trainer(limit_val_batches=0, **limits, **quiet).fit(federation, datamodule=data)
    for module in federation.clients.values():
        assert module.learner.planned == alone.planned == (6, 18)
        assert module.learner.rates == pytest.approx(alone.rates)
    # nor does the plan end anything
    L.Trainer(max_epochs=5, limit_val_batches=0, **quiet).fit(federation, datamodule=data, ckpt_path=None)
    assert len(federation.clients[0].learner.rates) > len(alone.rates)


class Elsewhere(L.LightningModule):
    """A module whose batches go to another device while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.seen: list[str] = []

    def on_train_epoch_start(self):
        self.trainer.strategy._root_device = torch.device("meta")

    def training_step(self, batch, batch_idx):
        self.seen.append(batch[0].device.type)
        return self.layer.weight.square().mean()

    def on_train_epoch_end(self):
        self.trainer.strategy._root_device = torch.device("cpu")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_the_short_way_brings_batches_to_the_device():
    """A DataLoader makes them on the CPU."""
    module, own = Elsewhere(), Ends()
    fitting = trainer(1, callbacks=[own])
    make_endless(fitting, own, lambda: None, lambda: True)
    make_lean(fitting, module, own)
    assert type(fitting.fit_loop.epoch_loop) is LeanEpochLoop
    fitting.fit(module, DataLoader(TensorDataset(torch.rand(8, 3)), batch_size=4))
    assert module.seen == ["meta", "meta"]


@pytest.fixture
def another_lightning(monkeypatch):
    """The short way has not been imported yet, and the warning not been given; both are put back."""
    monkeypatch.delitem(sys.modules, "lit_pfl.lightning_internals.lean_loop")
    batch_loop._short_way.cache_clear()
    yield monkeypatch
    batch_loop._short_way.cache_clear()


def take_the_short_way(fittings, own):
    for fitting in fittings:
        fitting.callbacks[:] = [own]
        make_lean(fitting, Elsewhere(), own)


def without_the_loop(monkeypatch):
    monkeypatch.delattr("lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop")


def without_the_module(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning.pytorch.loops.fetchers", None)


def without_a_method(monkeypatch):
    monkeypatch.delattr("lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop.update_lr_schedulers")


def with_another_signature(monkeypatch):
    loop = "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop.run"
    monkeypatch.setattr(loop, lambda self, data_fetcher, kwargs: None)


@pytest.mark.parametrize("change", [without_the_loop, without_the_module, without_a_method, with_another_signature])
def test_another_lightning_is_taken_its_own_way_with_one_warning(another_lightning, change):
    fittings, own = [trainer(1, callbacks=[]) for _ in range(2)], L.Callback()
    stock = [fitting.fit_loop.epoch_loop for fitting in fittings]
    change(another_lightning)
    with pytest.warns(UserWarning, match="Clients take the Trainer's own loop") as warned:
        take_the_short_way(fittings, own)
    assert len(warned) == 1
    assert [fitting.fit_loop.epoch_loop for fitting in fittings] == stock


@pytest.mark.seconds
def test_the_trainers_own_loop_gives_the_same_weights(another_lightning):
    lean = run(client(FedAvg))
    batch_loop._short_way.cache_clear()
    another_lightning.delitem(sys.modules, "lit_pfl.lightning_internals.lean_loop")
    another_lightning.delattr("lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop", raising=True)
    with pytest.warns(UserWarning, match="Clients take the Trainer's own loop"):
        own = run(client(FedAvg))
    assert_equal(weights(lean), weights(own))


class Flat(Learner):
    """Somebody's module for :class:`Digits`, without a schedule."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 10), momentum=0.9)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)


class Logs(Flat):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("step", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_epoch_end(self):
        self.log("end", float(self.current_epoch))


class LogsAtTheEnd(Flat):
    def on_train_epoch_end(self):
        self.log("end", float(self.current_epoch))


class EndsItsEpoch(Flat):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            raise StopIteration
        return super().training_step(batch, batch_idx)


def progress(fitting):
    loop = fitting.fit_loop
    counts = [loop.epoch_progress.state_dict(), loop.epoch_loop.batch_progress.state_dict()]
    return [*counts, fitting.global_step, loop.epoch_loop._batches_that_stepped]


@pytest.mark.seconds
@pytest.mark.parametrize("learner", [Flat, Logs, LogsAtTheEnd, EndsItsEpoch])
def test_the_short_way_counts_and_logs_what_the_trainers_own_does(learner):
    both = [
        run(FedAvg(learner=learner()), rounds=3, local_epochs=2, client_trainer=options)
        for options in ({}, {"callbacks": [Listens()]})
    ]
    assert [type(f.clients[0].trainer.fit_loop.epoch_loop) is LeanEpochLoop for f in both] == [True, False]
    short, own = (f.clients[1].trainer for f in both)
    assert_equal(*map(weights, both))
    assert progress(short) == progress(own)
    assert short.callback_metrics == own.callback_metrics
    assert ("end" in short.callback_metrics) == ("Logs" in learner.__name__)


@pytest.mark.seconds
def test_callbacks_that_a_learner_brings_hear_of_batches():
    heard = []

    class Hears(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            heard.append(pl_module.spec.client_id)

    class Brings(Flat):
        def configure_callbacks(self):
            return [Hears()]

    federation = run(FedAvg(learner=Brings()), rounds=2)
    each = [len(federation.data.client(k).train) for k in federation.clients]
    assert [heard.count(k) for k in federation.clients] == [2 * batches for batches in each]
    assert_equal(weights(federation), weights(run(FedAvg(learner=Flat()), rounds=2)))


def test_callbacks_of_other_packages_are_looked_up_once_for_all_clients_and_made_for_each(monkeypatch):
    from lightning.fabric.utilities import registry

    from lit_pfl.lightning_internals import undisturbed  # the function, in whose module the look-up is

    looked, made = [], []

    class Factory:
        name = "another package's"

        def load(self):
            return lambda: made.append(L.Callback()) or [made[-1]]

    def entry_points(**which):
        looked.append(which)
        return [Factory()]

    module = sys.modules[undisturbed.__module__]
    for one in (registry, module):
        monkeypatch.setattr(one, "entry_points", entry_points)
    module._entry_points.cache_clear()
    federation = run(client(FedAvg), digits(3), rounds=1)
    module._entry_points.cache_clear()
    assert looked == [{"group": "lightning.pytorch.callbacks_factory"}] * 2  # for the federation's Trainer, for theirs
    assert registry.entry_points is entry_points
    own = [callback for module in federation.clients.values() for callback in module.trainer.callbacks]
    assert len(made) == 5  # also for one that never trains, whose Trainer is lent to others
    assert all(any(one is callback for callback in own) for one in made[2:])
