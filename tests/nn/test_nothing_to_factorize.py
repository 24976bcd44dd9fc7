"""Methods with weights of a form of their own, of networks that have no layer for it."""

import lightning as L
import pytest
import torch
from torch import nn

from lit_pfl.core import ClientSpec
from lit_pfl.errors import ConfigError
from lit_pfl.methods import PFedPara, SimFed


class Volumes(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv3d(1, 2, 3)
        self.out = nn.Conv3d(2, 2, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.out(self.body(batch)).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("method", "line"),
    [
        (SimFed, "model.factorization: Volumes has no two-dimensional convolution and no linear layer that is trained"),
        (PFedPara, "PFedPara needs a two-dimensional convolution or a linear layer in the body that it can replace"),
    ],
)
def test_what_would_change_nothing_is_refused(method, line):
    client = method(learner=Volumes(), head="^out", **({"encoder": "body"} if method is SimFed else {}))
    with pytest.raises(ConfigError, match=line) as error:
        client.build(ClientSpec(example=torch.zeros(1, 1, 8, 8, 8)))
    assert "\n" not in str(error.value)


def test_without_factorization_such_a_network_trains():
    made = SimFed(learner=Volumes(), head="^out", encoder="body", factorization=None).build(
        ClientSpec(example=torch.zeros(1, 1, 8, 8, 8))
    )
    assert isinstance(made.learner.body, nn.Conv3d)
