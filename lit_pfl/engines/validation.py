"""What a Trainer monitors: schedules and callbacks that wait for a score; and the validation of a client that does."""

import lightning as L
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_pfl.core import Client
from lit_pfl.data import has_batches
from lit_pfl.errors import ConfigError
from lit_pfl.learners import STAGE
from lit_pfl.learners.callbacks_in import callbacks_in
from lit_pfl.learners.scoring import RUNNING, score
from lit_pfl.lightning_internals import show_scores, told_evaluating
from lit_pfl.randomness import normal_number_kept, scoring_draws

#: hooks of callbacks that come while a Trainer validates or tests
UNUSED = [
    f"on_{stage}_{when}"
    for stage in ("validation", "test")
    for when in ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")
]


def monitors(trainer: L.Trainer) -> dict[str, str]:
    """Return the names of the scores that a Trainer's callbacks monitor, each with one that does."""
    there = {getattr(callback, "monitor", None): callback for callback in trainer.callbacks}  # type: ignore[attr-defined]
    return {name: type(callback).__name__ for name, callback in there.items() if isinstance(name, str)}


def monitored(trainer: L.Trainer) -> dict[str, str]:
    """Return those that its schedules wait for as well."""
    schedules = {
        str(config.monitor): type(config.scheduler).__name__
        for config in trainer.lr_scheduler_configs
        if config.reduce_on_plateau and config.strict
    }
    return {**monitors(trainer), **schedules}


class OwnValidation:
    """Validates a client on its own data at the end of a local epoch, if something in its Trainer waits for a score.

    Training does not feel it: the client's random stream and the learner are put back afterwards.
    """

    def __init__(self, client: Client, seed: int) -> None:
        self.client, self.seed = client, seed
        self._scored: set[str] = set()  # what only a validation has told so far

    def __call__(self) -> None:
        """Validate, unless all that is monitored has been logged in training."""
        trainer = self.client.trainer
        logged = trainer.callback_metrics.keys() - self._scored
        if not monitored(trainer).keys() - logged:
            return
        data = self.client.data
        assert data is not None
        draws = scoring_draws(self.seed, self.client.spec.client_id, data.scored_with)
        with normal_number_kept(), draws, self.client.personalized() as learner:
            logged_now = score(learner, data.val, "val").logged
        show_scores(trainer, logged_now)
        self._scored |= logged_now.keys()
        with told_evaluating(self.client, RUNNING["val"]):
            call._call_callback_hooks(trainer, "on_validation_end", monitoring_callbacks=True)


def warn_of_unused(client: Client) -> None:
    """Say which callbacks of a client's Trainer wait for hooks of validation or tests, as which it is not scored."""
    own = callbacks_in(client.learner)
    for callback in client.trainer.callbacks:  # type: ignore[attr-defined]
        for hook in [] if callback in own else UNUSED:
            made = getattr(type(callback), hook)
            if made is not getattr(L.Callback, hook) and not made.__module__.startswith("lightning."):
                rank_zero_warn(
                    f"{type(callback).__name__}.{hook} is not called: a federation scores clients outside of their "
                    "Trainers. Log scores in validation_step and test_step of the learner, or in its own hooks."
                )
                break


def check_monitored(client: Client) -> None:
    """See that a client whose Trainer monitors a validation score has data for it."""
    assert client.data is not None
    for name, who in monitored(client.trainer).items():
        if STAGE.match(name) and not has_batches(client.data.val):
            raise ConfigError(
                f"Client {client.spec.client_id}: {who} monitors {name!r}, and this client has no validation data; "
                "give it some, or monitor a score of its training."
            )
