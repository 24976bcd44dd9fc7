"""What a round costs that ten clients take part in, of few registered clients and of many.

    python tests/benchmarks/many_clients.py [100] [1000] [10000] [100000] [--methods FedAvg Ditto] [--awake N]
        [--validated N] [--rounds N] [--all-first] [--job tiny] [--aggregated]

Every federation runs in a process of its own: the first experiment of the paper of FedAvg (McMahan et al. 2017, Table
1, 2NN), 600 images of 28 x 28 a client, batches of 10; or, with ``--job tiny``, an MLP of a few hundred weights and
eight training samples a client, so that next to nothing is computed. One epoch a round, ``--validated`` clients
validated (100) and a checkpoint written after every round, no test. The figures are medians over the rounds after the
first two: seconds of the whole round, of training, of validation and of the checkpoint; then seconds until the first
round; the peak of memory, and bytes on disk in the end. Seconds are the processor's, so that other work on the machine
does not count. ``--awake`` is the engine's; without it all clients stay in memory. With ``--all-first`` everybody
trains in round 1, so that everybody has a state. With ``--aggregated`` models are scored after aggregation only, and
not kept as they have trained (``keep_trained=False``).

In the tiny job a participant that is in memory and has trained before takes a fifth of the time of another one, which
needs a Trainer first. Compare columns whose participants are of one kind: with ``--awake 20 --validated 10``, few are
in memory.
"""

import argparse
import json
import logging
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch

from lit_pfl import Federation, methods
from lit_pfl.core.participation import Participation
from lit_pfl.data import ClientData, FederatedDataModule, TensorLoader
from lit_pfl.engines import Local
from lit_pfl.lightning_internals import LastCheckpoint
from lit_pfl.models import MLP
from lit_pfl.randomness import Draws

TEN = 10


@dataclass(frozen=True)
class Job:
    """What a client computes: the side of its images, how many for training and for each kind of scoring, and so on."""

    side: int
    training: int
    scoring: int
    batch: int
    hidden: int


JOBS = {"tiny": Job(4, 8, 4, 4, 16), "McMahan": Job(28, 600, 100, 10, 200)}


class Few(FederatedDataModule):
    """A few samples a client, of a set that they all have in common."""

    def __init__(self, number: int, job: Job) -> None:
        super().__init__()
        self.number, self.job = number, job
        generator = torch.Generator().manual_seed(0)
        self.samples = torch.randn(4096, 1, job.side, job.side, generator=generator), torch.arange(4096) % 4

    @property
    def clients(self) -> list[int]:
        return list(range(self.number))

    def client(self, client_id: int) -> ClientData:
        job = self.job
        own = (torch.arange(job.training + 2 * job.scoring) + 16 * client_id) % 4096
        train, val, test = (
            TensorLoader(self.samples, part, job.batch, shuffle=index == 0)
            for index, part in enumerate(own.split([job.training, job.scoring, job.scoring]))
        )
        return ClientData(train, val, test, tuple(part[:1] for part in self.samples), num_classes=4)


class AllThenTen(Participation):
    """Everybody in the first round, ten clients afterwards."""

    def draw(self, round: int, clients: Sequence[int], samples: Mapping[int, int], draws: Draws) -> list[int]:
        return list(clients) if round == 1 else draws.choose(clients, TEN, "participation", round - 1)


class Watch(L.Callback):
    """Takes the times of a round's parts."""

    def __init__(self) -> None:
        self.parts: list[dict[str, float]] = []
        self.started: float | None = None

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        now = time.process_time()
        if self.parts:
            self.parts[-1]["round"] = now - self.began
        else:
            self.started = now
        self.began = now
        self.parts.append({"train": 0.0, "evaluate": 0.0, "save": 0.0})

    def on_train_batch_end(self, *args: Any) -> None:
        self.parts[-1]["train"] = time.process_time() - self.began

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.validating = time.process_time()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.parts[-1]["evaluate"] = time.process_time() - self.validating


class TimedCheckpoint(LastCheckpoint):
    """Takes the time of a checkpoint."""

    def __init__(self, folder: Path, watch: Watch) -> None:
        super().__init__(folder)
        self.watch = watch

    def _save_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        began = time.process_time()
        super()._save_checkpoint(trainer, filepath)
        self.watch.parts[-1]["save"] = time.process_time() - began


def measure(number: int, method: str, options: argparse.Namespace) -> dict[str, float]:
    """Run a federation; return its figures."""
    job = JOBS[options.job]
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    began, watch = time.process_time(), Watch()
    with tempfile.TemporaryDirectory() as folder:
        prototype = getattr(methods, method)(backbone=partial(MLP, hidden=job.hidden))
        federation = Federation(
            prototype, participation=AllThenTen() if options.all_first else TEN, evaluate_clients=options.validated,
            seed=1, threads=1, engine=Local(options.awake),
            evaluate="after" if options.aggregated else "before", keep_trained=not options.aggregated,
        )  # fmt: skip
        trainer = L.Trainer(
            max_epochs=options.rounds, accelerator="cpu", logger=False, enable_progress_bar=False,
            enable_model_summary=False, num_sanity_val_steps=0, limit_test_batches=0, default_root_dir=folder,
            callbacks=[watch, TimedCheckpoint(Path(folder) / "checkpoints", watch)],
        )  # fmt: skip
        trainer.fit(federation, datamodule=Few(number, job))
        disk = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    timed = watch.parts[2:-1]
    assert watch.started is not None
    return {
        **{part: median(one[part] for one in timed) for part in ("round", "train", "evaluate", "save")},
        "start": watch.started - began,
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "disk": disk,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", type=int, default=[100, 1_000, 10_000])
    parser.add_argument("--methods", nargs="+", default=["FedAvg", "Ditto"])
    parser.add_argument("--awake", type=int)
    parser.add_argument("--validated", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=22)
    parser.add_argument("--all-first", action="store_true")
    parser.add_argument("--job", choices=JOBS, default="McMahan")
    parser.add_argument("--aggregated", action="store_true")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # in a process of its own
    chosen = parser.parse_args()
    if chosen.one:
        print(json.dumps(measure(int(chosen.one[0]), chosen.one[1], chosen)))
        sys.exit()
    print(
        "| method | clients | awake | s a round | training | validation | checkpoint | s before round 1 | "
        "GB of memory | MB on disk |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    for method in chosen.methods:
        for number in chosen.clients:
            one = [sys.executable, *sys.argv, "--one", str(number), method]
            done = subprocess.run(one, check=True, capture_output=True, text=True)
            found = json.loads(done.stdout.splitlines()[-1])
            seconds = " | ".join(f"{found[part]:.3f}" for part in ("round", "train", "evaluate", "save", "start"))
            print(
                f"| {method} | {number:,} | {chosen.awake or 'all'} | {seconds} | {found['memory'] / 1e9:.2f} | "
                f"{found['disk'] / 1e6:.1f} |",
                flush=True,
            )
