"""Rounds that end at a deadline: who is late, what is left out, what is counted."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from cli.typed import TINY, rows, typed
from lit_pfl import Federation
from lit_pfl.core.asynchronous import FedBuff
from lit_pfl.core.deadline import Deadline, Pace, Plan, Speeds
from lit_pfl.core.participation import Trace
from lit_pfl.core.privacy import ClientPrivacy
from lit_pfl.engines import Stacked
from lit_pfl.errors import ConfigError, UploadError
from lit_pfl.methods import FedAvg, FedNova, FedProx, FedRep, FedSLR, Scaffold, SimFed
from lit_pfl.randomness import Draws
from lit_pfl_callbacks import RefusedUploads, RunLogger
from tiny import GroupNet, assert_equal, client, digits, run, trainer, weights

DRAWS = Draws(5)


def speeds(folder, text: str, **options) -> Speeds:
    (folder / "speeds.csv").write_text(text)
    return Speeds(file=str(folder / "speeds.csv"), **options)


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


# Speeds


def test_times_of_clients_are_log_normal_and_each_keeps_its_own():
    made = Speeds(batch=2.0, spread=0.5, latency=3.0)
    times = np.array([made.of(client, 1, DRAWS).batch for client in range(400)])
    assert stats.kstest(times, stats.lognorm(0.5, scale=2.0).cdf).pvalue > 0.01
    assert made.of(7, 1, DRAWS) == made.of(7, 2, DRAWS)
    assert made.of(7, 1, DRAWS).latency == 3.0
    assert made.of(7, 1, DRAWS) != made.of(7, 1, Draws(6))
    assert Speeds(spread=0).of(7, 1, DRAWS) == Pace(1.0, 0.0)


def test_a_time_may_vary_from_round_to_round():
    made = Speeds(spread=0, variation=0.3)
    times = np.log([made.of(4, round, DRAWS).batch for round in range(400)])
    assert stats.kstest(times, stats.norm(0, 0.3).cdf).pvalue > 0.01


def test_times_are_read_from_a_file(tmp_path):
    made = speeds(tmp_path, "client,batch,latency,what\n0,2.5,1,x\n3,0.5,,x\n", latency=7.0)
    assert made.of(0, 1, DRAWS) == Pace(2.5, 1.0)
    assert made.of(3, 9, DRAWS) == Pace(0.5, 7.0)
    made.check([0, 3])
    with pytest.raises(ConfigError, match=r"speeds.file=.*: there is no row of client 1"):
        made.check([0, 1, 3])
    for option in (Deadline(9, speeds=made), FedBuff(2, speeds=made)):
        with pytest.raises(ConfigError, match=r"speeds.file=.*: there is no row of client 1"):
            run(client(FedAvg), **{"deadline" if isinstance(option, Deadline) else "asynchronous": option})


@pytest.mark.parametrize(
    "text",
    [
        "client,batch\n0,-1\n", "client,batch\n0,1\n0,2\n", "client\n0\n", "client,batch\n0,nan\n",
        "client,batch,latency\n0,1,-1\n",
    ],
)  # fmt: skip
def test_a_file_that_is_none(tmp_path, text):
    with pytest.raises(ConfigError, match=r"line [23]: give the columns client and batch"):
        speeds(tmp_path, text)
    with pytest.raises(ConfigError, match="cannot be read"):
        Speeds(file=str(tmp_path / "missing.csv"))


def test_what_just_fits_fits():
    assert Pace(0.1, 0.0).fitting(0.3) == 3
    assert Pace(0.1, 0.2).fitting(0.3) == 1
    assert Pace(1.0, 5.0).fitting(4.0) < 0
    assert Pace(0.0, 5.0).fitting(4.0) < 0
    assert Pace(0.0, 5.0).fitting(5.0) > 10**9


# Plans


@pytest.mark.parametrize("option", ["batch", "spread", "variation", "latency"])
@pytest.mark.parametrize("value", [math.inf, math.nan, -1.0, 1e300])
def test_times_that_no_clock_shows_are_refused(option, value):
    with pytest.raises(ConfigError, match=rf"speeds.{option}=.*: give a number from 0 to "):
        Speeds(**{option: value})


def plan(folder, batches: dict[int, int], **options) -> Plan:
    made = speeds(folder, "client,batch\n0,1\n1,2\n2,4\n3,8\n")
    return Deadline(speeds=made, **options).plan(1, batches, DRAWS)


ALL = dict.fromkeys(range(4), 5)  # 5, 10, 20 and 40 seconds


def test_a_round_waits_until_the_deadline(tmp_path):
    made = plan(tmp_path, ALL, seconds=20)
    assert (made.seconds, dict(made.batches), list(made.late)) == (20.0, {}, [3])
    assert "Client 3: too late: its upload would have come after 40 s of simulated time; the round took 20 s." in str(
        made.late[3]
    )
    assert plan(tmp_path, ALL, seconds=100) == Plan(40.0, {}, {}), "and no longer than there is somebody to wait for"


@pytest.mark.parametrize("wanted", [2, 0.5])
def test_a_round_ends_with_the_uploads_that_are_wanted(tmp_path, wanted):
    made = plan(tmp_path, ALL, seconds=100, wanted=wanted)
    assert (made.seconds, list(made.late)) == (10.0, [2, 3])
    made = plan(tmp_path, ALL, seconds=7, wanted=wanted)
    assert (made.seconds, list(made.late)) == (7.0, [1, 2, 3])


def test_part_of_the_work_is_what_fits(tmp_path):
    made = plan(tmp_path, ALL, seconds=11, late="partial")
    assert (made.seconds, dict(made.batches), list(made.late)) == (10.0, {2: 2, 3: 1}, [])
    made = plan(tmp_path, ALL, seconds=7, late="partial")
    assert (dict(made.batches), list(made.late)) == ({1: 3, 2: 1}, [3])
    made = plan(tmp_path, ALL, seconds=11, late="partial", wanted=3)
    assert (made.seconds, dict(made.batches), list(made.late)) == (8.0, {2: 2, 3: 1}, [1])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seconds": 0}, "deadline.seconds=0"),
        ({"seconds": math.inf}, "deadline.seconds=inf: give a number above 0, up to"),
        ({"seconds": 1, "wanted": 1.5}, "deadline.wanted=1.5"),
        ({"seconds": 1, "late": "wait"}, "deadline.late='wait': choose drop, partial"),
    ],
)
def test_what_cannot_be(options, said):
    with pytest.raises(ConfigError, match=said):
        Deadline(**options)


# In a federation


def late_in(federation: Federation, rounds: int) -> list[list[int]]:
    """Return who is late in each round."""
    batches = federation.timetable.batches
    plans = [
        federation.deadline.plan(r + 1, {k: batches[k] for k in federation.participants(r)}, DRAWS_OF_RUN)
        for r in range(rounds)
    ]
    return [list(one.late) for one in plans]


DRAWS_OF_RUN = Draws(3)
SLOW = {"deadline": Deadline(9, speeds=Speeds(spread=0.8, variation=0.6)), "quorum": 0.0}
FIRST = Deadline(1000, wanted=2, speeds=Speeds(spread=0.8, variation=0.6))


@pytest.mark.seconds
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("method", "options"),
    [
        (FedAvg, {}),
        (SimFed, {}),
        (FedSLR, {}),
        (Scaffold, {"optimizer": plain_sgd, "scheduler": None}),
    ],
)
def test_a_late_client_is_one_that_did_not_take_part_but_for_its_download(tmp_path, method, options):
    """Bit for bit, whatever server and clients keep of each other."""
    data = {"num_clients": 6, "batch_size": 32}
    federation = run(client(method, **options), digits(**data), rounds=4, participation=0.7, deadline=FIRST)
    late = late_in(federation, 4)
    assert [len(one) for one in late] == [2] * 4
    there = [sorted(set(federation.participants(r)) - set(late[r])) for r in range(4)]
    (tmp_path / "trace.csv").write_text(
        "round,client\n" + "".join(f"{r + 1},{k}\n" for r in range(4) for k in there[r])
    )
    alike = run(client(method, **options), digits(**data), rounds=4, participation=Trace(str(tmp_path / "trace.csv")))
    assert_equal(weights(federation), weights(alike))
    assert_equal(federation.coordinator.server.state_dict(), alike.coordinator.server.state_dict())
    assert_equal(federation.engine.state_dict(), alike.engine.state_dict())
    assert federation.rows == alike.rows
    more = federation.traffic.total - alike.traffic.total
    down = {k: federation.traffic.clients.get(k, [0, 0])[1] - alike.traffic.clients.get(k, [0, 0])[1] for k in range(6)}
    assert more == sum(down.values()) > 0
    assert {k for k, size in down.items() if size} == {k for one in late for k in one}


@pytest.mark.seconds
def test_who_is_late_is_written_and_the_clock_goes_on(tmp_path, recwarn):
    logger = RunLogger(str(tmp_path), name="", version="run")
    federation = Federation(client(FedAvg), seed=3, threads=1, **SLOW)
    trainer(4, logger=logger, callbacks=[RefusedUploads()]).fit(federation, datamodule=digits(6, batch_size=32))
    late = late_in(federation, 4)
    found = rows(tmp_path / "run/refused.csv")
    assert [(int(row["round"]), int(row["client"])) for row in found] == [(r + 1, k) for r in range(4) for k in late[r]]
    assert all(f"Client {row['client']}: too late" in row["reason"] for row in found)
    assert not [warning for warning in recwarn if "goes on without" in str(warning.message)]
    times = [float(row["simulated_seconds"]) for row in rows(tmp_path / "run/metrics.csv") if row["simulated_seconds"]]
    assert times == sorted(times)
    assert times[-1] == federation.coordinator.clock <= 36


def test_a_quorum_counts_late_uploads_as_missing():
    with pytest.raises(UploadError, match=r"Round 1: 0 of 4 uploads are usable.*Client 0: too late"):
        run(client(FedAvg), deadline=Deadline(0.5, speeds=Speeds(spread=0)))
    federation = run(client(FedAvg), deadline=Deadline(0.5, speeds=Speeds(spread=0)), quorum=0.0)
    assert (federation.coordinator.round, federation.coordinator.clock) == (2, 1.0)
    assert federation.scores.trained == set()
    assert federation.traffic.up == 0 < federation.traffic.down


@pytest.mark.seconds
def test_a_deadline_that_nobody_misses_changes_nothing():
    federation = run(client(FedAvg), deadline=Deadline(1e9, late="partial"))
    plain = run(client(FedAvg))
    assert_equal(weights(federation), weights(plain))
    assert federation.traffic.state_dict() == plain.traffic.state_dict()


# Part of the work


class Counts(FedAvg):
    """Notes the batches and the ends of epochs of every round."""

    def begin_round(self):
        self.__dict__.setdefault("seen", []).append([])

    def begin_epoch(self, epoch, local_epochs):
        self.seen[-1].append(0)

    def objective(self, batch, batch_idx):
        self.seen[-1][-1] += 1
        return super().objective(batch, batch_idx)


class Clipped(Counts):
    """Takes the Trainer's own way through a batch."""

    def on_after_backward(self):
        assert all(p.grad is None or p.grad.isfinite().all() for p in self.parameters())


@pytest.mark.parametrize("kind", [Counts, Clipped])
def test_a_slow_client_trains_the_batches_that_fit(tmp_path, kind):
    made = speeds(tmp_path, "client,batch\n0,1\n1,2\n2,4\n3,100\n")
    deadline = Deadline(13, late="partial", speeds=made)
    data = digits(4, batch_size=72)
    federation = run(client(kind), data, rounds=2, local_epochs=2, deadline=deadline)
    every = federation.timetable.batches[0] // 2
    for k, fits in enumerate([2 * every, 6, 3]):
        epochs = [min(fits, every), max(0, fits - every)]
        assert federation.clients[k].seen == [epochs, epochs]
        steps = federation.clients[k].trainer.global_step
        assert steps == 2 * fits
    assert [refusal.client for refusal in federation.refused] == [3]
    # a schedule counts the epochs of which something was trained
    counted = [federation.clients[k].trainer.lr_scheduler_configs[0].scheduler.last_epoch for k in range(3)]
    assert counted == [4, 4, 2]


def test_part_of_the_work_weighs_as_much_and_is_made_good_by_fednova(tmp_path):
    made = speeds(tmp_path, "client,batch\n0,1\n1,2\n")
    options = {"rounds": 1, "deadline": Deadline(5, late="partial", speeds=made)}
    plain = {"optimizer": plain_sgd, "scheduler": None}
    data = {"num_clients": 2, "batch_size": 64}
    average = run(client(FedAvg, **plain), digits(**data), **options)
    assert min(average.timetable.batches.values()) > 5
    uploads, model = weights(average), average.coordinator.server.model
    sizes = [average.data.client(k).num_samples for k in range(2)]
    full = next(name for name in model if name.endswith("head.weight"))
    mean = sum(size * uploads[k][full].double() for k, size in enumerate(sizes)) / sum(sizes)
    torch.testing.assert_close(model[full].double(), mean, atol=1e-6, rtol=0)
    nova = run(client(FedNova, **plain), digits(**data), **options)
    assert not torch.equal(nova.coordinator.server.model[full], model[full])


@pytest.mark.parametrize("method", [FedProx, FedRep, SimFed])
def test_any_method_does_part_of_the_work(method):
    options = {"rounds": 2, "local_epochs": 2, "deadline": Deadline(4, late="partial", speeds=Speeds(spread=0.6))}
    federation = run(client(method), digits(4, batch_size=32), **options)
    assert all(tensor.isfinite().all() for own in weights(federation).values() for tensor in own.values())


# The same run again


@pytest.mark.seconds
def test_stacked_clients_do_the_same_part():
    options = {"deadline": Deadline(4, late="partial", speeds=Speeds(spread=0.8)), "rounds": 2, "quorum": 0.0}
    one, other = (
        run(client(FedAvg, backbone=GroupNet), digits(6, batch_size=32), **options, engine=engine)
        for engine in (None, Stacked(4))
    )
    for k, state in weights(one).items():
        for name, tensor in weights(other)[k].items():
            torch.testing.assert_close(tensor, state[name], rtol=1e-3, atol=2e-5)
    assert one.traffic.state_dict() == other.traffic.state_dict()
    assert one.refused == other.refused


@pytest.mark.seconds
@pytest.mark.parametrize("late", ["drop", "partial"])
def test_a_run_that_is_resumed_is_the_same(tmp_path, late):
    def made():
        deadline = Deadline(6, late=late, speeds=Speeds(spread=0.8, variation=0.5))
        return Federation(client(FedAvg), seed=3, threads=1, local_epochs=2, deadline=deadline, quorum=0.0)

    whole, part, again = made(), made(), made()
    data = {"num_clients": 6, "batch_size": 32}
    trainer(4).fit(whole, datamodule=digits(**data))
    saves = trainer(2)
    saves.fit(part, datamodule=digits(**data))
    saves.save_checkpoint(tmp_path / "two.ckpt")
    trainer(4).fit(again, datamodule=digits(**data), ckpt_path=tmp_path / "two.ckpt")
    assert_equal(whole.coordinator.state_dict(), again.coordinator.state_dict())
    assert_equal(whole.engine.state_dict(), again.engine.state_dict())
    assert whole.rows == again.rows
    other = Federation(client(FedAvg), seed=3, threads=1, local_epochs=2)
    with pytest.raises(ConfigError, match=r"federation.deadline: the checkpoint is of a run with Deadline\(seconds=6"):
        trainer(4).fit(other, datamodule=digits(**data), ckpt_path=tmp_path / "two.ckpt")


@pytest.mark.slow
def test_it_is_chosen_by_name(capsys, tmp_path):
    words = ["fit", *TINY, "--federation.deadline", "Deadline", "--federation.deadline.seconds", "4",
             "--federation.deadline.late", "partial", "--federation.deadline.speeds", "Speeds",
             "--federation.deadline.speeds.spread", "0.5", "--federation.quorum", "0"]  # fmt: skip
    came = typed(capsys, *words, "--folder", str(tmp_path / "run"))
    assert came.errors == []
    assert float(rows(tmp_path / "run/metrics.csv")[0]["simulated_seconds"]) > 0
    assert typed(capsys, "fit", "--config", str(tmp_path / "run/config.yaml"), "--folder", "again").errors == []


def test_privacy_does_not_go_with_who_comes_first():
    with pytest.raises(ConfigError, match=r"federation.deadline.wanted: .*leave wanted out"):
        Federation(client(FedAvg), deadline=Deadline(1, wanted=2), privacy=ClientPrivacy())
    Federation(client(FedAvg), deadline=Deadline(1), privacy=ClientPrivacy())


def test_a_loader_without_a_length_needs_a_limit():
    from lit_pfl.federation.timetable import batches_of_round

    class Data:
        train = iter(())

    with pytest.raises(ConfigError, match="client 3's training loader has no length"):
        batches_of_round(3, Data, 2, {})
    assert batches_of_round(3, Data, 2, {"limit_train_batches": 4}) == 8
    Data.train = range(10)
    assert batches_of_round(3, Data, 2, {}) == 20
    assert batches_of_round(3, Data, 2, {"limit_train_batches": 0.25}) == 4
    assert math.isfinite(batches_of_round(3, Data, 1, {"limit_train_batches": 50}))
