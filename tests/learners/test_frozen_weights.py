"""Weights that never train stay at home, are compared on joining, and are held once; those of adapters have a role."""

import copy
from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_pfl import Federation, Server
from lit_pfl.core.privacy import ClientPrivacy
from lit_pfl.core.robust import CoordinateMedian, NormClipping
from lit_pfl.data import PerClient
from lit_pfl.errors import ConfigError, UploadError
from lit_pfl.lightning_internals import LastCheckpoint
from lit_pfl.links import LocalHub
from lit_pfl.methods import APFL, Ditto, FactorizedFL, FedAvg, FedPer, FedSLR, Scaffold, SimFed, StandAlone
from lit_pfl.testing.method_tester import LoRALinear
from lit_pfl_callbacks import FederatedLoop
from lit_pfl_callbacks.frozen import FROZEN, frozen_weights, read_table, table_of
from tiny import Learner, assert_equal, trainer, weights


class Pretrained(Learner):
    """A frozen network of 20,400 weights, and a head that is trained."""

    def __init__(self, seed=0, train_from=None, momentum=None):
        torch.manual_seed(seed)
        body = nn.Sequential(nn.Linear(8, 100), nn.ReLU(), nn.Linear(100, 195)).requires_grad_(False)
        super().__init__(body, nn.Linear(195, 2), momentum=0.9)
        self.train_from = train_from
        if momentum:
            self.query = nn.Linear(8, 8)
            self.key = copy.deepcopy(self.query).requires_grad_(False)
            self.momentum = momentum

    def training_step(self, batch, batch_idx):
        x, y = batch
        if hasattr(self, "key"):
            with torch.no_grad():
                for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
                    key.data.mul_(self.momentum).add_(query.data, alpha=1 - self.momentum)
            x = self.query(x) + self.key(x)
        return super().training_step((x, y), batch_idx)

    def on_train_epoch_start(self):
        if self.train_from is not None and self.current_epoch >= self.train_from:
            self.body[0].requires_grad_(True)


def samples(client):
    draws = torch.Generator().manual_seed(client)
    x = torch.randn(16, 8, generator=draws)
    return TensorDataset(x, (x.sum(1) > 0).long())


class Data(L.LightningDataModule):
    num_classes = 2

    def __init__(self, client):
        super().__init__()
        self.client = client

    def train_dataloader(self):
        return DataLoader(samples(self.client), 4, shuffle=True)

    val_dataloader = test_dataloader = train_dataloader


def fit(method, rounds=2, clients=3, ckpt_path=None, fitting=None, **options):
    federation = Federation(method, **{"seed": 1, "threads": 1, **options})
    fitting = fitting or trainer(rounds)
    fitting.fit(federation, datamodule=PerClient([Data(k) for k in range(clients)]), ckpt_path=ckpt_path)
    return federation


METHODS = {
    "FedAvg": FedAvg, "Ditto": Ditto, "FedPer": partial(FedPer, personal_layers=0), "FedSLR": FedSLR,
    "SimFed": partial(SimFed, encoder="body"), "APFL": APFL, "Scaffold": Scaffold,
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_frozen_weights_are_not_sent_and_are_held_once(name):
    start = Pretrained()
    federation = fit(METHODS[name](learner=Pretrained()), rounds=1)
    client = federation.clients[0]
    assert set(client.frozen) == {f"body.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")}
    assert not client.upload().keys() & client.frozen.keys()
    for one in federation.clients.values():
        for at, weight in one.frozen.items():
            assert weight.data_ptr() == client.frozen[at].data_ptr()
            assert torch.equal(weight, start.get_parameter(at))
    up, _ = federation.traffic.clients[0]
    assert up < 10_000  # of the head; all weights are 80 kB


def test_two_sites_with_other_pretrained_weights_are_told_so():
    def fits(*modules):
        hub = LocalHub()
        for client, module in enumerate(modules):
            fitting = trainer(1, callbacks=[FederatedLoop(hub.link)])
            hub.add(client, lambda t=fitting, m=module, c=client: t.fit(m, DataLoader(samples(c), 4)))
        return hub.run(Server())

    coordinator = fits(Pretrained(), Pretrained())
    assert set(coordinator.server.model) == {"head.weight", "head.bias"}
    with pytest.raises(ConfigError, match=r"^Client 1: weight 'body\.0\.weight' differs from the first client's; "):
        fits(Pretrained(), Pretrained(seed=1))
    unfrozen = Pretrained()
    unfrozen.body[2].requires_grad_(True)
    with pytest.raises(ConfigError, match=r"^Client 1: weight 'body\.2\.weight' is frozen at one client and not at"):
        fits(Pretrained(), unfrozen)
    with pytest.raises(ConfigError, match=r"^Client 1: weight 'body\.0\.weight' differs"):
        fits(FedAvg(learner=Pretrained()), FedAvg(learner=Pretrained(seed=1)))


def test_all_frozen_is_refused():
    with pytest.raises(ConfigError, match=r"^model\.learner: no tensor is left to share, since all weights"):
        fit(FedAvg(learner=Pretrained().requires_grad_(False)))
    with pytest.raises(ConfigError, match=r"^model\.shares='head': no tensor is left to share"):
        fit(FedPer(learner=Pretrained(), shares="head", personal_layers=1))


@pytest.mark.few(1)
@pytest.mark.parametrize("method", [FedAvg, StandAlone, Ditto])
def test_what_is_unfrozen_later_travels_from_then_on_and_a_resumed_run_is_the_same(tmp_path, method):
    def run(folder, rounds, ckpt_path=None):
        saving = trainer(rounds, callbacks=[LastCheckpoint(tmp_path / folder)], enable_checkpointing=True)
        return fit(method(learner=Pretrained(train_from=2)), rounds, ckpt_path=ckpt_path, fitting=saving)

    whole = run("whole", 4)
    for client in whole.clients.values():
        assert set(client.frozen) == {"body.2.weight", "body.2.bias"}
    one, other = (whole.clients[k].learner.body[0].weight for k in (0, 1))
    assert one.data_ptr() != other.data_ptr()
    assert not torch.equal(one, Pretrained().body[0].weight)
    assert not torch.equal(one, other)  # as trained
    assert ("body.0.weight" in whole.coordinator.server.model) == (method is not StandAlone)
    for rounds in (1, 3):
        run(f"cut{rounds}", rounds)
        assert_equal(weights(whole), weights(run(f"cut{rounds}", 4, tmp_path / f"cut{rounds}" / "last.ckpt")))


def test_a_weight_that_one_client_has_unfrozen_travels_to_all():
    """Participation differs, and so do the epochs that clients have trained."""
    federation = fit(FedAvg(learner=Pretrained(train_from=1)), rounds=5, participation=0.4)
    assert "body.0.weight" in federation.coordinator.server.model
    model = federation.coordinator.server.model
    last = [federation.clients[client] for client in federation.participants(4)]
    assert torch.equal(last[0].learner.body[0].weight, model["body.0.weight"])


def test_methods_that_keep_something_for_every_weight_refuse_it():
    with pytest.raises(ConfigError, match=r"'body\.0\.weight' is unfrozen in training, and Scaffold keeps something"):
        fit(Scaffold(learner=PlainSteps(train_from=1)))


class PlainSteps(Pretrained):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


METHODS["Scaffold"] = lambda learner, **options: Scaffold(learner=PlainSteps(), **options)


class Unfreezes(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.body)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.body[0], optimizer)


def test_lightnings_finetuning_callback_at_a_site():
    hub, modules = LocalHub(), [Pretrained().requires_grad_(True) for _ in range(2)]
    for client, module in enumerate(modules):
        fitting = trainer(3, callbacks=[Unfreezes(), FederatedLoop(hub.link)])
        hub.add(client, lambda t=fitting, m=module, c=client: t.fit(m, DataLoader(samples(c), 4)))
    coordinator = hub.run(Server())
    assert "body.0.weight" in coordinator.server.model
    assert "body.2.weight" not in coordinator.server.model
    assert_equal({0: dict(modules[0].state_dict())}, {0: dict(modules[1].state_dict())})


def test_a_momentum_copy_is_no_frozen_weight():
    """It changes without a gradient, so it travels as it always has and every client has its own."""
    module = Pretrained(momentum=0.5)
    assert "key.weight" not in frozen_weights(module)
    federation = fit(FedAvg(learner=module))
    assert "key.weight" in federation.clients[0].upload()
    one, other = (federation.clients[k].learner.key.weight for k in (0, 1))
    assert one.data_ptr() != other.data_ptr()
    assert not torch.equal(one, other)


class ChangesFrozenOnes(Pretrained):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.body[0].weight.data.mul_(0.99)


@pytest.mark.parametrize("fits", [1, 2])
def test_frozen_weights_that_a_module_changes_all_the_same_are_not_shared(recwarn, fits):
    def run(clients):
        federation, fitting = Federation(StandAlone(learner=ChangesFrozenOnes()), seed=1, threads=1), trainer(2)
        data = PerClient([Data(k) for k in range(clients)])
        for fit in range(fits):
            fitting.fit_loop.max_epochs = 2 * (fit + 1)
            fitting.fit(federation, datamodule=data)
        return [client.learner.body for client in federation.clients.values()]

    (one, other), [alone] = run(2), run(1)
    for body in (one, other):
        assert torch.equal(body[0].weight, alone[0].weight)
    assert one[0].weight.data_ptr() != other[0].weight.data_ptr()
    assert one[2].weight.data_ptr() == other[2].weight.data_ptr()
    assert any("changes 'body.0.weight' in training although" in str(told.message) for told in recwarn)


def test_the_global_model_has_frozen_weights_from_home():
    federation = Federation(FedAvg(learner=Pretrained()), seed=1, threads=1, evaluate="global")
    with pytest.raises(ConfigError, match="has no data of all"):  # but the model is there
        trainer(1).fit(federation, datamodule=PerClient([Data(k) for k in range(2)]))


def test_tables_of_frozen_weights():
    table = table_of({"a.b": torch.ones(2, 3), "c": torch.zeros((), dtype=torch.bfloat16)})
    read = read_table(table)
    assert read["a.b"][:2] == (torch.float32, (2, 3))
    assert read["c"][:2] == (torch.bfloat16, ())
    for nonsense in (b"", b"[]", b"{", b'{"a": 1}', b'{"a": ["no_type", [1], ""]}', b'{"a": ["nn", [1], ""]}', b"\xff"):
        with pytest.raises(ValueError, match="no table"):
            read_table(torch.tensor(list(nonsense), dtype=torch.uint8))
    assert FROZEN.endswith("#bits")


# ------------------------------------------------------------------------------------------------------------ adapters


class Adapted(Pretrained):
    def __init__(self, **options):
        super().__init__(**options)
        torch.manual_seed(1)
        self.body[2] = LoRALinear(100, 195)


def test_adapters_are_a_role():
    client = fit(FedAvg(learner=Adapted())).clients[0]
    found = {name for name, role in client.roles().items() if role == "adapter"}
    assert found == {"body.2.lora_A.default.weight", "body.2.lora_B.default.weight"}
    assert set(client.upload()) == {*found, "head.weight", "head.bias"}


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        ({"shares": "adapter"}, {"body.2.lora_A.default.weight", "body.2.lora_B.default.weight"}),
        ({"local": "adapter"}, {"head.weight", "head.bias"}),
        ({"shares": "lora_A"}, {"body.2.lora_A.default.weight"}),
        ({"shares": "adapter", "local": "lora_B"}, {"body.2.lora_A.default.weight"}),
        ({"shares": "head"}, {"head.weight", "head.bias"}),
    ],
)
def test_what_travels_is_chosen_by_role_or_name(options, sent):
    assert set(fit(FedAvg(learner=Adapted(), **options)).clients[0].upload()) == sent


@pytest.mark.parametrize("method", [FedAvg, Ditto, FedSLR, partial(SimFed, encoder="body"), FactorizedFL])
def test_methods_around_adapters(method):
    federation = fit(method(learner=Adapted()))
    assert not federation.coordinator.refused
    assert federation.traffic.clients[0][0] < 50_000


class OtherMomentum(Pretrained):
    """A momentum encoder that does not start as a copy, and stays as it is after the first epoch.

    It is taken for frozen until it is seen to change, which a run that is resumed later never sees.
    """

    def __init__(self):
        super().__init__(momentum=0.5)
        self.key = nn.Linear(8, 8).requires_grad_(False)

    def on_train_epoch_start(self):
        self.momentum = 0.5 if self.current_epoch == 0 else 1.0


def test_a_run_resumes_whose_module_changes_frozen_weights_of_other_values_than_those_trained(tmp_path):
    checkpoint = LastCheckpoint(tmp_path)
    with pytest.warns(UserWarning, match="OtherMomentum changes 'key.weight' in training"):
        whole = fit(FedAvg(learner=OtherMomentum()), rounds=3)
    fit(FedAvg(learner=OtherMomentum()), fitting=trainer(1, callbacks=[checkpoint], enable_checkpointing=True))
    resumed = fit(FedAvg(learner=OtherMomentum()), rounds=3, ckpt_path=tmp_path / "last.ckpt")
    assert_equal(weights(resumed), weights(whole))
    keys = [client.learner.key.weight for client in whole.clients.values()]
    assert not torch.equal(keys[0], keys[1])  # every client has its own


class LateMomentum(Pretrained):
    """A momentum encoder that starts to move in the second round."""

    def __init__(self):
        super().__init__(momentum=1.0)
        self.key = nn.Linear(8, 8).requires_grad_(False)

    def on_train_epoch_start(self):
        self.momentum = 1.0 if self.current_epoch == 0 else 0.5


def test_frozen_weights_that_change_late_end_the_run_and_a_resumed_one_keeps_them_apart(tmp_path):
    fitting = trainer(3, callbacks=[LastCheckpoint(tmp_path)], enable_checkpointing=True)
    with pytest.raises(ConfigError, match="LateMomentum has changed 'key.weight', which has requires_grad=False"):
        fit(FedAvg(learner=LateMomentum()), fitting=fitting)
    with pytest.warns(UserWarning, match="LateMomentum changes 'key.weight' in training"):
        resumed = fit(FedAvg(learner=LateMomentum()), rounds=3, ckpt_path=tmp_path / "last.ckpt")
    keys = [client.learner.key.weight for client in resumed.clients.values()]
    assert not torch.equal(keys[0], keys[1])


class Remembers(Pretrained):
    """Keeps what it has computed, with the graph behind it."""

    def __init__(self):
        super().__init__()
        self.last = self(torch.zeros(2, 8))


def test_a_module_that_keeps_an_activation_is_copied():
    learner = Remembers()
    assert not learner.last.is_leaf
    federation = fit(FedAvg(learner=learner), rounds=1)
    assert {client.learner.last.shape for client in federation.clients.values()} == {(2, 2)}


@pytest.mark.parametrize(
    ("method", "option", "says"),
    [
        ({"mean": NormClipping(1.0)}, {}, "model.mean=NormClipping"),
        ({}, {"max_update_norm": 100.0}, "federation.max_update_norm"),
        ({}, {"privacy": ClientPrivacy(clip=1.0)}, "federation.privacy"),
    ],
    ids=["mean", "norm", "privacy"],
)
def test_updates_of_weights_that_are_unfrozen_later_cannot_be_measured(method, option, says):
    """All of a weight would be its update."""
    if "privacy" in option:
        pytest.importorskip("dp_accounting")
    said = rf"Round 2: 0 of 3 .* Client 0: {says} measures updates, and the server .*'body\.0\.weight' was"
    with pytest.raises(UploadError, match=said), pytest.warns(UserWarning, match="Client 2: "):
        fit(FedAvg(learner=PlainSteps(train_from=1), **method), **option)
    fit(FedAvg(learner=PlainSteps(train_from=1), mean=CoordinateMedian()))
    fit(FedAvg(learner=PlainSteps(), **method), **option)
