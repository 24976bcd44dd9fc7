"""What every client achieved: ``clients.csv`` during the run, a table at its end."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from rich.console import Console

from lit_pfl_callbacks.dashboard import Dashboard
from lit_pfl_callbacks.own_scores import OwnScores
from lit_pfl_callbacks.protocols import HasOtherStates, HasScores, HasTraffic, Row
from lit_pfl_callbacks.rounds import keeps, writes
from lit_pfl_callbacks.run_folder import append_rows, checked_rows, resume_command, run_folder, write_rows
from lit_pfl_callbacks.scores_shown import best_validated, of_own_models, print_scores
from lit_pfl_callbacks.states import with_states
from lit_pfl_callbacks.waiting import waits

COLUMNS = ["client", "round", "split", "model", "state", "n"]  # and a column for every metric
KEY = ["client", "round", "split", "model", "state"]  # there are no two lines with the same
NEEDED = ["client", "round", "split", "model"]  # those that a file has whatever the version that wrote it


class ClientsTable(L.Callback):
    """Writes ``clients.csv`` into the run folder, and prints a table of all clients when a run ends.

    The module has the scores of its latest evaluation (:class:`~lit_pfl_callbacks.protocols.HasScores`). Of any other
    module, such as one site's, the file has what its validation and its test log, with no client and the model ``own``;
    Lightning shows these itself, so no table is printed. ``state`` is the state in which the model was scored:
    ``trained``, ``aggregated`` or ``global``. A module that has scored further states
    (:class:`~lit_pfl_callbacks.protocols.HasOtherStates`) has a line for each, and the table shows them side by side.
    A ``model`` that ends in ``:untrained`` is that of a client that has never trained, scored as it would start now.
    Below the clients stands what says how fair the result is: the deviation over clients, and the worst 10 %. After a
    fit in which every round was validated, a line has the scores of the last round and of the best one on validation
    data. Loggers get the scores' distribution in every round, and the table at the end. ``lit-pfl report`` holds runs
    against each other.

    Args:
        show: whether to print the table.
        most: the largest number of clients to print one by one; of more, the worst and the best are shown.

    Raises:
        MisconfigurationException: as a run begins, when the ``clients.csv`` of its folder is not one to continue.
    """

    def __init__(self, show: bool = True, most: int = 40) -> None:
        self.show = show
        self.most = most
        self._dashboard = Dashboard()
        self._file: tuple[Path, list[str]] | None = None  # that was begun, and its columns
        self._validated = False  # in the round that is going on
        self._written: Sequence[Any] = ()
        self._own = OwnScores()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Look whether the run can continue its file, before anything is computed that would be lost."""
        if stage == "fit":  # perhaps another one than before
            self._file, self._written = None, ()
        if writes(trainer) and stage != "predict":
            checked_rows(run_folder(trainer) / "clients.csv", NEEDED)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take note of the round that is scored."""
        self._own.load(checkpoint)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say so where there will be no scores."""
        if not isinstance(pl_module, HasScores) and not trainer.enable_validation:
            waits(trainer, self, "a validation or a test that logs metrics; this fit has no validation")

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take note of what is there before."""
        self._own.begin(trainer)

    on_test_start = on_validation_start

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write and show the scores of an evaluation on its own; those of a round wait until the round is complete."""
        if trainer.sanity_checking:
            return
        self._validated = True
        self._find(trainer, pl_module, "val")
        if trainer.state.fn != "fit":
            self._add(trainer, pl_module)
            self._show(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the validation scores of a round."""
        if self._validated:
            self._write(trainer, pl_module)
            self._validated = False

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write and show test scores."""
        self._find(trainer, pl_module, "test")
        self._add(trainer, pl_module)
        self._show(trainer, pl_module)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Write the test scores of a fit's last round, and show them."""
        if stage == "fit" and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._write(trainer, pl_module)
            self._show(trainer, pl_module)
        self._own.forget()

    def _find(self, trainer: L.Trainer, pl_module: L.LightningModule, split: str) -> None:
        """Find the scores of a module that does not tell them."""
        if isinstance(pl_module, HasScores):
            return
        self._own.end(trainer, split)
        if not self._own.rows:
            name = type(pl_module).__name__
            waits(trainer, self, f"metrics: the {split} step of {name} logs none by self.log(...)")

    def _rows(self, pl_module: L.LightningModule) -> Sequence[Any]:
        return pl_module.rows if isinstance(pl_module, HasScores) else self._own.rows

    def _write(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        rows = self._rows(pl_module)
        if not rows or rows is self._written or not writes(trainer):
            return
        # of a round some clients may be scored, and then all; these take the place of those
        again = bool(self._written) and _which(self._written[0]) == _which(rows[0])
        self._written, path = rows, run_folder(trainer) / "clients.csv"
        records = self._records(pl_module)
        own = of_own_models(rows) if isinstance(pl_module, HasScores) else []
        for name in dict.fromkeys(name for row in own for name in row.scores):
            scores = [row.scores[name] for row in own if name in row.scores]
            self._dashboard.histogram(trainer, own[0].round, f"clients/{own[0].split}/{name}", scores)
        if again or self._file is None or self._file[0] != path or not records[0].keys() <= set(self._file[1]):
            split, round = _which(rows[0])
            step = round + (split == "test")  # a test of the last round comes after its validation, and beside it
            again_written = {(row["split"], str(round)) for row in records}
            kept = [
                row
                for row in _lines(path)
                if int(float(row["round"])) < step and (row["split"], row["round"]) not in again_written
            ]
            self._file = path, write_rows(path, kept + records)
            return
        append_rows(path, records, self._file[1])

    def _add(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Put scores of one round among those of all rounds, instead of the same clients' same ones."""
        rows = self._rows(pl_module)
        if not rows or not writes(trainer):
            return
        path = run_folder(trainer) / "clients.csv"
        records = self._records(pl_module)
        lines = {tuple(str(row[name]) for name in KEY): row for row in [*_lines(path), *records]}
        write_rows(path, sorted(lines.values(), key=lambda row: (int(float(row["round"])), row["split"] != "val")))

    def _show(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        rows = of_own_models([row for row in self._rows(pl_module) if row.n])
        if not rows or not isinstance(pl_module, HasScores) or not trainer.is_global_zero:
            return
        self._dashboard.table(trainer, rows[0].round, f"clients/{rows[0].split}", self._records(pl_module))
        if not self.show:
            return
        # folders and metrics may have any names: no part of one is markup, as [bold] and :smile: would be
        console = Console(width=max(80, Console().width), markup=False, emoji=False)
        others = [row for row in _others(pl_module) if row.n]
        traffic = pl_module.traffic.clients if isinstance(pl_module, HasTraffic) else {}
        print_scores(console, rows, others, pl_module.higher_is_better, traffic, self.most)
        if trainer.state.fn == "fit" and keeps(trainer):
            lines = _lines(run_folder(trainer) / "clients.csv")
            if best := best_validated(lines, rows[0], pl_module.higher_is_better):
                console.print(best, highlight=False, soft_wrap=True)
        self._say_what_next(console, trainer)

    def _records(self, pl_module: L.LightningModule) -> list[dict[str, Any]]:
        """Return the scores as lines of the file."""
        rows = [*self._rows(pl_module), *_others(pl_module)]
        names = dict.fromkeys(name for row in rows for name in row.scores)
        return with_states([
            {column: getattr(row, column, "") for column in COLUMNS}
            | {name + "_score" * (name in COLUMNS): row.scores.get(name, "") for name in names}
            for row in rows
        ])  # fmt: skip

    def _say_what_next(self, console: Console, trainer: L.Trainer) -> None:
        if not keeps(trainer):
            return
        folder = run_folder(trainer)
        console.print(f"Run folder: {folder}", highlight=False, soft_wrap=True)
        files = [
            name for name in ("config.yaml", "metrics.csv", "clients.csv", "checkpoints") if (folder / name).exists()
        ]
        console.print(f"  holds {', '.join(files)}", highlight=False, soft_wrap=True)
        command = resume_command(folder)
        rounds = (trainer.max_epochs or 0) * 2
        if command is not None and trainer.state.fn == "fit" and rounds > 0:
            console.print("Next, twice as many rounds:", highlight=False)
            console.print(f"  {command} --trainer.max_epochs {rounds}", highlight=False, soft_wrap=True)


def _which(row: Row) -> tuple[str, int]:
    return row.split, row.round


def _others(pl_module: L.LightningModule) -> Sequence[Row]:
    return pl_module.other_rows if isinstance(pl_module, HasOtherStates) else ()


def _lines(path: Path) -> list[dict[str, Any]]:
    return with_states(checked_rows(path, NEEDED))
