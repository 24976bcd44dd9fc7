"""How a federation is doing while it runs."""

import math
import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from lit_pfl_callbacks.own_scores import OwnScores
from lit_pfl_callbacks.protocols import HasClients, HasScores, HasTraffic, Transfer
from lit_pfl_callbacks.rounds import loop_of
from lit_pfl_callbacks.scores_shown import TITLES, human_bytes


class RoundProgress(ProgressBar):
    """One line: round r of R, client k of K, the validation score, bytes sent so far, time left.

    On a terminal that can draw it again the line is live; elsewhere a line is printed after every round. Under a
    Trainer without clients it counts batches, and with a :class:`~lit_pfl_callbacks.FederatedLoop` that site's bytes;
    without either, none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.console = Console()
        self._bar: Progress | None = None
        self._enabled = True
        self._scored: int | None = None  # rounds before the one that was last validated
        self._score = ""
        self._trained = 0  # clients in this round
        self._own: int | None = None  # bytes of a site, if it is one
        self._validated = OwnScores()

    def disable(self) -> None:
        """Show nothing."""
        self._enabled = False

    def enable(self) -> None:
        """Show the line."""
        self._enabled = True

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count what a site sends."""
        loop = None if isinstance(pl_module, HasTraffic) else loop_of(trainer)
        if loop is None:
            self._own = None
        elif self._note not in loop.watchers:
            self._own = 0
            loop.watchers.append(self._note)

    def _note(self, sent: Transfer) -> None:
        self._own = (self._own or 0) + sent.nbytes

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Put up the line."""
        self._began, self._first_round = time.monotonic(), trainer.current_epoch
        live = self.console.is_terminal and not self.console.is_dumb_terminal  # which cannot draw a line again
        if not self._enabled or not live or not trainer.is_global_zero:
            return
        self._bar = Progress(
            TextColumn("round {task.fields[round]}"),
            BarColumn(),
            # a metric's name is no markup
            TextColumn(
                "{task.fields[unit]} {task.fields[client]} · {task.fields[score]}{task.fields[sent]} · left",
                markup=False,
            ),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
        )
        clients, rounds = self._clients(trainer), trainer.max_epochs or 0
        self._task = self._bar.add_task(
            "", total=clients * rounds if clients and rounds > 0 else None,
            completed=(clients or 0) * trainer.current_epoch,
            unit=_units(pl_module)[0], round=self._rounds(trainer), client=_of(0, clients), score="not validated",
            sent=self._sent(pl_module),
        )  # fmt: skip
        self._bar.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move on by a client."""
        if self._bar is not None:
            # where the loader tells clients, a batch is a list of some, mostly of one
            each = len(batch) if hasattr(trainer.train_dataloader, "clients") else 1
            self._trained = (self._trained if batch_idx else 0) + each
            client, sent = _of(self._trained, self._clients(trainer)), self._sent(pl_module)
            self._bar.update(self._task, advance=each, round=self._rounds(trainer), client=client, sent=sent)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take note of what is there before."""
        self._validated.begin(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take note of the round's score: the accuracy, else a metric that knows what is better, else the first."""
        self._validated.end(trainer, "val")
        if trainer.sanity_checking or not self._validated.rows:
            return
        scores = self._validated.rows[0].scores
        telling = [*pl_module.higher_is_better] if isinstance(pl_module, HasScores) else []
        names = ["acc", *telling, *(name for name in scores if name != "round")]  # which a federation logs, too
        name = next((name for name in names if name in scores), None)
        if name is None:
            return
        self._scored, self._score = trainer.current_epoch, f"{TITLES.get(name, name)} {scores[name]:.4f}"

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Show the round's score, or the latest and of which round it is."""
        shown = "not validated" if self._scored is None else self._score
        if self._scored not in (None, trainer.current_epoch):
            shown += f" (of round {self._scored + 1})"
        if self._bar is not None:
            self._bar.update(self._task, score=shown)
        elif self._enabled and trainer.is_global_zero:
            done = trainer.current_epoch + 1 - self._first_round
            left = ""
            if trainer.max_epochs and trainer.max_epochs > 0:
                seconds = (time.monotonic() - self._began) / done * (trainer.max_epochs - trainer.current_epoch - 1)
                left = f" · {seconds:.0f} s left"
            clients = self._clients(trainer)
            some = "" if clients is None else f" · {clients} {_units(pl_module)[1]}"
            sent = f"{sent} so far" if (sent := self._sent(pl_module)) else ""
            print(f"round {self._rounds(trainer)}{some} · {shown}{sent}{left}", flush=True)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the line down."""
        self._stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Take the line down."""
        self._stop()

    def get_metrics(
        self, trainer: L.Trainer, pl_module: L.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Return what other bars show: nothing."""
        return {}

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _clients(self, trainer: L.Trainer) -> int | None:
        """Return how many clients train in a round, if that is known: where batches hold several, the loader tells."""
        clients = getattr(trainer.train_dataloader, "clients", None)
        if clients is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            batches = self.total_train_batches
            return int(batches) if math.isfinite(batches) else None
        return len(clients)

    @staticmethod
    def _rounds(trainer: L.Trainer) -> str:
        rounds = trainer.max_epochs
        return f"{trainer.current_epoch + 1}/{rounds}" if rounds and rounds > 0 else str(trainer.current_epoch + 1)

    def _sent(self, pl_module: L.LightningModule) -> str:
        """Return the bytes sent, behind what stands before them; nothing where nobody sends any."""
        sent = pl_module.traffic.total if isinstance(pl_module, HasTraffic) else self._own
        return "" if sent is None else f" · {human_bytes(sent)}"


def _units(pl_module: L.LightningModule) -> tuple[str, str]:
    """Return what there are several of in a round: one, and more."""
    return ("client", "clients") if isinstance(pl_module, HasClients) else ("batch", "batches")


def _of(done: int, clients: int | None) -> str:
    return str(done) if clients is None else f"{min(done, clients)}/{clients}"
