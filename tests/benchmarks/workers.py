"""How much time a federation in worker processes takes beyond the training itself.

    python tests/benchmarks/workers.py [A] [B] [C] [--root FOLDER] [--rounds N] [--clients N] [--workers N]
        [--no-recover]

The jobs are those of ``speed.py``. Two things take turns, so that they see the same machine: the federation on Ray, in
workers of one thread; and bare PyTorch loops, each of one thread in one of the same workers, over the same clients,
that tell each other nothing. The ratio is that of the medians of their seconds a round.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import lightning as L
import torch
from speed import JOBS, Images, bare, federation, read

from lit_pfl.engines import Ray

LOOPS: dict[tuple[int, ...], Callable[[], None]] = {}  # of a worker


def bare_round(job: tuple[Any, ...], own: dict[int, tuple[int, ...]], client: Any) -> float:
    """Train all clients of this worker in a bare loop; return how many seconds that took."""
    mine = own[client.spec.client_id]
    if mine not in LOOPS:
        name, clients, each, batch_size, backbone, _ = job
        data = Images(*read(name, None), clients, each, batch_size)
        data.setup()
        LOOPS[mine] = bare(data, backbone, list(mine))
    began = time.perf_counter()
    with torch.enable_grad():
        LOOPS[mine]()
    return time.perf_counter() - began


class TakeTurns(L.Callback):
    """Runs the bare loops after every round and takes the times of both."""

    def __init__(self, job: tuple[Any, ...]) -> None:
        self.job = job
        self.seconds: list[tuple[float, float]] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.began = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        ours, workers = time.perf_counter() - self.began, pl_module.engine.of_workers()
        own = {clients[0]: tuple(clients) for clients in workers}
        self.seconds.append((ours, max(pl_module.ask(partial(bare_round, self.job, own), own).values())))


def compare(job: str, root: str | None, rounds: int, workers: int, recover: bool) -> None:
    name, clients, each, batch_size, backbone, _ = JOBS[job]
    torch.manual_seed(0)
    turns = TakeTurns(JOBS[job])
    data = Images(*read(name, root), clients, each, batch_size)
    began = time.perf_counter()
    federation(data, backbone, 1, rounds + 1, turns, engine=Ray(workers, recover=recover))
    whole = time.perf_counter() - began
    # the first round starts the clients' Trainers
    ours, two = (median(times) for times in zip(*turns.seconds[1:], strict=True))
    start = whole - sum(map(sum, turns.seconds))
    print(
        f"| {job} | {name}, {clients} x {each}, batch {batch_size}, {backbone.__name__} | "  # type: ignore[attr-defined]
        f"{1e3 * two:.0f} | {1e3 * ours:.0f} | {ours / two:.2f} | {start:.1f} |",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", choices=["A", "B", "C", "D"], help="default: A, B and C")
    parser.add_argument("--root", help="folder with the data sets")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that are timed")
    parser.add_argument("--clients", type=int, help="fewer clients than a job has")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--no-recover", action="store_true", help="keep no states")
    chosen = parser.parse_args()
    print(
        "| job | work | bare loops, ms a round | federation on Ray, ms a round | ratio | s of starting and ending |\n"
        "|---|---|---|---|---|---|"
    )
    for job in chosen.jobs or ["A", "B", "C"]:
        if chosen.clients:
            JOBS[job] = (JOBS[job][0], chosen.clients, *JOBS[job][2:])
        compare(job, chosen.root, chosen.rounds, chosen.workers, not chosen.no_recover)
