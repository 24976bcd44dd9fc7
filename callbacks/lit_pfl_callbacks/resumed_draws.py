"""Let a fit that resumes draw the same random numbers as one that was not interrupted."""

from typing import Any

import lightning as L

from lit_pfl_callbacks.generators import OwnGenerators, plain
from lit_pfl_callbacks.loader_state import load_loader_states
from lit_pfl_callbacks.random_state import random_state, set_random_state


class ResumedDraws:
    """Lets a fit that resumes at the end of a round draw the same numbers as one that was not interrupted.

    Such a fit loads the reply from the state before it, as the other one did, and begins its first epoch in the state
    after it, whatever has been drawn in between: while batches were started too early, or by hooks of the fit's start.
    """

    def __init__(self) -> None:
        self._before: dict[str, Any] = {}
        self._saved: dict[str, Any] = {}
        self._loader, self._own = None, OwnGenerators(())

    def keep(self, loader: Any) -> None:
        """Keep the state before a reply is loaded, also of generators that the training loader has of its own."""
        self._look_at(loader)
        self._before = self._state()

    def _look_at(self, loader: Any) -> None:
        if loader is not self._loader:  # else what its samplers had at first is known
            self._loader, self._own = loader, OwnGenerators(loader)

    def _state(self) -> dict[str, Any]:
        return {**random_state(), "own": plain(self._own.states())}

    def _restore(self, state: dict[str, Any], loader: Any) -> None:
        set_random_state(state)
        self._look_at(loader)
        self._own.restore(state.get("own", []))

    def forget(self) -> None:
        """Drop all states: after this, a checkpoint is not of the end of a round."""
        self._before, self._saved = {}, {}

    def state_dict(self) -> dict[str, Any]:
        """Return what goes into a checkpoint at the end of a round; at other times nothing."""
        return {"random": {"before": self._before, "after": self._state()}} if self._before else {}

    def load(self, saved: dict[str, Any]) -> None:
        """Take what a checkpoint contains."""
        self._saved = saved

    def before_reply(self, loader: Any) -> None:
        """Restore the state before the reply was loaded, if the fit resumes."""
        if self._saved:
            self._restore(self._saved["before"], loader)

    def after_reply(self, trainer: L.Trainer) -> None:
        """Have the state after the reply restored once all hooks of the fit's start have run, if the fit resumes."""
        if not (saved := self._saved):
            return
        strategy = trainer.strategy
        hook = type(strategy).on_train_start  # of them all the last

        def on_train_start() -> None:
            del strategy.on_train_start
            hook(strategy)
            if self._saved is saved:  # else a fit that failed before has left this here
                self._restore(saved["after"], trainer.train_dataloader)
                _start_batches_again(trainer)

        strategy.on_train_start = on_train_start  # type: ignore[method-assign]


def _start_batches_again(trainer: L.Trainer) -> None:
    """Let batches be started as in any other epoch; in a fit that resumes, Lightning has done so before all hooks."""
    loop, epoch = trainer.fit_loop, trainer.current_epoch
    load_loader_states(loop)
    every: int = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
    loop._resuming_from_checkpoint = False  # then it does so once more, after the hooks of the epoch
    if every:  # and makes loaders anew before them, when it is time
        loop._last_train_dl_reload_epoch = epoch - (epoch % every or every)
