"""What loggers are shown."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger

from callbacks.plain import Group, Line, Score, batches, rows, trainer
from lit_pfl_callbacks import ClientsTable, RoundTimer, RunLogger, SparsityMonitor
from lit_pfl_callbacks.dashboard import Board, MLflow, NoBoard, TensorBoard, WandbBoard, board_of, heat


def test_heat_maps_are_blue_white_and_red():
    picture = heat(torch.tensor([[1.0, -1.0, 0.0], [torch.nan, 5.0, -7.0]]))
    assert picture.shape == (2 * 86, 3 * 86, 3)  # squares, of at least 256 pixels together
    assert picture.dtype == torch.uint8
    middles = picture[43::86, 43::86].tolist()
    red, blue = [178, 24, 43], [33, 102, 172]
    assert middles == [[red, blue, [255] * 3], [[128] * 3, red, blue]]
    halfway = heat(torch.tensor([[0.5]]))[0, 0].tolist()
    assert all(abs(value - (255 + c) / 2) <= 0.5 for value, c in zip(halfway, red, strict=True))
    assert heat(torch.zeros(300, 300)).shape == (300, 300, 3)


def test_every_logger_has_the_board_of_its_kind(tmp_path):
    assert type(board_of(RunLogger(str(tmp_path)))) is NoBoard
    assert type(board_of(CSVLogger(str(tmp_path)))) is Board
    for kind, board in ((WandbLogger, WandbBoard), (TensorBoardLogger, TensorBoard), (MLFlowLogger, MLflow)):
        assert type(board_of(kind.__new__(kind))) is board


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scores_that_are_missing_or_no_numbers_end_no_run(tmp_path, bad):
    pytest.importorskip("wandb")
    shown = []
    weights_and_biases = WandbLogger(str(tmp_path), offline=True)
    weights_and_biases._experiment = SimpleNamespace(
        define_metric=lambda *_, **__: None, log=lambda metrics, **_: shown.append(metrics)
    )
    weights_and_biases.log_metrics = lambda metrics, step: shown.append(metrics)
    loggers = [TensorBoardLogger(str(tmp_path), name="", version="board"), weights_and_biases]
    fitting = trainer(tmp_path, 1, [ClientsTable()], logger=loggers)

    class Missing(Group):
        def validation_step(self, batch, batch_idx):
            scores = [{"acc": 0.5}, {"acc": bad}, {}]
            self.rows = [Score(k, 1, "val", "own:before", len(own), own) for k, own in enumerate(scores)]

    fitting.fit(Missing(), batches(), batches())
    [histogram] = [metrics[name] for metrics in shown for name in metrics if name == "clients/val/acc"]
    assert sum(histogram.histogram) == 1
    [table] = [metrics[name] for metrics in shown for name in metrics if name == "clients/val"]
    assert [row[table.columns.index("acc")] for row in table.data][::2] == [0.5, None]


def test_other_loggers_get_numbers(tmp_path):
    plain = CSVLogger(str(tmp_path), name="", version="other")
    fitting = trainer(tmp_path, 2, [RoundTimer(), SparsityMonitor()])
    fitting.loggers = [RunLogger(str(tmp_path), name="", version="run"), plain]
    fitting.fit(Line(), batches())
    plain.save()
    found = [line for line in rows(tmp_path / "other" / "metrics.csv") if line["time/train"]]
    assert [line["step"] for line in found] == ["0", "1"]  # as Lightning has it, of a batch an epoch
    assert not (tmp_path / "run" / "metrics.csv").exists()
    assert len(rows(tmp_path / "run" / "times.csv")) == 8
