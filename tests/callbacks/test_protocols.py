"""What a module tells, and what only has the same name."""

import pytest
import torch
from torch import nn

from callbacks.plain import Group, Line, batches, rows, trainer
from lit_pfl_callbacks import (
    ClientsTable,
    CommunicationLedger,
    FeatureAlignment,
    PersonalizedModels,
    RoundProgress,
    RoundTimer,
    SparsityMonitor,
)
from lit_pfl_callbacks.protocols import HasClients, HasScores, HasSeconds, HasTraffic


class Own(Line):
    """Somebody's module, whose attributes mean other things."""

    def __init__(self):
        super().__init__()
        self.client_ids, self.rows, self.higher_is_better, self.traffic, self.seconds = 3, 4, True, 0.5, 2.0
        self.mixing, self.ask, self.roles, self.weight_parts = 0.1, False, ["a"], "none"
        self.hidden = nn.Linear(3, 3)

    def forward(self, x):
        return self.net(self.hidden(x))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


def test_attributes_of_other_kinds_are_the_module_s_own(tmp_path):
    callbacks = [
        RoundTimer(), SparsityMonitor(every_n_rounds=1), FeatureAlignment(), CommunicationLedger(), ClientsTable(),
        PersonalizedModels(), RoundProgress(),
    ]  # fmt: skip
    data = batches()
    data.dataset.tensors = data.dataset.tensors[0], torch.arange(8) % 2
    trainer(tmp_path, 1, callbacks, enable_progress_bar=True).fit(Own(), data)
    assert {line["layer"] for line in rows(tmp_path / "run" / "sparsity.csv")} == {"net", "hidden"}
    assert (tmp_path / "run" / "models" / "model.safetensors").exists()


@pytest.mark.parametrize("protocol", [HasClients, HasScores, HasSeconds, HasTraffic])
def test_what_is_of_the_kind_is_told(protocol):
    assert isinstance(Group(), protocol)
    assert not isinstance(Own(), protocol)
    assert not isinstance(Line(), protocol)
