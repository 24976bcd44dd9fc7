"""The examples in docstrings and guides are true."""

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torchvision.transforms.functional import to_pil_image

import lit_pfl
import lit_pfl.data
import lit_pfl.engines
import lit_pfl.methods
import lit_pfl_callbacks
from lit_pfl.data import Digits
from tiny import TinyNet, trainer

ROOT = Path(__file__).parent.parent
MODULES = [
    module.name
    for package in (lit_pfl, lit_pfl_callbacks)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring(name):
    if name.startswith("lit_pfl.links.flower"):
        pytest.importorskip("flwr")
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def blocks_of(page: str, marked: str = "python") -> list[str]:
    """Return a page's programs: those marked ``python``, which are one, or ``py``, which stand alone."""
    return re.findall(rf"^```{marked}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", ["your_module", "your_data", "your_method", "existing_project"])
def test_guide(name, monkeypatch, tmp_path):
    """Its blocks are run as one program."""
    blocks = blocks_of(f"docs/{name}.md")
    assert len(blocks) >= 3
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(blocks), f"docs/{name}.md", "exec"), {"__name__": "guide"})


#: a library that nobody here can change, and a federation of its module
THEIRS = """
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.utilities.rank_zero import rank_zero_only


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(8, 4), 4)
"""
FEDERATED = """
import lightning as L
import theirs
from lit_pfl import Federation
from lit_pfl.data import PerClient
from lit_pfl.methods import Ditto

assert issubclass(L.pytorch.callbacks.ModelCheckpoint, theirs.Callback)
data = PerClient([theirs.Data(), theirs.Data()])
L.Trainer(max_epochs=1, accelerator="cpu", logger=False).fit(Federation(Ditto(learner=theirs.Module())), data)
"""


@pytest.mark.slow
def test_a_library_made_with_pytorch_lightning_is_given_the_classes_of_lightning(tmp_path):
    [lines] = blocks_of("docs/existing_project.md", "py")
    (tmp_path / "theirs.py").write_text(THEIRS)
    done = subprocess.run([sys.executable, "-c", lines + FEDERATED], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class OneRound(L.Trainer):
    """What a page's Trainer is here."""

    def __init__(self, max_epochs: int, **options: Any) -> None:
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        short = {"max_epochs": 1, "limit_test_batches": 0, "limit_val_batches": 0}
        super().__init__(**{**options, **quiet, **short, "accelerator": "cpu"})


def few_digits(**options: Any) -> Digits:
    """Return what a page's data are here."""
    return Digits(**{**options, "num_clients": 5}, train_fraction=0.05, test_fraction=0.1)


@pytest.mark.parametrize(
    "page",
    [
        "docs/export.md",
        "docs/factorized_fl.md",
        pytest.param("docs/engines.md", marks=pytest.mark.slow),
    ],
)
def test_program(page, monkeypatch, tmp_path):
    """A page's first program runs as it stands, but for one round on a few digits."""
    if page == "docs/engines.md":
        pytest.importorskip("ray")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(L, "Trainer", OneRound)
    for name in ("Digits", "CIFAR10"):
        monkeypatch.setattr(lit_pfl.data, name, few_digits)
    ray = lit_pfl.engines.Ray
    monkeypatch.setattr(lit_pfl.engines, "Ray", lambda workers: ray(workers=2))
    exec(compile(blocks_of(page)[0], page, "exec"), {"__name__": "page"})


def test_splits_of_other_libraries(monkeypatch, tmp_path):
    """They are read from what those libraries write: clients have the same samples."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    images, labels = np.random.default_rng(0).random((400, 1, 12, 12)), np.arange(400) % 10
    for part, first, last in (("train", 0, 15), ("test", 15, 20)):
        (folder := Path("dataset/MNIST") / part).mkdir(parents=True)
        for client in range(20):
            own = slice(20 * client + first, 20 * client + last)
            np.savez_compressed(folder / f"{client}.npz", data={"x": images[own], "y": labels[own]})

    class FederatedDataset:
        def __init__(self, dataset: str, partitioners: dict[str, int]) -> None:
            pictures = [to_pil_image(torch.from_numpy(image).float()) for image in images]
            self.whole = datasets.Dataset.from_dict({"image": pictures, "label": labels})

        def load_partition(self, client: int) -> Any:
            return self.whole.shard(20, client)

    monkeypatch.setitem(sys.modules, "flwr_datasets", SimpleNamespace(FederatedDataset=FederatedDataset))
    for block, counted in zip(blocks_of("docs/coming_from.md"), (16, 15), strict=True):
        names: dict[str, Any] = {}
        exec(block, names)
        data = names["data"]
        federation = lit_pfl.Federation(lit_pfl.methods.FedAvg(backbone=TinyNet))
        trainer(1).fit(federation, datamodule=data)
        assert [data.client(client).num_samples for client in range(20)] == [counted] * 20
        own = data.client(3)
        batches = [batch for loader in (own.train, own.val, own.test) for batch in loader]
        seen = torch.cat([batch["image"] / 255 if isinstance(batch, dict) else batch[0] for batch in batches])
        brightness, expected = seen.mean((1, 2, 3)), torch.from_numpy(images[60:80]).mean((1, 2, 3))
        torch.testing.assert_close(brightness.unique(), expected.sort().values.float(), atol=0.004, rtol=0)


def test_the_readme(monkeypatch):
    """Its programs are parts: they run with what the text around them names."""
    monkeypatch.setattr(L, "Trainer", OneRound)
    monkeypatch.setattr(lit_pfl.data, "CIFAR10", few_digits)
    federate, simulate, ring = blocks_of("README.md")
    names = {"torch": torch, "Client": lit_pfl.Client, "MixingServer": lit_pfl.MixingServer}
    exec(simulate, names)
    exec(ring, names)
    assert names["RingServer"]().mixing_matrix(1, dict.fromkeys(range(3))).sum(1).tolist() == [1.0] * 3
    compile(federate, "README.md", "exec")


@pytest.mark.slow
@pytest.mark.long
def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("sphinx")
    plain = ["-D", "html_theme=basic"]  # the one of the site draws all pages in the sidebar of each
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", *plain, ROOT / "docs", tmp_path]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    method, tutorial = ((tmp_path / f"{page}.html").read_text() for page in ("methods/SimFed", "tutorial"))
    assert "What a client sends" in method
    assert "After the last round, on test data" in tutorial  # what its command printed
    assert len(list((tmp_path / "_images").glob("tutorial_*.svg"))) == 2
