"""What a round of a large federation takes, computed from costs that are measured here.

    python tests/benchmarks/planning.py

The costs are those of FedAvg with job C of ``speed.py``: a CNN, 64 images a client, batches of 16, one local epoch, one
thread a process. Seconds are the processor's, so that others who work on the machine matter less. Bytes are exact.
Memory is that of the machine that has the server, with clients which have all trained, by plain SGD: its share of the
clients, what Ray keeps of all of them in case that a worker is lost, and the uploads of a round. To the server's
machine come the uploads and those states of the other machines' participants. Training, the server's mean and bringing
things together come one after another.
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

#: bytes a second between machines: 10 Gbit/s
WIRE = 10e9 / 8
#: clients, participants of a round, processes, machines
PLANS = [
    (1_000, 1_000, 1, 1),
    (1_000, 1_000, 2, 1),
    (1_000, 1_000, 16, 1),
    (1_000, 1_000, 16, 4),
    (100_000, 1_000, 16, 4),
    (100_000, 1_000, 128, 16),
    (100_000, 100_000, 128, 16),
]


class Costs(NamedTuple):
    """What is measured.

    Args:
        payload: bytes of an upload, and of a reply.
        train: seconds for a client's round.
        mean: seconds for an upload's share in the server's step.
        state: bytes of a client's state, which Ray keeps.
        share: seconds to put an upload and a state into the memory that a machine's processes share.
        client: bytes of memory for a client.
        process: bytes of memory for a process without clients.
    """

    payload: int
    train: float
    mean: float
    state: int
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
                began = time.process_time()
                aggregate(*args)
                self.steps.append(time.process_time() - began)

            server.aggregate = timed
        self.began = time.process_time()

    def on_train_epoch_end(self, *args: Any) -> None:
        self.rounds.append(time.process_time() - self.began)
        self.state = self.federation.engine.states([0])


def measure(clients: int = 20, rounds: int = 5) -> Costs:
    torch.set_num_threads(1)
    name, _, each, batch_size, backbone, _ = JOBS["C"]
    watch = Watch()
    federation(Images(*read(name, None), clients, each, batch_size), backbone, 1, rounds + 1, watch)
    upload = watch.federation.clients[0].upload()
    seconds = []
    for _ in range(20):
        began = time.process_time()
        sent = packed((upload, watch.state))
        for array in sent.tensors:
            array.copy()
        seconds.append(time.process_time() - began)
    step = median(watch.steps[1:]) / clients
    train = median(watch.rounds[1:]) / clients - step  # the first round starts the clients' Trainers
    resident = {n: int(subprocess.check_output([sys.executable, SPEED, "--resident", str(n)])) for n in (10, 100)}
    client = (resident[100] - resident[10]) / 90
    state = len(sent.head) + sum(array.nbytes for array in sent.tensors) - upload.nbytes
    return Costs(upload.nbytes, train, step, state, median(seconds), client, resident[10] - 10 * client)


def planned(costs: Costs, clients: int, participants: int, processes: int, machines: int) -> str:
    """Return a line of the table."""
    elsewhere = participants * (machines - 1) / machines
    wire = elsewhere * (costs.payload + costs.state) + (machines - 1) * costs.payload  # one reply a machine
    memory = (costs.process * processes + clients * costs.client) / machines + participants * costs.payload
    bring = wire / WIRE
    if processes > 1:
        memory += clients * costs.state
        bring += participants / processes * costs.share
    train, mean = participants / processes * costs.train, participants * costs.mean
    return (
        f"| {clients:,} | {participants:,} | {processes} on {machines} | {wire / 1e9:.1f} | {memory / 1e9:.1f} | "
        f"{train:.1f} | {mean:.1f} | {bring:.1f} |"
    )


SPEED = str(__file__).replace("planning.py", "speed.py")

if __name__ == "__main__":
    costs = measure()
    print(
        f"An upload: {costs.payload / 1e6:.2f} MB, a client's state {costs.state / 1e6:.2f} MB; to put both into "
        f"shared memory: {1e3 * costs.share:.2f} ms. A client's round: {1e3 * costs.train:.1f} ms. An upload in "
        f"the server's mean: {1e3 * costs.mean:.2f} ms. A client: {costs.client / 1e6:.2f} MB of memory, a process "
        f"without any: {costs.process / 1e6:.0f} MB.\n"
    )
    print(
        "| clients | in a round | processes on machines | GB between machines | GB of memory where the server is | "
        "s of training | s of the server's step | s of bringing together |\n|---|---|---|---|---|---|---|---|"
    )
    for plan in PLANS:
        print(planned(costs, *plan))
