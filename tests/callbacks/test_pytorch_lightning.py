"""Projects that import ``pytorch_lightning``, which has Lightning's classes once more."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_pfl import Federation
from lit_pfl.data import PerClient
from lit_pfl.errors import ConfigError
from lit_pfl.links import LocalHub
from lit_pfl.methods import FedAvg
from lit_pfl.testing import check_learner
from lit_pfl_callbacks import FederatedLoop

pl = pytest.importorskip("pytorch_lightning")


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        draw = torch.Generator().manual_seed(0)
        return DataLoader(TensorDataset(torch.randn(12, 4, generator=draw), torch.arange(12) % 2), 4)


def test_its_trainer_takes_the_callback():
    hub, modules = LocalHub(), [Module(), Module()]

    def fit(module):
        trainer = pl.Trainer(
            max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[FederatedLoop(hub.link)],
        )  # fmt: skip
        trainer.fit(module, Data())

    for client, module in enumerate(modules):
        hub.add(client, lambda module=module: fit(module))
    assert hub.run().round == 3
    assert torch.equal(modules[0].net.weight, modules[1].net.weight)


@pytest.mark.parametrize(
    ("give", "line"),
    [
        (lambda: FedAvg(learner=Module()).configure_server(), "model.learner: Module .* L.LightningModule"),
        (lambda: check_learner(Module(), [torch.zeros(1)]), "check_learner: Module .* L.LightningModule"),
        (lambda: PerClient([Data()]).setup(), r"data.modules\[0\]: Data .* L.LightningDataModule"),
        (
            lambda: Federation(FedAvg(), client_trainer={"callbacks": [pl.Callback()]}),
            "federation.client_trainer.callbacks: Callback .* L.Callback",
        ),
    ],
)
def test_its_classes_are_refused_by_their_name(give, line):
    with pytest.raises(ConfigError, match=f"^{line}") as error:
        give()
    assert "is made with pytorch_lightning" in str(error.value)
    assert "\n" not in str(error.value)
