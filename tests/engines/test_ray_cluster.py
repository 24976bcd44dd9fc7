"""Several nodes of Ray, all on this machine: to the same bits, whoever joins or is lost."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections import defaultdict
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from ray_runs import fit_saved, same, same_files

from lit_pfl import methods as M
from lit_pfl.engines import Local, Ray, cleaner
from tiny import TinyNet, client

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs Ray", allow_module_level=True)
pytestmark = pytest.mark.slow


class Nodes:
    """Starts nodes of a cluster by ``ray start``, each with ports and a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folders: list[Path] = []
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"

    def start(self, cores: int) -> None:
        folder = self.folder / str(len(self.folders))
        head = ["--head", "--port", str(self.port), "--include-dashboard", "false"]
        where = ["--address", self.address] if self.folders else head
        options = ["--node-ip-address", "127.0.0.1", "--num-cpus", str(cores), "--temp-dir", str(folder)]
        ray = str(Path(sys.executable).with_name("ray"))
        for left in (2, 1, 0):
            came = subprocess.run([ray, "start", *where, *options], capture_output=True, text=True)
            if not came.returncode:
                break
            # Ray gives a node 30 seconds, which on busy cores may be too few, and leaves what it has started so far
            cleaner.clean(str(folder), {os.getpid()})
            assert left, came.stdout + came.stderr
        self.folders.append(folder)

    def lose(self, number: int) -> None:
        """End all processes of a node at once, as when a machine's power fails."""
        for process in cleaner.processes_in(str(self.folders[number]), {os.getpid()}):
            os.kill(process, signal.SIGKILL)


def in_a_process(script, tmp_path):
    """Run a function of this file: Ray reads where it is and its token when it is imported."""
    with tempfile.TemporaryDirectory(prefix="lit-pfl-nodes-", dir="/tmp") as folder:  # names of sockets must be short
        paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent.parent), *sys.path])
        secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4, "RAY_USAGE_STATS_ENABLED": "0"}
        code = f"from pathlib import Path; import test_ray_cluster as t; t.{script}(t.Nodes(Path({folder!r})))"
        try:
            came = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", code],
                env={**os.environ, **secret, "PYTHONPATH": paths},
                cwd=tmp_path,
                capture_output=True,
                text=True,
            )
        finally:
            cleaner.clean(folder, {os.getpid()})
    assert came.returncode == 0, came.stderr


def memory(module):
    """Return which node a client is on, and of its samples which piece of that node's memory they are in."""
    import ray

    address = module.data.train.data.images.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, inode, *_ = line.split()
        start, end = (int(part, 16) for part in span.split("-"))
        if start <= address < end:
            return ray.get_runtime_context().get_node_id(), os.getpid(), (inode, int(offset, 16) + address - start)
    raise AssertionError("mapped nowhere")


def two_nodes(nodes):
    torch.set_num_threads(1)
    nodes.start(cores=2)
    nodes.start(cores=1)
    one, two = Path("one"), Path("two")
    here, there = (
        fit_saved(client(M.Ditto), Local(), one, 3),
        fit_saved(client(M.Ditto), Ray(address=nodes.address), two, 3),
    )
    same(here, there)
    same_files(one, two)
    pieces, workers = defaultdict(set), defaultdict(set)
    for node, process, piece in there.ask(memory).values():
        pieces[node].add(piece)
        workers[node].add(process)
    assert sorted(len(some) for some in workers.values()) == [1, 2]
    assert [len(some) for some in pieces.values()] == [1, 1]  # a copy of the samples on every node


def test_two_nodes_come_to_the_same_bits_and_have_one_copy_of_the_samples_each(tmp_path):
    in_a_process("two_nodes", tmp_path)


class ComeAndGo(L.Callback):
    """Lets a second node join before the second round's training, and be lost before the fourth's."""

    def __init__(self, nodes):
        self.nodes = nodes
        self.workers = []

    def on_train_epoch_start(self, trainer, pl_module):
        crew = pl_module.engine._crew
        if trainer.current_epoch == 1:
            self.nodes.start(cores=1)
            crew.call_up(None, 6)
            crew.ray.wait([worker.ready for worker in crew.coming], num_returns=len(crew.coming))
        elif trainer.current_epoch == 3:
            self.nodes.lose(1)

    def on_train_epoch_end(self, trainer, pl_module):
        self.workers.append(len(pl_module.engine.of_workers()))
        assert all(pl_module.engine.of_workers())


def come_and_go(nodes):
    torch.set_num_threads(1)
    nodes.start(cores=1)
    watch = ComeAndGo(nodes)
    one, two = Path("one"), Path("two")
    # Ray keeps what is below 100 kB elsewhere, which would not be lost with the node
    method = client(M.Ditto, backbone=partial(TinyNet, width=1000))
    here, there = (
        fit_saved(method, Local(), one, 5),
        fit_saved(method, Ray(address=nodes.address), two, 5, callbacks=[watch]),
    )
    assert watch.workers == [1, 2, 2, 1, 1]
    same(here, there)
    same_files(one, two)


def test_a_node_that_joins_is_used_and_one_that_is_lost_costs_time_only(tmp_path):
    in_a_process("come_and_go", tmp_path)
