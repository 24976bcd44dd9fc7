"""Projects that know nothing of lit_pfl: a site with a link of its own, and a module that stands for some clients."""

from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cli.typed import rows as rows
from lit_pfl_callbacks.protocols import transfer


class Line(L.LightningModule):
    """A regression: 3 inputs, 2 outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(3, 2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.net(batch[0]) - batch[1]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/acc", -self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Echo:
    """A link that sends back what it gets, and one tensor more."""

    def join(self, info: Any) -> Any:
        return {}

    def exchange(self, upload: Any) -> Any:
        return {name: tensor.clone() for name, tensor in upload.items()}


class Score(NamedTuple):
    client: int
    round: int
    split: str
    model: str
    n: int
    scores: dict[str, float]


class Counted:
    def __init__(self) -> None:
        self.total, self.clients, self.watchers = 0, {}, []


class Group(Line):
    """Three clients in one module, which train by themselves; it tells callbacks all that there is to tell."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(nn.Linear(3, 2) for _ in range(3))
        self.client_ids, self.clients = [0, 1, 2], dict(enumerate(self.members))
        self.traffic = Counted()
        self.seconds = {"aggregate": 0.0, "link": 0.0}
        self.rows: list[Score] = []
        self.higher_is_better = {"acc": True}
        self.weights: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.stack([(member(batch[0]) - batch[1]).square().mean() for member in self.members]).sum()

    def send(self, client: int, direction: str, tensors: dict[str, torch.Tensor]) -> None:
        for watcher in self.traffic.watchers:
            watcher(transfer(self.current_epoch + 1, client, direction, tensors))

    def on_train_epoch_start(self) -> None:
        self.begun = {c: {n: t.clone() for n, t in m.state_dict().items()} for c, m in self.clients.items()}

    def on_train_batch_end(self, *_: Any) -> None:
        for client, member in self.clients.items():
            self.send(client, "down", self.begun[client])
            self.send(client, "up", {**member.state_dict(), "embedding": self.embedding(client)})
        weights = torch.eye(3)
        weights[0, 1] = 0.5
        weights[1, 2] = float(self.current_epoch == 0)
        self.weights = weights

    def mixing(self) -> Any:
        return None if self.weights is None else ([0, 1, 2], self.weights)

    def embedding(self, client: int) -> torch.Tensor:
        return torch.tensor([float(client), client**2 - 1.0, 1.0, float(self.current_epoch)])

    def ask(self, question: Any, clients: Any = None, as_scored: bool = False) -> dict[int, Any]:
        return {client: question(self.clients[client]) for client in (self.client_ids if clients is None else clients)}


def batches() -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 3, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :2]), batch_size=8)


def trainer(folder: Any, epochs: int, callbacks: list[L.Callback], **options: Any) -> L.Trainer:
    """Return a Trainer with a logger of Lightning's own, which keeps the latest checkpoint."""
    keep = L.pytorch.callbacks.ModelCheckpoint(
        folder / "run", filename="last", save_on_train_epoch_end=True, enable_version_counter=False
    )
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    logger = CSVLogger(str(folder), name="", version="run")
    return L.Trainer(**{
        "max_epochs": epochs, "accelerator": "cpu", "logger": logger, "callbacks": [*callbacks, keep],
        "log_every_n_steps": 1, **quiet, **options,
    })  # fmt: skip
