"""Numbers and pictures for whatever a Trainer's loggers can hold.

W&B, TensorBoard and MLflow get heat maps, histograms, tables, curves, maps and files, each in its own way; other
loggers get the numbers. :class:`~lit_pfl_callbacks.RunLogger` gets nothing: callbacks write files next to its own.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from torch import Tensor

from lit_pfl_callbacks.protocols import HasClients
from lit_pfl_callbacks.run_folder import RunLogger

Rows = Sequence[Mapping[str, Any]]
PIXELS = 256  # of a heat map's sides, at least


class Dashboard:
    """What a callback shows, on all of a Trainer's loggers."""

    def __init__(self) -> None:
        self._boards: dict[int, tuple[Logger, Board]] = {}

    def boards(self, trainer: L.Trainer) -> Iterator["Board"]:
        """Return a board for every logger that has one, in the process that writes."""
        for logger in trainer.loggers if trainer.is_global_zero else ():
            if id(logger) not in self._boards:
                self._boards[id(logger)] = logger, board_of(logger)
            yield self._boards[id(logger)][1]

    def scalars(self, trainer: L.Trainer, round: int, metrics: Mapping[str, float]) -> None:
        """Show numbers of a round, by name; under a Trainer without clients next to Lightning's own of the epoch."""
        own = isinstance(trainer.lightning_module, HasClients)
        step = max(0, trainer.global_step - 1)  # as of what Lightning logs at the end of an epoch
        for board in self.boards(trainer):
            if own:
                board.scalars(round, metrics)
            else:
                board.beside(step, {"epoch": trainer.current_epoch, **metrics})

    def heat_map(self, trainer: L.Trainer, round: int, name: str, matrix: Tensor) -> None:
        """Show a (rows, columns) matrix of values from -1, blue, by 0, white, to 1, red."""
        for board in self.boards(trainer):
            board.image(round, name, heat(matrix))

    def histogram(self, trainer: L.Trainer, round: int, name: str, values: Sequence[float]) -> None:
        """Show how values are distributed, those that are finite."""
        values = [value for value in values if math.isfinite(value)]  # of others no logger knows a histogram
        for board in self.boards(trainer) if values else ():
            board.histogram(round, name, values)

    def table(self, trainer: L.Trainer, round: int, name: str, rows: Rows) -> None:
        """Show rows that have the same columns."""
        for board in self.boards(trainer) if rows else ():
            board.table(round, name, rows)

    def curve(self, trainer: L.Trainer, name: str, points: Rows) -> None:
        """Show a curve over something else than rounds: rows of two columns, of which the first is a whole number."""
        for board in self.boards(trainer) if points else ():
            board.curve(name, points)

    def point(self, trainer: L.Trainer, name: str, step: int, value: float) -> None:
        """Show one more point of such a curve, where curves grow by points."""
        for board in self.boards(trainer):
            board.point(name, step, value)

    def map(self, trainer: L.Trainer, round: int, name: str, points: Rows) -> None:
        """Show points: rows of a client, x and y."""
        for board in self.boards(trainer) if points else ():
            board.map(round, name, points)

    def files(self, trainer: L.Trainer, name: str, paths: Sequence[Path], about: Mapping[str, Any]) -> None:
        """Keep files, with what is to be known about them."""
        for board in self.boards(trainer):
            board.files(name, paths, about)


def heat(matrix: Tensor) -> Tensor:
    """Return a matrix as a picture, (height, width, 3) uint8, of squares: -1 is blue, 0 white, 1 red, NaN grey."""
    values = matrix.detach().float().cpu()
    known = values.nan_to_num(0.0).clamp(-1, 1)
    warm, cold = torch.tensor([178.0, 24.0, 43.0]), torch.tensor([33.0, 102.0, 172.0])  # ColorBrewer's RdBu
    ends = torch.where((known > 0)[..., None], warm, cold)
    picture = 255 + (ends - 255) * known.abs()[..., None]
    picture[values.isnan()] = 128
    side = max(1, -(-PIXELS // max(matrix.shape)))
    return picture.round().byte().repeat_interleave(side, 0).repeat_interleave(side, 1)


class Board:
    """Any logger: it gets numbers, and nothing else."""

    def __init__(self, logger: Any) -> None:
        self.logger = logger

    def scalars(self, round: int, metrics: Mapping[str, float]) -> None:
        """Show numbers."""
        self.beside(round, metrics)

    def beside(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show numbers at a step of the Trainer's."""
        self.logger.log_metrics(dict(metrics), step=step)

    def image(self, round: int, name: str, picture: Tensor) -> None:
        """Show a picture, (height, width, 3) uint8."""

    def histogram(self, round: int, name: str, values: Sequence[float]) -> None:
        """Show a distribution."""

    def table(self, round: int, name: str, rows: Rows) -> None:
        """Show rows."""

    def curve(self, name: str, points: Rows) -> None:
        """Show a curve, in the place of what has been shown of it."""

    def point(self, name: str, step: int, value: float) -> None:
        """Add a point to a curve."""

    def map(self, round: int, name: str, points: Rows) -> None:
        """Show points."""

    def files(self, name: str, paths: Sequence[Path], about: Mapping[str, Any]) -> None:
        """Keep files."""


class NoBoard(Board):
    """The run folder's own logger."""

    def beside(self, step: int, metrics: Mapping[str, float]) -> None:
        pass


class WandbBoard(Board):
    """W&B: media of its own kinds, all of them over rounds."""

    def __init__(self, logger: Any) -> None:
        super().__init__(logger)
        self._log = RoundLog()

    def scalars(self, round: int, metrics: Mapping[str, Any]) -> None:
        self._log.write([self.logger], round, metrics)

    def image(self, round: int, name: str, picture: Tensor) -> None:
        import wandb

        self.scalars(round, {name: wandb.Image(picture.numpy())})

    def histogram(self, round: int, name: str, values: Sequence[float]) -> None:
        import wandb

        self.scalars(round, {name: wandb.Histogram(list(values))})

    def _table(self, rows: Rows) -> Any:
        import wandb

        # a column is of one type; an empty cell is None in all of them
        cells = [[None if cell == "" else cell for cell in row.values()] for row in rows]
        return wandb.Table(columns=list(rows[0]), data=cells)

    def table(self, round: int, name: str, rows: Rows) -> None:
        self.scalars(round, {name: self._table(rows)})

    def curve(self, name: str, points: Rows) -> None:
        import wandb

        x, y = points[0]
        self.logger.experiment.log({name: wandb.plot.line(self._table(points), x, y, title=name)})

    def map(self, round: int, name: str, points: Rows) -> None:
        import wandb

        self.scalars(round, {name: wandb.plot.scatter(self._table(points), "x", "y", title=f"{name}, round {round}")})

    def files(self, name: str, paths: Sequence[Path], about: Mapping[str, Any]) -> None:
        import wandb

        artifact = wandb.Artifact(f"{name}-{self.logger.experiment.id}", type="model", metadata=dict(about))
        for path in paths:
            artifact.add_file(str(path))
        self.logger.experiment.log_artifact(artifact)


class TensorBoard(Board):
    """TensorBoard: tables are text, and curves have steps of their own."""

    def image(self, round: int, name: str, picture: Tensor) -> None:
        self.logger.experiment.add_image(name, picture.numpy(), round, dataformats="HWC")

    def histogram(self, round: int, name: str, values: Sequence[float]) -> None:
        self.logger.experiment.add_histogram(name, torch.tensor(values), round)

    def table(self, round: int, name: str, rows: Rows) -> None:
        lines = [rows[0], dict.fromkeys(rows[0], "---"), *rows]
        lines[0] = dict(zip(rows[0], rows[0], strict=True))
        text = "\n".join("| " + " | ".join(str(cell) for cell in line.values()) + " |" for line in lines)
        self.logger.experiment.add_text(name, text, round)

    def point(self, name: str, step: int, value: float) -> None:
        self.logger.experiment.add_scalar(name, value, step)

    def map(self, round: int, name: str, points: Rows) -> None:
        places = torch.tensor([[point["x"], point["y"]] for point in points])
        clients = [str(point["client"]) for point in points]
        self.logger.experiment.add_embedding(places, clients, global_step=round, tag=name)


class MLflow(Board):
    """MLflow: what is not a number is an artifact."""

    def image(self, round: int, name: str, picture: Tensor) -> None:
        self.logger.experiment.log_image(self.logger.run_id, picture.numpy(), key=name, step=round)

    def histogram(self, round: int, name: str, values: Sequence[float]) -> None:
        self._table(f"{name}/round_{round}", [{"value": value} for value in values])

    def table(self, round: int, name: str, rows: Rows) -> None:
        self._table(f"{name}/round_{round}", rows)

    def curve(self, name: str, points: Rows) -> None:
        self._table(name, points)

    def map(self, round: int, name: str, points: Rows) -> None:
        self._table(f"{name}/round_{round}", points)

    def _table(self, name: str, rows: Rows) -> None:
        self.logger.experiment.log_dict(self.logger.run_id, {"rows": [dict(row) for row in rows]}, f"{name}.json")

    def files(self, name: str, paths: Sequence[Path], about: Mapping[str, Any]) -> None:
        for path in paths:
            self.logger.experiment.log_artifact(self.logger.run_id, str(path), name)
        self.logger.experiment.log_dict(self.logger.run_id, dict(about), f"{name}/about.json")


#: by the kind of a logger, the first that fits
BOARDS: dict[Any, type[Board]] = {
    RunLogger: NoBoard,
    WandbLogger: WandbBoard,
    TensorBoardLogger: TensorBoard,
    MLFlowLogger: MLflow,
    Logger: Board,
}


def board_of(logger: Logger) -> Board:
    """Return the board of a logger."""
    return next(board for kind, board in BOARDS.items() if isinstance(logger, kind))(logger)


class RoundLog:
    """Writes metrics to loggers at once: what a checkpoint holds must have been logged before."""

    def __init__(self) -> None:
        self._named: set[str] = set()
        self._loggers: list[Logger] = []

    def write(self, loggers: Sequence[Logger], round: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a round."""
        self.name_axes(loggers, metrics)
        for logger in loggers:
            logger.log_metrics({"round": round, **metrics}, step=round)

    def name_axes(self, loggers: Sequence[Logger], metrics: Mapping[str, float]) -> None:
        """Tell W&B to draw over rounds; name by name, since it resolves overlapping patterns at random."""
        if self._loggers != loggers:  # under another Trainer
            self._named, self._loggers = set(), list(loggers)
        new = metrics.keys() - self._named
        self._named |= new
        for logger in loggers:
            if isinstance(logger, WandbLogger):
                for name in sorted(new):
                    logger.experiment.define_metric(name, step_metric="round")
