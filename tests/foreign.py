"""LightningModules that know nothing of this library: Lightning's own, and such as users write."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pydoc_data.topics import topics
from typing import Any

import lightning as L
import torch
from lightning.pytorch.demos import BoringModel, LightningLSTM, LightningTransformer, SimpleLSTM, Transformer
from sklearn.datasets import load_breast_cancer, load_diabetes
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import MeanSquaredError, R2Score
from torchmetrics.classification import BinaryAUROC, BinaryJaccardIndex

from lit_pfl import Client
from lit_pfl.data import PerClient

TRAIN, VAL, TEST, BATCH = 40, 8, 8, 4  # all of whole batches, also of four fifths: some keep a state of one size


class Regression(L.LightningModule):
    """Foretells a number; metrics are objects, in training too; its schedule counts steps; not all state is tensors."""

    def __init__(self, optimizer: str = "AdamW", dropout: float = 0.1) -> None:
        super().__init__()
        self.optimizer, self.lr = optimizer, {"AdamW": 0.01, "SGD": 0.1}[optimizer]
        self.net = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))
        self.train_mse = MeanSquaredError()
        self.val_r2, self.val_mse = R2Score(), MeanSquaredError()
        self.unit = {"name": "points"}

    def get_extra_state(self) -> dict[str, str]:
        return self.unit

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.unit = state

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        predicted = self.net(x).squeeze(1)
        self.train_mse(predicted, y)
        self.log("train_mse", self.train_mse)
        return nn.functional.mse_loss(predicted, y)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        predicted = self.net(x).squeeze(1)
        self.val_r2(predicted, y)
        self.val_mse.update(predicted, y)
        self.log_dict({"val_r2": self.val_r2, "val_mse": self.val_mse}, prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = getattr(torch.optim, self.optimizer)(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Screening(L.LightningModule):
    """Tells two classes apart in batches that are dicts, by an area under a curve."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(30, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(8, 1)
        self.auroc = BinaryAUROC()

    def forward(self, features: Tensor) -> Tensor:
        return self.head(self.body(features)).squeeze(1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        logits = self(batch["features"])
        return {"loss": nn.functional.binary_cross_entropy_with_logits(logits, batch["benign"].float())}

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        self.auroc(self(batch["features"]), batch["benign"])
        self.log("val/auroc", self.auroc, on_epoch=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, weight_decay=1e-3)


class Segmentation(L.LightningModule):
    """Finds discs in pictures; its schedule counts epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.decoder = nn.Conv2d(4, 1, 1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, masks = batch
        loss = nn.functional.binary_cross_entropy_with_logits(self.decoder(self.encoder(images)), masks)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, masks = batch
        jaccard = BinaryJaccardIndex().to(self.device)
        self.log("test_jaccard", jaccard(self.decoder(self.encoder(images)), masks.int()), batch_size=len(images))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)]


class Loaders(L.LightningDataModule):
    """Somebody's data module: the samples of one client, in order for training, validation and testing."""

    def __init__(self, samples: Dataset, batch_size: int = BATCH) -> None:
        super().__init__()
        self.samples, self.batch_size = samples, batch_size

    def _part(self, start: int, end: int, shuffle: bool = False) -> DataLoader:
        part = torch.utils.data.Subset(self.samples, range(start, end))
        # Only training draws from PyTorch's own generator: scoring is to change nothing.
        generator = None if shuffle else torch.Generator()
        return DataLoader(part, self.batch_size, shuffle=shuffle, generator=generator)

    def train_dataloader(self) -> DataLoader:
        return self._part(0, TRAIN, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self._part(TRAIN, TRAIN + VAL)

    def test_dataloader(self) -> DataLoader:
        return self._part(TRAIN + VAL, TRAIN + VAL + TEST)


class Dicts(Dataset):
    """Samples that are dicts."""

    def __init__(self, **columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


NUM_CLIENTS = 3
NEEDED = TRAIN + VAL + TEST


@cache
def diabetes() -> list[Dataset]:
    x, y = (torch.tensor(part, dtype=torch.float32) for part in load_diabetes(return_X_y=True))
    x, y = (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()
    return [TensorDataset(a, b) for a, b in zip(x.split(NEEDED), y.split(NEEDED), strict=True)]


@cache
def breast_cancer() -> list[Dataset]:
    features, benign = load_breast_cancer(return_X_y=True)
    x, y = torch.tensor(features, dtype=torch.float32), torch.tensor(benign)
    x = (x - x.mean(0)) / x.std(0)
    return [Dicts(features=a, benign=b) for a, b in zip(x.split(NEEDED), y.split(NEEDED), strict=True)]


@cache
def discs() -> list[Dataset]:
    generator = torch.Generator().manual_seed(0)
    centres = torch.rand(NUM_CLIENTS * NEEDED, 2, 1, 1, generator=generator) * 8
    rows, columns = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    masks = ((rows - centres[:, 0]) ** 2 + (columns - centres[:, 1]) ** 2 < 6).float()[:, None]
    images = masks + 0.3 * torch.randn(masks.shape, generator=generator)
    return [TensorDataset(a, b) for a, b in zip(images.split(NEEDED), masks.split(NEEDED), strict=True)]


WINDOW, VOCABULARY = 6, 96  # printable ASCII, and all else as one


@cache
def texts() -> list[Dataset]:
    """The longest topics of Python's own help, one a client: windows of characters, and those that follow."""

    def windows(text: str) -> Dataset:
        codes = torch.tensor([min(max(ord(c) - 31, 0), VOCABULARY - 1) for c in text[: NEEDED * WINDOW + 1]])
        return TensorDataset(codes[:-1].view(-1, WINDOW), codes[1:].view(-1, WINDOW))

    return [windows(text) for text in sorted(topics.values(), key=len)[-NUM_CLIENTS:]]


@cache
def vectors() -> list[Dataset]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(NEEDED, 32, generator=generator) / 3 + client / 3 for client in range(NUM_CLIENTS)]  # type: ignore[misc]


def small_lstm() -> L.LightningModule:
    module = LightningLSTM(vocab_size=VOCABULARY)
    module.model = SimpleLSTM(VOCABULARY, ninp=8, nhid=8, nlayers=2)
    return module


def small_transformer() -> L.LightningModule:
    module = LightningTransformer(vocab_size=VOCABULARY)
    module.model = Transformer(VOCABULARY, ninp=8, nhead=2, nhid=8, nlayers=1)
    return module


@dataclass(frozen=True)
class Project:
    """What somebody has: a module, each client's samples, and what they would say to federate it.

    Args:
        make: makes the module.
        samples: returns every client's.
        parts: which of its parts are the head and the encoder, as options of a method.
        federation: options of the federation.
        metrics: what it is scored by.
    """

    make: Callable[[], L.LightningModule]
    samples: Callable[[], list[Dataset]]
    parts: dict[str, str] = field(default_factory=dict)
    federation: dict[str, Any] = field(default_factory=dict)
    metrics: frozenset[str] = frozenset({"loss"})

    def method(self, kind: type[Client], **options: Any) -> Client:
        """Return a method around the module, always with the same first weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return kind(learner=self.make(), **{**self.parts, **options})

    def data(self) -> PerClient:
        """Return a data module a client."""
        return PerClient([Loaders(samples) for samples in self.samples()[:NUM_CLIENTS]])


CLIPPED = {"client_trainer": {"gradient_clip_val": 0.25}}  # as the demo's learning rate of 20 wants it
PROJECTS = {
    "LSTM": Project(
        small_lstm, texts, {"head": r"^model\.decoder", "encoder": "model.encoder"}, CLIPPED
    ),
    "Transformer": Project(
        small_transformer, texts, {"head": r"^model\.decoder", "encoder": "model.transformer"}
    ),
    "Boring": Project(BoringModel, vectors, {"head": "^layer", "encoder": "layer"}, metrics=frozenset()),
    "Regression": Project(
        Regression, diabetes, {"head": r"^net\.3\.", "encoder": "net.0"}, metrics=frozenset({"r2", "mse"})
    ),
    "Screening": Project(Screening, breast_cancer, metrics=frozenset({"auroc"})),
    "Segmentation": Project(Segmentation, discs, {"head": "^decoder"}, metrics=frozenset({"jaccard"})),
}  # fmt: skip
