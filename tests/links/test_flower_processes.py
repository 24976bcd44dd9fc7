"""Federations of Flower with its own processes on this machine: SuperLink, SuperNodes, TLS, keys. Minutes in all."""

import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("flwr")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "flower"))

import certificates
from flwr.supercore.task_identity import TaskIdentity
from loopback import Loopback
from sites import task

from links.grids import DirectGrid, assert_same, states
from links.warm import Warm
from lit_pfl import Federation
from lit_pfl.lightning_internals import read_whole
from lit_pfl.links.flower import client_app
from lit_pfl.links.flower.messages import pack
from lit_pfl.links.flower.plan import Plan
from lit_pfl.links.flower.server import FlowerServer
from lit_pfl_callbacks.run_folder import read_rows
from tiny import assert_equal, trainer

pytestmark = pytest.mark.slow
METHODS = ["SimFed", "FactorizedFL", "Scaffold", "Ditto", "FedSLR", "PsiNet"]
CONFIG = {"clients": 6, "rounds": 4, "participation": 0.5, "seed": 1, "threads": 1, "local-epochs": 2}
NODES = {"north": [0, 1], "south": [2, 3], "west": [4, 5]}


@pytest.fixture(scope="module")
def federation(tmp_path_factory) -> Iterator[Loopback]:
    """A SuperLink and three SuperNodes with two clients each."""
    folder = tmp_path_factory.mktemp("loopback")
    federation = Loopback(folder)
    federation.environment["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] = "0.1"
    with Warm(folder / "warm", federation.environment) as warm:
        federation.environment["PATH"] = f"{warm.bin}:{federation.environment['PATH']}"
        with federation:
            for node, clients in NODES.items():
                federation.register(node)
                federation.start_supernode(node, clients)
            yield federation


def until(happened, seconds=600) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.2)


def test_six_methods_are_the_same_run_as_in_one_process(federation):
    def run(method: str) -> str:
        return federation.run(method=method, folder=str(federation.folder / method), timeout=600.0).stdout

    with ThreadPoolExecutor(3) as pool:  # more at a time, and the SuperLink's data base is often locked
        printed = dict(zip(METHODS, pool.map(run, METHODS), strict=True))
    for method in METHODS:
        whole = Federation(task.method({"method": method}), local_epochs=2, participation=0.5, seed=1, threads=1)
        trainer(4).fit(whole, datamodule=task.digits(6))
        assert (federation.folder / method / "checkpoint.ckpt").exists(), printed[method]
        assert_same(federation.folder, federation.folder / method, whole)


def in_one_process(place: Path, method: str, **config) -> DirectGrid:
    config = {**CONFIG, "method": method, **config, "folder": str(place / "server")}
    nodes = {
        number: {"clients": ",".join(map(str, clients)), "folder": str(place / node)}
        for number, (node, clients) in enumerate(NODES.items())
    }
    return DirectGrid(client_app(task.method, task.data), nodes, config)


def start_until_it_joins(federation: Loopback, node: str) -> None:
    """Start a SuperNode again and again: a SuperLink refuses one that it takes to be there still, for a minute."""
    start = len(federation.log(node))
    while "SuperNode ID" not in federation.log(node)[start:]:
        if node not in federation.processes or federation.processes[node].poll() is not None:
            federation.start_supernode(node, NODES[node])
        time.sleep(1)


def test_nodes_and_superlink_are_killed_and_started_again(federation, tmp_path, monkeypatch):
    """A SuperNode in round 2, which then is missing; and the SuperLink, once the node has taken part again."""
    folder = federation.folder / "killed"
    config = {"method": "Ditto", "participation": 1.0, "rounds": 9, "timeout": 25.0}

    def uploads() -> list[int]:
        return [int(row["uploads"]) for row in read_rows(folder / "metrics.csv")]

    log = federation.folder / "south.log"
    start = log.stat().st_size
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(federation.run, **config, folder=str(folder))
        until(lambda: b"ROUND 2]" in log.read_bytes()[start:])
        federation.stop("south", signal=9)
        start_until_it_joins(federation, "south")
        until(lambda: uploads()[-1:] == [6] and 4 in uploads())
        federation.stop("superlink", signal=9)
        with pytest.raises(RuntimeError):
            running.result()
    done = len(uploads())
    federation.start_superlink()
    assert "continues after round" in federation.run(**config, folder=str(folder)).stdout
    assert uploads()[:2] == [6, 4]
    assert len(uploads()) == 9 > done
    assert uploads()[-1] == 6

    assert_as_without_network(federation, folder, tmp_path, monkeypatch, **config)


def refusals(folder: Path) -> list[tuple[str, int, str]]:
    """Return round, client and reason of what was refused."""
    path = folder / "refused.csv"
    return [(row["round"], int(row["client"]), row["reason"]) for row in read_rows(path)] if path.exists() else []


def assert_as_without_network(federation: Loopback, folder: Path, tmp_path: Path, monkeypatch, **config) -> None:
    """Compare with a run in one process, in which nodes were silent where they were refused or missing, bit for bit."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    reference = in_one_process(tmp_path, **config)
    for round, client, _ in refusals(folder):
        reference.down_in.setdefault(round, set()).add(client // 2)
    plan = Plan.of(reference.config)
    FlowerServer(reference, task.method(reference.config), task.spec(reference.config), plan).run()
    assert_equal(states(federation.folder, folder), states(tmp_path, tmp_path / "server"))
    coordinators = [read_whole(path / "checkpoint.ckpt")["coordinator"] for path in (folder, tmp_path / "server")]
    assert_equal(*(coordinator["server"] for coordinator in coordinators))


class Listener:
    """Passes bytes on between nodes and a SuperLink, and keeps them."""

    def __init__(self, port: int) -> None:
        self.target, self.heard = port, bytearray()
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = self.server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.server.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self.target))
            for ends in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                self.heard += data
                sink.sendall(data)
        except OSError:
            pass
        finally:
            sink.close()


def test_traffic_is_not_plain_text(federation):
    listener = Listener(federation.port)
    federation.stop("west")
    federation.start_supernode("west", NODES["west"], listener.port)
    federation.run(method="FedAvg", folder=str(federation.folder / "heard"), rounds=1, participation=1.0)
    federation.stop("west")
    federation.start_supernode("west", NODES["west"])
    payload = pack({4: task.method({"method": "FedAvg"}).build(task.spec({})).initial()})
    [array] = payload["payloads"].values()
    payload_words = [b"data_offsets", b'"dtype":"F32"', b"backbone"]
    assert all(word in array.data for word in payload_words)  # what a payload looks like
    assert len(listener.heard) > 2 * 2 * array.numpy().nbytes
    assert listener.heard[:2] == b"\x16\x03"  # a TLS handshake
    for word in [*payload_words, b"/v1/fleet", b"POST /"]:
        assert word not in listener.heard


def refused(federation: Loopback, node: str) -> str:
    """Return what a SuperNode says that cannot join."""
    federation.start_supernode(node, [0])
    process = federation.processes[node]
    process.wait(90)
    federation.processes.pop(node)
    assert process.returncode != 0
    log = federation.log(node)
    assert "SuperNode ID" not in log  # what one says that has joined
    return log


def test_an_unknown_node_is_refused(federation):
    certificates.node_keys(federation.keys, "stranger")
    assert "Failed to activate SuperNode" in refused(federation, "stranger")
    assert "[/v1/fleet/activate-node][ApiError:2004]" in federation.log("superlink")
    assert "SuperNode ID" in federation.log("north")


def test_a_wrong_certificate_is_refused(federation):
    """By a SuperNode that trusts another authority than the one of this SuperLink."""
    certificates.node_keys(federation.keys, "betrayed")
    federation.flwr("supernode", "register", str(federation.keys / "betrayed.pub"), "loopback")
    keys, others = federation.keys, federation.folder / "others"
    certificates.main(others, ["127.0.0.1"], [])
    (others / "betrayed").write_bytes((keys / "betrayed").read_bytes())
    federation.keys = others
    try:
        assert "CERTIFICATE_VERIFY_FAILED" in refused(federation, "betrayed")
    finally:
        federation.keys = keys


def test_old_rounds_and_other_runs_are_refused(federation, tmp_path, monkeypatch):
    """A node that is registered answers round 2 with what it sent in another run, and round 4 with round 1."""
    project = tmp_path / "project"
    shutil.copytree(federation.project, project)
    shutil.copy(Path(__file__).with_name("replaying.py"), project / "sites" / "client_app.py")
    options = project / "pyproject.toml"
    options.write_text(options.read_text().replace('method = "Ditto"', 'method = "Ditto"\nagain = ""'))
    config = {"method": "Ditto", "participation": 1.0, "timeout": 60.0}
    federation.stop("south")
    monkeypatch.setattr(federation, "project", project)
    federation.start_supernode("south", NODES["south"], replays=True)
    try:
        federation.run(**config, folder=str(federation.folder / "earlier"), rounds=2)
        folder = federation.folder / "replayed"
        printed = federation.run(**config, folder=str(folder), rounds=4, again="2=earlier/2,4=1").stdout
        until((folder / "clients.csv").exists)  # what is printed may break off earlier
    finally:
        federation.stop("south")
        federation.start_supernode("south", NODES["south"])
    reasons = {"2": "of another run", "4": "of round 1, not of round 4"}
    expected = [(n, c, f"Client {c}: its node's answer is {reasons[n]}.") for n in "24" for c in (2, 3)]
    assert refusals(folder) == expected
    assert "Client 2: its node's answer is of another run." in printed
    assert_as_without_network(federation, folder, tmp_path, monkeypatch, **config)


@pytest.mark.parametrize("seed", range(int(os.environ.get("LIT_PFL_KILLED_NODES", "2"))))
def test_a_node_that_is_killed_at_random(federation, tmp_path, monkeypatch, seed):
    """The run ends, and is that in which nodes were silent in the rounds in which they were missing."""
    random = Random(seed)
    node, method = random.choice(list(NODES)), random.choice(METHODS)
    signum, moment, rounds = random.choice([9, 15]), random.random(), random.choice([4, 6, 8])
    folder = federation.folder / f"killed {seed}"
    config = {"method": method, "participation": random.choice([0.5, 1.0]), "rounds": rounds, "timeout": 45.0}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(federation.run, **config, quorum=0.0, folder=str(folder))
        until(lambda: (folder / "checkpoint.ckpt").exists())
        time.sleep(moment * 6 * rounds)  # about what rounds take
        done = len(read_rows(folder / "metrics.csv")) if (folder / "metrics.csv").exists() else 0
        federation.stop(node, signum)
        start_until_it_joins(federation, node)
        running.result()
    until((folder / "clients.csv").exists)
    missing = len(refusals(folder))
    print(f"{seed} {method}: {node} got signal {signum} after round {done} of {rounds}, {missing} uploads missing")
    assert_as_without_network(federation, folder, tmp_path, monkeypatch, **config, quorum=0.0)
