"""What a module sets in its hooks at the start of a fit is there wherever its steps are called."""

import copy

import lightning as L
import pytest
import torch
from torch.utils.data import TensorDataset

from lit_pfl import Federation
from lit_pfl.data import FromDataset
from lit_pfl.engines import Local, visitors
from lit_pfl.errors import ConfigError
from lit_pfl.methods import Ditto, FedAvg, KNNPer
from tiny import assert_equal, weights

HOOKS = ("setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start")


class Plain(L.LightningModule):
    scale = 2.0
    begun = 0

    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.cross_entropy(self.head(self.body(batch[0])), batch[1])
        return self.scale * loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Scored(Plain):
    def validation_step(self, batch, batch_idx):
        self.log("loss", self.training_step(batch, batch_idx))


def setting(hook: str, base: type = Scored) -> type:
    """Return a module that has its scale from a hook only."""

    def sets(self, *args, **kwargs):
        self.rule = 2.0

    return type("Setting", (base,), {hook: sets, "scale": property(lambda self: self.rule)})


def fit(learner, method=FedAvg, engine=None, participation=1.0, rounds=2, **options):
    data = TensorDataset(torch.rand(30, 3, generator=torch.Generator().manual_seed(0)), torch.arange(30) % 2)
    trainer = L.Trainer(
        max_epochs=rounds, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **options,
    )  # fmt: skip
    federation = Federation(method(learner=learner), seed=0, engine=engine, participation=participation)
    trainer.fit(federation, datamodule=FromDataset(data, num_clients=3, batch_size=4, labels=lambda s: int(s[1])))
    return federation, trainer


@pytest.mark.parametrize("base", [Plain, Scored])
@pytest.mark.parametrize("hook", HOOKS)
def test_what_hooks_set_is_there_when_steps_are_tried(hook, base):
    if hook in HOOKS[3:] and base is Scored:
        pytest.skip("a sanity check comes before epochs, as in Lightning")
    fit(setting(hook, base)())


@pytest.mark.parametrize("options", [{}, {"participation": 0.4}, {"engine": Local(awake=1)}])
@pytest.mark.parametrize("hook", HOOKS[:3])
def test_clients_that_have_not_trained_are_scored(hook, options):
    _, trainer = fit(setting(hook)(), **options)
    assert torch.isfinite(trainer.callback_metrics["val/loss"])
    _, trainer = fit(setting(hook)(), method=Ditto, num_sanity_val_steps=0, **options)
    assert torch.isfinite(trainer.callback_metrics["val/loss"])


def test_tensors_and_draws_are_as_without_the_first_look(monkeypatch):
    def resets(self):
        self.begun += 1
        torch.nn.init.normal_(self.head.bias)

    kind = type("Resets", (Scored,), {"on_fit_start": resets})
    learner = kind()
    looked, _ = fit(copy.deepcopy(learner))
    monkeypatch.setattr(visitors, "_begin", lambda client: None)
    expected, _ = fit(learner)
    for client in looked.clients:
        assert_equal(weights(looked)[client], weights(expected)[client])
        assert (looked.clients[client].learner.begun, expected.clients[client].learner.begun) == (2, 1)


class Even(Plain):
    def training_step(self, batch, batch_idx):
        assert len(batch[0]) % 2 == 0, "pairs only"
        return super().training_step(batch, batch_idx)


def test_a_step_that_cannot_do_with_one_sample_is_tried_on_a_batch():
    scored = {"validation_step": lambda self, batch, batch_idx: None}
    fit(type("Pairs", (Even,), scored)(), rounds=1)
    with pytest.warns(UserWarning, match="no validation_step, and its training_step no loss for val data .*pairs only"):
        fit(Even(), rounds=1)


def test_one_that_can_do_with_neither_is_refused():
    class Never(Plain):
        def training_step(self, batch, batch_idx):
            raise ValueError("no")

    with pytest.raises(ConfigError, match=r"Never has no training loss for a batch .*float32\[1, 3\].*ValueError: no"):
        fit(Never())
    with pytest.raises(ConfigError, match=r"Never has no training loss for a batch .*float32\[1, 3\].*ValueError: no"):
        fit(Never(), method=KNNPer)
