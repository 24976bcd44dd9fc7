"""What clients train: the built-in image classifier, and how anybody's LightningModule is taken in."""

from lit_pfl.data.batches import size_of
from lit_pfl.learners.checks import check_callbacks, check_copies, check_learner
from lit_pfl.learners.classifier import (
    BackboneCallable,
    ImageClassifier,
    Mixture,
    OptimizerCallable,
    SchedulerCallable,
    network_of,
    quick_backbone,
)
from lit_pfl.learners.forward import forward_changed
from lit_pfl.learners.handing_on import call_hook, hand_on, hand_on_evaluation, place_checkpoints, taken_out
from lit_pfl.learners.heads import (
    AddLogits,
    HeadCall,
    at_head,
    find_head,
    linear_layers,
    log_mixture,
    sizes_of_head,
    takes_features,
)
from lit_pfl.learners.logs import STAGE, LossTally, recorded, silenced
from lit_pfl.learners.optimizers import (
    add_parameters,
    configured_by,
    extend,
    refuse_scaled_gradients,
    set_schedules_to,
    single_optimizer,
)
from lit_pfl.learners.splitting import split_batch
from lit_pfl.learners.steps import SkipBatch, Step, call_step, call_with, training_loss, training_outputs
from lit_pfl.learners.unchanged import holding, unchanged, unseen, without_gradients, without_trace

__all__ = [
    "STAGE",
    "AddLogits",
    "BackboneCallable",
    "HeadCall",
    "ImageClassifier",
    "LossTally",
    "Mixture",
    "OptimizerCallable",
    "SchedulerCallable",
    "SkipBatch",
    "Step",
    "add_parameters",
    "at_head",
    "call_hook",
    "call_step",
    "call_with",
    "check_callbacks",
    "check_copies",
    "check_learner",
    "configured_by",
    "extend",
    "find_head",
    "forward_changed",
    "hand_on",
    "hand_on_evaluation",
    "holding",
    "linear_layers",
    "log_mixture",
    "network_of",
    "place_checkpoints",
    "quick_backbone",
    "recorded",
    "refuse_scaled_gradients",
    "set_schedules_to",
    "silenced",
    "single_optimizer",
    "size_of",
    "sizes_of_head",
    "split_batch",
    "taken_out",
    "takes_features",
    "training_loss",
    "training_outputs",
    "unchanged",
    "unseen",
    "without_gradients",
    "without_trace",
]
