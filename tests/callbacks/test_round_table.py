"""Files that get rows round by round."""

import csv

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from callbacks.plain import Line, rows
from callbacks.plain import trainer as plain_trainer
from lit_pfl import Federation
from lit_pfl.methods import SimFed
from lit_pfl_callbacks import ClientsTable, EmbeddingMap, RunLogger, Similarity, SparsityMonitor
from lit_pfl_callbacks.rounds import RoundTable
from lit_pfl_callbacks.run_folder import write_rows
from tiny import client, digits, trainer

FILES = ("similarity.csv", "matching.csv", "embeddings.csv", "sparsity.csv")


@pytest.mark.seconds
def test_a_run_that_goes_on_from_an_earlier_round_has_no_rows_of_rounds_it_does_not_reach(tmp_path):
    def measured(rounds, path=None):
        callbacks = [kind(every_n_rounds=3) for kind in (Similarity, EmbeddingMap, SparsityMonitor)]
        keep = ModelCheckpoint(tmp_path / "kept", filename="{epoch}", save_top_k=-1)
        logger = RunLogger(str(tmp_path), name="", version="run")
        trainer(rounds, callbacks=[*callbacks, keep], logger=logger, enable_checkpointing=True).fit(
            Federation(client(SimFed), seed=1, threads=1), datamodule=digits(3), ckpt_path=path, weights_only=False
        )
        return [{int(row["round"]) for row in rows(tmp_path / "run" / name)} for name in FILES]

    assert measured(6) == [{1, 3, 6}] * 4
    assert measured(4, tmp_path / "kept" / "epoch=2.ckpt") == [{1, 3}] * 4
    assert measured(6, tmp_path / "kept" / "epoch=3.ckpt") == [{1, 3, 6}] * 4


@pytest.mark.seconds
def test_another_fit_of_the_same_callbacks_in_the_same_folder_takes_the_place_of_the_first(tmp_path):
    callbacks = [Similarity(), EmbeddingMap(), SparsityMonitor(), ClientsTable(show=False)]
    files = [*FILES, "clients.csv"]
    written = []
    for _ in range(2):
        logger = RunLogger(str(tmp_path), name="", version="run")
        federation = Federation(client(SimFed), seed=1, threads=1)
        trainer(2, callbacks=callbacks, logger=logger).fit(federation, datamodule=digits(3))
        written.append([rows(tmp_path / "run" / name) for name in files])
    assert written[0] == written[1]


def test_a_round_does_not_make_the_text_of_former_rounds_anew(tmp_path, monkeypatch):
    made = []
    write = csv.DictWriter.writerows
    monkeypatch.setattr(csv.DictWriter, "writerows", lambda self, rows: made.extend(rows) or write(self, rows))
    logger = RunLogger(str(tmp_path), name="", version="run")
    for round in range(1, 101):
        logger.log_metrics({"round": round, "train/loss": 1 / round})
        logger.log_metrics({"round": round, "val/acc": round / 100})
    logger.log_metrics({"round": 50, "test/acc": 0.5})
    assert len(made) < 600
    table = rows(tmp_path / "run" / "metrics.csv")
    assert [float(row["round"]) for row in table] == [*range(1, 101)]
    assert [float(row["val/acc"]) for row in table] == [round / 100 for round in range(1, 101)]
    assert [row["test/acc"] for row in table if row["test/acc"]] == ["0.5"]


def test_a_round_that_has_no_row_this_time_leaves_none_of_the_run_before(tmp_path):
    """Not even once a later round has one."""
    fitting, path = plain_trainer(tmp_path, 9, []), tmp_path / "run" / "what.csv"
    fitting.strategy.connect(Line())
    write_rows(path, [{"round": 5, "client": 1}])
    table = RoundTable("what.csv", ["round", "client"])
    table.check(fitting)
    fitting.fit_loop.epoch_progress.current.completed = 4
    table.add(fitting, [])
    assert not path.exists()
    table.add(fitting, [{"round": 7, "client": 0}])
    assert rows(path) == [{"round": "7", "client": "0"}]
