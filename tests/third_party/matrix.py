"""Every module under every method: whether it trains, is resumed and is scored as it is, or what is in the way.

``python tests/third_party/matrix.py`` tries all of them and writes ``docs/third_party.md`` anew.
"""

import logging
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from modules import MODULES, Module

import lit_pfl.methods
from lit_pfl import Federation
from lit_pfl.errors import ConfigError
from lit_pfl.nn.factorization import Factorization
from lit_pfl.testing import assert_equal

PAGE = Path(__file__).parent.parent.parent / "docs/third_party.md"
METHODS = sorted(lit_pfl.methods.__all__)

ROUNDS = 2
TWO_EPOCHS = {"FedRep", "FedSLR"}  # which train two models in a round, one after the other

#: why a module can be refused: what its line says, and what the page says of it
REASONS = {
    "chain": (
        "FedMA matches the units of a plain chain of layers",
        "needs a plain chain of `lit_pfl.models`",
    ),
    "groups": ("PsiNet divides a `backbone`", "needs a `backbone` of `lit_pfl.models` with a linear head"),
    "sgd": ("use torch.optim.SGD", "needs plain SGD, and the module has another optimizer"),
    "logits": (
        "use model.mixing=parameters",
        'needs `mixing="parameters"`: `training_step` does not call `forward` for a tensor',
    ),
    "density": ("give more", "needs `density=0.9`: frozen copies, which have no masks, are half of the network"),
    "layers": (
        "needs a two-dimensional convolution or a linear layer in the body",
        "needs a two-dimensional convolution or a linear layer in the body",
    ),
    "body": ("and this one has no weights", "needs a body with weights"),
    "norms": ("has no batch norm", "needs batch norm"),
    "manual": ("steps its optimizers itself", "needs automatic optimization"),
    "mu": (
        "adds the L1 norm of mu to the loss",
        "needs `factorization=Factorization(l1=0)`: no penalty",
    ),
    "loss": ("compares losses", "needs a loss that `training_step` returns"),
    "calls": ("needs a head that training_step calls once", "needs a head that `training_step` calls once"),
    "shape": (
        "needs a head that returns (B, C) logits",
        "needs a head that gives each sample a logit a class",
    ),
    "linear": ("needs a head with a linear layer", "needs a head with a linear layer, `Floco` one of nothing else"),
    "module": ("names parameters of several modules", "needs a head that is one module, from features to logits"),
    "classes": ("has no class labels", "needs class labels"),
    "unfit": ("for which batch norm is unfit", "trains heads on generated features, so they may have no batch norm"),
    "adapters": ("trains adapters, and", "needs a module with adapters"),
    "noise": (
        "gets has none that can be replaced",
        "puts noise in the place of a batch's tensors, which needs them in tuples, lists, dicts or dataclasses",
    ),
    "samples": ("divides batches into samples", "divides batches into samples, and graphs of a batch are one object"),
    "forward": ("FedEM mixes what forward returns", "needs a `training_step` that calls `forward`"),
    "size": (
        "use a smaller network, a smaller hidden_dim",
        "needs `hidden_dim=10` for so large a network",
    ),
}
#: options that are the answer to a reason
ANSWERS: dict[str, dict[str, Any]] = {
    "logits": {"mixing": "parameters"},
    "density": {"density": 0.9},
    "mu": {"factorization": Factorization(l1=0)},
    "size": {"hidden_dim": 10},
}
#: methods that look at class labels, at the numbers of a head's features and logits, at a head
CLASSES = (
    "CCVR", "FD", "FLUTE", "FML", "FedAS", "FedEM", "FedGH", "FedGen", "FedKD", "FedLC", "FedNTD", "FedPAC", "FedPHP",
    "FedProto", "FedRS", "FedRoD", "GPFL", "KNNPer", "PFedFDA",
)  # fmt: skip
SIZES = (
    "CCVR", "FD", "FLUTE", "FedCP", "FedDBE", "FedGH", "FedGen", "FedKD", "FedPAC", "FedProto", "Floco", "GPFL",
    "PFedFDA",
)  # fmt: skip
HEADS = (*CLASSES, "ElasticAggregation", "FedCP", "FedDBE", "Floco", "MOON")
ADAPTERS = dict.fromkeys(("FFALoRA", "FedDPA", "FedIT", "FedSALoRA", "FlexLoRA"), "adapters")
BUILDS = {"FedMA": "chain", "PsiNet": "groups", **ADAPTERS}
ADAM = {**BUILDS, "FedNova": "sgd", "PFedMe": "sgd", "Scaffold": "sgd"}
NO_NORM = {"FedBN": "norms"}
TWO_VIEWS = {**dict.fromkeys(HEADS, "calls"), "FedGen": "unfit", "CCVR": "unfit", "Floco": "linear"}
NO_CLASSES, NO_LOGITS = dict.fromkeys(CLASSES, "classes"), dict.fromkeys(HEADS, "shape")
STEPS = (
    *HEADS, "APFL", "APPLE", "Ditto", "FedADMM", "FedAH", "FedALA", "FedAMP", "FedBABU", "FedDPA", "FedDyn", "FedMA",
    "FedNova",
    "FedProx", "FedRep", "FedSLR", "FedSpa", "HeurFedAMP", "PFedHN", "PFedMe", "PerFedAvg", "PsiNet", "Scaffold",
)  # fmt: skip
BODIES = ("FLUTE", "FedAH", "FedBABU", "FedPAC", "FedRep")
#: which methods refuse which module, and why; all others train it
REFUSED: dict[str, dict[str, str]] = {
    "ClassificationTask": ADAM,
    "SemanticSegmentationTask": {**ADAM, **NO_LOGITS, **dict.fromkeys(SIZES, "linear"), "PFedHN": "size"},
    "RegressionTask": {**ADAM, **NO_CLASSES},
    "BYOLTask": {**ADAM, **TWO_VIEWS, "PFedHN": "size"},
    "NBeats": {**ADAM, **NO_NORM, **dict.fromkeys(HEADS, "module")},
    "TemporalFusionTransformer": {**ADAM, **NO_NORM, **NO_LOGITS},
    "BertForSequenceClassification with LoRA": {
        **{method: reason for method, reason in ADAM.items() if method not in ADAPTERS}, **NO_NORM, "FedEM": "forward",
        "Floco": "linear",
    },
    "GIN": {**ADAM, "FactorizedFL": "layers", "PFedPara": "layers", "PerFedAvg": "samples",
            "SimFed": "noise"},
    "MoCoTask": {**ADAM, **TWO_VIEWS, "APFL": "logits", "PFedPara": "layers"},
    "DeepAR": {**ADAM, **NO_NORM, **NO_LOGITS, "FactorizedFL": "layers", "PFedPara": "layers"},
    "SimCLR": {**BUILDS, **TWO_VIEWS},
    "BYOL": {**BUILDS, **TWO_VIEWS, "FedSpa": "density"},
    "BoringModel": {**BUILDS, **NO_NORM, **NO_CLASSES, "FactorizedFL": "layers", "PFedPara": "layers",
                    **dict.fromkeys(BODIES, "body")},
    "LightningTransformer": {**BUILDS, **NO_NORM, **NO_LOGITS},
    "GAN": {**ADAPTERS, **dict.fromkeys(STEPS, "manual"), **NO_NORM, "FactorizedFL": "mu", "SimFed": "mu",
            "FedFOMO": "loss", "AgnosticFL": "loss", "IFCA": "loss"},
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What has become of a module under a method.

    Attributes:
        line: why it was refused before training; empty if it was trained, resumed and scored.
        scores: metrics of clients that were told of, if it was.
    """

    line: str = ""
    scores: frozenset[str] = frozenset()


def quiet_trainer(folder: Path | None = None, **options: Any) -> L.Trainer:
    callbacks = [] if folder is None else [ModelCheckpoint(folder, "{epoch}", save_top_k=-1)]
    return L.Trainer(
        max_epochs=ROUNDS, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, enable_checkpointing=folder is not None, callbacks=callbacks, **options,
    )  # fmt: skip


def fit(module: Module, method: str, folder: Path | None = None, ckpt_path: Path | None = None, **options: Any) -> Any:
    """Train two rounds of a federation, or go on from a checkpoint."""
    kind = getattr(lit_pfl.methods, method)
    epochs = {"local_epochs": 2} if method in TWO_EPOCHS else {}
    torch.manual_seed(1)
    federation = Federation(module.method(kind, **options), seed=3, threads=1, **epochs)
    trainer = quiet_trainer(folder)
    trainer.fit(federation, datamodule=module.per_client(), ckpt_path=ckpt_path, weights_only=module.weights_only)
    return federation


def outcome(name: str, method: str, **options: Any) -> Outcome:
    """Try a module under a method.

    Args:
        name: of the module.
        method: the method's name.
        options: further ones of the method.

    Raises:
        AssertionError: when it is refused too late, or goes on in another way from a checkpoint.
    """
    module = MODULES[name]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            whole = fit(module, method, Path(folder), **options)
        except ConfigError as error:
            if not any(Path(folder).iterdir()):
                return Outcome(str(error))
            raise AssertionError("it is refused after a round") from error
        assert not whole.coordinator.refused, str(whole.coordinator.refused[0])
        resumed = fit(module, method, ckpt_path=Path(folder) / "epoch=0.ckpt", **options)
    states = [{k: c.state_dict() for k, c in run.clients.items()} for run in (whole, resumed)]
    assert_equal(states[1], states[0], "resumed, the state of client")
    assert resumed.rows == whole.rows, "resumed, the scores are others"
    told = whole.trainer.callback_metrics
    return Outcome(scores=frozenset(key.removeprefix("val/") for key in told if key.startswith("val/")))


def reason_of(line: str) -> str:
    """Return which reason a line gives."""
    return next(reason for reason, (needle, _) in REASONS.items() if needle in line)


def page(refused: Mapping[str, Mapping[str, str]]) -> str:
    """Return the page of the documentation, from the reasons for which modules were refused."""
    used = {reason for of in refused.values() for method, reason in of.items() if method in METHODS}
    letters = {reason: chr(ord("a") + i) for i, reason in enumerate(reason for reason in REASONS if reason in used)}
    rows = []
    for method in METHODS:
        reasons = [refused.get(name, {}).get(method) for name in MODULES]
        cells = ["yes" if not r else f"{'yes ' * (r in ANSWERS)}({letters[r]})" for r in reasons]
        rows.append(f"| `{method}` | {' | '.join(cells)} |")
    modules = [
        f"| {i} | {name} | `{module.library}` | {', '.join(sorted(f'`{score}`' for score in module.scores)) or '—'} |"
        for i, (name, module) in enumerate(MODULES.items(), 1)
    ]
    footnotes = [f"- ({letters[reason]}) The method {REASONS[reason][1]}." for reason in letters]
    numbers = " | ".join(map(str, range(1, len(MODULES) + 1)))
    return TEMPLATE.format(
        modules="\n".join(modules), numbers=numbers, rule="---|" * len(MODULES), rows="\n".join(rows),
        footnotes="\n".join(footnotes),
    )  # fmt: skip


TEMPLATE = """# Modules of other libraries

These modules train under the methods of lit-pfl as their libraries ship them: with their own optimizer, schedule, data
module and logging. Each cell was tried by `tests/third_party`: two clients train two rounds, the run is saved after
the first round and resumed, the resumed run has the same weights and scores bit for bit, and clients are scored by
what the module logs itself. Where a method cannot train a module, it says so in one line before training.

| | module | library | scores |
|---|---|---|---|
{modules}

MoCoTask, BYOLTask and BoringModel log nothing in validation, so their clients have no scores.

"yes" means that the module trains as it is. A letter is explained below the table; "yes" with a letter means that the
method needs one option.

| method | {numbers} |
|---|{rule}
{rows}

{footnotes}

For methods that treat heads or encoders separately, name these, for example `head=r"^model\\.fc\\."` and
`encoder="model.layer4"` for a ResNet of ClassificationTask: see [Your module](your_module.md). Checkpoints of
pytorch-forecasting hold classes of its own. To resume from one, call `trainer.fit(..., ckpt_path=...,
weights_only=False)`, as without lit-pfl.

`SimFed`, `FactorizedFL` and `PFedPara` factorize a copy of a trained part like its original, so its moving average
still works. Such a copy is a momentum encoder or another frozen one (MoCoTask, BYOL), an `AveragedModel` or timm's
`ModelEmaV3`. Copies outside modules, such as diffusers' `EMAModel`, are refused. If the copy starts
with other values, as in MoCoTask, `PFedPara` leaves both dense, and refuses a module in which nothing else is left to
replace.

Also tried, by hand, in 2026: chemprop 2.3 (`MPNN`) and scvi-tools 1.4 (`TrainingPlan`) train and are scored under
FedAvg, Ditto and FactorizedFL, with their own loaders. anomalib 2.7's `Stfpm`, `ReverseDistillation` and `Fastflow`
do so under FedAvg and Ditto, and `Ganomaly` under FedAvg. For anomalib pass `local="post_processor"`: its buffers are
NaN before a validation, and no upload may be.

To try your own module under all methods, use `lit_pfl.testing.check_learner`.
"""

if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel("ERROR")
    torch.set_num_threads(1)
    seen = {name: {method: outcome(name, method).line for method in METHODS} for name in MODULES}
    PAGE.write_text(page({name: {m: reason_of(line) for m, line in of.items() if line} for name, of in seen.items()}))
