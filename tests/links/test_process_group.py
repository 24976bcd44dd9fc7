"""A process a client: somebody's own script, started with torchrun."""

import difflib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from lit_pfl import Client, Federation, Payload, Server
from lit_pfl.core.asynchronous import FedBuff
from lit_pfl.errors import ConfigError
from lit_pfl.links import LocalHub, ProcessGroupLink, process_group
from lit_pfl.methods import FedAvg, Scaffold
from lit_pfl_callbacks import FederatedLoop, JoinInfo
from tiny import assert_equal, digits, trainer

HERE = Path(__file__).parent
EXAMPLES = HERE.parent.parent / "examples" / "torchrun"
sys.path.append(str(EXAMPLES))
sys.path.append(str(HERE))
from ddp_site_of_a_group import fit_site, site_module  # noqa: E402
from methods_on_link import CLIENTS, METHODS, PARTICIPATION, ROUNDS, SEED  # noqa: E402
from project import MyModule, my_data  # noqa: E402


def torchrun(processes: int, script: Path, *words: object) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), str(script)]
    came = subprocess.run(
        [*command, *map(str, words)], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert came.returncode == 0, came.stderr
    return came


def averaged_by_hand(sites: int, rounds: int, epochs: int) -> dict[str, Tensor]:
    """Return what plain PyTorch makes of the project: every site trains on, then all take the weighted mean."""
    models, optimizers, data, drawn = [], [], [], []
    for site in range(sites):
        torch.manual_seed(1)
        models.append(MyModule())
        optimizers.append(models[-1].configure_optimizers())
        data.append(my_data(site)[0])
        drawn.append(torch.get_rng_state())
    for _ in range(rounds):
        for site, (model, optimizer, batches) in enumerate(zip(models, optimizers, data, strict=True)):
            torch.set_rng_state(drawn[site])
            for _ in range(epochs):
                for batch in batches:
                    optimizer.zero_grad()
                    model.training_step(batch, 0).backward()
                    optimizer.step()
            drawn[site] = torch.get_rng_state()
        sizes = [len(batches.dataset) for batches in data]
        with torch.no_grad():
            for parameters in zip(*(model.parameters() for model in models), strict=True):
                mean = sum(p.double() * n / sum(sizes) for p, n in zip(parameters, sizes, strict=True))
                for parameter in parameters:
                    parameter.copy_(mean)
    return models[0].state_dict()


@pytest.mark.slow
def test_a_module_that_knows_nothing_of_it_is_averaged_over_two_processes(tmp_path):
    """Only the callback is added. Bytes are those of three uploads and of four replies: at first, and after each."""
    torchrun(2, HERE / "third_party.py", tmp_path, "none", 6)
    ends = [torch.load(tmp_path / f"{site}.pt") for site in range(2)]
    assert_equal(ends[0], ends[1])
    expected = averaged_by_hand(sites=2, rounds=3, epochs=2)
    for name, tensor in ends[0].items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)
    state = torch.load(tmp_path / "coordinator.pt")
    assert state["round"] == 3
    each = len(Payload(expected).to_bytes())
    assert state["ledger"]["clients"] == {0: [3 * each, 4 * each], 1: [3 * each, 4 * each]}


@pytest.mark.slow
def test_all_processes_resume_from_their_checkpoints(tmp_path):
    """Scaffold has a state at the server too; it is in the checkpoint of rank 0's Trainer."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    torchrun(2, HERE / "third_party.py", whole, "Scaffold", 8)
    torchrun(2, HERE / "third_party.py", resumed, "Scaffold", 4)
    torchrun(2, HERE / "third_party.py", resumed, "Scaffold", 8, "resume")
    for name in ("0.pt", "1.pt"):
        assert_equal(torch.load(whole / name), torch.load(resumed / name), name)
    one, two = (torch.load(folder / "coordinator.pt") for folder in (whole, resumed))
    assert one["ledger"] == two["ledger"]  # a reply that is sent again does not count
    assert_equal(one, two)


@pytest.mark.slow
@pytest.mark.long
def test_the_example_before_and_after():
    def scores(script: str) -> dict[str, float]:
        found = re.findall(r"site (\d): R2 (-?\d+\.\d+)", torchrun(4, EXAMPLES / script).stdout)
        return {site: float(r2) for site, r2 in sorted(found)}

    before, after, personalized = (scores(name) for name in ("before.py", "after.py", "personalized.py"))
    for found in (before, after, personalized):
        assert list(found) == ["0", "1", "2", "3"]
    assert all(before[site] != after[site] != personalized[site] for site in before)
    assert max(sum(after.values()), sum(personalized.values())) > sum(before.values())


def test_the_example_changes_no_more_than_the_callback():
    before, after = (EXAMPLES.joinpath(name).read_text().splitlines() for name in ("before.py", "after.py"))
    code = [line for line in difflib.ndiff(before, after) if line[:2] == "+ " and line[2:].startswith("    ")]
    assert code == [
        "+     loop = FederatedLoop(ProcessGroupLink(), every_n_epochs=2)",
        '+     trainer = L.Trainer(max_epochs=40, accelerator="cpu", callbacks=[loop], **QUIET)',
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"participation": 0.5}, "rounds: clients that wait"),
        ({"participation": 0}, "participation=0"),
        ({"rounds": 0}, "rounds=0: give 1 or more"),
        (
            {"deadline": 5},
            r"ProcessGroupLink\(deadline=...\): only a Federation has simulated time. Here, a round waits",
        ),
        ({"asynchronous": FedBuff()}, r"ProcessGroupLink\(asynchronous=...\): only a Federation has simulated time"),
        ({"privacy": None}, "only a Federation protects uploads"),
        ({"rank": 0}, r"ProcessGroupLink\(rank=0, size=None, address=None\): .* needs all three"),
        ({"rank": 0, "size": 2, "address": "localhost"}, "address='localhost': give host:port of the site of rank 0"),
        ({"rank": 0, "size": 2, "address": "localhost:99999"}, "address='localhost:99999': give host:port of the site"),
        ({"rank": "0", "size": 2, "address": "localhost:7"}, "rank='0' and size=2: give whole numbers"),
        ({"rank": 2, "size": 2, "address": "localhost:7"}, "rank=2 and size=2: ranks are from 0 to 1"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        ProcessGroupLink(**options)


def test_an_option_that_there_is_not_is_refused_as_by_python():
    with pytest.raises(TypeError, match="ProcessGroupLink has no option roundz"):
        ProcessGroupLink(roundz=3)


def test_loggers_write_in_every_process(tmp_path, monkeypatch):
    """Lightning counts torchrun's processes as those of one training, of which the first one logs."""
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    ProcessGroupLink()
    logger = CSVLogger(tmp_path, name="", version="")
    logger.log_metrics({"loss": 1.0}, step=0)
    logger.save()
    assert (tmp_path / "metrics.csv").exists()


def test_without_torchrun_it_says_so(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="RANK is not in the environment; start the script with torchrun"):
        ProcessGroupLink().join(JoinInfo(1, {"w": torch.ones(1)}))


def test_processes_of_slurm_find_each_other_by_what_slurm_says(monkeypatch):
    said = {"NTASKS": "8", "NTASKS_PER_NODE": "4", "PROCID": "5", "NODELIST": "gpu[07-08]", "JOB_ID": "314159"}
    for name, value in said.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # Lightning sets some, which are to go again
        monkeypatch.delenv(name)
    started = Mock(side_effect=ConnectionError)
    monkeypatch.setattr(process_group, "Processes", started)
    with pytest.raises(ConnectionError):
        ProcessGroupLink(timeout=9.0).join(JoinInfo(1, W))
    assert started.call_args.args == (5, 8, "gpu07", 15000 + 4159, 9.0)
    monkeypatch.setenv("SLURM_NTASKS", "1")
    with pytest.raises(ConfigError, match="RANK is not in the environment; .* or with srun in a job of several tasks"):
        ProcessGroupLink().join(JoinInfo(1, W))
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "7"}.items():
        monkeypatch.setenv(name, value)  # torchrun, started by srun
    with pytest.raises(ConnectionError):
        ProcessGroupLink(timeout=9.0).join(JoinInfo(1, W))
    assert started.call_args.args == (1, 2, "here", 7, 9.0)


def test_processes_that_train_one_model_are_no_clients():
    with pytest.raises(ConfigError, match=r"this Trainer has 2 that train one model; give Trainer\(devices=1\)"):
        ProcessGroupLink().join(JoinInfo(1, {"w": torch.ones(1)}, processes=2))


@pytest.mark.slow
def test_sites_of_two_processes_each_come_to_what_sites_of_one_do(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    words = [sys.executable, str(HERE / "ddp_site_of_a_group.py"), address, str(tmp_path)]
    # started by torchrun or by hand: what started a site's own processes is not asked for the other sites
    by_torchrun = [words[0], "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", *words[1:]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen([*command, str(site)], env=environment, stderr=subprocess.PIPE, text=True)
        for site, command in enumerate([words, by_torchrun])
    ]
    for one in started:
        _, errors = one.communicate(timeout=600)
        assert one.returncode == 0, errors
    hub = LocalHub()
    modules = [site_module(site) for site in range(2)]
    for site, module in enumerate(modules):
        hub.add(site, lambda site=site, module=module: fit_site(hub.link, module, site))
    hub.run()
    for site, module in enumerate(modules):
        for rank in range(2):
            torch.testing.assert_close(dict(torch.load(tmp_path / f"{site}_{rank}.pt")), dict(module.state_dict()))


class Wire:
    """Two processes' messages, in a queue each way."""

    rank, size = 0, 2

    def __init__(self, *arrives: bytes) -> None:
        self.arrives, self.sent = list(arrives), []

    def receive(self, source: int) -> bytes:
        return self.arrives.pop(0)

    def send(self, message: bytes, to: int) -> None:
        self.sent.append(message)


def message(payload: Payload, **words: object) -> bytes:
    link = ProcessGroupLink()
    link._processes = wire = Wire()
    link._send(1, payload, **words)
    return wire.sent[0]


W = {"w": torch.ones(3)}
BAD = {
    "nothing": b"",
    "noise": b"\xff" * 90,
    "deep": (200_000).to_bytes(8, "big") + b"[" * 200_000,
    "no words": (2).to_bytes(8, "big") + b"{}" + Payload(W).to_bytes(),
    "no payload": message(Payload(W))[:-5],
    "another shape": message(Payload({"w": torch.ones(4)})),
    "another name": message(Payload({"v": torch.ones(3)})),
    "NaN": message(Payload({"w": torch.tensor([1, torch.nan, 1])})),
}


def joins(**words: object) -> bytes:
    return message(Payload(W), **{"num_samples": 3, "method": "", "local_epochs": 1, "completed": 0, **words})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"method": "Ditto"}, "Client 1 trains by Ditto, but rank 0 without a method. Use the same method"),
        ({"local_epochs": 2}, r"Client 1 has FederatedLoop\(every_n_epochs=2\), but rank 0 has 1. Use the same number"),
        ({"completed": 2}, "Client 1 begins after 2 rounds, but rank 0 after 0. Give every fit the ckpt"),
    ],
)
def test_processes_that_do_not_go_together_are_refused_in_all_of_them(words, said):
    link = ProcessGroupLink()
    link._processes = wire = Wire(joins(**words))
    with pytest.raises(ConfigError, match=said):
        link.join(JoinInfo(3, W))
    there = ProcessGroupLink()
    there._processes, there._limit = Wire(*wire.sent), 0
    with pytest.raises(ConfigError, match=said):
        there._reply()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, {"completed": 3}),  # as all may be that were trained before
        ({"rounds": 9, "participation": 0.5}, {"completed": 2}),  # who waits for a turn has not saved the last one
    ],
)
def test_other_rounds_are_right_where_all_or_only_some_take_part(options, words):
    link = ProcessGroupLink(seed=3, **options)
    link._processes = Wire(joins(**words), *[message(Payload(W))] * 9)
    link.join(JoinInfo(3, W, completed=3))


def test_a_checkpoint_after_the_last_round_has_all_bytes_and_the_run_ends_again_from_it():
    link = ProcessGroupLink(rounds=1)
    link._processes = Wire(joins(), message(Payload(W)))
    link.join(JoinInfo(3, W))
    assert link.exchange(W) is None
    saved = link.state_dict()
    assert saved["ledger"] == link.coordinator.ledger.state_dict()
    again = ProcessGroupLink(rounds=1)
    again.load_state_dict(saved)
    again._processes = Wire(joins(completed=1))
    assert again.join(JoinInfo(3, W, completed=1)) is None
    assert again.state_dict()["ledger"] == saved["ledger"]


def test_the_server_is_that_of_the_method_unless_one_is_given():
    link, given = ProcessGroupLink(), Server()
    link.take_server(Scaffold(learner=MyModule()))
    assert type(link.server) is type(Scaffold(learner=MyModule()).configure_server())
    link = ProcessGroupLink(given)
    link.take_server(Scaffold(learner=MyModule()))
    assert link.server is given


def test_a_method_is_known_by_the_one_that_it_builds_on():
    class Mine(FedAvg):
        pass

    class Own(Client):
        shares = frozenset({"body"})

    assert (Mine().method_name, Own().method_name) == ("FedAvg", "Own")


def test_a_fit_without_a_batch_says_so_and_one_that_is_over_ends():
    def fit(data, epochs):
        loop = FederatedLoop(ProcessGroupLink())
        L.Trainer(max_epochs=epochs, logger=False, enable_checkpointing=False, callbacks=[loop]).fit(MyModule(), data)

    with pytest.raises(ConfigError, match="this process's training loader gives no batch"):
        fit([], 1)
    fit(my_data(0)[0], 0)


def test_a_rank_that_there_is_not(monkeypatch):
    for name, value in {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="RANK=2 and WORLD_SIZE=2: ranks are from 0 to 1"):
        ProcessGroupLink().join(JoinInfo(1, W))


@pytest.mark.parametrize("name", BAD)
def test_an_upload_that_is_none_is_refused_by_client_and_its_process_is_told(name):
    link = ProcessGroupLink(quorum=0.5)
    link._processes = wire = Wire(joins(), BAD[name], message(Payload(W)))
    link.join(JoinInfo(3, W))
    with pytest.warns(UserWarning, match="Round 1 continues without one upload. Client 1: "):
        link.exchange(W)
    assert link.coordinator.refused[0].client == 1
    there = ProcessGroupLink()
    there._processes, there._limit = Wire(*wire.sent[-1:]), 0
    with pytest.warns(UserWarning, match="Rank 0 has refused this process's upload of round 1. Client 1: "):
        assert_equal(dict(there._reply()), W)
    link.exchange(W)
    assert not link.coordinator.refused
    assert b'"refused": null' in wire.sent[-1]


@pytest.mark.slow
def test_a_client_a_process_ends_as_all_in_one(tmp_path):
    """What a federation in one process makes of the same clients, of methods with all that methods have."""
    torchrun(CLIENTS, HERE / "methods_on_link.py", tmp_path, *METHODS)
    for name, make in METHODS.items():
        federation = Federation(make(), seed=SEED, threads=1, participation=PARTICIPATION)
        trainer(ROUNDS).fit(federation, datamodule=digits(CLIENTS))
        found = [torch.load(tmp_path / f"{name}.{rank}", weights_only=False) for rank in range(CLIENTS)]
        assert_equal({k: c.state_dict() for k, c in federation.clients.items()}, {
            client: state for part in found for client, state in part["clients"].items()
        }, name)  # fmt: skip
        assert_equal(federation.coordinator.state_dict(), found[0]["coordinator"], name)
