"""What loggers are shown."""

import torch
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger

from callbacks.plain import Line, batches, rows, trainer
from lit_pfl_callbacks import RoundTimer, RunLogger, SparsityMonitor
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


def test_other_loggers_get_numbers(tmp_path):
    plain = CSVLogger(str(tmp_path), name="", version="other")
    fitting = trainer(tmp_path, 2, [RoundTimer(), SparsityMonitor()])
    fitting.loggers = [RunLogger(str(tmp_path), name="", version="run"), plain]
    fitting.fit(Line(), batches())
    plain.save()
    found = [line for line in rows(tmp_path / "other" / "metrics.csv") if line["time/train"]]
    assert [line["step"] for line in found] == ["1", "2"]
    assert not (tmp_path / "run" / "metrics.csv").exists()
    assert len(rows(tmp_path / "run" / "times.csv")) == 8
