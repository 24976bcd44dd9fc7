"""The same job here and in PFLlib: accuracy, and CPU seconds a round.

    python tests/benchmarks/pfllib.py --pfllib CHECKOUT --root FOLDER [--methods FedAvg ...] [--rounds N] [--seeds ...]

20 clients of two MNIST classes each, 60 images for training, PFLlib's CNN on 28 x 28 pixels, batches of 10, SGD with a
learning rate of 0.05, one local epoch (FedRep: one more for the head), one thread. Both have the same images, the same
split and the same initial weights; the order of batches is each one's own. PFLlib's options are its defaults, except
for Ditto's ``-mu``: 0 by default, and 1 in this job, as is the default here.

Scored is what clients have received after the last round (Ditto: the personal model), the share of all test images that
are classified rightly. A round's time is the median over the rounds without evaluation, of the process's CPU time: so
what else runs on the machine changes it little. CHECKOUT holds ``system/``; PFLlib needs h5py and scikit-learn. FOLDER
is where MNIST is.
"""

import argparse
import contextlib
import csv
import io
import logging
import os
import random
import sys
import tempfile
import time
import warnings
from importlib import import_module
from pathlib import Path
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn

from lit_pfl import Federation, methods
from lit_pfl.data import MNIST, ClassShards
from lit_pfl.models import Backbone

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")

CLIENTS, IMAGES, BATCH, RATE = 20, 60, 10, 0.05
#: PFLlib's modules of a method, whether it takes a network in two parts, and which of its last scores is the one meant
THEIRS = {
    "FedAvg": ("avg", True, -1),
    "Ditto": ("ditto", False, -1),
    "FedRep": ("rep", True, -1),
    "FedALA": ("ala", False, -2),  # the last one is of clients that have trained again
    "FedProto": ("proto", True, -1),
}
#: PFLlib's options that its servers and clients read, at their defaults
DEFAULTS = {
    "device": "cpu", "num_classes": 10, "num_clients": CLIENTS, "batch_size": BATCH, "local_learning_rate": RATE,
    "learning_rate_decay": False, "learning_rate_decay_gamma": 0.99, "local_epochs": 1, "join_ratio": 1.0,
    "random_join_ratio": False, "save_folder_name": "items", "auto_break": False, "dlg_eval": False, "dlg_gap": 100,
    "batch_num_per_client": 2, "num_new_clients": 0, "fine_tuning_epoch_new": 0, "client_drop_rate": 0.0,
    "train_slow_rate": 0.0, "send_slow_rate": 0.0, "time_select": False, "time_threthold": 10000, "top_cnt": 100,
    "goal": "test", "dataset": "job", "lamda": 1.0, "mu": 1.0, "plocal_epochs": 1, "eta": 1.0, "rand_percent": 80,
    "layer_idx": 2,
}  # fmt: skip


class Few(ClassShards):
    """Two classes at every client, of whose images the same number is kept: PFLlib drops what fills no batch."""

    def split(self, labels: Any, num_clients: int, rng: np.random.Generator) -> list[Any]:
        return [np.sort(rng.permutation(own)[:IMAGES]) for own in super().split(labels, num_clients, rng)]


class Network(Backbone):
    """PFLlib's CNN, as a body and a head, that starts from given weights."""

    start: tuple[Tensor, ...] = ()

    def __init__(self, channels: int, classes: int) -> None:
        body = nn.Sequential(
            nn.Conv2d(channels, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(),
        )  # fmt: skip
        super().__init__(body, nn.Linear(512, classes))
        with torch.no_grad():
            for parameter, value in zip(self.parameters(), self.start, strict=bool(self.start)):
                parameter.copy_(value)


class Rounds(L.Callback):
    """Takes every round's CPU time."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_epoch_start(self, *args: Any) -> None:
        self.began = time.process_time()

    def on_train_epoch_end(self, *args: Any) -> None:
        self.seconds.append(time.process_time() - self.began)


def data(root: Path) -> MNIST:
    few = {"train_fraction": 0.025, "test_fraction": 0.025, "val_fraction": 0.0}
    return MNIST(root=root, verify=False, image_size=28, channels=1, num_clients=CLIENTS, partition=Few(2),
                 batch_size=BATCH, **few)  # fmt: skip


def ours(name: str, root: Path, rounds: int, seed: int) -> tuple[float, float]:
    """Return accuracy and seconds a round here."""
    times = Rounds()
    method = getattr(methods, name)(backbone=Network, optimizer=lambda p: torch.optim.SGD(p, lr=RATE))
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=rounds, callbacks=[times], logger=False, enable_progress_bar=False, enable_checkpointing=False,
            enable_model_summary=False, accelerator="cpu", num_sanity_val_steps=0, limit_val_batches=0,
            default_root_dir=folder,
        )  # fmt: skip
        federation = Federation(method, seed=seed, threads=1, evaluate="after")
        trainer.fit(federation, datamodule=data(root))
    return float(trainer.callback_metrics["test/acc"]), median(times.seconds[1:])


def write(own: MNIST, folder: Path) -> None:
    """Write every client's images as PFLlib reads them."""
    for part in ("train", "test"):
        (folder / "dataset" / "job" / part).mkdir(parents=True)
        for k in own.clients:
            loader = getattr(own.client(k), part).in_order(10_000)
            [(x, y)] = list(loader)
            np.savez(folder / "dataset" / "job" / part / f"{k}.npz", data={"x": x.numpy(), "y": y.numpy()})


def theirs(name: str, rounds: int, seed: int) -> tuple[float, float]:
    """Return accuracy and seconds a round in PFLlib; its modules are found, and the data are in ``../dataset``."""
    module, split, which = THEIRS[name]
    models = import_module("flcore.trainmodel.models")
    for one in (random, np.random):
        one.seed(seed)
    network = models.FedAvgCNN(in_features=1, num_classes=10, dim=1024)
    with torch.no_grad():
        for parameter, value in zip(network.parameters(), Network.start, strict=True):
            parameter.copy_(value)
    if split:
        head, network.fc = network.fc, nn.Identity()
        network = models.BaseHeadSplit(network, head)
    options = SimpleNamespace(**DEFAULTS, model=network, algorithm=name, global_rounds=rounds, eval_gap=rounds)
    clock, time.time = time.time, time.process_time  # what it takes a round's time by
    try:
        server = getattr(import_module(f"flcore.servers.server{module}"), name)(options, 0)
        torch.manual_seed(seed)  # every client sets it to 0 as it is made
        server.train()
    finally:
        time.time = clock
    return server.rs_test_acc[which], median(server.Budget[1:rounds])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pfllib", type=Path, required=True, help="a checkout of PFLlib")
    parser.add_argument("--root", type=Path, required=True, help="where MNIST is")
    parser.add_argument("--methods", nargs="+", default=list(THEIRS), choices=list(THEIRS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.path.insert(0, str(options.pfllib.resolve() / "system"))
    root = options.root.resolve()
    rows = csv.writer(sys.stdout)
    rows.writerow(["method", "accuracy here", "accuracy there", "seconds a round here", "seconds a round there"])
    with tempfile.TemporaryDirectory() as folder:
        own = data(root)
        own.prepare_data()
        own.setup("fit")
        write(own, Path(folder))
        (Path(folder) / "system").mkdir()
        os.chdir(Path(folder) / "system")
        for name in options.methods:
            found = []
            for seed in options.seeds:
                torch.manual_seed(seed)
                Network.start = ()
                Network.start = tuple(p.detach().clone() for p in Network(1, 10).parameters())
                here = ours(name, root, options.rounds, seed)
                with contextlib.redirect_stdout(io.StringIO()):
                    there = theirs(name, options.rounds, seed)
                found.append((here[0], there[0], here[1], there[1]))
            means = [fmean(column) for column in zip(*found, strict=True)]
            rows.writerow([name, *(f"{100 * mean:.2f}" for mean in means[:2]), *(f"{mean:.2f}" for mean in means[2:])])
            sys.stdout.flush()


if __name__ == "__main__":
    main()
