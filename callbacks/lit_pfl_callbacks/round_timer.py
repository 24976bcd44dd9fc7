"""Where the time of a round goes."""

import time
from typing import Any

import lightning as L

from lit_pfl_callbacks.dashboard import Dashboard
from lit_pfl_callbacks.rounds import RoundTable, ends_round, epochs_a_round, round_of, seconds_of

COLUMNS = ["round", "phase", "seconds"]
PHASES = ("train", "evaluate", "aggregate", "link")


class RoundTimer(L.Callback):
    """Writes the seconds of every round into ``times.csv``, by phase; four lines a round, whatever the clients.

    ``evaluate`` is validation; ``aggregate`` and ``link`` are what the module has in ``seconds``
    (:class:`~lit_pfl_callbacks.protocols.HasSeconds`), at a site the waiting of its
    :class:`~lit_pfl_callbacks.FederatedLoop`; ``train`` is all else between a round's beginning and its end. What comes
    between rounds, such as checkpoints, is of none. Under a plain Trainer, a round is an epoch.

    Attributes:
        seconds: the sums over rounds, by phase; they continue in a resumed run.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._table = RoundTable("times.csv", COLUMNS)
        self._dashboard = Dashboard()
        self._round = dict.fromkeys(PHASES, 0.0)  # of the round that is going on
        self._told: dict[str, float] = {}  # what the module had told when it was last asked
        self._inside = 0.0  # what it has told, and what validation took, since the epoch began
        self._began = self._validation = 0.0

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin."""
        self._table.check(trainer)
        self._told = seconds_of(trainer, pl_module)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin an epoch."""
        if trainer.current_epoch % epochs_a_round(trainer) == 0:
            self._round = dict.fromkeys(PHASES, 0.0)
        self._ask(trainer, pl_module)  # of a site that has waited since the round before
        self._began, self._inside = time.perf_counter(), 0.0

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin to evaluate."""
        self._validation = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """End to evaluate."""
        if not trainer.sanity_checking:
            self._add("evaluate", time.perf_counter() - self._validation)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """End an epoch, and maybe a round."""
        self._ask(trainer, pl_module)
        self._round["train"] += max(0.0, time.perf_counter() - self._began - self._inside)
        if not ends_round(trainer):
            return
        for phase, spent in self._round.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + spent
        rows = [{"round": round_of(trainer), "phase": p, "seconds": round(s, 6)} for p, s in self._round.items()]
        self._table.add(trainer, rows)
        self._dashboard.scalars(trainer, round_of(trainer), {f"time/{p}": s for p, s in self._round.items()})

    def _ask(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        told = seconds_of(trainer, pl_module)
        for phase in told:
            self._add(phase, told[phase] - self._told.get(phase, 0.0))
        self._told = told

    def _add(self, phase: str, spent: float) -> None:
        self._round[phase] = self._round.get(phase, 0.0) + spent
        self._inside += spent

    def state_dict(self) -> dict[str, Any]:
        """Return the sums."""
        return {"seconds": dict(self.seconds), "table": self._table.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over sums."""
        self.seconds = dict(state_dict["seconds"])
        self._table.load_state_dict(state_dict["table"])
