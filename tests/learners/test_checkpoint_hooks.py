"""What a learner does to its checkpoints, it does under a method too: its hooks see its tensors under its own names."""

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_pfl import Federation
from lit_pfl.core import ClientSpec
from lit_pfl.data import PerClient
from lit_pfl.errors import ConfigError
from lit_pfl.links import LocalHub
from lit_pfl.methods import Ditto, FedAvg
from lit_pfl_callbacks import FederatedLoop
from lit_pfl_callbacks.tensors import tensors_of
from tiny import assert_equal, trainer, weights


class Taught(L.LightningModule):
    """Learns from a teacher that is never trained."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.teacher, self.head = nn.Linear(3, 2).requires_grad_(False), nn.Sequential(nn.Linear(3, 2))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.head(batch[0]), self.teacher(batch[0]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), lr=0.1, momentum=0.9)


class KeepsWhatIsTrained(Taught):
    """As with a LoRA: a new dict of the trained weights only."""

    def __init__(self):
        super().__init__()
        self.strict_loading = False

    def on_save_checkpoint(self, checkpoint):
        trained = {name for name, weight in self.named_parameters() if weight.requires_grad}
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k in trained}


class PutsBack(Taught):
    """Takes the teacher out of the dict that is there, and puts it back."""

    def on_save_checkpoint(self, checkpoint):
        for name in self.teacher.state_dict():
            del checkpoint["state_dict"][f"teacher.{name}"]

    def on_load_checkpoint(self, checkpoint):
        checkpoint["state_dict"].update({f"teacher.{k}": v for k, v in self.teacher.state_dict().items()})


def samples(client):
    return TensorDataset(torch.randn(8, 3, generator=torch.Generator().manual_seed(client)))


def sites(method, learner, folder, rounds, former=None):
    """Train two sites, under a Trainer of their own each, and return their methods; every one leaves a checkpoint."""
    modules, hub = [method(learner=learner()) for _ in range(2)], LocalHub(seed=1)

    def fit(number):
        fitting = trainer(rounds, callbacks=[FederatedLoop(hub.link)])
        path = former and folder / f"{former}-{number}.ckpt"
        fitting.fit(modules[number], DataLoader(samples(number), 4), ckpt_path=path, weights_only=False)
        fitting.save_checkpoint(folder / f"{rounds}-{number}.ckpt")

    for number in range(2):
        hub.add(number, lambda number=number: fit(number))
    hub.run(method(learner=learner()).configure_server())
    return modules


@pytest.mark.parametrize("method", [FedAvg, Ditto])
@pytest.mark.parametrize("learner", [KeepsWhatIsTrained, PutsBack])
def test_a_site_goes_on_from_what_its_module_keeps(tmp_path, learner, method):
    straight = sites(method, Taught, tmp_path, 3)
    sites(method, learner, tmp_path, 1)
    resumed = sites(method, learner, tmp_path, 3, former=1)
    for one, other in zip(straight, resumed, strict=True):
        assert_equal(tensors_of(one), tensors_of(other))
    kept = torch.load(tmp_path / "1-0.ckpt", weights_only=False)["state_dict"]
    parts = list(resumed[0].learners)
    assert set(kept) == {f"{part}.head.0.{name}" for part in parts for name in ("weight", "bias")}


def federation(method, learner, rounds, folder, resume=False):
    """Train a federation, and leave its checkpoint."""
    data = PerClient([L.LightningDataModule.from_datasets(samples(k), batch_size=4) for k in range(2)])
    made, fitting = Federation(method(learner=learner()), seed=1, threads=1), trainer(rounds)
    fitting.fit(made, datamodule=data, ckpt_path=folder / "last.ckpt" if resume else None)
    fitting.save_checkpoint(folder / "last.ckpt")
    return made


@pytest.mark.parametrize("method", [FedAvg, Ditto])
@pytest.mark.parametrize("learner", [KeepsWhatIsTrained, PutsBack])
def test_a_federation_goes_on_from_what_its_module_keeps(tmp_path, learner, method):
    straight = federation(method, Taught, 3, tmp_path)
    federation(method, learner, 1, tmp_path)
    kept = torch.load(tmp_path / "last.ckpt", weights_only=False)["federation"]["clients"][0]["state_dict"]
    resumed = federation(method, learner, 3, tmp_path, resume=True)
    assert_equal(weights(straight), weights(resumed))
    parts = list(resumed.clients[0].learners)
    assert set(kept) == {f"{part}.head.0.{name}" for part in parts for name in ("weight", "bias")}


def test_what_is_not_missing_has_to_fit_all_the_same(tmp_path):
    class Wider(KeepsWhatIsTrained):
        def __init__(self):
            super().__init__()
            self.head = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

    federation(FedAvg, KeepsWhatIsTrained, 1, tmp_path)
    with pytest.raises(ConfigError, match=r"'learner\.head\.0\.weight' is \(2, 3\), where this model's is \(4, 3\)"):
        federation(FedAvg, Wider, 2, tmp_path, resume=True)


def test_other_entries_and_their_versions_are_left_as_they_are():
    client = FedAvg(learner=PutsBack())
    client.configure(ClientSpec())
    state = client.state_dict()
    checkpoint = {"state_dict": state}
    state["else"] = torch.ones(())
    client.on_save_checkpoint(checkpoint)
    assert set(checkpoint["state_dict"]) == {"else", "learner.head.0.weight", "learner.head.0.bias"}
    assert checkpoint["state_dict"]._metadata["learner.head.0"] == {"version": 1}
    client.on_load_checkpoint(checkpoint)
    assert set(checkpoint["state_dict"]) == {"else", *client.state_dict()}


@pytest.mark.parametrize("strict", [True, False])
def test_the_learner_says_how_strictly_it_is_loaded(strict):
    client = FedAvg(learner=Taught())
    client.learner.strict_loading = strict
    assert client.strict_loading is strict
    client.strict_loading = False
    assert not client.strict_loading


class Named(Taught):
    def __init__(self, width=3, kind="small", logger=True):
        super().__init__()
        self.save_hyperparameters(ignore="logger", logger=logger)


@pytest.mark.parametrize("logger", [True, False])
def test_hyperparameters_are_where_they_are_without_a_method(tmp_path, logger):
    found = {}
    for module in (Named(5, logger=logger), FedAvg(learner=Named(5, logger=logger))):
        folder = tmp_path / type(module).__name__
        hub = LocalHub()
        fitting = trainer(1, logger=CSVLogger(folder, name="", version=""), callbacks=[FederatedLoop(hub.link)])
        hub.add(0, lambda fitting=fitting, module=module: fitting.fit(module, DataLoader(samples(0), 4)))
        hub.run(module.configure_server() if isinstance(module, FedAvg) else None)
        fitting.save_checkpoint(folder / "one.ckpt")
        checkpoint = torch.load(folder / "one.ckpt", weights_only=False)
        kept = {name: checkpoint[name] for name in ("hyper_parameters", "hparams_name")}
        told = folder / "hparams.yaml"
        found[type(module)] = kept, yaml.safe_load(told.read_text()) if told.exists() else None
    assert found[FedAvg] == found[Named]
    assert found[FedAvg][0]["hyper_parameters"] == {"width": 5, "kind": "small"}
    assert bool(found[FedAvg][1]) is logger


def test_a_method_that_has_hyperparameters_keeps_its_own():
    class Own(FedAvg):
        def __init__(self, strength=2, **options):
            super().__init__(**options)
            self.save_hyperparameters("strength")

    module = Own(learner=Named())
    module.configure_model()
    assert module.hparams == {"strength": 2}
