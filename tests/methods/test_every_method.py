"""What holds for every method, whoever writes it: a new one is tested here without being named."""

import csv
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from second_device import servers_elsewhere
from torch import Tensor, nn

import lit_pfl.methods
from lit_pfl import Client, Federation
from lit_pfl.cli import main
from lit_pfl.data import Digits
from lit_pfl.errors import ConfigError, UploadError
from lit_pfl.lightning_internals import AtomicCheckpointIO, LastCheckpoint
from lit_pfl.models import Backbone
from lit_pfl.payload import Payload
from tiny import Backwards, GroupNet, assert_equal, spec, trainer, weights

CONFIGS = Path(__file__).parents[2] / "configs"
METHODS = sorted(
    name for name in lit_pfl.methods.__all__ if issubclass(getattr(lit_pfl.methods, name), Client)
)  # fmt: skip


#: 90 images to train on, 90 to validate with; the rest is for testing
FEW: dict[str, Any] = {
    "image_size": 8, "batch_size": 16, "permute_labels": True, "train_fraction": 0.05, "test_fraction": 0.9
}  # fmt: skip


class PlainNet(Backbone):
    """A chain without any norm, for methods that can do with nothing else."""

    def __init__(self, channels: int, classes: int) -> None:
        body = nn.Sequential(
            nn.Conv2d(channels, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 8), nn.ReLU()
        )
        super().__init__(body, nn.Linear(8, classes))


class MixedNet(Backbone):
    """A convolution, batch norm and a classifier."""

    def __init__(self, channels: int, classes: int) -> None:
        body = nn.Sequential(
            nn.Conv2d(channels, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
        )
        super().__init__(body, nn.Linear(16, classes))


class MethodTester:
    """Runs one method on a few digits, with the options of its own configuration."""

    def __init__(self, name: str) -> None:
        self.config = CONFIGS / f"{name.lower()}.yaml"
        self.name = name

    def method(self, **options: Any) -> Client:
        """Return the method as configured, with a tiny network that it can use."""
        model = yaml.safe_load(self.config.read_text())["model"]
        model["init_args"] |= options
        parser = ArgumentParser(exit_on_error=False)
        parser.add_subclass_arguments(Client, "model")
        method: Client = parser.instantiate(parser.parse_object({"model": model})).model
        method.make_backbone = MixedNet
        try:
            method.build(spec(channels=1, image_size=8, local_epochs=2))
        except ConfigError:
            method.make_backbone = PlainNet
        return method

    def run(
        self, data: Digits | None = None, rounds: int = 2, method: Client | None = None, **options: Any
    ) -> Federation:
        """Run a federation and return it."""
        federation = Federation(method or self.method(), **{"seed": 3, "threads": 1, "local_epochs": 2, **options})
        trainer(rounds).fit(federation, datamodule=data or digits())
        return federation


def digits(num_clients: int = 3, **options: Any) -> Digits:
    return Digits(**{"num_clients": num_clients, **FEW, **options})


@pytest.fixture(params=METHODS)
def tester(request) -> MethodTester:
    return MethodTester(request.param)


def test_two_rounds_from_its_own_configuration(tester, tmp_path):
    small = {"data.num_clients": 3, "data.train_fraction": 0.05, "data.test_fraction": 0.9,
             "federation.local_epochs": 2, "trainer.max_epochs": 2, "trainer.enable_progress_bar": "false",
             "trainer.logger.save_dir": tmp_path}  # fmt: skip
    model = yaml.safe_load(tester.config.read_text())["model"]["init_args"]["backbone"]
    if "width" in model.get("init_args", {}):
        small["model.backbone.width"] = 2
    main(["fit", "--config", str(tester.config), *(f"--{name}={value}" for name, value in small.items())])
    [folder] = tmp_path.glob("*/version_0")
    rows = list(csv.DictReader((folder / "metrics.csv").open()))
    assert [float(row["round"]) for row in rows] == [1, 2]
    assert {"train/loss", "val/acc", "val/acc_std", "val/acc_worst10", "test/acc", "comm/up_bytes", "comm/down_bytes",
            "comm/total_bytes"} <= set(rows[0])  # fmt: skip
    assert all(0 <= float(row["val/acc"]) <= 1 and float(row["train/loss"]) > 0 for row in rows)
    assert float(rows[-1]["test/acc"]) >= 0
    assert (folder / "checkpoints" / "last.ckpt").exists()


def test_resumed_equals_uninterrupted(tester, tmp_path):
    def run(folder: Path, rounds: int, resume: bool = False) -> Federation:
        federation = Federation(tester.method(), seed=3, threads=1, local_epochs=2, participation=2)
        checkpoint = LastCheckpoint(folder)
        options: dict[str, Any] = {"callbacks": [checkpoint], "enable_checkpointing": True}
        fitting = trainer(rounds, default_root_dir=str(folder), **options)
        fitting.fit(federation, datamodule=digits(), ckpt_path=folder / "last.ckpt" if resume else None)
        return federation

    whole = run(tmp_path / "whole", 4)
    run(tmp_path / "parts", 2)
    resumed = run(tmp_path / "parts", 4, resume=True)
    assert_equal(weights(resumed), weights(whole))
    assert resumed.traffic.state_dict() == whole.traffic.state_dict()
    one, other = (
        AtomicCheckpointIO().load_checkpoint(tmp_path / folder / "last.ckpt")["federation"]["coordinator"]
        for folder in ("whole", "parts")
    )
    assert_equal(other, one)


def test_servers_work_on_the_clients_device_also_after_a_resume(tester, tmp_path):
    """There, where the CPU's tensors do not mix with the clients', everything comes out as on the CPU."""

    def run(rounds: int, resume: bool = False) -> Federation:
        federation = Federation(tester.method(), seed=3, threads=1, local_epochs=2, participation=2)
        checkpoint = LastCheckpoint()
        checkpoint.dirpath = str(tmp_path)
        fitting = trainer(rounds, callbacks=[checkpoint], enable_checkpointing=True)
        fitting.fit(federation, datamodule=digits(), ckpt_path=tmp_path / "last.ckpt" if resume else None)
        return federation

    expected = weights(run(4))
    with servers_elsewhere():
        run(2)
        assert_equal(weights(run(4, resume=True)), expected)


def test_the_order_of_clients_does_not_matter(tester):
    forwards, backwards = (tester.run(kind(num_clients=3, **FEW), rounds=3) for kind in (Digits, Backwards))
    assert_equal(weights(backwards), weights(forwards))
    assert forwards.traffic.state_dict() == backwards.traffic.state_dict()


def test_clients_that_do_not_take_part_stay_as_they_are(tester):
    federation = Federation(tester.method(), seed=3, threads=1, participation=2, local_epochs=2)
    seen: list[dict[int, dict[str, Tensor]]] = []

    class Watch(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            seen.append(weights(pl_module))

    trainer(4, callbacks=[Watch()]).fit(federation, datamodule=digits(4))
    for completed in range(1, 4):
        absent = federation.clients.keys() - set(federation.participants(completed))
        assert len(absent) == 2
        for client in absent:
            assert_equal(seen[completed][client], seen[completed - 1][client])


def test_a_single_client(tester):
    federation = tester.run(digits(1), rounds=3)
    assert len(federation.rows) == len(federation.clients[0].evaluated)


def test_a_single_batch(tester):
    federation = tester.run(digits(batch_size=10_000))
    assert all(len(client.training_data()) == 1 for client in federation.clients.values())


def test_bytes_are_those_of_the_encoded_payloads(tester, monkeypatch):
    sent: dict[str, list[int]] = {"up": [], "down": []}

    def watch(direction: str) -> None:
        ledger = lit_pfl.coordinator.Ledger
        count = getattr(ledger, f"sent_{direction}")

        def counted(self, client: int, payload: Payload) -> None:
            data = payload.to_bytes()
            sent[direction].append(len(data))
            received = Payload.from_bytes(data)
            assert received.keys() == payload.keys()
            assert all(torch.equal(received[name], payload[name]) for name in payload)
            count(self, client, payload)

        monkeypatch.setattr(ledger, f"sent_{direction}", counted)

    watch("up")
    watch("down")
    federation = tester.run(rounds=3)
    assert len(sent["up"]) == len(sent["down"]) == 9
    assert federation.traffic.total == sum(sent["up"]) + sum(sent["down"])


@pytest.mark.parametrize("permute_labels", [True, False])
def test_heads_travel_only_where_labels_agree(tester, permute_labels):
    federation = tester.run(digits(permute_labels=permute_labels), rounds=2)
    heads = [
        name
        for client, module in federation.clients.items()
        for name in [*module.upload(), *federation.coordinator.server.reply(client)]
        if ".head." in name
    ]
    if permute_labels:
        assert not heads
        own = [nn.utils.parameters_to_vector(c.backbone.head.parameters()) for c in federation.clients.values()]
        assert not torch.equal(own[0], own[1])


def test_a_bad_upload_is_refused_and_the_round_goes_on(tester, monkeypatch):
    collect = lit_pfl.coordinator.Coordinator.collect
    refused: list[int] = []

    def poisoned(self, uploads):
        assert not [upload for upload in uploads.values() if isinstance(upload, UploadError)]
        bad = Payload(
            {name: torch.full_like(t, torch.nan) if t.is_floating_point() else t for name, t in uploads[1].items()}
        )
        collect(self, {**uploads, 1: bad} if len(bad) else uploads)
        refused.append(len(self.refused))

    monkeypatch.setattr(lit_pfl.coordinator.Coordinator, "collect", poisoned)
    with warnings.catch_warnings(record=True):
        federation = tester.run(digits(permute_labels=False), rounds=3)
    assert refused == [1 if federation.clients[1].upload() else 0] * 3
    assert all(torch.isfinite(t).all() for state in weights(federation).values() for t in state.values())


def test_a_client_whose_training_runs_away_begins_again_from_its_last_good_state(tester, monkeypatch):
    method = tester.method()
    step = type(method).training_step

    def spoilt(self, batch, batch_idx):
        bad = self.spec.client_id == 1 and self.completed_rounds == 1 and self.current_epoch % 2 == 0
        return step(self, batch, batch_idx) * (float("nan") if bad else 1.0)

    monkeypatch.setattr(type(method), "training_step", spoilt)
    with pytest.warns(UserWarning, match=r"Round 2 goes on .*Client 1: .*The client begins its next"):
        federation = tester.run(method=method, rounds=4)
    assert not federation.coordinator.refused
    states = [weights(federation)[1], federation.clients[1].upload(), federation.coordinator.server.reply(1)]
    assert all(torch.isfinite(tensor).all() for state in states for tensor in state.values())


@pytest.mark.parametrize(
    "options",
    [
        {"client_trainer": {"gradient_clip_val": 0.5}},
        {"client_trainer": {"precision": "bf16-mixed"}},
        {"evaluate": "after"},
    ],
    ids=["clipping", "mixed precision", "evaluated after"],
)
def test_with_what_a_trainer_offers(tester, options):
    federation = tester.run(**options)
    assert all(torch.isfinite(t).all() for state in weights(federation).values() for t in state.values())


@pytest.mark.parametrize("backbone", [GroupNet, PlainNet])
def test_with_other_networks(tester, backbone):
    method = tester.method()
    method.make_backbone = backbone
    try:
        method.build(spec(channels=1, image_size=8, local_epochs=2))
    except ConfigError as error:  # some cannot; then they say why
        assert "model.backbone" in str(error)  # noqa: PT017
    else:
        assert tester.run(method=method).rows


def test_with_running_statistics_averaged(tester):
    federation = tester.run(method=tester.method(norm_stats="averaged"), rounds=3)
    assert all(torch.isfinite(t).all() for state in weights(federation).values() for t in state.values())


def test_with_a_schedule(tester):
    step = {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 1, "gamma": 0.5}}
    federation = tester.run(method=tester.method(scheduler=step), rounds=2)
    assert federation.rows
