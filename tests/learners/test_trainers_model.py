"""Modules that find themselves in their Trainer, and that call their ``forward`` by its name."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

import lit_pfl.methods
from learners.test_asking_the_trainer import Rows
from lit_pfl import Federation
from lit_pfl.data import PerClient
from lit_pfl.errors import ConfigError
from lit_pfl.testing import assert_equal

METHODS = sorted(lit_pfl.methods.__all__)


class Plain(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.BatchNorm1d(5))
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x))

    def step(self, x: Tensor) -> Tensor:
        return self(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.step(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("acc", (self.step(batch[0]).argmax(1) == batch[1]).float().mean())

    def trained(self) -> Any:
        return self.parameters()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.trained(), lr=0.1)


class Template(Plain):
    """As in a well-known template of Lightning projects."""

    def step(self, x: Tensor) -> Tensor:
        return self.forward(x)

    def trained(self) -> Any:
        return self.trainer.model.parameters()


def run(method: str, kind: type[Plain]) -> Any:
    torch.manual_seed(0)
    client = getattr(lit_pfl.methods, method)(learner=kind(), head="^out", encoder="body")
    trainer = L.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    federation = Federation(client, seed=0, threads=1)
    trainer.fit(federation, datamodule=PerClient([Rows(0), Rows(1)]))
    return {client: module.state_dict() for client, module in federation.clients.items()}, trainer.callback_metrics


@pytest.mark.few(8)
@pytest.mark.parametrize("method", ["APFL", "FedEM", *(name for name in METHODS if name not in ("APFL", "FedEM"))])
def test_a_module_of_a_template_trains_as_a_plain_one_does(method):
    try:
        expected = run(method, Plain)
    except ConfigError as error:
        pytest.skip(str(error))
    assert_equal(run(method, Template), expected)
