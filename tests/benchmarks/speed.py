"""How much time a federation takes beyond the training itself, and how much memory beyond the clients' tensors.

    python tests/benchmarks/speed.py [A] [B] [C] [D] [tiny] [resnet] [table] [memory] [--root FOLDER] [--rounds N]
        [--engine Stacked] [--accelerator gpu]

Every job is FedAvg with full participation, one local epoch a round, SGD with lr 0.01 and no evaluation, 400 batches a
round (40 for ResNet-9). The federation and a bare PyTorch loop that does the same work on the same resident images take
turns in one process; the ratio is that of the medians of their seconds a round. FOLDER holds ``FashionMNIST`` and
``cifar-10-batches-py`` as torchvision lays them out; without it images are random, which takes the same time. ``table``
is somebody's own module on DataLoaders of their own data modules; the bare loop iterates such DataLoaders too. The
stacked engine trains all but ``table``; ``table`` and ``memory`` are for the CPU.
"""

import argparse
import ctypes
import gc
import logging
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_pfl import Federation
from lit_pfl.data import FederatedDataModule, ImageDataModule, ImageSet, Partition, PerClient
from lit_pfl.engines import Engine, Local, Stacked
from lit_pfl.methods import FedAvg
from lit_pfl.models import CNN, MLP, Backbone, ResNet9

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")


class Tiny(Backbone):
    """Two convolutions of 8 and 16 channels."""

    def __init__(self, channels: int, classes: int) -> None:
        convolutions = [
            *(nn.Conv2d(channels, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        ]
        super().__init__(nn.Sequential(*convolutions), nn.LazyLinear(classes))


#: data set, clients, images a client, batch size, backbone, threads
JOBS: dict[str, tuple[str, int, int, int, Callable[[int, int], Backbone], int]] = {
    "A": ("FashionMNIST", 20, 640, 32, CNN, 2),
    "B": ("CIFAR10", 20, 640, 32, CNN, 2),
    "C": ("FashionMNIST", 100, 64, 16, CNN, 2),
    "D": ("FashionMNIST", 100, 64, 16, MLP, 1),
    "tiny": ("FashionMNIST", 100, 64, 16, Tiny, 1),
    "resnet": ("CIFAR10", 4, 640, 64, ResNet9, 2),
}


class Equal(Partition):
    """Every client gets the same number of images."""

    def split(self, labels: Any, num_clients: int, rng: np.random.Generator) -> list[Any]:
        return list(np.arange(len(labels)).reshape(num_clients, -1))


class Images(ImageDataModule):
    """Images in memory, in their own size."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, clients: int, each: int, batch_size: int) -> None:
        # a tenth more for the test data, which is not looked at
        super().__init__(clients, Equal(), batch_size=batch_size, train_fraction=10 / 11, test_fraction=1 / 11)
        n = clients * each * 11 // 10
        self.source = images[:n], labels[:n]

    def load(self) -> ImageSet:
        images, labels = self.source
        half = torch.full((images.shape[1],), 0.5)
        return ImageSet(images, labels, 10, half, half, channels=images.shape[1])


def read(name: str, root: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    size = {"FashionMNIST": (1, 28, 28), "CIFAR10": (3, 32, 32)}[name]
    if root is None:
        return torch.randint(0, 256, (20_000, *size), dtype=torch.uint8), torch.randint(0, 10, (20_000,))
    if name == "CIFAR10":
        import pickle

        raw = pickle.loads((Path(root) / "cifar-10-batches-py/data_batch_1").read_bytes(), encoding="latin1")
        more = pickle.loads((Path(root) / "cifar-10-batches-py/data_batch_2").read_bytes(), encoding="latin1")
        images = np.concatenate([raw["data"], more["data"]]).reshape(-1, *size)
        return torch.from_numpy(images), torch.tensor(raw["labels"] + more["labels"])
    from torchvision.datasets import FashionMNIST

    data = FashionMNIST(root)
    return data.data.unsqueeze(1), data.targets


def bare(
    data: Images, backbone: Callable[[int, int], Backbone], clients: Sequence[int] | None = None, device: str = "cpu"
) -> Callable[[], None]:
    """Return one round of FedAvg in plain PyTorch, as one would write it, of all clients or of some."""
    clients, channels = clients or range(data.num_clients), data.client(0).example[0].shape[1]
    images, labels = (tensor.to(device) for tensor in data.source)
    indices = [data.client(k).train.dataset.to(device) for k in clients]
    models = [backbone(channels, 10) for _ in clients]
    for model in models:
        model.to(device)(images[:2].float())
        model.load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    average = [p.detach().clone() for p in models[0].parameters()]

    def round() -> None:
        for model, optimizer, own in zip(models, optimizers, indices, strict=True):
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), average, strict=True):
                    parameter.copy_(value)
            for batch in own[torch.randperm(len(own)).to(device)].split(data.batch_size):
                x = images[batch].float().div_(255).sub_(0.5).div_(0.5)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), labels[batch]).backward()
                optimizer.step()
        with torch.no_grad():
            for value, *same in zip(average, *[model.parameters() for model in models], strict=True):
                value.zero_()
                for parameter in same:
                    value.add_(parameter, alpha=1 / len(models))

    return round


def wait_for_gpu() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class Alternate(L.Callback):
    """Runs the bare loop after every round and takes the times of both."""

    def __init__(self, bare_round: Callable[[], None], threads: int) -> None:
        self.bare_round, self.threads = bare_round, threads
        self.federation: list[float] = []
        self.bare: list[float] = []

    def on_train_epoch_start(self, *args: Any) -> None:
        self.began = time.perf_counter()

    def on_train_epoch_end(self, *args: Any) -> None:
        wait_for_gpu()
        self.federation.append(time.perf_counter() - self.began)
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        began = time.perf_counter()
        self.bare_round()
        wait_for_gpu()
        self.bare.append(time.perf_counter() - began)
        torch.set_num_threads(before)


def federation(
    data: Images,
    backbone: Callable[[int, int], Backbone],
    threads: int | None,
    rounds: int,
    *callbacks: Any,
    **options: Any,
) -> None:
    # the lay-out of the bare loop, though channels last, the default for these networks, is faster
    method = FedAvg(backbone=backbone, optimizer=lambda p: torch.optim.SGD(p, lr=0.01), channels_last=False)
    run(method, data, threads, rounds, *callbacks, **options)


def run(
    method: FedAvg,
    data: FederatedDataModule,
    threads: int | None,
    rounds: int,
    *callbacks: Any,
    engine: Engine | None = None,
    **options: Any,
) -> None:
    trainer = L.Trainer(
        max_epochs=rounds, callbacks=list(callbacks), logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, limit_val_batches=0,
        **{"accelerator": "cpu", **options},
    )  # fmt: skip
    made = Federation(method, seed=1, threads=threads, engine=engine)
    made.on_fit_end = lambda: made.engine.stop()  # type: ignore[method-assign]  # without the test at the end
    trainer.fit(made, datamodule=data)


def speed(job: str, root: str | None, rounds: int, accelerator: str = "cpu", **engine: Any) -> None:
    name, clients, each, batch_size, backbone, threads = JOBS[job]
    torch.set_num_threads(threads)
    data = Images(*read(name, root), clients, each, batch_size)
    data.setup()
    device = {"gpu": "cuda"}.get(accelerator, accelerator)
    times = Alternate(bare(data, backbone, device=device), threads)
    federation(data, backbone, threads, rounds + 1, times, accelerator=accelerator, **engine)
    batches = clients * -(-each // batch_size)
    ours, theirs = median(times.federation[1:]), median(times.bare[1:])  # the first round starts the clients' Trainers
    print(
        f"| {job} | {name}, {clients} x {each}, batch {batch_size}, {backbone.__name__}, "  # type: ignore[attr-defined]
        f"{f'{threads} threads' if device == 'cpu' else torch.cuda.get_device_name()} | "
        f"{1e3 * theirs / batches:.2f} | {1e3 * ours / batches:.2f} | {ours / theirs:.2f} |",
        flush=True,
    )


class Rows(L.LightningDataModule):
    """One client's table: 64 rows of 30 numbers and a class."""

    def __init__(self, client: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(client)
        rows, labels = torch.randn(64, 30, generator=draw), torch.randint(0, 2, (64,), generator=draw)
        self.rows = TensorDataset(rows, labels)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.rows, 16, shuffle=True)


class Perceptron(L.LightningModule):
    """A module as somebody writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(30, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 2))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows, labels = batch
        return nn.functional.cross_entropy(self.net(rows), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def table(rounds: int, clients: int = 100) -> None:
    """Compare on 100 clients with a data module each, on one thread."""
    torch.set_num_threads(1)
    models = [Perceptron() for _ in range(clients)]
    loaders = [Rows(client).train_dataloader() for client in range(clients)]
    average = [p.detach().clone() for p in models[0].parameters()]
    optimizers = [model.configure_optimizers() for model in models]

    def bare_round() -> None:
        for model, optimizer, loader in zip(models, optimizers, loaders, strict=True):
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), average, strict=True):
                    parameter.copy_(value)
            for batch in loader:
                optimizer.zero_grad()
                model.training_step(batch, 0).backward()
                optimizer.step()
        with torch.no_grad():
            for value, *same in zip(average, *[model.parameters() for model in models], strict=True):
                value.copy_(sum(same) / len(same))

    times = Alternate(bare_round, 1)
    run(FedAvg(learner=Perceptron()), PerClient(Rows, num_clients=clients), 1, rounds + 1, times)
    ours, theirs = median(times.federation[1:]), median(times.bare[1:])
    work = f"{clients} x 64 rows of 30, batch 16, a data module each, MLP 200-200, 1 thread"
    each = 1e3 / (4 * clients)
    print(f"| table | {work} | {each * theirs:.2f} | {each * ours:.2f} | {ours / theirs:.2f} |", flush=True)


def memory(root: str | None) -> None:
    """Compare processes with different numbers of clients: C's CNN, 16 images each."""
    sizes = {
        n: int(subprocess.check_output([sys.executable, __file__, "--resident", str(n)], text=True))
        for n in (10, 100, 1000)
    }
    model = CNN(1, 10)
    model(torch.zeros(1, 1, 28, 28))
    tensors = sum(p.numel() * p.element_size() for p in model.parameters())
    for few, many in ((10, 100), (100, 1000)):
        each = (sizes[many] - sizes[few]) / (many - few)
        print(
            f"| {few} to {many} | {each / 1e3:.0f} | {tensors / 1e3:.0f} | {(each - tensors) / 1e3:.0f} |", flush=True
        )


class Resident(L.Callback):
    """Prints how much memory the process holds after the last round, while all clients sleep."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch + 1 == trainer.max_epochs:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            print(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize())


def resident(clients: int) -> None:
    torch.set_num_threads(1)
    images, labels = torch.zeros(1100 * 16, 1, 28, 28, dtype=torch.uint8), torch.zeros(1100 * 16, dtype=torch.long)
    federation(Images(images, labels, clients, 16, 16), CNN, 1, 3, Resident())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", help="default: all")
    parser.add_argument("--root", help="folder with the data sets")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that are timed")
    parser.add_argument("--engine", choices=["Local", "Stacked"], default="Local")
    parser.add_argument("--stack_size", type=int, default=32)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--resident", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.resident:
        resident(options.resident)
        sys.exit()
    chosen = options.jobs or [*JOBS, "table", "memory"]
    print("| job | work | bare loop, ms a batch | federation, ms a batch | ratio |\n|---|---|---|---|---|")
    for job in chosen:
        if job in JOBS:
            engine = Stacked(options.stack_size) if options.engine == "Stacked" else Local()
            speed(job, options.root, options.rounds, options.accelerator, engine=engine)
    if "table" in chosen:
        table(options.rounds)
    if "memory" in chosen:
        print("\n| clients | kB for each further client | its tensors, kB | beyond, kB |\n|---|---|---|---|")
        memory(options.root)
