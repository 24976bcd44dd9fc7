"""Every callback in a project without a federation: it does its work, or says in one warning what it waits for."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.utils.data import DataLoader, Dataset

from callbacks.plain import Echo, rows
from lit_pfl_callbacks import (
    ClientsTable,
    CommunicationLedger,
    EmbeddingMap,
    FeatureAlignment,
    FeatureMap,
    FederatedLoop,
    PersonalizedModels,
    Predictions,
    RoundProgress,
    RoundTimer,
    RunLogger,
    Similarity,
    SparsityMonitor,
)

ROOT = Path(__file__).parent.parent.parent
KINDS = [
    ClientsTable, CommunicationLedger, EmbeddingMap, FeatureAlignment, FeatureMap, PersonalizedModels, Predictions,
    RoundProgress, RoundTimer, Similarity, SparsityMonitor,
]  # fmt: skip


class Pictures(Dataset):
    """Batches are dicts, as torchgeo's."""

    def __init__(self, inputs: str = "image", labels: str = "label", ids: bool = False) -> None:
        self.names, self.ids = (inputs, labels), ids

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(i)
        picture = dict(zip(self.names, (torch.randn(3, 8, 8, generator=draw), torch.tensor(i % 3)), strict=True))
        return {**picture, "id": f"scene {i}"} if self.ids else picture


class Logs(L.LightningModule):
    """A classifier of dicts, which logs what projects log."""

    def __init__(self, inputs: str = "image", labels: str = "label") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.names = inputs, labels
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self(batch[self.names[0]]), batch[self.names[1]])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("train_loss", loss := self.loss(batch), on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log_dict({"val_loss": self.loss(batch), "constant": 1.0})

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[self.names[0]])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Project(NamedTuple):
    module: L.LightningModule
    loader: DataLoader


def boring() -> Project:
    module = BoringModel()
    return Project(module, module.train_dataloader())


def logs(**names: str) -> Project:
    return Project(Logs(**names), DataLoader(Pictures(**names), 4))


def geo() -> Project:
    torchgeo = pytest.importorskip("torchgeo.trainers")
    task = torchgeo.ClassificationTask(model="resnet18", in_channels=3, task="multiclass", num_classes=3, loss="ce")
    return Project(task, DataLoader(Pictures(), 4))


def quiet(folder: Path, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    default = {
        "max_epochs": 2, "accelerator": "cpu", "default_root_dir": folder, "logger": False, "limit_train_batches": 2,
        "enable_checkpointing": False, "enable_model_summary": False,
        "enable_progress_bar": any(isinstance(callback, RoundProgress) for callback in callbacks),
    }  # fmt: skip
    return L.Trainer(callbacks=list(callbacks), **{**default, **options})


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def waiting(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(one.message) for one in caught if "waits for" in str(one.message)]


def started(make: Any, folder: Path, kinds: list[Any], **options: Any) -> list[str]:
    """Run everything that a Trainer can; return what callbacks have said that they wait for."""
    project = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = quiet(folder, *[kind() for kind in kinds], **options)
        trainer.fit(project.module, project.loader, project.loader)
        trainer.validate(project.module, project.loader, verbose=False)
        trainer.test(project.module, project.loader, verbose=False)
        trainer.predict(project.module, project.loader)
    return waiting(caught)


#: by callback: its file in a classifier's project, or what it waits for; and of BoringModel, where that is other
DOES = {
    ClientsTable: ("clients.csv", "logs none"),
    CommunicationLedger: ("CommunicationLedger: waits for a federation, or a FederatedLoop in this Trainer; ", None),
    EmbeddingMap: (
        "EmbeddingMap: waits for uploads of several clients under a method that sends an `embedding`",
        None,
    ),
    FeatureAlignment: ("features.csv", "batches of inputs and labels, not a Tensor"),
    FeatureMap: ("feature_map.csv", "batches of inputs and labels, not a Tensor"),
    PersonalizedModels: ("models/model.safetensors", None),
    Predictions: ("predictions.csv", None),
    RoundProgress: (None, None),
    RoundTimer: ("times.csv", None),
    Similarity: ("Similarity: waits for several clients to compare; ", None),
    SparsityMonitor: ("sparsity.csv", None),
}


def test_no_callback_is_left_out():
    assert set(DOES) == set(KINDS)


@pytest.mark.seconds
@pytest.mark.few(8)
@pytest.mark.parametrize("make", [boring, logs, geo])
@pytest.mark.parametrize("kind", KINDS)
def test_it_works_or_says_once_what_it_waits_for(kind, make, tmp_path):
    expected, of_boring = DOES[kind]
    expected = of_boring if make is boring and of_boring else expected
    said, found = started(make, tmp_path, [kind]), names(tmp_path)
    if expected is None:
        assert (said, found) == ([], set())
    elif " " in expected:
        assert len(said) == 1
        assert said[0].startswith(f"{kind.__name__}: waits for ")
        assert expected in said[0]
        assert "\n" not in said[0]
        assert found == set()
    else:
        assert said == []
        assert found == {expected}


def test_a_second_fit_of_a_trainer_says_no_more(tmp_path):
    project, callback = boring(), EmbeddingMap()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for trainer in (quiet(tmp_path, callback), quiet(tmp_path, callback)):
            for _ in range(2):
                trainer.fit(project.module, project.loader)
    assert len(waiting(caught)) == 2  # one each


def test_files_lie_where_the_logger_writes(tmp_path):
    started(logs, tmp_path / "root", KINDS, logger=RunLogger(str(tmp_path), name="", version="run"))
    files = {does for does, _ in DOES.values() if does and " " not in does}
    assert names(tmp_path) == {f"run/{file}" for file in files | {"metrics.csv"}}


@pytest.mark.parametrize("make", [boring, logs])
@pytest.mark.parametrize("start", ["fit", "validate", "test", "predict"])
def test_code_that_is_only_tried_out_leaves_nothing(start, make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module, loader = make()
    data = [loader] * (1 + (start == "fit"))
    getattr(quiet(tmp_path, *[kind() for kind in KINDS], fast_dev_run=True), start)(module, *data)
    assert names(tmp_path) == set()


@pytest.mark.parametrize("make", [boring, logs])
@pytest.mark.parametrize("start", ["validate", "test", "predict"])
def test_nothing_need_be_trained(start, make, tmp_path):
    module, loader = make()
    getattr(quiet(tmp_path, *[kind() for kind in KINDS]), start)(module, loader)
    expected = {"predictions.csv"} if start == "predict" else {"clients.csv"} if make is logs else set()
    assert names(tmp_path) == expected
    if expected == {"clients.csv"}:
        [line] = rows(tmp_path / "clients.csv")
        assert (line["round"], line["split"], line["n"]) == ("0", start[:3] if start == "validate" else start, "12")


def test_scores_are_what_each_validation_logs_and_no_more(tmp_path):
    module, loader = logs()
    table, seen = ClientsTable(), []

    class Sees(L.Callback):
        def on_validation_end(self, trainer, pl_module):
            if not trainer.sanity_checking:
                seen.append(float(trainer.callback_metrics["val_loss"]))

    trainer = quiet(tmp_path, table, Sees(), max_epochs=4, check_val_every_n_epoch=2, enable_checkpointing=True)
    trainer.fit(module, loader, loader)
    trainer.save_checkpoint(tmp_path / "mine.ckpt")
    trainer.test(module, loader, verbose=False)
    lines = rows(tmp_path / "clients.csv")
    assert list(lines[0]) == ["client", "round", "split", "model", "state", "n", "loss", "constant"]
    assert [(line["round"], line["split"]) for line in lines] == [("2", "val"), ("4", "val"), ("4", "test")]
    assert [float(line["loss"]) for line in lines[:2]] == seen
    before = (tmp_path / "clients.csv").read_text()
    fresh = logs().module
    quiet(tmp_path, ClientsTable()).test(fresh, loader, ckpt_path=tmp_path / "mine.ckpt", verbose=False)
    assert (tmp_path / "clients.csv").read_text() == before  # the same scores of the same round


def test_where_no_validation_is_none_is_promised(tmp_path):
    module, loader = logs()
    with pytest.warns(match="ClientsTable: waits for a validation or a test that logs metrics; this fit has no valid"):
        quiet(tmp_path, ClientsTable()).fit(module, loader)


def test_a_site_has_its_own_ledger_curve_and_progress(tmp_path, capsys):
    module, loader = logs()
    ledger = CommunicationLedger()
    loop = FederatedLoop(Echo())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet(tmp_path, ledger, ClientsTable(), RoundProgress(), loop).fit(module, loader, loader)
    size = sum(parameter.nbytes for parameter in module.parameters())
    assert waiting(caught) == []
    assert ledger.total == 4 * size  # two uploads, two replies after them; nothing on joining
    assert [value for _, value in ledger.curve] == [float(line["loss"]) for line in rows(tmp_path / "clients.csv")]
    lines = rows(tmp_path / "communication.csv")
    assert sum(int(line["bytes"]) for line in lines) == ledger.total
    assert f"{size * 2 / 1000:.2f} kB so far" in capsys.readouterr().out


class TestBatches:
    @pytest.mark.parametrize("names", [{"inputs": "pixel_values", "labels": "targets"}, {"inputs": "x", "labels": "y"}])
    @pytest.mark.parametrize("kind", [FeatureAlignment, FeatureMap])
    def test_dicts_go_by_usual_names(self, kind, names, tmp_path):
        module, loader = logs(**names)
        callback = kind()
        quiet(tmp_path, callback).fit(module, loader, loader)
        assert callback.rows

    @pytest.mark.parametrize("kind", [FeatureAlignment, FeatureMap])
    def test_other_names_can_be_given(self, kind, tmp_path):
        own = {"inputs": "scene", "labels": "crop"}
        module, loader = logs(**own)
        with pytest.warns(match=rf"not a dict of 'scene', 'crop'; name them by {kind.__name__}\(inputs=..., labels="):
            quiet(tmp_path, kind()).fit(module, loader, loader)
        callback = kind(**own)
        quiet(tmp_path, callback).fit(module, loader, loader)
        assert callback.rows

    def test_outputs_may_hold_logits(self, tmp_path):
        class Output(Logs):
            def forward(self, x):
                return {"logits": self.net(x)}

            def loss(self, batch):
                return nn.functional.cross_entropy(self.net(batch["image"]), batch["label"])

        callback, loader = FeatureAlignment(), DataLoader(Pictures(), 4)
        quiet(tmp_path, callback).fit(Output(), loader, loader)
        assert callback.rows

    @pytest.mark.parametrize("kind", [FeatureAlignment, FeatureMap])
    def test_a_forward_that_fails_does_not_end_a_training(self, kind, tmp_path):
        class Needs(Logs):
            def forward(self, x, mask):
                return self.net(x)

            def loss(self, batch):
                return self(batch["image"], None).square().mean()

        loader = DataLoader(Pictures(), 4)
        with pytest.warns(match=rf"{kind.__name__}: waits for a classifier \(TypeError: .*'mask'"):
            quiet(tmp_path, kind()).fit(Needs(), loader, loader)

    @pytest.mark.parametrize("kind", [FeatureAlignment, FeatureMap])
    def test_loaders_need_no_length(self, kind, tmp_path):
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                return iter([Pictures()[i] for i in range(12)])

        callback = kind()
        quiet(tmp_path, callback).fit(Logs(), DataLoader(Stream(), 4), DataLoader(Stream(), 4))
        assert callback.rows


class TestPredictions:
    def predicted(self, folder: Path, step: Any, loaders: Any = None) -> list[dict[str, str]]:
        class Says(Logs):
            def predict_step(self, batch, batch_idx, dataloader_idx=0):
                return step(self, batch)

        loaders = DataLoader(Pictures(), 5) if loaders is None else loaders
        quiet(folder, Predictions()).predict(Says(), loaders, return_predictions=False)
        return rows(folder / "predictions.csv")

    def test_logits_beside_labels_are_classes(self, tmp_path):
        lines = self.predicted(tmp_path, lambda module, batch: module(batch["image"]))
        assert [line["sample"] for line in lines] == [str(i) for i in range(12)]
        assert [line["label"] for line in lines] == [str(i % 3) for i in range(12)]
        expected = Logs()(torch.stack([Pictures()[i]["image"] for i in range(12)])).softmax(1)
        assert [int(line["prediction"]) for line in lines] == expected.argmax(1).tolist()
        assert [float(line["probability"]) for line in lines] == pytest.approx(expected.amax(1).tolist(), abs=1e-6)

    def test_probabilities_are_of_classes_without_labels_too(self, tmp_path):
        one = self.predicted(tmp_path, lambda module, batch: module(batch["image"]).softmax(1))
        unlabelled = DataLoader([{"image": Pictures()[i]["image"]} for i in range(12)], 5)
        two = self.predicted(tmp_path, lambda module, batch: module(batch["image"]).softmax(1), unlabelled)
        assert [line["prediction"] for line in one] == [line["prediction"] for line in two]
        assert {line["label"] for line in two} == {""}

    def test_other_tensors_are_as_they_are(self, tmp_path):
        lines = self.predicted(tmp_path, lambda module, batch: batch["image"].mean((1, 2, 3)))
        assert [float(line["prediction"]) for line in lines] == pytest.approx(
            [float(Pictures()[i]["image"].mean()) for i in range(12)]
        )
        assert {line["probability"] for line in lines} == {""}

    def test_dicts_have_a_column_an_entry(self, tmp_path):
        def step(module, batch):
            scores = batch["image"].mean((1, 2, 3))
            return {"score": scores, "label": batch["label"] + 1, "name": ["a"] * len(scores), "none": None}

        lines = self.predicted(tmp_path, step)
        assert list(lines[0]) == ["client", "sample", "label", "score", "label_predicted", "name"]
        assert [line["label_predicted"] for line in lines] == [str(i % 3 + 1) for i in range(12)]
        assert {line["name"] for line in lines} == {"a"}

    def test_lists_are_of_samples_or_of_batches(self, tmp_path):
        for step in (
            lambda module, batch: [float(label) for label in batch["label"]],
            lambda module, batch: list(batch["label"].float().split(2)),
        ):
            lines = self.predicted(tmp_path, step)
            assert [float(line["prediction"]) for line in lines] == [float(i % 3) for i in range(12)]

    def test_ids_in_a_batch_are_those_of_the_samples(self, tmp_path):
        lines = self.predicted(
            tmp_path, lambda module, batch: module(batch["image"]), DataLoader(Pictures(ids=True), 5)
        )
        assert [line["sample"] for line in lines] == [f"scene {i}" for i in range(12)]

    def test_places_are_those_in_the_data_set_and_loaders_have_numbers(self, tmp_path):
        order = list(range(11, -1, -1))
        backwards = DataLoader(Pictures(), 5, sampler=order)
        lines = self.predicted(
            tmp_path, lambda module, batch: module(batch["image"]), [backwards, DataLoader(Pictures(), 7)]
        )
        places = [(line["loader"], int(line["sample"])) for line in lines]
        assert places == [("0", i) for i in order] + [("1", i) for i in range(12)]

    @pytest.mark.parametrize("said", [None, 3.5, torch.tensor(2.0), "words"])
    def test_what_is_not_of_samples_breaks_nothing(self, said, tmp_path):
        class Says(Logs):
            def predict_step(self, batch, batch_idx):
                return said

        quiet(tmp_path, Predictions()).predict(Says(), DataLoader(Pictures(), 5))
        assert (tmp_path / "predictions.csv").exists()


DDP = """
import sys, warnings
from pathlib import Path
from callbacks.test_plain_projects import KINDS, logs, quiet
import torch

warnings.simplefilter("ignore")
folder, (module, loader) = Path(sys.argv[1]), logs()
trainer = quiet(folder, *[kind() for kind in KINDS], devices=2, strategy="ddp")
trainer.fit(module, loader, loader)
trainer.test(module, loader, verbose=False)
trainer.predict(module, loader)
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_of_two_processes_the_first_writes(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(DDP)
    paths = {"PYTHONPATH": ":".join(str(ROOT / part) for part in ("", "callbacks", "tests")), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script, tmp_path / "out"], env={**os.environ, **paths}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    files = {does for does, _ in DOES.values() if does and " " not in does}
    assert names(tmp_path / "out") == files
    assert [line["sample"] for line in rows(tmp_path / "out/predictions.csv")] == [str(i) for i in range(12)]
    assert [line["split"] for line in rows(tmp_path / "out/clients.csv")] == ["val", "val", "test"]
