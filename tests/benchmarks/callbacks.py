"""What every callback costs: its share of a round, with its defaults.

    python tests/benchmarks/callbacks.py [JOB ...] [--rounds N]

Each job is one local epoch a round on random images, with validation after every round and a run folder, as on the
command line. All callbacks watch the same run; the time inside each one's hooks, and inside what it is called with on
every transfer, is added up. Ten rounds hold what is done every five or ten rounds in its proportion, and, on top, the
first round, in which everything is measured.
"""

import argparse
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
from speed import CNN, MLP, Images, read
from torch import nn

from lit_pfl import Federation
from lit_pfl.core import Client
from lit_pfl.methods import FedAvg, SimFed
from lit_pfl_callbacks import (
    ClientsTable,
    CommunicationLedger,
    EmbeddingMap,
    RoundTimer,
    RunLogger,
    Similarity,
    SparsityMonitor,
)

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")

#: method, network, clients, images a client, batch size
JOBS: dict[str, tuple[type[Client], Callable[[int, int], nn.Module], int, int, int]] = {
    "simfed": (SimFed, CNN, 20, 320, 32),
    "fedavg": (FedAvg, CNN, 20, 320, 32),
    "hundred": (SimFed, CNN, 100, 64, 16),
    "thousand": (FedAvg, MLP, 1000, 16, 16),
}
KINDS: list[type[L.Callback]] = [
    ClientsTable, CommunicationLedger, EmbeddingMap, RoundTimer, Similarity, SparsityMonitor,
]  # fmt: skip
HOOKS = (
    "on_fit_start", "on_train_start", "on_train_epoch_start", "on_validation_start", "on_validation_end",
    "on_train_epoch_end", "on_train_end",
)  # fmt: skip


class Clocked:
    """Adds up the time inside a callback."""

    def __init__(self, callback: L.Callback) -> None:
        self.seconds = 0.0
        for name in (*HOOKS, "_note"):
            if hasattr(callback, name):
                setattr(callback, name, self.around(getattr(callback, name)))

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def clocked(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds += time.perf_counter() - began

        return clocked


class Rounds(L.Callback):
    """Adds up the time of rounds: all but what the loop does between them."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def on_train_epoch_start(self, *args: Any) -> None:
        self.began = time.perf_counter()

    def on_train_epoch_end(self, *args: Any) -> None:
        self.seconds += time.perf_counter() - self.began


def run(job: str, rounds: int) -> None:
    method, network, clients, each, batch_size = JOBS[job]
    images, labels = read("FashionMNIST", None)
    data = Images(images, labels, clients, each, batch_size)
    callbacks, clock = [kind(show=False) if kind is ClientsTable else kind() for kind in KINDS], Rounds()
    clocked = [Clocked(callback) for callback in callbacks]
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=rounds, accelerator="cpu", logger=RunLogger(folder), callbacks=[*callbacks, clock],
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        )  # fmt: skip
        trainer.fit(Federation(method(backbone=network), seed=1, threads=1), datamodule=data)
    # what callbacks do before the clock's own hook is in its rounds; those are given without it
    whole = clock.seconds - sum(one.seconds for one in clocked)
    print(f"{job}: {method.__name__}, {clients} clients x {each}, {whole / rounds:.2f} s a round, {rounds} rounds")
    for callback, one in zip(callbacks, clocked, strict=True):
        share = one.seconds / whole
        print(f"  {type(callback).__name__:22} {1000 * one.seconds / rounds:8.2f} ms a round {100 * share:7.3f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=", ".join(JOBS))
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    for job in arguments.jobs or JOBS:
        run(job, arguments.rounds)


if __name__ == "__main__":
    main()
