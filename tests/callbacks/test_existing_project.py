"""What a project's own Trainer offers goes on working once its module is under a method."""

import csv
import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, Subset

from foreign import Loaders, Regression, diabetes
from lit_pfl import Client
from lit_pfl.links import LocalHub, ProcessGroupLink
from lit_pfl.methods import APFL, Ditto, FedRep, Scaffold
from lit_pfl_callbacks import FederatedLoop
from tiny import assert_equal, trainer

METHODS = [Scaffold, Ditto, APFL, FedRep]
EPOCHS = 2


def method(kind: type[Client]) -> Client:
    torch.manual_seed(0)
    learner = Regression("SGD" if kind is Scaffold else "AdamW", dropout=0.0)
    return kind(learner=learner, head=r"^net\.3\.")


def fit(kind: type[Client], rounds: int = 3, **options: Any) -> list[Client]:
    """Run sites under their own Trainers, the first with further options."""
    hub, modules = LocalHub(), [method(kind) for _ in range(2)]
    for site, module in enumerate(modules):
        loop = FederatedLoop(hub.link, every_n_epochs=EPOCHS)
        own = {**options, "callbacks": [*options.get("callbacks", []), loop]} if site == 0 else {"callbacks": [loop]}
        fitting, data = trainer(rounds * EPOCHS, **own), Loaders(diabetes()[site])
        in_order = DataLoader(Subset(diabetes()[site], range(40)), 8)
        batches = in_order, data.val_dataloader()
        hub.add(site, lambda t=fitting, m=module, b=batches: t.fit(m, *b))
    hub.run()
    return modules


def test_the_configuration_of_the_guide_is_what_hydra_makes_a_site_of():
    instantiate = pytest.importorskip("hydra.utils").instantiate
    omegaconf = pytest.importorskip("omegaconf").OmegaConf
    guide = (Path(__file__).parents[2] / "docs" / "existing_project.md").read_text()
    written = re.findall("^```yaml\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)[0]
    learner = {"_target_": f"{Regression.__module__}.Regression"}
    config = omegaconf.merge(omegaconf.create(written), {"learner": learner})
    assert isinstance(instantiate(config.model).learner, Regression)
    loop = instantiate(config.callbacks.federated_loop)
    assert (type(loop), loop.every_n_epochs) == (FederatedLoop, 2)
    assert isinstance(loop.link, ProcessGroupLink)


def test_the_configuration_of_the_guide_is_what_a_lightning_cli_makes_a_site_of():
    guide = (Path(__file__).parents[2] / "docs" / "existing_project.md").read_text()
    written = re.findall("^```yaml\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)[1]
    Path("site.yaml").write_text(written.replace("my_project.MyModule", f"{Regression.__module__}.Regression"))
    cli = LightningCLI(Client, subclass_mode_model=True, args=["--config", "site.yaml"], run=False)
    assert isinstance(cli.model, Ditto)
    assert isinstance(cli.model.learner, Regression)
    [loop] = [callback for callback in cli.trainer.callbacks if isinstance(callback, FederatedLoop)]
    assert isinstance(loop.link, ProcessGroupLink)
    assert loop.every_n_epochs == 2


def rows(folder: Path, name: str) -> list[float]:
    [file] = folder.rglob("metrics.csv")
    return [float(row[name]) for row in csv.DictReader(file.open()) if row.get(name)]


@pytest.mark.parametrize("kind", METHODS)
def test_loggers_and_checkpoints_of_the_best(kind, tmp_path):
    best = ModelCheckpoint(tmp_path / "best", monitor="val_mse", save_top_k=1, filename="{epoch}")
    options = {"callbacks": [best], "enable_checkpointing": True, "logger": CSVLogger(tmp_path), "log_every_n_steps": 1}
    fit(kind, **options)
    logged = rows(tmp_path, "val_mse")
    assert len(logged) == len(rows(tmp_path, "val_r2")) == 3 * EPOCHS
    assert len(rows(tmp_path, "train_mse")) == 3 * EPOCHS * 5
    assert float(best.best_model_score) == pytest.approx(min(logged))
    assert Path(best.best_model_path).name == f"epoch={logged.index(min(logged))}.ckpt"


@pytest.mark.parametrize("kind", METHODS)
def test_validation_is_of_the_personalized_model(kind, tmp_path):
    module = fit(kind)[0]
    validating = trainer()
    [scores] = validating.validate(module, Loaders(diabetes()[0]).val_dataloader(), verbose=False)
    x, y = (torch.stack(part) for part in zip(*[diabetes()[0][i] for i in range(40, 48)], strict=True))
    with module.personalized() as learner, torch.no_grad():
        error = (learner.net(x).squeeze(1) - y).square().mean()
    assert scores["val_mse"] == pytest.approx(float(error), rel=1e-5)
    [again] = validating.validate(module, Loaders(diabetes()[0]).val_dataloader(), verbose=False)
    assert again == scores
    validating.save_checkpoint(tmp_path / "mine.ckpt")
    fresh = method(kind)
    [loaded] = trainer().validate(fresh, Loaders(diabetes()[0]).val_dataloader(), tmp_path / "mine.ckpt", verbose=False)
    assert loaded == scores


@pytest.mark.parametrize("kind", METHODS)
def test_a_checkpoint_saved_by_hand_holds_the_module(kind, tmp_path):
    class Saves(L.Callback):
        def on_fit_end(self, trainer, pl_module):
            trainer.save_checkpoint(tmp_path / "mine.ckpt")

    module = fit(kind, callbacks=[Saves()])[0]
    saved = torch.load(tmp_path / "mine.ckpt", weights_only=True)
    assert_equal(dict(saved["state_dict"]), dict(module.state_dict()))
    assert {name for name in saved["state_dict"] if name.startswith("learner.net.")}


@pytest.mark.parametrize("kind", METHODS)
def test_early_stopping_ends_a_site_s_fit_and_the_others_go_on(kind):
    class Counts(L.Callback):
        epochs = 0

        def on_train_epoch_end(self, trainer, pl_module):
            self.epochs += 1

    early, counter = EarlyStopping("val_mse", min_delta=1e9, patience=2), Counts()
    fit(kind, rounds=4, callbacks=[early, counter])
    assert early.stopped_epoch == 2
    assert counter.epochs == 3
