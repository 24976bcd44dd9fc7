"""What is done to Lightning's own classes and PyTorch's optimizers: private names of theirs are used only here."""

from lit_pfl.lightning_internals.batch_loop import HOOKS, make_lean
from lit_pfl.lightning_internals.checkpoint_io import (
    AtomicCheckpointIO,
    LastCheckpoint,
    MemoryCheckpointIO,
    read_checkpoint,
    read_whole,
)
from lit_pfl.lightning_internals.endless import Elsewhere, limit_batches, make_endless
from lit_pfl.lightning_internals.inside import (
    as_trained,
    came_of_loading,
    forget_scores,
    hand_down_trainer,
    hand_up_hparams,
    in_hook,
    leave_jobs_alone,
    lend_data,
    lend_training,
    lent_trainer,
    log_nothing,
    name_metrics,
    optimizers_and_schedules,
    optimizers_in,
    saved_hparams,
    show_progress,
    show_scores,
    told_evaluating,
)
from lit_pfl.lightning_internals.late_loader import LateLoader
from lit_pfl.lightning_internals.own_copy import own_copy
from lit_pfl.lightning_internals.quick import NoProfiler, QuickModule
from lit_pfl.lightning_internals.state_files import ASLEEP, FOLDER, Content, SavedStates
from lit_pfl.lightning_internals.state_writing import StateFiles
from lit_pfl.lightning_internals.undisturbed import looked_up_once, signals_kept, undisturbed
