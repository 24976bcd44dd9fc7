"""What a module sets in its hooks at the start of a fit is there wherever its steps are called."""

import copy

import lightning as L
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import Subset, TensorDataset

from lit_pfl import Client, Federation
from lit_pfl.core import ClientSpec
from lit_pfl.data import FromDataset, PerClient
from lit_pfl.engines import Local
from lit_pfl.errors import ConfigError
from lit_pfl.learners.scoring import score
from lit_pfl.methods import Ditto, FedAvg, KNNPer
from tiny import Learner

HOOKS = ("setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start")


class Plain(Learner):
    scale = 2.0
    begun = 0  # how often its fit has

    def __init__(self):
        super().__init__(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))

    def training_step(self, batch, batch_idx):
        return self.scale * torch.nn.functional.cross_entropy(self.head(self.body(batch[0])), batch[1])


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


# a sanity check comes before the epochs, as in Lightning
@pytest.mark.parametrize(
    ("hook", "base"), [*((hook, Plain) for hook in HOOKS), *((hook, Scored) for hook in HOOKS[:3])]
)
def test_what_hooks_set_is_there_when_steps_are_tried(hook, base):
    fit(setting(hook, base)())


@pytest.mark.parametrize("options", [{}, {"participation": 0.4}, {"engine": Local(awake=1)}])
@pytest.mark.parametrize("hook", HOOKS[:3])
def test_clients_that_have_not_trained_are_scored(hook, options):
    _, trainer = fit(setting(hook)(), **options)
    assert torch.isfinite(trainer.callback_metrics["val/loss"])
    _, trainer = fit(setting(hook)(), method=Ditto, num_sanity_val_steps=0, **options)
    assert torch.isfinite(trainer.callback_metrics["val/loss"])


@pytest.mark.seconds
def test_hooks_that_steps_do_not_need_are_called_once():
    """Called twice, this one would freeze the body before ``configure_optimizers`` looks for what trains."""

    class Gradual(Scored):
        def on_fit_start(self):
            self.begun += 1
            self.body.requires_grad_(False)

        def on_train_epoch_start(self):
            self.body.requires_grad_(self.current_epoch > 0)

        def configure_optimizers(self):
            return torch.optim.SGD([weight for weight in self.parameters() if weight.requires_grad], 0.1)

    learner = Gradual()
    federation, _ = fit(copy.deepcopy(learner))
    for client in federation.clients.values():
        assert client.learner.begun == 1
        assert not torch.equal(client.learner.body.weight, learner.body.weight)


def test_tensors_stay_as_they_were_when_a_hook_is_called_ahead(monkeypatch):
    """A look whether a learner can do with its data leaves them; then a client joins as a Trainer's fit would begin."""

    class Resets(Scored):
        scale = property(lambda self: self.rule)

        def on_fit_start(self):
            self.rule = 2.0
            torch.nn.init.constant_(self.head.bias, 7.0)
            self.body.requires_grad_(False)

    learner, sent = Resets(), []
    joining = Client.joining

    def noted(self):
        payload = joining(self)
        sent.append((self.learner.rule, self.learner.body.weight.requires_grad, payload.clone()))
        return payload

    monkeypatch.setattr(Client, "joining", noted)
    fit(copy.deepcopy(learner), rounds=1)
    for rule, trains, _ in sent:
        assert (rule, trains) == (2.0, True)
    looks, joins = sent[::2], sent[1::2]
    assert len(looks) == len(joins) > 1
    for _, _, payload in looks:
        assert torch.equal(payload["head.bias"], learner.head.bias.detach())
    for _, _, payload in joins:
        assert torch.equal(payload["head.bias"], torch.full((2,), 7.0))


class Even(Plain):
    def training_step(self, batch, batch_idx):
        assert len(batch[0]) % 2 == 0, "pairs only"
        return super().training_step(batch, batch_idx)


def test_a_step_that_cannot_do_with_one_sample_is_tried_on_a_batch():
    scored = {"validation_step": lambda self, batch, batch_idx: None}
    fit(type("Pairs", (Even,), scored)(), rounds=1)
    with pytest.warns(UserWarning, match="no validation_step, and its training_step no loss for val data .*pairs only"):
        fit(Even(), rounds=1)


def test_a_step_that_fails_on_a_later_batch_or_for_want_of_memory_fails():
    def batch(samples):
        return torch.zeros(samples, 3), torch.zeros(samples, dtype=torch.int64)

    class Large(Plain):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with pytest.raises(AssertionError, match="pairs only"):
        score(Even(), [batch(2), batch(1)], "val")
    with pytest.raises(RuntimeError, match="out of memory"):
        score(Large(), [batch(2)], "val")


def test_one_that_can_do_with_neither_is_refused():
    class Never(Plain):
        def training_step(self, batch, batch_idx):
            raise ValueError("no")

    with pytest.raises(ConfigError, match=r"Never has no training loss for a batch .*float32\[1, 3\].*ValueError: no"):
        fit(Never())
    with pytest.raises(ConfigError, match=r"Never has no training loss for a batch .*float32\[1, 3\].*ValueError: no"):
        fit(Never(), method=KNNPer)


def test_the_error_is_the_step_s_and_not_that_of_counting_its_operations():
    class Never(Plain):
        def training_step(self, batch, batch_idx):
            with torch.inference_mode():  # with parameters in it, PyTorch's counter has an error of its own
                self.head(self.head.weight)
            raise ValueError("no")

    with pytest.raises(ConfigError, match=r"Never has no training loss for a batch .*ValueError: no"):
        fit(Never())


def test_where_a_whole_batch_fails_in_another_way_that_is_told():
    class Broken(Even):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + self.no_such

    with pytest.raises(ConfigError, match=r"Broken has no .*float32\[[2-9], 3\].*AttributeError: .*no_such"):
        fit(Broken())


def test_a_buffer_of_infinity_stays_at_home():
    """A causal mask, or a bound of GPyTorch: a constant that no mean can be taken of."""

    class Masked(Scored):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
            self.register_buffer("seen", torch.zeros(1))

    with pytest.warns(UserWarning, match="Masked: infinity cannot be averaged; not sent: mask"):
        federation, _ = fit(Masked(), rounds=1)
    assert "seen" in federation.coordinator.server.model
    assert "mask" not in federation.coordinator.server.model


def test_buffers_without_values_are_not_asked_for_any():
    with FakeTensorMode():
        learner = Scored()
        learner.register_buffer("seen", torch.zeros(1))
        client = FedAvg(learner=learner)
        client.configure(ClientSpec(example=(torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64))))
    assert "seen" in client.shared_parameters()


class Drawn(torch.utils.data.Dataset):
    """Samples with a random transform that has a generator of its own."""

    def __init__(self, seed=None):
        self.rng = np.random.default_rng(seed)

    def __len__(self):
        return 30

    def __getitem__(self, i):
        return torch.full((3,), i / 30) + torch.from_numpy(self.rng.normal(size=3)).float(), i % 2


@pytest.mark.parametrize("kind", ["unseeded", "seeded", "of other size"])
def test_runs_on_samples_that_draw_on_their_own_are_resumed(tmp_path, kind):
    def run(rounds, path=None, more=0):
        data = Drawn(1 if kind == "seeded" else None)
        parts = [Subset(data, range(k, 30 - 2 * more * k, 2)) for k in range(2)]
        modules = [L.LightningDataModule.from_datasets(part, batch_size=5) for part in parts]
        trainer = L.Trainer(max_epochs=rounds, accelerator="cpu", logger=False, enable_checkpointing=False,
                            enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
        trainer.fit(Federation(FedAvg(learner=Scored()), seed=0), datamodule=PerClient(modules), ckpt_path=path)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return trainer

    run(1)
    if kind == "of other size":
        with pytest.raises(ConfigError, match="client 1 had other samples"):
            run(2, tmp_path / "last.ckpt", more=1)
    else:
        assert run(2, tmp_path / "last.ckpt").current_epoch == 2


def test_predictions_without_a_step_of_its_own():
    class Whole(Scored):
        def forward(self, x):
            return x.no_such_part

    federation, trainer = fit(Scored(), rounds=1)
    found = trainer.predict(federation, datamodule=trainer.datamodule)
    assert all(logits.shape[1:] == (2,) for part in found for logits in part.values())
    federation, trainer = fit(Whole(), rounds=1)
    with pytest.raises(ConfigError, match="forward of Whole cannot do with a batch, .* give it a predict_step"):
        trainer.predict(federation, datamodule=trainer.datamodule)
