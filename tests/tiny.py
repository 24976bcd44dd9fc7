"""A federation small enough for tests: real digits, a network of a few hundred parameters."""

from collections.abc import Iterable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lit_pfl import Client, Federation
from lit_pfl.core import ClientSpec
from lit_pfl.data import BatchLoader, Digits
from lit_pfl.data.federated import FederatedDataModule
from lit_pfl.models import Backbone
from lit_pfl.testing import assert_equal as assert_equal
from lit_pfl.testing.method_tester import GroupNet as GroupNet
from lit_pfl.testing.method_tester import MixedNet as MixedNet
from lit_pfl.testing.method_tester import trainer as trainer
from lit_pfl_callbacks.tensors import tensors_of


class TinyNet(Backbone):
    """A convolution, batch norm, dropout and a classifier: something of everything that must be kept apart."""

    def __init__(self, channels: int = 1, classes: int = 10, width: int = 4) -> None:
        body = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride=2), nn.BatchNorm2d(width), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.1),
        )  # fmt: skip
        super().__init__(body, nn.Linear(4 * width, classes))


class Parts(Backbone):
    """Any body and any head."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__(body, head)


class Learner(L.LightningModule):
    """Somebody's classifier, of which a test overrides what it is about."""

    def __init__(self, body: nn.Module, head: nn.Module, **sgd: float) -> None:
        super().__init__()
        self.body, self.head, self.sgd = body, head, {"lr": 0.1, **sgd}

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), **self.sgd)


class Site(L.LightningDataModule):
    """A client's samples, the same batches in training, validation and testing."""

    def __init__(self, samples: Any, batch_size: int) -> None:
        super().__init__()
        self.samples, self.batch_size = samples, batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.samples, self.batch_size)

    val_dataloader = test_dataloader = train_dataloader


def momentum_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def step_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def client(method: type[Client], **options: Any) -> Client:
    return method(**{"backbone": TinyNet, "optimizer": momentum_sgd, "scheduler": step_schedule, **options})


def digits(num_clients: int = 4, **options: Any) -> Digits:
    return Digits(num_clients=num_clients, **{"image_size": 8, "batch_size": 64, **options})


def run(method: Client, data: FederatedDataModule | None = None, rounds: int = 2, **options: Any) -> Federation:
    """Run a federation and return it."""
    federation = Federation(method, **{"seed": 3, "threads": 1, **options})
    trainer(rounds).fit(federation, datamodule=data or digits())
    return federation


def spec(
    client: int = 0,
    channels: int = 3,
    image_size: int = 32,
    num_classes: int = 10,
    labels_agree: bool = True,
    local_epochs: int = 1,
) -> ClientSpec:
    """Return what a client that classifies images is to learn."""
    example = torch.zeros(1, channels, image_size, image_size), torch.zeros(1, dtype=torch.int64)
    return ClientSpec(client, example, num_classes, labels_agree, local_epochs)


def short(name: str) -> str:
    """Return a tensor's name in an image classifier, or what comes before ``backbone.`` in another learner."""
    return name.removeprefix("learner.").replace("personal.backbone.", "personal.")


def weights(federation: Federation) -> dict[int, dict[str, Tensor]]:
    """Return copies of all clients' states, by the names that they travel under."""
    return {k: {short(name): t.clone() for name, t in tensors_of(c).items()} for k, c in federation.clients.items()}


class Backwards(Digits):
    """Digits whose clients are trained in the opposite order."""

    def train_dataloader(self) -> Any:
        sets = super().train_dataloader()
        choose = sets.choose
        sets.choose = lambda completed: list(reversed(choose(completed)))
        sets.set_epoch(0)
        return sets


def loader(indices: range, data: Digits) -> BatchLoader:
    """Return batches of some images of a data module, in a fixed order."""
    assert data.data is not None
    return BatchLoader(data.data, torch.tensor(list(indices)), batch_size=32)


#: methods that are tried in every way by default: those of the four papers, and what all are compared with
ALWAYS = ("FactorizedFL", "FedAvg", "FedSLR", "PsiNet", "SimFed")
#: the methods of the four papers and their baselines, tried in every way by `pytest -m slow`; others by `-m full`
OF_THE_PAPERS = (
    "APFL", "AgnosticFL", "ClusteredFL", "Ditto", "FactorizedFL", "FedAvg", "FedDyn", "FedFOMO", "FedMA", "FedPer",
    "FedProx", "FedRep", "FedSLR", "FedSpa", "LGFedAvg", "PFedPara", "PerFedAvg", "PsiNet", "Scaffold", "SimFed",
    "StandAlone",
)  # fmt: skip


def always_first(methods: Iterable[Any]) -> list[Any]:
    """Return methods, or their names, as parameters of a test: all but ``ALWAYS`` are slow."""
    named = [(getattr(method, "__name__", method), method) for method in methods]
    return [pytest.param(one, id=name, marks=() if name in ALWAYS else pytest.mark.slow) for name, one in named]
