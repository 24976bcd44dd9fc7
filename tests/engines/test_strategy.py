"""Federations in two processes: the same numbers, and a clean end whatever happens to one of them."""

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.pytorch.demos.boring_classes import BoringModel
from methods_on_ranks import METHODS, OTHERS, outcome, run

from lit_pfl import Federation
from lit_pfl.cli import main
from lit_pfl.engines.ranks import Ranks
from lit_pfl.errors import ConfigError
from lit_pfl.methods import FedAvg
from tiny import assert_equal, client, digits, trainer

HERE = Path(__file__).parent
LIT_PFL = Path(sys.executable).with_name("lit-pfl")
RUN = Path("runs/Dies-Digits/version_0")


def environment(**more: str) -> dict[str, str]:
    """Return what a process started by a test finds around it."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "OMP_NUM_THREADS": "1", **more}


def started(script: str, *words: object, launcher: tuple[str, ...] = (), **more: str) -> subprocess.CompletedProcess:
    command = [*(launcher or (sys.executable,)), str(HERE / script), *map(str, words)]
    return subprocess.run(command, env=environment(**more), capture_output=True, text=True, timeout=600)


def of_all(folder: Path, method: str) -> dict:
    """Return what the processes of a run have kept: clients of all, and everything else, in which they agree."""
    first, *others = (torch.load(path, weights_only=False) for path in sorted(folder.glob(f"{method}.*")))
    assert others
    for other in others:
        if other["coordinator"] is not None:
            assert_equal(other["coordinator"], first["coordinator"])
            assert other["rows"] == first["rows"]
        assert not first["clients"].keys() & other["clients"].keys()
        first["clients"] |= other["clients"]
    return {**first, "clients": dict(sorted(first["clients"].items()))}


@pytest.mark.parametrize("methods", [METHODS, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["some", "others"])
def test_two_processes_end_as_one(tmp_path, methods):
    """Weights, what the server has, byte counts and scores, bit for bit, of all methods."""
    came = started("methods_on_ranks.py", tmp_path, 2, *methods)
    assert came.returncode == 0, came.stderr
    for method in methods:
        one, two = outcome(run(method, 1)), of_all(tmp_path, method)
        assert len(two["clients"]) == 6
        assert_equal(one, two, method)


@pytest.mark.slow
def test_a_client_a_process_ends_as_all_in_one(tmp_path):
    """torchrun with the unchanged callback: what a federation in one process makes of the same clients."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "6")
    came = started("methods_on_link.py", tmp_path, *METHODS, launcher=torchrun)
    assert came.returncode == 0, came.stderr
    for method in METHODS:
        one, six = outcome(run(method, 1)), of_all(tmp_path, method)
        del one["rows"]
        assert_equal(one, six, method)


def lit_pfl(*words: str, **more: str) -> subprocess.CompletedProcess:
    """Type a command."""
    command = [str(LIT_PFL), *words]
    return subprocess.run(command, env=environment(**more), capture_output=True, text=True, timeout=600)


FEW = [
    "--model", "dying.Dies", "--model.backbone", "MLP", "--data.num_clients", "4", "--data.image_size", "8",
    "--trainer.max_epochs", "4", "--trainer.accelerator", "cpu", "--federation.threads", "1",
]  # fmt: skip


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def federation_in(folder: Path) -> dict:
    return torch.load(folder / "checkpoints/last.ckpt")["federation"]


def test_a_killed_process_ends_the_other_and_the_run_goes_on_in_one(tmp_path):
    """And from one process in two: the checkpoint is a federation's, not a process's."""
    killed = lit_pfl("fit", *FEW, "--trainer.devices", "2", DIES="SIGKILL", DIES_WITH_CLIENT="1")
    assert killed.returncode == 2
    message = killed.stderr.strip().splitlines()[-1]
    assert "ended by signal 9" in message
    assert f"go on with: lit-pfl fit --config {RUN}/config.yaml --ckpt_path {RUN}/checkpoints/last.ckpt" in message
    assert [line.partition(" ·")[0] for line in killed.stdout.splitlines()] == ["round 1/4", "round 2/4"]
    assert [path.name for path in Path("runs/Dies-Digits").iterdir()] == ["version_0"]

    resume = ["fit", "--config", f"{RUN}/config.yaml", "--ckpt_path", f"{RUN}/checkpoints/last.ckpt"]
    main([*resume, "--trainer.max_epochs", "3", "--trainer.devices", "1"])
    four = lit_pfl(*resume, "--trainer.devices", "2", "--trainer.max_epochs", "4")
    assert four.returncode == 0, four.stderr
    assert four.stdout.count("Run folder") == 1
    main(["fit", *FEW])
    assert_equal(federation_in(RUN), federation_in(RUN.with_name("version_1")))


def test_a_process_that_gives_up_ends_in_good_order():
    came = started("giving_up.py", find_free_network_port())
    assert (came.returncode, came.stderr) == (2, "")


@pytest.mark.slow
def test_the_tables_of_two_processes_are_those_of_one():
    """What is sent by kind of tensor, also from the other process; whose parameters are how alike; who stands where."""
    tiny = str(HERE.parent / "conf/tiny.yaml")
    for version, words in {"one": [], "two": ["--trainer.devices", "2", "--trainer.strategy", "federated"]}.items():
        words += ["--config", tiny, "--trainer.logger.version", version, "--trainer.max_epochs", "1"]
        assert lit_pfl("fit", *words).returncode == 0
    one, two = (Path("runs/SimFed-Digits") / version for version in ("one", "two"))
    for name in ("communication.csv", "embeddings.csv", "clients.csv", "metrics.csv"):
        assert (one / name).read_text() == (two / name).read_text(), name
    of_parameters = [
        [line for line in (run / "similarity.csv").read_text().splitlines() if line.split(",")[1] in ("u", "v")]
        for run in (one, two)
    ]
    assert of_parameters[0] == of_parameters[1]
    assert len(of_parameters[0]) == 2 * 3


@pytest.mark.slow
def test_the_files_of_a_run_are_those_of_one_process():
    """What loggers, tables and callbacks write, and predictions."""
    tiny = ["--config", str(HERE.parent / "conf/tiny.yaml"), "--federation.threads", "1", "--seed_everything", "1"]
    one, two = Path("runs/one"), Path("runs/two")
    for folder, devices in ((one, "1"), (two, "2")):
        run = ["--trainer.logger.name", "", "--trainer.logger.version", folder.name]
        last = ["--ckpt_path", f"{folder}/checkpoints/last.ckpt", "--trainer.devices", devices]
        callbacks = ["--trainer.callbacks+=PersonalizedModels", "--federation.evaluate", "after"]
        for words in (
            ["fit", *tiny, *run, *callbacks, "--trainer.devices", devices],
            ["predict", "--config", f"{folder}/config.yaml", *last],
        ):
            came = lit_pfl(*words)
            assert came.returncode == 0, came.stderr
    for name in ("metrics.csv", "clients.csv", "predictions.csv"):
        assert (one / name).read_text() == (two / name).read_text(), name
    models = [{path.name: path.read_bytes() for path in (run / "models").iterdir()} for run in (one, two)]
    assert sorted(models[0]) == [f"client_{k}.safetensors" for k in range(3)]
    assert models[0] == models[1]
    # uploads are compared among the clients of a process
    alike = [[row for row in rows(run / "similarity.csv") if row["group"] in "uv"] for run in (one, two)]
    assert len(alike[0]) == 2 * 3
    assert alike[0] == alike[1]
    assert_equal(federation_in(one), federation_in(two))


@pytest.mark.slow
@pytest.mark.parametrize("client", ["0", "1"])
def test_an_error_in_one_process_is_known_in_the_other(client):
    came = lit_pfl("fit", *FEW, "--trainer.devices", "2", DIES="error", DIES_WITH_CLIENT=client)
    assert came.returncode in (1, 2)
    assert f"Rank {client} could not go on (ArithmeticError: no more (in the fit of client {client}))." in came.stderr
    assert federation_in(RUN)["coordinator"]["round"] == 2


@pytest.mark.slow
def test_the_first_process_killed_ends_the_other():
    came = lit_pfl("fit", *FEW, "--trainer.devices", "2", DIES="SIGKILL", DIES_WITH_CLIENT="0")
    assert came.returncode == -signal.SIGKILL
    assert "Another process of this run is gone" in came.stderr  # which is read until the other process has ended
    assert federation_in(RUN)["coordinator"]["round"] == 2


@pytest.mark.slow
def test_a_process_that_does_not_answer_is_waited_for_no_longer_than_said():
    strategy = ["--trainer.strategy", "lit_pfl.engines.strategy.FederatedStrategy", "--trainer.strategy.timeout", "120"]
    came = lit_pfl("fit", *FEW, "--trainer.devices", "2", *strategy, DIES="SIGSTOP", DIES_WITH_CLIENT="1")
    assert came.returncode == 2
    assert "has not answered for 120 seconds" in came.stderr
    assert federation_in(RUN)["coordinator"]["round"] == 2


@pytest.mark.parametrize("devices", [1, 2])
def test_other_strategies_are_refused(devices):
    fitting = trainer(1, devices=devices, strategy="ddp_spawn")
    federation = Federation(client(FedAvg), seed=3)
    federation._trainer = fitting
    with pytest.raises(ConfigError, match="trainer.strategy: DDPStrategy trains copies of one model, one in each "):
        federation.setup("fit")


def test_a_module_that_is_no_federation_is_refused():
    with pytest.raises(ConfigError, match="spreads a Federation's clients; BoringModel is none"):
        trainer(1, devices=2, strategy="federated").strategy.connect(BoringModel())


def test_one_process_under_the_strategy_is_one_process():
    federation = Federation(client(FedAvg), seed=3, threads=1)
    trainer(2, devices=1, strategy="federated").fit(federation, datamodule=digits())
    assert federation.ranks.size == 1
    assert len(federation.clients) == 4


@pytest.mark.slow
def test_what_processes_tell_each_other_arrives_as_it_was_on_one_machine_and_on_several():
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4")
    came = started("some_ranks.py", launcher=torchrun)
    assert came.returncode == 0, came.stderr


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_clients_are_dealt_by_size(size):
    """Every client to one process, the loads within the largest client of each other."""
    sizes = {k: 10 + (k * 37) % 50 for k in range(20)}
    dealt = []
    for rank in range(size):
        ranks = Ranks()
        ranks.rank, ranks.size = rank, size
        dealt.append(ranks.dealt(sizes))
    assert sorted(client for own in dealt for client in own) == list(sizes)
    loads = [sum(sizes[k] for k in own) for own in dealt]
    assert max(loads) - min(loads) <= max(sizes.values())


def test_more_processes_than_clients_are_refused():
    ranks = Ranks()
    ranks.size = 3
    with pytest.raises(ConfigError, match="3 processes are more than the 2 clients"):
        ranks.dealt({0: 5, 1: 5})
