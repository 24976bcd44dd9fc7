"""The same job here and in another library: accuracy, and CPU seconds a round.

    python tests/benchmarks/other_libraries.py PFLlib --code CHECKOUT --root FOLDER [--methods FedAvg ...] [--rounds N]
    python tests/benchmarks/other_libraries.py FL-bench --code CHECKOUT --root FOLDER [--seeds 1 2 3]

20 clients of two MNIST classes each, 60 images for training, PFLlib's CNN on 28 x 28 pixels, batches of 10, SGD with a
learning rate of 0.05, one local epoch (FedRep: one more for the head), one thread. Both have the same images, the same
split and the same initial weights; the order of batches is each one's own. Options are the library's defaults, except
for PFLlib's ``-mu`` of Ditto: 0 by default, and 1 in this job, as is the default here and in FL-bench.

Scored is what clients have received after the last round (Ditto: the personal model), the share of all test images that
are classified rightly. A round's time is the median over the rounds without evaluation, of the process's CPU time: so
what else runs on the machine changes it little. FOLDER is where MNIST is. PFLlib needs h5py and scikit-learn, FL-bench
needs hydra-core, nvidia-ml-py, ray, rich and scikit-learn.
"""

import argparse
import contextlib
import csv
import io
import json
import logging
import os
import pickle
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
from unittest import mock

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
PFLLIB = {
    "FedAvg": ("avg", True, -1),
    "Ditto": ("ditto", False, -1),
    "FedRep": ("rep", True, -1),
    "FedALA": ("ala", False, -2),  # the last one is of clients that have trained again
    "FedProto": ("proto", True, -1),
}
#: PFLlib's options that its servers and clients read, at their defaults
PFLLIB_DEFAULTS = {
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


def samples(own: MNIST, client: int, part: str) -> tuple[Tensor, Tensor]:
    """Return a client's images of a part, "train" or "test", and their labels."""
    [(x, y)] = list(getattr(own.client(client), part).in_order(10_000))
    return x, y


def start(network: nn.Module) -> None:
    """Give a network of another library the weights that the network here starts from."""
    with torch.no_grad():
        for parameter, value in zip(network.parameters(), Network.start, strict=True):
            parameter.copy_(value)


class PFLlib:
    """PFLlib: its modules are in ``system``, its data in ``../dataset``."""

    modules = "system"

    def __init__(self, own: MNIST, folder: Path) -> None:
        for part in ("train", "test"):
            (folder / "dataset" / "job" / part).mkdir(parents=True)
            for k in own.clients:
                x, y = samples(own, k, part)
                np.savez(folder / "dataset" / "job" / part / f"{k}.npz", data={"x": x.numpy(), "y": y.numpy()})
        (folder / "system").mkdir()
        os.chdir(folder / "system")

    def run(self, name: str, rounds: int, seed: int) -> tuple[float, float]:
        """Return accuracy and seconds a round."""
        module, split, which = PFLLIB[name]
        models = import_module("flcore.trainmodel.models")
        for one in (random, np.random):
            one.seed(seed)
        network = models.FedAvgCNN(in_features=1, num_classes=10, dim=1024)
        start(network)
        if split:
            head, network.fc = network.fc, nn.Identity()
            network = models.BaseHeadSplit(network, head)
        options = SimpleNamespace(
            **PFLLIB_DEFAULTS, model=network, algorithm=name, global_rounds=rounds, eval_gap=rounds
        )
        with mock.patch("time.time", time.process_time):  # what it takes a round's time by
            server = getattr(import_module(f"flcore.servers.server{module}"), name)(options, 0)
            torch.manual_seed(seed)  # every client sets it to 0 as it is made
            server.train()
        return server.rs_test_acc[which], median(server.Budget[1:rounds])


class FLBench:
    """FL-bench, in its mode "serial": its images and its network are replaced by those of the job."""

    modules = "."
    #: with one local epoch its FedRep would train the body alone
    epochs = {"FedRep": 2}

    def __init__(self, own: MNIST, folder: Path) -> None:
        self.folder = folder
        clients = list(own.clients)
        parts, images, labels, indices = ("train", "test"), [], [], []
        for k in clients:
            indices.append({"val": []})
            for part in parts:
                x, y = samples(own, k, part)
                first = sum(map(len, labels))
                indices[-1][part] = list(range(first, first + len(y)))
                images.append(x)
                labels.append(y)
        self.images, self.labels = torch.cat(images), torch.cat(labels)
        everybody = {"train": clients, "val": clients, "test": clients, "total": len(clients)}
        (folder / "data" / "mnist").mkdir(parents=True)
        (folder / "data" / "mnist" / "args.json").write_text(json.dumps({}))
        with (folder / "data" / "mnist" / "partition.pkl").open("wb") as file:
            pickle.dump({"separation": everybody, "data_indices": indices}, file)

    def run(self, name: str, rounds: int, seed: int) -> tuple[float, float]:
        """Return accuracy and seconds a round."""
        from omegaconf import DictConfig

        base, datasets = import_module("src.server.fedavg"), import_module("data.utils.datasets")
        cls = getattr(import_module(f"src.server.{name.lower()}"), f"{name}Server")
        common = {
            "seed": seed, "join_ratio": 1.0, "global_epoch": rounds, "local_epoch": self.epochs.get(name, 1),
            "batch_size": BATCH, "client_side_evaluation": False, "test": {"client": {"interval": rounds}},
            "verbose_gap": rounds + 1, "use_cuda": False, "save_log": False, "save_learning_curve_plot": False,
            "save_metrics": False,
        }  # fmt: skip
        settings = DictConfig({"optimizer": {"lr": RATE}, "model": {"name": "avgcnn"}, "common": common})
        hyperparameters = getattr(cls, "get_hyperparams", None)
        options = import_module("src.utils.functional").parse_args(settings, name.lower(), hyperparameters)

        class Images(datasets.BaseDataset):  # type: ignore[misc, name-defined]
            def _rescale_data(self) -> None: ...  # they are normalized

        def network(**_: Any) -> nn.Module:
            one: nn.Module = import_module("src.utils.models").FedAvgCNN(dataset="mnist", pretrained=False)
            start(one)
            return one

        def images(root: Path, args: Any, **transforms: Any) -> Any:
            return Images(self.images, self.labels, list(range(10)), **transforms)

        run_folder = SimpleNamespace(runtime=SimpleNamespace(output_dir=self.folder))
        replaced = {
            "FLBENCH_ROOT": self.folder, "MODELS": {"avgcnn": network}, "DATASETS": {"mnist": images},
            "DATA_MEAN": {"mnist": [0.0]}, "DATA_STD": {"mnist": [1.0]},
            "HydraConfig": SimpleNamespace(get=lambda: run_folder),
        }  # fmt: skip
        seconds = []
        with mock.patch.multiple(base, **replaced):
            server = cls(options)
            one_round = server.train_one_round

            def timed() -> None:
                began = time.process_time()
                one_round()
                seconds.append(time.process_time() - began)

            server.train_one_round = timed
            server.train()
        return server.test_results[rounds]["all_clients"]["before"]["test"].accuracy / 100, median(seconds[1:])


LIBRARIES = {"PFLlib": PFLlib, "FL-bench": FLBench}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=list(LIBRARIES))
    parser.add_argument("--code", type=Path, required=True, help="a checkout of that library")
    parser.add_argument("--root", type=Path, required=True, help="where MNIST is")
    parser.add_argument("--methods", nargs="+", default=list(PFLLIB), choices=list(PFLLIB))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    torch.set_num_threads(1)
    cls = LIBRARIES[options.library]
    sys.path.insert(0, str((options.code / cls.modules).resolve()))
    root = options.root.resolve()
    rows = csv.writer(sys.stdout)
    rows.writerow(["method", "accuracy here", "accuracy there", "seconds a round here", "seconds a round there"])
    with tempfile.TemporaryDirectory() as folder:
        own = data(root)
        own.prepare_data()
        own.setup("fit")
        library = cls(own, Path(folder))
        for name in options.methods:
            found = []
            for seed in options.seeds:
                torch.manual_seed(seed)
                Network.start = ()
                Network.start = tuple(p.detach().clone() for p in Network(1, 10).parameters())
                here = ours(name, root, options.rounds, seed)
                with contextlib.redirect_stdout(io.StringIO()):
                    there = library.run(name, options.rounds, seed)
                found.append((here[0], there[0], here[1], there[1]))
            means = [fmean(column) for column in zip(*found, strict=True)]
            rows.writerow([name, *(f"{100 * mean:.2f}" for mean in means[:2]), *(f"{mean:.2f}" for mean in means[2:])])
            sys.stdout.flush()


if __name__ == "__main__":
    main()
