"""Every module under every method: whether it trains, is resumed and is scored as it is, or what is in the way.

``python tests/third_party/matrix.py`` writes ``docs/third_party.md`` anew.
"""

import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import lit_pfl.methods
from lit_pfl import Federation
from lit_pfl.errors import ConfigError
from lit_pfl.testing import assert_equal
from modules import MODULES, Module

ROUNDS = 2
TWO_EPOCHS = {"FedRep", "FedSLR"}  # which train two models in a round, one after the other


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


def outcome(name: str, method: str) -> Outcome:
    """Try a module under a method.

    Raises:
        AssertionError: when it is refused too late, or goes on in another way from a checkpoint.
    """
    module = MODULES[name]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            whole = fit(module, method, Path(folder))
        except ConfigError as error:
            assert not any(Path(folder).iterdir()), f"it is refused after a round: {error}"
            return Outcome(str(error))
        assert not whole.coordinator.refused, str(whole.coordinator.refused[0])
        resumed = fit(module, method, ckpt_path=Path(folder) / "epoch=0.ckpt")
    states = [{k: c.state_dict() for k, c in run.clients.items()} for run in (whole, resumed)]
    assert_equal(states[1], states[0], "resumed, the state of client")
    assert resumed.rows == whole.rows, "resumed, the scores are others"
    told = whole.trainer.callback_metrics
    return Outcome(scores=frozenset(key.removeprefix("val/") for key in told if key.startswith("val/")))
