"""A federation whose modules remember which rows they have trained on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lit_pfl import Federation
from lit_pfl.data import PerClient
from lit_pfl.engines import Local
from lit_pfl.links import LocalHub
from lit_pfl.methods import FedAvg
from lit_pfl_callbacks import FederatedLoop
from lit_pfl_callbacks.tensors import tensors_of
from tiny import Learner, assert_equal, trainer

ROWS = torch.arange(24.0).view(8, 3)


class Module(Learner):
    """Remembers the first number of every row that it has seen."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 2), nn.Linear(2, 1))
        self.seen: list[int] = []

    def training_step(self, batch, batch_idx):
        self.seen += batch[:, 0].int().tolist()
        noisy = batch / 24 + 0.1 * torch.rand_like(batch)
        return self.head(self.body(noisy).tanh()).square().mean()


def federation(method: Any = FedAvg, **options: Any) -> Federation:
    torch.manual_seed(0)
    return Federation(method(learner=Module()), seed=1, **options)


def weights(federation: Federation) -> list[dict[str, torch.Tensor]]:
    return [tensors_of(client) for client in federation.clients.values()]


class Site(L.LightningDataModule):
    def __init__(self, loader: DataLoader) -> None:
        super().__init__()
        self.loader = loader

    def train_dataloader(self) -> DataLoader:
        return self.loader


def check_resumed(data: Callable[[], PerClient], folder: Path) -> None:
    """See that a resumed run is the same run, also in the same process with the same data."""
    whole, same = federation(participation=1), data()
    trainer(4).fit(whole, datamodule=data())
    first = trainer(2)
    first.fit(federation(participation=1), datamodule=same)
    first.save_checkpoint(folder / "two.ckpt")
    for modules in (data(), same):
        resumed = federation(participation=1)
        trainer(4).fit(resumed, datamodule=modules, ckpt_path=folder / "two.ckpt", weights_only=True)
        assert_equal(weights(resumed), weights(whole))


def check_asleep(data: Callable[[], PerClient]) -> None:
    """See that clients that sleep come to the same."""
    one, other = federation(evaluate="after"), federation(evaluate="after", engine=Local(awake=1))
    for fed in (one, other):
        trainer(3).fit(fed, datamodule=data())
    assert_equal(other.coordinator.state_dict(), one.coordinator.state_dict())


def check_resumed_site(data: Callable[[int], Site], folder: Path) -> None:
    """See that sites with Trainers of their own that resume are the same."""

    def run(part: str, rounds: int, state: Any = None) -> Any:
        hub, modules, states = LocalHub(seed=1), [], []
        for site in range(2):
            torch.manual_seed(0)
            modules.append(Module())
            saving = ModelCheckpoint(folder / f"{part}{site}", save_last=True, save_on_train_epoch_end=True)
            fitting = trainer(
                rounds, enable_checkpointing=True, callbacks=[FederatedLoop(hub.link, 1, num_samples=8), saving]
            )
            path = None if state is None else folder / f"{part}{site}/last.ckpt"
            own = data(site).loader
            hub.add(site, lambda t=fitting, m=modules[-1], x=own, p=path: t.fit(m, x, ckpt_path=p))
        hub.run(state=state, after_round=lambda coordinator: states.append(coordinator.state_dict()))
        return modules, states

    whole, _ = run("whole", 4)
    _, states = run("parts", 2)
    resumed, _ = run("parts", 4, states[-1])
    for one, other in zip(resumed, whole, strict=True):
        assert one.seen == other.seen[len(other.seen) // 2 :]
        assert_equal(one.state_dict(), other.state_dict())
