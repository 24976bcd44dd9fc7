"""A learner that loads its tensors in a way of its own does so under a method: under its own names."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lit_pfl import Federation
from lit_pfl.data import PerClient
from lit_pfl.engines import Local
from lit_pfl.methods import Ditto, FedAvg
from tiny import Learner, assert_equal, trainer, weights


class KnowsItsPlace(nn.Linear):
    """Reads whole names, as torch_uncertainty's CheckpointCollector does."""

    def _load_from_state_dict(self, state_dict, prefix, *args):
        assert state_dict["body.weight"].shape == self.weight.shape
        super()._load_from_state_dict(state_dict, prefix, *args)


class LoadsItself(Learner):
    """Knows what is in its own checkpoints."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(KnowsItsPlace(6, 5), nn.Linear(5, 3))
        self.register_buffer("rounds", torch.zeros(1))

    def on_train_epoch_end(self):
        self.rounds += 1

    def load_state_dict(self, state_dict, strict=True):
        assert {"rounds", "body.weight", "head.bias"} <= state_dict.keys()
        super().load_state_dict(state_dict, strict)  # and returns nothing, as many of them


def data(client):
    draw = torch.Generator().manual_seed(client)
    samples = TensorDataset(torch.randn(16, 6, generator=draw), torch.randint(0, 3, (16,), generator=draw))
    return L.LightningDataModule.from_datasets(samples, samples, samples, batch_size=8)


def federation(method, rounds, folder, engine=None, resume=False):
    made = Federation(method(learner=LoadsItself()), seed=1, **({"engine": engine} if engine else {"threads": 1}))
    fitting = trainer(rounds, default_root_dir=folder)
    path = folder / "last.ckpt"
    fitting.fit(made, datamodule=PerClient([data(k) for k in range(3)]), ckpt_path=path if resume else None)
    fitting.save_checkpoint(path)
    return made


@pytest.mark.parametrize("method", [FedAvg, Ditto])
def test_a_federation_sleeps_and_resumes(tmp_path, method):
    straight = weights(federation(method, 3, tmp_path))
    federation(method, 1, tmp_path)
    assert_equal(weights(federation(method, 3, tmp_path, resume=True)), straight)
    federation(method, 1, tmp_path, Local(awake=1))
    asleep = federation(method, 3, tmp_path, Local(awake=1), resume=True)
    assert_equal(weights(asleep), {name: straight[name] for name in weights(asleep)})


def test_versions_of_modules_reach_their_loading():
    module = FedAvg(learner=Learner(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)), nn.Linear(5, 3)))
    state = module.state_dict()
    del state["learner.body.1.num_batches_tracked"]  # only versions before 2 of BatchNorm do without
    with pytest.raises(RuntimeError, match="num_batches_tracked"):
        module.load_state_dict(state)
    found = module.load_state_dict({**state, "learner.other": torch.ones(1)}, strict=False)
    assert "learner.other" in found.unexpected_keys
