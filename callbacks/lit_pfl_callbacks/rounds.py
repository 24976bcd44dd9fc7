"""Which round it is, who of the clients is looked at, and files that get rows round by round."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import lightning as L

from lit_pfl_callbacks.federated_loop import FederatedLoop
from lit_pfl_callbacks.protocols import HasClients, HasSeconds
from lit_pfl_callbacks.run_folder import append_rows, checked_rows, run_folder, write_rows

T = TypeVar("T")


def loop_of(trainer: L.Trainer) -> FederatedLoop | None:
    """Return the callback that makes a Trainer one site of a federation, if it has one."""
    callbacks: Sequence[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return next((callback for callback in callbacks if isinstance(callback, FederatedLoop)), None)


def keeps(trainer: L.Trainer) -> bool:
    """Say whether a run has a folder that is written into: not where code is only tried out.

    A federation without a logger has none. A module on its own writes into the Trainer's ``default_root_dir`` then.
    """
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return False
    return bool(trainer.loggers) or not isinstance(trainer.lightning_module, HasClients)


def writes(trainer: L.Trainer) -> bool:
    """Say whether it is this process that writes into the run's folder, if there is one."""
    return keeps(trainer) and trainer.is_global_zero


def epochs_a_round(trainer: L.Trainer) -> int:
    """Return how many of a Trainer's epochs are a round: one, but at a site as many as lie between two exchanges."""
    loop = loop_of(trainer)
    return 1 if loop is None else loop.every_n_epochs


def round_of(trainer: L.Trainer) -> int:
    """Return the round, from 1, that is continuing, or that the epoch which is ending belongs to."""
    return trainer.current_epoch // epochs_a_round(trainer) + 1


def ends_round(trainer: L.Trainer) -> bool:
    """Say whether the epoch that is continuing is a round's last."""
    return (trainer.current_epoch + 1) % epochs_a_round(trainer) == 0


def due(round: int, every_n_rounds: int) -> bool:
    """Say whether a round is one to measure: the first, and then every this many."""
    return round == 1 or round % every_n_rounds == 0


def seconds_of(trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, float]:
    """Return what this process has spent so far on other things than training, by phase."""
    source = pl_module if isinstance(pl_module, HasSeconds) else loop_of(trainer)
    return {} if source is None else dict(source.seconds)


def spread(ids: Sequence[T], most: int | None) -> list[T]:
    """Return at most this many, evenly spread, the first and the last among them.

    Example:
        >>> spread(range(10), 4)
        [0, 3, 6, 9]
    """
    if most is None or len(ids) <= most:
        return list(ids)
    if most == 1:
        return [ids[0]]
    return [ids[i * (len(ids) - 1) // (most - 1)] for i in range(most)]


class RoundTable:
    """A CSV file in the run folder to which every round adds rows.

    A run that is resumed keeps what is there of earlier rounds and writes the others again, so that no row is there
    twice and none is missing, wherever it was stopped. Resumed into another folder, it takes those rows along.

    Args:
        name: the file's name.
        columns: its columns, ``round`` among them.
    """

    def __init__(self, name: str, columns: Sequence[str]) -> None:
        self.name, self.columns = name, list(columns)
        self._path: Path | None = None
        self._former: Path | None = None  # the file of the run that is resumed

    def check(self, trainer: L.Trainer) -> None:
        """Look whether a run can continue the file, before anything is computed that would be lost."""
        self._path, self._former = None, self._path or self._former  # it may be another fit than before
        if writes(trainer):
            checked_rows(self._source(trainer), self.columns)

    def _source(self, trainer: L.Trainer) -> Path:
        """Return the file that rows of earlier rounds are in."""
        path = run_folder(trainer) / self.name
        return path if path.exists() or self._former is None else self._former

    def add(self, trainer: L.Trainer, rows: list[dict[str, Any]]) -> None:
        """Write rows, of one round or of some that follow each other, unless the Trainer keeps nothing.

        A round that has none, such as one that is not measured, says so by an empty list: after a run is resumed, what
        was there of that round and of later ones is gone all the same.
        """
        if not writes(trainer):
            return
        path = run_folder(trainer) / self.name
        if path == self._path:
            if rows:
                append_rows(path, rows, self.columns)
            return
        first = min((row["round"] for row in rows), default=round_of(trainer))
        before = [row for row in checked_rows(self._source(trainer), self.columns) if int(float(row["round"])) < first]
        if before or rows:
            write_rows(path, [{column: row[column] for column in self.columns} for row in [*before, *rows]])
            self._path = path
        else:
            path.unlink(missing_ok=True)
            self._former = None

    def state_dict(self) -> dict[str, Any]:
        """Return where the file is."""
        path = self._path or self._former
        return {"file": None if path is None else str(path.absolute())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state of :meth:`state_dict`."""
        self._path, self._former = None, None if state["file"] is None else Path(state["file"])
