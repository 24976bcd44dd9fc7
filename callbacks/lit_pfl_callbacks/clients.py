"""What every client achieved: ``clients.csv`` during the run, a table at its end."""

import math
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any

import lightning as L
from rich.console import Console
from rich.table import Table

from lit_pfl_callbacks.run_folder import (
    append_rows,
    read_rows,
    read_rows_before,
    resume_command,
    run_folder,
    write_rows,
)

COLUMNS = ["client", "round", "split", "model", "n", "acc", "loss"]


class ClientsTable(L.Callback):
    """Writes ``clients.csv`` into the run folder, and prints a table of all clients when a run ends.

    The module tells the scores of its latest evaluation in ``rows``: objects with the attributes ``client``, ``round``,
    ``split``, ``model``, ``n``, ``acc`` and ``loss``. A ``model`` that ends in ``:joining`` is that of a client that
    has never trained, as it would join now.

    Args:
        show: whether to print the table.
        most: the largest number of clients to print one by one; of more, the worst and the best are shown.
    """

    def __init__(self, show: bool = True, most: int = 40) -> None:
        self.show = show
        self.most = most
        self._began = False
        self._validated = False  # in the round that is going on

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write and show the scores of an evaluation by itself; those of a round wait until the round is complete."""
        self._validated = not trainer.sanity_checking
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
        self._add(trainer, pl_module)
        self._show(trainer, pl_module)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Write the test scores of a fit's last round, and show them."""
        if stage == "fit" and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._write(trainer, pl_module)
            self._show(trainer, pl_module)

    def _write(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        rows: Sequence[Any] = getattr(pl_module, "rows", ())
        if not rows or not trainer.is_global_zero or not trainer.loggers:
            return
        path = run_folder(trainer) / "clients.csv"
        records = [{column: getattr(row, column) for column in COLUMNS} for row in rows]
        if not self._began:
            split = rows[0].split  # a test of the last round comes after that round's validation, and beside it
            step = rows[0].round + (split == "test")
            kept = [
                row
                for row in read_rows_before(path, step, "round")
                if (row["split"], row["round"]) != (split, str(rows[0].round))
            ]
            write_rows(path, kept + records)
            self._began = True
            return
        append_rows(path, records, COLUMNS)

    def _add(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Put scores of one round among those of all rounds, in place of the same ones."""
        rows: Sequence[Any] = getattr(pl_module, "rows", ())
        if not rows or not trainer.is_global_zero or not trainer.loggers:
            return
        path = run_folder(trainer) / "clients.csv"
        records = [{column: getattr(row, column) for column in COLUMNS} for row in rows]
        new = {(str(row.round), row.split, row.model) for row in rows}
        kept = [row for row in read_rows(path) if (row["round"], row["split"], row["model"]) not in new]
        write_rows(path, sorted(kept + records, key=lambda row: (int(row["round"]), row["split"] == "test")))

    def _show(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        rows: list[Any] = [row for row in getattr(pl_module, "rows", ()) if row.n]
        if not self.show or not rows or not trainer.is_global_zero:
            return
        joining = sum(row.model.endswith(":joining") for row in rows)
        first = next((row for row in rows if not row.model.endswith(":joining")), rows[0])
        which, _, when = first.model.partition(":")
        after = f"{which.capitalize()} models after round {first.round}" if first.round else "Untrained models"
        title = f"{after}, on each client's {first.split} data"
        if when and first.round:
            title += f" ({when} aggregation)"
        table = Table(title=title, title_justify="left", title_style="bold")
        for column in ("client", "images", "accuracy", "loss", "sent", "received"):
            table.add_column(column, justify="right")
        ordered = sorted(rows, key=lambda row: row.acc)
        shown = rows
        if len(rows) > self.most:
            half = self.most // 2
            shown = ordered[:half] + [None] + ordered[-half:]
        traffic = getattr(getattr(pl_module, "traffic", None), "clients", {})
        for row in shown:
            if row is None:
                table.add_row(*["..."] * 6)
                continue
            up, down = traffic.get(row.client, (0, 0))
            table.add_row(
                str(row.client), str(row.n), f"{row.acc:.4f}", f"{row.loss:.4f}", human_bytes(up), human_bytes(down)
            )
        acc = [row.acc for row in ordered]
        worst = acc[: math.ceil(len(acc) / 10)]
        table.add_section()
        total = (
            human_bytes(sum(up for up, _ in traffic.values())),
            human_bytes(sum(down for _, down in traffic.values())),
        )
        table.add_row("mean", "", f"{fmean(acc):.4f}", f"{fmean(row.loss for row in rows):.4f}", *total)
        table.add_row("std", "", f"{pstdev(acc):.4f}", "", "(all)", "(all)")
        table.add_row("worst 10%", "", f"{fmean(worst):.4f}", "", "", "")
        console = Console(width=max(80, Console().width))
        console.print(table)
        if joining and first.round:
            console.print(f"Clients that have never trained, scored as they would join now: {joining}.")
        self._say_what_next(console, trainer)

    def _say_what_next(self, console: Console, trainer: L.Trainer) -> None:
        if not trainer.loggers:
            return
        folder = run_folder(trainer)
        console.print(f"Run folder: {folder}", highlight=False, soft_wrap=True)
        files = [
            name for name in ("config.yaml", "metrics.csv", "clients.csv", "checkpoints") if (folder / name).exists()
        ]
        console.print(f"  holds {', '.join(files)}", highlight=False, soft_wrap=True)
        command = resume_command(folder)
        if command is not None and trainer.state.fn == "fit":
            rounds = (trainer.max_epochs or 0) * 2
            console.print("Next, twice as many rounds:", highlight=False)
            console.print(f"  {command} --trainer.max_epochs {rounds}", highlight=False, soft_wrap=True)


def human_bytes(size: float) -> str:
    """Write a number of bytes for people, in powers of 1000.

    Example:
        >>> human_bytes(20_388_400)
        '20.39 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"
