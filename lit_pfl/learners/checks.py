"""Which LightningModules can be learners."""

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.nn.parameter import is_lazy

from lit_pfl.errors import ConfigError, refuse_other_lightning

_AVERAGES = (
    "puts averaged weights in place when a Trainer validates, saves or ends; clients are scored, sent and resumed as "
    "they are trained"
)
_TRIES = "trains before the first round; let a Trainer that is given the module alone find it"
_COMPILE = "let configure_model call self.net.compile(), or __init__ set self.net = torch.compile(self.net)"
#: Lightning's callbacks that neither clients nor a federation can have, and why
REFUSED = {
    StochasticWeightAveraging: _AVERAGES,
    WeightAveraging: _AVERAGES,
    LearningRateFinder: _TRIES,
    BatchSizeFinder: _TRIES,
    ModelPruning: "gives the weights that it prunes other names while a Trainer fits; clients send them by name",
}


def check_learner(learner: Any, why_automatic: str = "") -> None:
    """See that a module can be trained under a method, and let it make its layers.

    Args:
        learner: the module.
        why_automatic: why the method cannot train a module that steps its optimizers itself; empty if it can.

    Raises:
        ConfigError: when it cannot.
    """
    _check_kind(learner)
    name = type(learner).__name__
    if not learner.automatic_optimization and why_automatic:
        raise ConfigError(
            f"model.learner: {name} steps its optimizers itself (automatic_optimization=False), but {why_automatic}; "
            "train it by FedAvg, StandAlone, FedPer or another method that only changes what is averaged."
        )
    if not is_overridden("training_step", learner):
        raise ConfigError(f"model.learner: {name} has no training_step.")
    if is_overridden("configure_model", learner):
        _make_layers(learner)
    if next(learner.parameters(), None) is None:
        raise ConfigError(
            f"model.learner: {name} has no parameters yet; make its layers in __init__ or configure_model."
        )
    check_shapes(learner)


def _check_kind(learner: Any) -> None:
    """See that a learner is a LightningModule."""
    if isinstance(learner, L.LightningModule):
        return
    if isinstance(learner, type):
        raise ConfigError(f"model.learner: {learner.__name__} is a class; pass a module, {learner.__name__}(...).")
    refuse_other_lightning("model.learner", learner, "LightningModule")
    if isinstance(whole := getattr(learner, "_orig_mod", None), L.LightningModule):
        raise ConfigError(
            f"model.learner: {type(whole).__name__} was compiled as a whole, and clients need copies; {_COMPILE}."
        )
    raise ConfigError(f"model.learner: {type(learner).__name__} is not a LightningModule; pass one.")


def check_shapes(learner: nn.Module) -> None:
    """See that every tensor of a module has a shape, since only then it can be copied for every client.

    Raises:
        ConfigError: when one has none.
    """
    for name, tensor in chain(learner.named_parameters(), learner.named_buffers()):
        if is_lazy(tensor):
            raise ConfigError(
                f"model.learner: {type(learner).__name__} has lazy layers, whose {name!r} has no shape before a first "
                "batch; let one of zeros through them at the end of __init__, or give them their sizes."
            )


def check_copies(learner: L.LightningModule) -> None:
    """See that copies of a module can be trained: every client has one.

    Raises:
        ConfigError: when they cannot.
    """
    _check_kind(learner)
    check_shapes(learner)
    for name, part in learner.named_modules():
        if isinstance(part, torch.jit.ScriptModule) and any(weight.requires_grad for weight in part.parameters()):
            raise ConfigError(
                f"model.learner: {name!r} of {type(learner).__name__} is a ScriptModule, whose copies PyTorch cannot "
                "train, and every client needs one of its own; leave out torch.jit.script."
            )
        if part._compiled_call_impl is not None:
            rank_zero_warn(
                f"{name or 'all'!r} of {type(learner).__name__} was compiled before it was copied for every client, "
                f"and PyTorch's copies are not compiled; {_COMPILE}."
            )


def check_callbacks(callbacks: Iterable[L.Callback], option: str, refused: Mapping[type, str] = REFUSED) -> None:
    """See that clients, or a federation, can have some callbacks.

    Args:
        callbacks: the callbacks.
        option: where they come from, for the error.
        refused: which they cannot have, and why.

    Raises:
        ConfigError: when they cannot.
    """
    for callback in callbacks:
        if why := next((why for kind, why in refused.items() if isinstance(callback, kind)), None):
            raise ConfigError(f"{option}: {type(callback).__name__} {why}.")


def _make_layers(learner: L.LightningModule) -> None:
    try:
        learner.configure_model()
    except RuntimeError as error:
        if learner._trainer is None and "not attached to a `Trainer`" in str(error):
            raise ConfigError(
                f"model.learner: {type(learner).__name__}.configure_model asks for its Trainer, which clients do not "
                "have yet when their layers are made; give __init__ what it needs to know."
            ) from error
        raise
