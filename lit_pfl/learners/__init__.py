"""What clients train: the built-in image classifier, and how anybody's LightningModule is taken in."""

from lit_pfl.data.batches import size_of
from lit_pfl.learners.checks import check_learner, check_shapes
from lit_pfl.learners.classifier import (
    BackboneCallable,
    ImageClassifier,
    Mixture,
    OptimizerCallable,
    SchedulerCallable,
    network_of,
    quick_backbone,
)
from lit_pfl.learners.hooks import call_hook, hand_on, place_checkpoints
from lit_pfl.learners.logs import STAGE, Recorder, recorded, silenced
from lit_pfl.learners.optimizers import extend, refuse_scaled_gradients, set_schedules_to, single_optimizer
from lit_pfl.learners.steps import (
    SkipBatch,
    Step,
    call_step,
    call_with,
    holding,
    split_batch,
    training_loss,
    training_outputs,
    unchanged,
    unseen,
)

__all__ = [
    "STAGE",
    "BackboneCallable",
    "ImageClassifier",
    "Mixture",
    "OptimizerCallable",
    "Recorder",
    "SchedulerCallable",
    "SkipBatch",
    "Step",
    "call_hook",
    "call_step",
    "call_with",
    "check_learner",
    "check_shapes",
    "extend",
    "hand_on",
    "holding",
    "network_of",
    "place_checkpoints",
    "quick_backbone",
    "recorded",
    "refuse_scaled_gradients",
    "set_schedules_to",
    "silenced",
    "single_optimizer",
    "size_of",
    "split_batch",
    "training_loss",
    "training_outputs",
    "unchanged",
    "unseen",
]
