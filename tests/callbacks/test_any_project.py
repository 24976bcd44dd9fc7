"""A project as it is becomes a site, with its Trainer, loaders, logger, checkpoints and schedules."""

import copy
import csv
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, TensorDataset

from lit_pfl.links import LocalHub
from lit_pfl.methods import Ditto, FedAvg, FedPer, SimFed
from lit_pfl_callbacks import FederatedLoop
from tiny import assert_equal

LOSSES: dict[int, list[list[float]]] = {}  # what modules have found in each validation, by site


class Boring(BoringModel):
    """Lightning's own, which logs its losses."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        note(self, loss := self.step(batch))
        self.log("val_loss", loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Plateau(L.LightningModule):
    """Its schedule waits for its validation, of which none is good enough."""

    def __init__(self, patience: int = 0) -> None:
        super().__init__()
        self.patience = patience
        self.body, self.head = torch.nn.Linear(5, 4), torch.nn.Linear(4, 1)

    def loss(self, batch: Any) -> torch.Tensor:
        return (self.head(self.body(batch[0]).tanh()) - batch[1]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("train_loss", loss := self.loss(batch))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        note(self, loss := self.loss(batch))
        self.log("val_loss", loss, prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=self.patience, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


def note(module: L.LightningModule, loss: torch.Tensor) -> None:
    if not module.trainer.sanity_checking:
        LOSSES[module.trainer.site][-1].append(float(loss))


class Project(NamedTuple):
    """A module, and the loaders of a site; where a method finds the module's head and encoder."""

    module: Callable[[], L.LightningModule]
    loaders: Callable[[int], list[DataLoader]]
    head: str
    encoder: str
    weights_only: bool = True


class OneCycle(Plateau):
    """Lightning's own example of a schedule that knows how many steps there will be."""

    def configure_optimizers(self) -> Any:
        steps = int(self.trainer.estimated_stepping_batches)
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Seeding(OneCycle):
    """Its hooks before the first batch draw, or seed the generators, whenever a fit begins."""

    def on_fit_start(self) -> None:
        torch.manual_seed(7)

    def on_train_start(self) -> None:
        torch.rand(3)

    def on_train_epoch_start(self) -> None:
        torch.rand(5)


def random_rows(site: int) -> list[DataLoader]:
    torch.manual_seed(site)
    return [DataLoader(RandomDataset(32, 8), 2), DataLoader(RandomDataset(32, 4), 2)]


def numbers(site: int) -> list[DataLoader]:
    draw = torch.Generator().manual_seed(site)
    x = torch.randn(12, 5, generator=draw)
    data = TensorDataset(x, x.sum(1, keepdim=True) * (site + 1))
    return [DataLoader(data, 3), DataLoader(data, 6)]


def shuffled(site: int) -> list[DataLoader]:
    train, val = numbers(site)
    return [DataLoader(train.dataset, 3, shuffle=True), val]


def forecasts(site: int) -> Any:
    np, pd = pytest.importorskip("numpy"), pytest.importorskip("pandas")
    forecasting = pytest.importorskip("pytorch_forecasting")
    draw = np.random.default_rng(site)
    values = np.sin(np.arange(48) / 5) + draw.normal(size=48) / 10
    table = pd.DataFrame({"value": values, "time": np.tile(np.arange(24), 2), "group": np.repeat(["a", "b"], 24)})
    return forecasting.TimeSeriesDataSet(
        table, time_idx="time", target="value", group_ids=["group"], max_encoder_length=6, min_encoder_length=6,
        max_prediction_length=2, time_varying_unknown_reals=["value"],
    )  # fmt: skip


def series(site: int) -> list[DataLoader]:
    data = forecasts(site)
    sizes = {"train": 8, "val": 80}  # all of the latter, so that a mean over batches is one over samples
    return [
        data.to_dataloader(train=name == "train", batch_size=size, num_workers=0, shuffle=False)
        for name, size in sizes.items()
    ]


def nbeats() -> L.LightningModule:
    NBeats = pytest.importorskip("pytorch_forecasting").NBeats

    class Noting(NBeats):
        def validation_step(self, batch, batch_idx):
            found = super().validation_step(batch, batch_idx)
            note(self, found["loss"] if isinstance(found, dict) else found)
            return found

    return Noting.from_dataset(forecasts(0), widths=[8, 8], dropout=0.0, learning_rate=1e-2)


def with_example(project: "Project") -> L.LightningModule:
    """Return a module that tells what its training step gets, which SimFed needs to know."""
    module = project.module()
    module.example_input_array = next(iter(project.loaders(0)[0]))
    return module


PROJECTS = {
    "boring": Project(Boring, random_rows, r"^layer\.", "layer"),
    "plateau": Project(Plateau, numbers, r"^head\.", "body"),
    # Lightning's checkpoints lose the step of such a schedule in the epoch at whose end they are saved
    "patient": Project(lambda: Plateau(patience=9), numbers, r"^head\.", "body"),
    "nbeats": Project(nbeats, series, r"theta_", "net_blocks.0.fc", weights_only=False),
}
METHODS: dict[str, Callable[[Project], L.LightningModule]] = {
    "plain": lambda project: project.module(),
    "FedAvg": lambda project: FedAvg(learner=project.module()),
    "Ditto": lambda project: Ditto(learner=project.module()),
    "SimFed": lambda project: SimFed(learner=with_example(project), encoder=project.encoder),
    "FedPer": lambda project: FedPer(learner=project.module(), head=project.head),
}
CASES = [
    (project, method)
    for project in PROJECTS
    for method in METHODS
    if (project, method) != ("boring", "FedPer")  # whose only layer is its head: nothing would travel
    and project != "plateau"
]


class Site(L.Trainer):
    """A stock Trainer that knows its number, for this test."""

    site: int


class Run(NamedTuple):
    modules: list[L.LightningModule]
    trainers: list[Site]
    states: list[dict[str, Any]]
    best: list[ModelCheckpoint]


class Draws(L.Callback):
    """Draws at the start of every epoch, before the callback of the federation."""

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        torch.rand(3)


class Marks(L.Callback):
    """Begins a list of losses with every validation."""

    def on_validation_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            LOSSES[trainer.site].append([])


def run(
    folder: Path,
    project: Project,
    method: str,
    rounds: int = 2,
    local_epochs: int = 1,
    state: Any = None,
    paths: Any = (None, None),
    logger: Any = CSVLogger,
    max_steps: int = -1,
    reload: int = 0,
    **options: Any,
) -> Run:
    """Run two sites, as a user writes them."""
    hub, found = LocalHub(seed=1), Run([], [], [], [])
    LOSSES.clear()
    for site in range(2):
        torch.manual_seed(0)
        module = METHODS[method](project)
        best = ModelCheckpoint(
            folder / f"site_{site}", monitor="val_loss", filename="{epoch}", save_top_k=-1,
            **{"save_on_train_epoch_end": True, **options},
        )  # fmt: skip
        trainer = Site(
            max_epochs=rounds * local_epochs, max_steps=max_steps,
            accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
            log_every_n_steps=1, reload_dataloaders_every_n_epochs=reload, logger=logger(folder, name=f"logs_{site}"),
            callbacks=[
                Draws(), FederatedLoop(hub.link, every_n_epochs=local_epochs), best,
                EarlyStopping("val_loss", patience=5), LearningRateMonitor(), Marks(),
            ],
        )  # fmt: skip
        trainer.site, LOSSES[site] = site, []
        loaders, path = project.loaders(site), paths[site]
        weights_only = None if path is None else project.weights_only
        hub.add(
            site,
            lambda t=trainer, m=module, x=loaders, p=path, w=weights_only: t.fit(m, *x, ckpt_path=p, weights_only=w),
        )
        found.modules.append(module)
        found.trainers.append(trainer)
        found.best.append(best)
    server = () if method == "plain" else (found.modules[0].configure_server(),)
    hub.run(*server, state=state, after_round=lambda c: found.states.append(copy.deepcopy(c.state_dict())))
    return found


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.few(9)
@pytest.mark.parametrize(("name", "method"), CASES)
def test_it_trains_logs_saves_and_goes_on_with_the_same_bits(name, method, tmp_path):
    project = PROJECTS[name]
    whole = run(tmp_path / "whole", project, method)
    assert [state["round"] for state in whole.states] == [1, 2]
    for site, losses in list(LOSSES.items()):
        [file] = (tmp_path / f"whole/logs_{site}").rglob("metrics.csv")
        logged = [float(row["val_loss"]) for row in csv.DictReader(file.open()) if row["val_loss"]]
        assert len(logged) == 2
        assert logged == pytest.approx([sum(own) / len(own) for own in losses], rel=1e-5)
        assert float(whole.best[site].best_model_score) == pytest.approx(min(logged))
        assert Path(whole.best[site].best_model_path).name == f"epoch={logged.index(min(logged))}.ckpt"
        assert any("lr" in name for name in next(csv.DictReader(file.open())))
    paths = [tmp_path / f"whole/site_{site}/epoch=0.ckpt" for site in range(2)]
    resumed = run(tmp_path / "resumed", project, method, state=whole.states[0], paths=paths)
    for one, other in zip(resumed.modules, whole.modules, strict=True):
        assert_equal(one.state_dict(), other.state_dict())
    for one, other in zip(resumed.trainers, whole.trainers, strict=True):
        assert one.callback_metrics["val_loss"] == other.callback_metrics["val_loss"]
    assert len({tuple(own) for _, losses in LOSSES.items() for own in losses}) == 2  # sites are not the same


@pytest.mark.parametrize("method", ["plain", "FedAvg", "Ditto"])
@pytest.mark.parametrize(("module", "reload"), [(OneCycle, 0), (Seeding, 0), (Seeding, 2)])
def test_batches_that_are_started_early_or_anew_or_after_a_seed_go_on_the_same(module, reload, method, tmp_path):
    project = Project(module, shuffled, r"^head\.", "body")
    whole = run(tmp_path / "whole", project, method, rounds=3, reload=reload)
    paths = [tmp_path / f"whole/site_{site}/epoch=1.ckpt" for site in range(2)]
    resumed = run(tmp_path / "resumed", project, method, rounds=3, reload=reload, state=whole.states[1], paths=paths)
    for one, other in zip(resumed.modules, whole.modules, strict=True):
        assert_equal(one.state_dict(), other.state_dict())


@pytest.mark.parametrize("method", ["plain", "Ditto"])
def test_a_fit_that_counts_steps_cannot_go_on(method, tmp_path):
    """Lightning ends the checkpoint's epoch once more, and the exchange with it."""
    project = PROJECTS["patient"]
    whole = run(tmp_path / "whole", project, method, max_steps=8)
    assert [state["round"] for state in whole.states] == [1, 2]
    paths = [tmp_path / f"whole/site_{site}/epoch=0.ckpt" for site in range(2)]
    with pytest.raises(MisconfigurationException, match="resume with max_epochs instead of max_steps") as error:
        run(tmp_path / "refused", project, method, state=whole.states[0], paths=paths, max_steps=8)
    assert "\n" not in str(error.value)
    resumed = run(tmp_path / "resumed", project, method, state=whole.states[0], paths=paths)
    for one, other in zip(resumed.modules, whole.modules, strict=True):
        assert_equal(one.state_dict(), other.state_dict())


@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_can_be_scored(method, tmp_path):
    project = PROJECTS["plateau"]
    found = run(tmp_path, project, method)
    path = found.best[0].best_model_path
    fresh, trainer = METHODS[method](project), Site(accelerator="cpu", logger=False, enable_progress_bar=False)
    trainer.site, LOSSES[0] = 0, [[]]
    loader = project.loaders(0)[1]
    [scores] = trainer.validate(fresh, loader, ckpt_path=path, verbose=False)
    assert scores["val_loss"] == pytest.approx(sum(LOSSES[0][0]) / 2)
    if method == "Ditto":  # whose personal model no reply overwrites
        assert scores["val_loss"] == pytest.approx(float(found.best[0].best_model_score))


@pytest.mark.parametrize("method", METHODS)
def test_a_schedule_that_waits_for_a_validation_gets_it(method, tmp_path):
    found = run(tmp_path, PROJECTS["plateau"], method, rounds=3, local_epochs=2)
    for trainer in found.trainers:
        assert trainer.optimizers[0].param_groups[0]["lr"] < 0.1


@pytest.mark.parametrize("method", ["plain", "Ditto"])
def test_a_checkpoint_of_a_validation_says_what_to_give_in_its_place(method, tmp_path):
    project = PROJECTS["plateau"]
    first = run(tmp_path / "first", project, method, save_on_train_epoch_end=False)
    paths = [Path(best.best_model_path) for best in first.best]
    with pytest.raises(MisconfigurationException, match=r"ModelCheckpoint\(save_on_train_epoch_end=True\)") as error:
        run(tmp_path / "second", project, method, rounds=3, state=first.states[-1], paths=paths)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("method", ["plain", "FedAvg", "Ditto"])
def test_tensorboard_and_local_epochs_do_as_well(method, tmp_path):
    pytest.importorskip("tensorboard")
    project = PROJECTS["patient"]
    options = {"local_epochs": 2, "logger": TensorBoardLogger}
    whole = run(tmp_path / "whole", project, method, **options)
    assert list((tmp_path / "whole/logs_0").rglob("events*"))
    paths = [tmp_path / f"whole/site_{site}/epoch=1.ckpt" for site in range(2)]
    resumed = run(tmp_path / "resumed", project, method, state=whole.states[0], paths=paths, **options)
    for one, other in zip(resumed.modules, whole.modules, strict=True):
        assert_equal(one.state_dict(), other.state_dict())
    with pytest.raises(MisconfigurationException, match="the middle of a round, .* saved 1 epoch earlier"):
        run(tmp_path, project, method, paths=[path.with_name("epoch=2.ckpt") for path in paths], **options)


def test_an_early_stop_ends_a_site_and_the_other_goes_on(tmp_path):
    class Once(Plateau):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            self.log("stuck", 1.0 if self.trainer.site == 0 else -float(self.current_epoch))

    hub, epochs = LocalHub(), {}

    def fit(site: int) -> None:
        trainer = Site(
            max_epochs=4, accelerator="cpu", enable_progress_bar=False, logger=False, default_root_dir=tmp_path,
            callbacks=[FederatedLoop(hub.link), EarlyStopping("stuck", patience=1)],
        )  # fmt: skip
        trainer.site, LOSSES[site] = site, [[]]
        trainer.fit(Once(), *numbers(site))
        epochs[site] = trainer.current_epoch

    for site in range(2):
        hub.add(site, lambda site=site: fit(site))
    assert hub.run().round == 4
    assert epochs == {0: 2, 1: 4}
