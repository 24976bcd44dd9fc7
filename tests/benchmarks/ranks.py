"""How much time a federation in two processes takes beyond the training itself.

    python tests/benchmarks/ranks.py [A] [B] [C] [--root FOLDER] [--rounds N]

The jobs are those of ``speed.py``. Three things take turns, so that they see the same machine: the federation in two
processes of one thread; two bare PyTorch loops, each of one thread in one of the same two processes, over the same
clients, that tell each other nothing; and one bare loop over all clients, with two threads, in one of them. The ratios
are those of the medians of their seconds a round.
"""

import argparse
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import lightning as L
import torch
from speed import JOBS, Images, bare, federation, read


class TakeTurns(L.Callback):
    """Runs the bare loops after every round and takes the times of all three, from everybody's start to everybody's
    end.
    """

    def __init__(self, make: Callable[[list[int] | None], Callable[[], None]]) -> None:
        self.make = make
        self.loops: list[tuple[int, Callable[[], None]]] = []  # threads, loop
        self.seconds: list[list[float]] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self.loops:
            alone = self.make(None) if trainer.is_global_zero else lambda: None
            self.loops = [(1, self.make(list(pl_module.clients))), (2, alone)]  # type: ignore[arg-type, call-overload]
        trainer.strategy.barrier()
        self.began = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.strategy.barrier()
        seconds = [time.perf_counter() - self.began]
        before = torch.get_num_threads()
        for threads, loop in self.loops:
            torch.set_num_threads(threads)
            trainer.strategy.barrier()
            began = time.perf_counter()
            loop()
            trainer.strategy.barrier()
            seconds.append(time.perf_counter() - began)
        torch.set_num_threads(before)
        self.seconds.append(seconds)
        self.first = trainer.is_global_zero


def compare(job: str, root: str | None, rounds: int) -> None:
    name, clients, each, batch_size, backbone, _ = JOBS[job]
    torch.manual_seed(0)
    data = Images(*read(name, root), clients, each, batch_size)
    data.setup()
    turns = TakeTurns(lambda some: bare(data, backbone, some))
    options: dict[str, Any] = {"devices": 2, "strategy": "federated"}
    federation(data, backbone, 1, rounds + 1, turns, **options)
    if not turns.first:
        return
    batches = clients * -(-each // batch_size)
    # the first round starts the clients' Trainers
    ours, two, one = (median(times) for times in zip(*turns.seconds[1:], strict=True))
    print(
        f"| {job} | {name}, {clients} x {each}, batch {batch_size}, {backbone.__name__} | "  # type: ignore[attr-defined]
        f"{1e3 * one / batches:.2f} | {1e3 * two / batches:.2f} | {1e3 * ours / batches:.2f} | {ours / two:.2f} | "
        f"{ours / one:.2f} |",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", choices=["A", "B", "C", "D"], help="default: A, B and C")
    parser.add_argument("--root", help="folder with the data sets")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that are timed")
    chosen = parser.parse_args()
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(
            "| job | work | one bare loop, two threads, ms a batch | two bare loops | federation, two processes | "
            "ratio to two | ratio to one |\n|---|---|---|---|---|---|---|"
        )
    for job in chosen.jobs or ["A", "B", "C"]:
        compare(job, chosen.root, chosen.rounds)
