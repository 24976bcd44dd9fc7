"""Which LightningModules can be learners."""

from typing import Any

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden

from lit_pfl.errors import ConfigError


def check_learner(learner: Any) -> None:
    """See that a module can be trained under a method, and let it make its layers.

    Raises:
        ConfigError: when it cannot.
    """
    name = type(learner).__name__
    if not isinstance(learner, L.LightningModule):
        raise ConfigError(f"model.learner: {name} is no LightningModule; give one.")
    if not learner.automatic_optimization:
        raise ConfigError(f"model.learner: {name} has automatic_optimization=False; a method needs it to be True.")
    if not is_overridden("training_step", learner):
        raise ConfigError(f"model.learner: {name} has no training_step.")
    if is_overridden("configure_model", learner):
        learner.configure_model()
    if next(learner.parameters(), None) is None:
        raise ConfigError(
            f"model.learner: {name} has no parameters yet; make its layers in __init__ or configure_model."
        )
