"""Which methods a module can be federated with."""

import itertools
from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.demos import BoringModel, LightningLSTM, LightningTransformer
from torch.utils.data import DataLoader

import lit_pfl.methods
from foreign import VOCABULARY, Loaders, Regression, diabetes, texts, vectors
from lit_pfl.core.classifying import Classifying
from lit_pfl.errors import ConfigError
from lit_pfl.methods import Ditto, FedAvg, FedIT, FedRep, Scaffold
from lit_pfl.testing import assert_equal, check_learner
from lit_pfl_callbacks.tensors import tensors_of


def batches():
    return itertools.islice(Loaders(diabetes()[0]).train_dataloader(), 3)


@pytest.mark.slow
def test_every_method_is_tried_and_the_module_stays_as_it_is():
    module = Regression()
    before = {name: tensor.clone() for name, tensor in tensors_of(module).items()}
    report = check_learner(module, batches(), head=r"^net\.3\.", encoder="net.0")
    assert list(report) == lit_pfl.methods.__all__
    kinds = {name: getattr(lit_pfl.methods, name) for name in lit_pfl.methods.__all__}
    classifying = {name for name, kind in kinds.items() if issubclass(kind, Classifying) and kind.needs_labels}
    adapted = {name for name, kind in kinds.items() if issubclass(kind, FedIT)}
    refused = {"FedBN", "FedMA", "FedNova", "PFedMe", "PsiNet", "Scaffold"} | classifying | adapted
    assert {name for name, reason in report.items() if reason} == refused
    assert all("has no class labels" in report[name] for name in classifying)
    assert "use torch.optim.SGD" in report["Scaffold"]
    assert report.works == [name for name in lit_pfl.methods.__all__ if name not in refused]
    assert_equal(tensors_of(module), before)


def test_the_report_is_a_table():
    report = check_learner(Regression, batches(), [FedAvg, FedRep, Scaffold])
    yes, head, scaffold = str(report).splitlines()
    assert yes == "FedAvg    yes"
    assert head.startswith("FedRep    model.head: FedRep has to know")
    assert scaffold.startswith("Scaffold  model.optimizer")


class Manual(Regression):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Breaks(Regression):
    def training_step(self, batch, batch_idx):
        raise KeyError("labels\nare not there")


class RunsAway(Regression):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * float("nan")


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Manual, "(automatic_optimization=False), but Ditto steps two models on one loss"),
        (Breaks, "KeyError: "),
        (RunsAway, "holds NaN or infinity"),
        (L.LightningModule, "LightningModule has no training_step"),
    ],
)
def test_what_is_in_the_way_is_a_line(module, reason):
    methods = [Ditto] if module is Manual else [FedAvg, Ditto]  # FedAvg can do with manual optimization
    for line in check_learner(module, batches(), methods).values():
        assert reason in line
        assert "\n" not in line


@pytest.mark.seconds
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("make", "samples"), [(LightningLSTM, texts), (LightningTransformer, texts), (BoringModel, vectors)]
)
def test_lightning_s_own_in_their_own_sizes(make, samples):
    options = {"vocab_size": VOCABULARY} if samples is texts else {}
    two = itertools.islice(DataLoader(samples()[0], 4), 2)
    assert check_learner(partial(make, **options), two, [FedAvg, Ditto]).works == ["FedAvg", "Ditto"]


def test_no_batch_is_said():
    with pytest.raises(ConfigError, match="give at least one batch"):
        check_learner(Regression, [])


def test_what_is_no_lightning_module_is_said():
    with pytest.raises(ConfigError, match="^check_learner: Linear is not a LightningModule; give one"):
        check_learner(torch.nn.Linear(2, 2), [torch.zeros(2, 2)])
