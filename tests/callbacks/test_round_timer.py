"""Where the time goes."""

import time

import pytest
from torch.utils.data import DataLoader

from callbacks.plain import Echo, Group, Line, batches, rows
from callbacks.plain import trainer as plain_trainer
from lit_pfl import Federation
from lit_pfl.core.server import Server
from lit_pfl.methods import FedAvg
from lit_pfl_callbacks import FederatedLoop, RoundTimer, RunLogger
from tiny import client, digits, trainer


def seconds(folder, round):
    lines = rows(folder / "run" / "times.csv")
    return {line["phase"]: float(line["seconds"]) for line in lines if line["round"] == str(round)}


class SlowLine(Line):
    """Takes 30 ms a batch to train, and 20 to validate."""

    def on_train_batch_start(self, *_):
        time.sleep(0.03)

    def on_validation_batch_start(self, *_):
        time.sleep(0.02)


class SlowLink(Echo):
    def exchange(self, upload):
        time.sleep(0.05)
        return super().exchange(upload)


def test_a_plain_trainer_has_epochs_that_train_and_evaluate(tmp_path):
    timer = RoundTimer()
    plain_trainer(tmp_path, 2, [timer]).fit(SlowLine(), batches(), batches())
    for round in (1, 2):
        spent = seconds(tmp_path, round)
        assert spent["train"] >= 0.03
        assert spent["evaluate"] >= 0.02
        assert spent["aggregate"] == spent["link"] == 0
    assert timer.seconds["train"] == pytest.approx(sum(seconds(tmp_path, r)["train"] for r in (1, 2)), abs=1e-4)


@pytest.mark.parametrize("first", [True, False], ids=["before the loop", "after the loop"])
def test_a_site_waits_for_its_link(tmp_path, first):
    """What a site has waited for since its last round is not training, wherever the timer stands."""
    timer, loop = RoundTimer(), FederatedLoop(SlowLink(), every_n_epochs=2)
    plain_trainer(tmp_path, 4, [timer, loop] if first else [loop, timer]).fit(SlowLine(), batches(), batches())
    assert [line["round"] for line in rows(tmp_path / "run" / "times.csv")] == ["1"] * 4 + ["2"] * 4
    assert seconds(tmp_path, 2)["link"] >= 0.05
    assert seconds(tmp_path, 1)["train"] >= 0.06
    assert loop.seconds["link"] >= 0.1


def test_a_federation_tells_what_the_server_takes(tmp_path, monkeypatch):
    aggregate, reply = Server.aggregate, Server.reply

    def slow_aggregate(self, round, uploads):
        time.sleep(0.05)
        aggregate(self, round, uploads)

    def slow_reply(self, client):
        time.sleep(0.01)
        return reply(self, client)

    monkeypatch.setattr(Server, "aggregate", slow_aggregate)
    monkeypatch.setattr(Server, "reply", slow_reply)
    timer, logger = RoundTimer(), RunLogger(str(tmp_path), name="", version="run")
    began = time.perf_counter()
    trainer(2, callbacks=[timer], logger=logger).fit(Federation(client(FedAvg), seed=1), datamodule=digits(4))
    whole = time.perf_counter() - began
    for round in (1, 2):
        spent = seconds(tmp_path, round)
        assert spent["aggregate"] >= 0.05 + 4 * 0.01
        assert all(value > 0 for value in spent.values())
    assert sum(timer.seconds.values()) < whole


def test_sums_go_on_in_a_resumed_run(tmp_path):
    before, after = RoundTimer(), RoundTimer()
    plain_trainer(tmp_path, 2, [before]).fit(SlowLine(), batches(), batches())
    plain_trainer(tmp_path, 3, [after]).fit(SlowLine(), batches(), batches(), ckpt_path=tmp_path / "run" / "last.ckpt")
    assert [line["round"] for line in rows(tmp_path / "run" / "times.csv")] == [
        str(r) for r in (1, 2, 3) for _ in "1234"
    ]
    assert after.seconds["train"] == pytest.approx(before.seconds["train"] + seconds(tmp_path, 3)["train"], abs=1e-4)


def test_phases_of_ones_own(tmp_path):
    class Own(Group):
        def on_train_batch_end(self, *_):
            self.seconds = {**self.seconds, "upload": self.seconds.get("upload", 0.0) + 0.001}

    timer = RoundTimer()
    plain_trainer(tmp_path, 2, [timer]).fit(Own(), batches())
    assert seconds(tmp_path, 2)["upload"] == 0.001
    assert timer.seconds["upload"] == pytest.approx(0.002)


def test_a_plain_trainer_s_rows_line_up_with_lightning_s(tmp_path):
    class Logs(Line):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, on_step=False, on_epoch=True)
            return loss

    data = DataLoader(batches().dataset, batch_size=2)
    plain_trainer(tmp_path, 2, [RoundTimer()]).fit(Logs(), data)
    lines = rows(tmp_path / "run" / "metrics.csv")
    places = [[(line["epoch"], line["step"]) for line in lines if line[name]] for name in ("loss", "time/train")]
    assert places[0] == places[1] == [("0", "3"), ("1", "7")]
