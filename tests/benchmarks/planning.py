"""What federations of many clients take, computed from costs that are measured here.

    python tests/benchmarks/planning.py

The costs are those of FedAvg with job C of ``speed.py``: a CNN, 64 images a client, batches of 16, one local epoch, one
thread a process. Bytes are exact. Memory is that of clients which have all trained, with plain SGD; machines
hold the uploads of a round once more. Seconds are those of training, of the server's mean and of bringing
uploads together, one after another.
"""

import subprocess
import sys
import time
from statistics import median
from typing import Any, NamedTuple

import lightning as L
import torch
from speed import JOBS, Images, federation, read

from lit_pfl.engines.parcels import packed

GIGABIT = 1e9 / 8
#: clients, participants of a round, processes, machines, bytes a second between machines
PLANS = [
    (1_000, 1_000, 1, 1, None),
    (1_000, 1_000, 2, 1, None),
    (1_000, 1_000, 16, 1, None),
    (1_000, 1_000, 16, 4, 10 * GIGABIT),
    (100_000, 1_000, 16, 4, 10 * GIGABIT),
    (100_000, 1_000, 128, 16, 10 * GIGABIT),
    (100_000, 100_000, 128, 16, 10 * GIGABIT),
]


class Costs(NamedTuple):
    """What is measured.

    Args:
        payload: bytes of an upload, and of a reply.
        train: seconds for a client's round.
        mean: seconds for an upload's share in the server's step.
        share: seconds to put an upload into the memory that a machine's processes share.
        client: bytes of memory for a client.
        process: bytes of memory for a process without clients.
    """

    payload: int
    train: float
    mean: float
    share: float
    client: float
    process: float


class Watch(L.Callback):
    """Takes the times of rounds, and of the server's steps in them."""

    def __init__(self) -> None:
        self.rounds: list[float] = []
        self.steps: list[float] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self.rounds and not hasattr(self, "federation"):
            self.federation: Any = pl_module
            server = pl_module.coordinator.server  # type: ignore[union-attr]
            aggregate = server.aggregate

            def timed(*args: Any) -> None:
                began = time.perf_counter()
                aggregate(*args)
                self.steps.append(time.perf_counter() - began)

            server.aggregate = timed
        self.began = time.perf_counter()

    def on_train_epoch_end(self, *args: Any) -> None:
        self.rounds.append(time.perf_counter() - self.began)


def measure(clients: int = 20, rounds: int = 5) -> Costs:
    torch.set_num_threads(1)
    name, _, each, batch_size, backbone, _ = JOBS["C"]
    watch = Watch()
    federation(Images(*read(name, None), clients, each, batch_size), backbone, 1, rounds + 1, watch)
    upload = watch.federation.clients[0].upload()
    seconds = []
    for _ in range(20):
        began = time.perf_counter()
        for array in packed(upload).tensors:
            array.copy()
        seconds.append(time.perf_counter() - began)
    step = median(watch.steps[1:]) / clients
    train = median(watch.rounds[1:]) / clients - step  # the first round starts the clients' Trainers
    resident = {n: int(subprocess.check_output([sys.executable, SPEED, "--resident", str(n)])) for n in (10, 100)}
    client = (resident[100] - resident[10]) / 90
    return Costs(upload.nbytes, train, step, median(seconds), client, resident[10] - 10 * client)


def planned(costs: Costs, clients: int, participants: int, processes: int, machines: int, speed: float | None) -> str:
    """Return a line of the table."""
    both_ways = 2 * participants * costs.payload
    memory = costs.process * processes / machines + clients * costs.client / machines
    memory += participants * costs.payload / machines  # all uploads of a round
    train, mean = participants / processes * costs.train, participants * costs.mean
    bring = participants / processes * costs.share if processes > 1 else 0.0
    if speed is not None:
        bring += participants * costs.payload * (machines - 1) / machines / speed  # to the process of the server
    return (
        f"| {clients:,} | {participants:,} | {processes} on {machines} | {both_ways / 1e9:.2f} | {memory / 1e9:.1f} | "
        f"{train:.1f} | {mean:.2f} | {bring:.2f} |"
    )


SPEED = str(__file__).replace("planning.py", "speed.py")

if __name__ == "__main__":
    costs = measure()
    print(
        f"An upload: {costs.payload / 1e6:.2f} MB. A client's round: {1e3 * costs.train:.1f} ms. An upload in the "
        f"server's mean: {1e3 * costs.mean:.2f} ms; put into shared memory: {1e3 * costs.share:.2f} ms. A client: "
        f"{costs.client / 1e6:.2f} MB of memory, a process without any: {costs.process / 1e6:.0f} MB.\n"
    )
    print(
        "| clients | in a round | processes on machines | GB sent a round, both ways | GB of memory a machine | "
        "s of training | s of the server's step | s of bringing uploads together |\n|---|---|---|---|---|---|---|---|"
    )
    for plan in PLANS:
        print(planned(costs, *plan))
