"""What every client has of its own."""

import threading
from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lit_pfl.core.server import Server
from lit_pfl.errors import ConfigError
from lit_pfl.links import LocalHub
from lit_pfl.methods import FedAvg, FedFOMO, FedProx
from lit_pfl_callbacks import FederatedLoop
from tiny import Learner, TinyNet, client, digits, momentum_sgd, run, spec, trainer


class Keeps(FedAvg):
    """A method that makes all sorts of things in its ``__init__``."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = set()
        self.total = torch.zeros(1)
        self.criterion = nn.PReLU()
        self.metric = MeanMetric()
        self.nested = {"counts": [0], "criterion": self.criterion}
        self.hook = self.note

    def note(self):
        self.seen.add(self.spec.client_id)

    def begin_round(self):
        self.hook()
        self.total += 1
        self.nested["counts"][0] += 1
        self.metric.update(float(self.spec.client_id))


def test_every_client_has_its_own_of_what_a_method_makes():
    federation = run(client(Keeps), digits(3), rounds=2)
    members = federation.clients.values()
    for k, member in federation.clients.items():
        assert (member.seen, member.total.item(), member.nested["counts"]) == ({k}, 2, [2])
        assert member.metric.compute() == k
        assert member.nested["criterion"] is member.criterion  # what was one object still is
    assert len({id(member.criterion.weight) for member in members}) == 3
    assert federation.prototype.seen == set()


def test_factories_are_not_copied():
    backbone, optimizer = partial(TinyNet, width=2), partial(torch.optim.SGD, lr=0.1)
    pattern = FedAvg(backbone=backbone, optimizer=optimizer)
    pattern.factories = {"more": [backbone]}
    member = pattern.build(spec(channels=1, image_size=8))
    assert member.make_backbone is backbone
    assert member.make_optimizer is optimizer
    assert member.factories["more"][0] is backbone


def test_what_cannot_be_copied_is_named():
    pattern = client(FedAvg, optimizer=momentum_sgd)
    pattern.lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"^FedAvg\.lock: every client needs one of its own"):
        pattern.build(spec(channels=1, image_size=8))


def test_a_part_whose_class_cannot_be_copied_is_named():
    class Average(nn.Module):
        def __new__(cls, model):
            return super().__new__(cls)

        def __init__(self, model):
            super().__init__()

    learner = Learner(nn.Linear(4, 4), nn.Linear(4, 2))
    learner.body.average = Average(learner.head)
    with pytest.raises(ConfigError, match=r"^FedAvg\.learner\.body\.average: .* cannot be copied .*in configure_model"):
        FedAvg(learner=learner).build(spec())


class Misspelt(FedAvg):
    shares = frozenset({"body", "heads"})


class OneWord(FedAvg):
    shares = "body"


@pytest.mark.parametrize(("method", "name"), [(Misspelt, "heads"), (OneWord, "b")])
def test_roles_that_there_are_not_are_named(method, name):
    with pytest.raises(
        ConfigError, match=f"{method.__name__}.shares: '{name}' is not a role; .* body, head, u,"
    ) as error:
        client(method).build(spec())
    assert "\n" not in str(error.value)


class Lazy(L.LightningModule):
    def __init__(self, made: bool = False):
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
        if made:
            self.net(torch.zeros(2, 3))

    def training_step(self, batch, batch_idx):
        return self.net(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class AsksForItsTrainer(Lazy):
    def configure_model(self):
        self.net = nn.Linear(3, self.trainer.max_epochs)


@pytest.mark.parametrize("alone", [False, True])
def test_lazy_layers_of_a_learner_are_asked_for_their_shapes(alone):
    build = (lambda method: method.configure_model()) if alone else (lambda method: method.build(spec()))
    message = "model.learner: Lazy has lazy layers, whose 'net.0.weight' has no shape"
    with pytest.raises(ConfigError, match=message) as error:
        build(FedAvg(learner=Lazy()))
    assert "\n" not in str(error.value)
    build(FedAvg(learner=Lazy(made=True)))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_a_scripted_part_trains_only_where_it_is_not_copied():
    learner = Lazy(made=True)
    learner.net = torch.jit.script(learner.net)
    with pytest.raises(ConfigError, match=r"^model\.learner: 'net' of Lazy is a ScriptModule, .*; leave out"):
        FedAvg(learner=learner).build(spec())
    FedAvg(learner=learner).configure_model()
    for weight in learner.net.parameters():
        weight.requires_grad_(False)
    learner.more = nn.Linear(1, 1)
    FedAvg(learner=learner).build(spec())


class Compiles(Lazy):
    def configure_model(self):
        self.net.compile(backend="eager")


def test_parts_are_compiled_in_configure_model():
    learner = Compiles(made=True)
    clients = [FedAvg(learner=learner).build(spec()) for _ in range(2)]
    assert all(client.learner.net._compiled_call_impl is not None for client in clients)
    assert learner.net._compiled_call_impl is None


@pytest.mark.parametrize(("part", "named"), [("net", "'net'"), ("", "'all'")])
def test_a_part_whose_copies_would_not_be_compiled_is_told(part, named):
    learner = Lazy(made=True)
    learner.get_submodule(part).compile(backend="eager")
    with pytest.warns(UserWarning, match=f"^{named} of Lazy was compiled before it was copied"):
        FedAvg(learner=learner).build(spec())


@pytest.mark.parametrize("alone", [False, True])
def test_a_learner_that_was_compiled_as_a_whole_is_refused(alone):
    method = FedAvg(learner=torch.compile(Lazy(made=True), backend="eager"))
    with pytest.raises(ConfigError, match=r"^model\.learner: Lazy was compiled as a whole, .*; let configure_model"):
        method.configure_model() if alone else method.build(spec())


def test_a_learner_that_asks_for_its_trainer_too_early_is_told():
    message = "AsksForItsTrainer.configure_model asks for its Trainer, .*; give __init__ what it needs"
    with pytest.raises(ConfigError, match=message) as error:
        FedAvg(learner=AsksForItsTrainer(made=True)).build(spec())
    assert "\n" not in str(error.value)


class MakesMore(Lazy):
    """Has a layer more when its training begins."""

    def __init__(self):
        super().__init__(made=True)

    def setup(self, stage):
        self.more = nn.Linear(1, 1)


class CompilesLate(Lazy):
    """Gives its tensors other names when its training begins."""

    def __init__(self):
        super().__init__(made=True)

    def setup(self, stage):
        self.net = torch.compile(self.net, backend="eager")


@pytest.mark.parametrize(
    ("learner", "message"),
    [
        (MakesMore, r"MakesMore makes 'more\.bias' in setup\(\), after .*; make its layers in __init__"),
        (CompilesLate, r"makes 'net\._orig_mod.* in setup\(\), after .*; compile in place, as by self\.net\.compile"),
    ],
)
def test_layers_that_are_made_too_late_to_travel_are_refused(learner, message):
    hub = LocalHub()
    trainer = L.Trainer(max_epochs=1, callbacks=[FederatedLoop(hub.link)], accelerator="cpu", logger=False)
    batches = DataLoader(TensorDataset(torch.randn(4, 3)), 2)
    hub.add(0, lambda: trainer.fit(FedAvg(learner=learner()), batches))
    with pytest.raises(ConfigError, match=message):
        hub.run(FedAvg(learner=Lazy(made=True)).configure_server())


def test_a_method_does_not_train_without_a_federation():
    batches = DataLoader(TensorDataset(torch.randn(4, 3)), 2)
    with pytest.raises(ConfigError, match=r"^FedProx is a method and trains in rounds: .*callbacks=\[FederatedLoop"):
        trainer(1).fit(FedProx(learner=Lazy(made=True)), batches)


def test_an_optimizer_that_a_command_line_has_put_in_is_refused():
    """LightningCLI replaces configure_optimizers of the method, not of its learner."""
    command = ["fit", "--model.learner", f"{__name__}.Lazy", "--model.learner.made", "true", "--optimizer", "SGD"]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    with pytest.raises(
        ConfigError, match=r"^FedProx\.configure_optimizers was replaced, as LightningCLI does"
    ) as error:
        LightningCLI(FedProx, L.LightningDataModule, trainer_defaults=quiet, args=[*command, "--optimizer.lr", "0.1"])
    assert "\n" not in str(error.value)


class Scaled(nn.Linear):
    """Keeps a tensor beside its own (``get_extra_state``), as layers of mixed precision do."""

    scale = torch.ones(1)

    def get_extra_state(self):
        return self.scale

    def set_extra_state(self, state):
        self.scale = state


class WithExtraState(Learner):
    def __init__(self):
        super().__init__(Scaled(3, 4), nn.Linear(4, 1))

    def training_step(self, batch, batch_idx):
        return self.head(self.body(batch[0])).square().mean()

    validation_step = training_step

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(8, 3)), batch_size=4)

    val_dataloader = train_dataloader


@pytest.mark.parametrize("method", [None, FedAvg, FedFOMO])
def test_tensors_in_extra_state_stay_at_home(method):
    hub = LocalHub()

    def make():
        return WithExtraState() if method is None else method(learner=WithExtraState())

    def fit():
        trainer(callbacks=[FederatedLoop(hub.link)]).fit(make())

    for client_id in range(2):
        hub.add(client_id, fit)
    server = Server() if method is None else make().configure_server()
    assert hub.run(server).round == 2
