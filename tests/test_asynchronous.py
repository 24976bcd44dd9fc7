"""Servers that do not wait: who uploads when, what stale uploads count, and the same run again."""

from pathlib import Path

import lightning as L
import pytest
import torch

from cli.typed import TINY, rows, typed
from lit_pfl import Federation, Payload
from lit_pfl.core.asynchronous import FedAsync, FedBuff, Schedule
from lit_pfl.core.deadline import Deadline, Speeds
from lit_pfl.core.participation import Bernoulli
from lit_pfl.core.privacy import ClientPrivacy
from lit_pfl.core.robust import CoordinateMedian
from lit_pfl.core.server_optimizer import ServerExtrapolation, ServerMomentum
from lit_pfl.core.updates import update_of
from lit_pfl.engines import Stacked
from lit_pfl.errors import ConfigError
from lit_pfl.federation import SignFlip
from lit_pfl.methods import Ditto, FedADMM, FedAvg, FedDyn, FedKD, FedPer, FedSLR, Scaffold, SimFed
from lit_pfl.randomness import Draws
from tiny import assert_equal, client, digits, run, trainer, weights

AT_ONCE = Speeds(batch=0, spread=0)


def schedule(asynchronous, batches: dict[int, int], concurrency: float, steps: int) -> list:
    made = Schedule(asynchronous, batches, concurrency, Draws(5))
    return [made.step(completed) for completed in range(steps)]


def speeds(folder, text: str) -> Speeds:
    (folder / "speeds.csv").write_text(text)
    return Speeds(file=str(folder / "speeds.csv"))


# Who uploads when


def test_fast_clients_go_round_while_a_slow_one_trains(tmp_path):
    """All three train at the same time; clients 0 and 1 are twice as fast as client 2."""
    made = FedBuff(buffer=2, speeds=speeds(tmp_path, "client,batch\n0,1\n1,1\n2,2.5\n"))
    steps = schedule(made, {0: 4, 1: 4, 2: 4}, 1.0, 5)
    assert [(sorted(step.starts), step.staleness, step.clock) for step in steps] == [
        ([0, 1, 2], {0: 0, 1: 0}, 4.0),
        ([0, 1], {0: 0, 1: 0}, 8.0),
        ([0, 1], {2: 2, 0: 0}, 12.0),
        ([0, 2], {1: 1, 0: 0}, 16.0),
        ([0, 1], {0: 0, 1: 0}, 20.0),
    ]


@pytest.mark.parametrize(("concurrency", "buffer"), [(0.3, 2), (7, 3), (1.0, 5), (2, 9), (1e-3, 1)])
def test_so_many_train_at_the_same_time_and_nobody_twice(concurrency, buffer):
    at_once = max(1, round(concurrency * 20)) if concurrency <= 1 else int(concurrency)
    training: dict[int, int] = {}
    clock = 0.0
    for number, step in enumerate(
        schedule(FedBuff(buffer, speeds=Speeds(variation=0.5)), dict.fromkeys(range(20), 3), concurrency, 60)
    ):
        assert len(step.staleness) == buffer
        assert not set(step.starts) & training.keys()
        training |= dict.fromkeys(step.starts, number)
        assert {client: number - training.pop(client) for client in step.staleness} == step.staleness
        assert len(training) <= at_once
        assert step.clock >= clock
        clock = step.clock


def test_a_schedule_is_of_the_seed_alone():
    made = FedBuff(3, speeds=Speeds(variation=0.5))
    one, other = (Schedule(made, dict.fromkeys(range(9), 3), 0.5, Draws(4)) for _ in range(2))
    assert one.step(20) == other.step(20)
    assert [one.step(i) for i in range(20)] == [other.step(i) for i in range(20)]


# What uploads count


def test_a_stale_upload_counts_less():
    upload, began, model = ({"w": torch.tensor([x]), "n": torch.tensor(int(x))} for x in (5.0, 1.0, 10.0))
    sent = Payload(upload)
    assert FedBuff(1).counted(sent, Payload(model), model, 0) is sent
    stale = FedBuff(1, exponent=0.5).counted(sent, Payload(began), model, 3)
    assert stale["w"].tolist() == [10 + 4 * 0.5]
    assert stale["n"] == 5
    for made, staleness, share in (
        (FedAsync(0.6, "constant"), 9, 0.6),
        (FedAsync(0.6, a=0.5), 3, 0.3),
        (FedAsync(0.6, "hinge", a=10, b=4), 4, 0.6),
        (FedAsync(0.6, "hinge", a=10, b=4), 5, 0.6 / 11),
    ):
        counted = made.counted(sent, Payload(began), model, staleness)
        torch.testing.assert_close(counted["w"], torch.tensor([10 - 5 * share]))
    assert FedAsync(1.0).counted(sent, Payload(model), model, 0) is sent


def test_a_running_variance_stays_above_zero():
    name, model = "norm.running_var", {"norm.running_var": torch.tensor([0.2])}
    began, sent = Payload({name: torch.tensor([1.0])}), Payload({name: torch.tensor([0.1])})
    stale = FedBuff(1, exponent=0.5).counted(sent, began, model, 3)
    torch.testing.assert_close(stale[name], torch.tensor([0.2 + 0.5 * (0.1 - 0.2)]))


# In a federation


def same(one: Federation, other: Federation) -> None:
    assert_equal(weights(one), weights(other))
    assert_equal(one.coordinator.server.state_dict(), other.coordinator.server.state_dict())
    assert_equal(one.engine.state_dict(), other.engine.state_dict())
    assert one.traffic.state_dict() == other.traffic.state_dict()
    assert one.rows == other.rows


@pytest.mark.seconds
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("method", "options"),
    [
        (FedAvg, {}),
        (Ditto, {}),
        (FedAvg, {"server_optimizer": ServerMomentum(0.5)}),
        (FedAvg, {"mean": CoordinateMedian()}),
    ],
)
@pytest.mark.parametrize(("participation", "made"), [(1.0, Speeds()), (4, AT_ONCE)])
def test_a_buffer_of_all_participants_is_the_method_itself(method, options, participation, made):
    """Bit for bit. Of some of the clients only without delays: else others begin before the last one has come."""
    buffer = 6 if participation == 1 else participation
    options = {"scheduler": None, **options}
    shared = {"rounds": 3, "participation": participation}
    plain = run(client(method, **options), digits(6), **shared)
    buffered = run(client(method, **options), digits(6), **shared, asynchronous=FedBuff(buffer, speeds=made))
    same(plain, buffered)


@pytest.mark.slow
def test_single_uploads_of_one_client_at_a_time_are_the_method_itself():
    shared = {"rounds": 5, "participation": 0.2}
    plain = run(client(FedAvg), digits(5), **shared)
    single = run(client(FedAvg), digits(5), **shared, asynchronous=FedAsync(1.0, speeds=Speeds(variation=0.5)))
    same(plain, single)


SLOW = Speeds(spread=1.0, variation=0.3)
BUFFERED = FedBuff(2, speeds=SLOW)


class Watch(L.Callback):
    """Notes the server's model before the first round and after every round, and the uploads of a round."""

    def __init__(self):
        self.models, self.uploads = [], []

    def note(self, federation):
        self.models.append(numbers(federation.coordinator.server.model))

    def on_train_start(self, trainer, pl_module):
        self.note(pl_module)
        pl_module.coordinator.changes.append(self.look)

    def look(self, round, uploads):
        self.uploads.append({client: numbers(upload) for client, upload in uploads.items()})
        return uploads

    def on_train_epoch_end(self, trainer, pl_module):
        self.note(pl_module)


def numbers(tensors):
    return {name: tensor.double().numpy().copy() for name, tensor in tensors.items()}


@pytest.mark.parametrize("made", [BUFFERED, FedAsync(speeds=SLOW)])
def test_a_model_is_made_as_the_paper_says(made):
    """From the clients' own uploads, and the models that they began with, in NumPy."""

    watch = Watch()
    federation = Federation(client(FedAvg, scheduler=None), seed=3, threads=1, participation=0.8, asynchronous=made)
    fitting = trainer(8, callbacks=[watch])
    fitting.fit(federation, datamodule=digits(5))
    began: dict[int, int] = {}
    stale = 0
    for i in range(8):
        step = federation.timetable._schedule.step(i)
        began |= dict.fromkeys(step.starts, i)
        own = watch.uploads[i]
        assert own.keys() == step.staleness.keys()
        sizes = {k: federation.data.client(k).num_samples for k in own}
        for name, after in watch.models[i + 1].items():
            expected = before = watch.models[i][name]
            if isinstance(made, FedAsync):
                ((k, upload),) = own.items()
                c = 0.6 * (1 + step.staleness[k]) ** -0.5
                expected = (1 - c) * before + c * upload[name]
            else:
                for k, upload in own.items():
                    share = sizes[k] / sum(sizes.values()) * (1 + step.staleness[k]) ** -0.5
                    expected = expected + share * (upload[name] - watch.models[began[k]][name])
            torch.testing.assert_close(torch.tensor(after), torch.tensor(expected), atol=1e-6, rtol=1e-5)
        stale += sum(step.staleness.values())
    assert stale > 4


def test_what_a_client_begins_with_is_counted_when_it_begins():
    federation = run(client(FedAvg), digits(5), rounds=4, asynchronous=FedBuff(2, speeds=SLOW))
    begun = sum(len(federation.timetable._schedule.step(i).starts) for i in range(4))
    size = federation.coordinator.server.model.nbytes
    assert sum(down for _, down in federation.traffic.clients.values()) == begun * size
    assert sum(up for up, _ in federation.traffic.clients.values()) == 8 * size
    assert len(federation.coordinator.in_training.models) == begun - 8
    assert federation.coordinator.clock == federation.timetable._schedule.step(3).clock


class Leaves(L.Callback):
    """Ends the training of client 1 with its first round."""

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop |= pl_module.spec.client_id == 1


@pytest.mark.seconds
def test_a_client_that_leaves_takes_no_round_of_another_one():
    """A step that waits for nobody else has no upload and counts; the next one is of the next clients all the same."""
    options = {"asynchronous": FedAsync(speeds=SLOW), "client_trainer": {"callbacks": [Leaves()]}}
    federation = run(client(FedAvg), digits(4), rounds=12, **options)
    steps = [federation.timetable._schedule.step(i) for i in range(12)]
    of_client_1 = [i for i, step in enumerate(steps) if 1 in step.staleness]
    assert len(of_client_1) > 1
    assert federation.coordinator.round == 12
    assert federation.coordinator.clock == steps[-1].clock
    begun = sum(1 in step.starts for step in steps[: of_client_1[0] + 1])  # and none of it later
    assert federation.traffic.clients[1][1] == begun * federation.coordinator.server.model.nbytes


@pytest.mark.seconds
def test_attackers_change_what_they_have_trained_from_the_model_that_they_began_with():
    class Compares(SignFlip):
        def _forge(self, round, uploads):
            begun = dict(self._coordinator.in_training.models)
            forged = super()._forge(round, uploads)
            for k in uploads:
                sign = -1 if k in self.attackers else 1
                assert_equal(update_of(forged[k], begun[k]), update_of(uploads[k], begun[k]), sign)
            return forged

    def assert_equal(got, trained, sign):
        for name, tensor in trained.items():
            torch.testing.assert_close(got[name], sign * tensor, atol=1e-6, rtol=1e-5)

    federation = Federation(client(FedAvg), seed=3, threads=1, asynchronous=FedBuff(2, speeds=SLOW))
    trainer(8, callbacks=[Compares(clients=[0, 2])]).fit(federation, datamodule=digits(4))
    steps = [federation.timetable._schedule.step(i).staleness for i in range(8)]
    assert any(step.get(k) for step in steps for k in (0, 2))


def test_a_bad_upload_is_refused_and_its_client_begins_anew():
    class Spoils(FedAvg):
        def upload(self):
            payload = super().upload()
            if self.completed_rounds and self.spec.client_id == 1:
                payload = payload.with_({next(iter(payload)): torch.full_like(next(iter(payload.values())), torch.nan)})
            return payload

    with pytest.warns(UserWarning, match="continues without one upload. Client 1"):
        federation = run(client(Spoils), digits(4), rounds=6, quorum=0.0, asynchronous=FedBuff(2, speeds=SLOW))
    assert all(tensor.isfinite().all() for tensor in federation.coordinator.server.model.values())
    assert federation.coordinator.round == 6


@pytest.mark.seconds
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("method", "made"),
    [
        (FedAvg, FedBuff(2, speeds=SLOW)),
        (FedPer, FedAsync(speeds=SLOW)),
        (FedDyn, FedBuff(2, exponent=0, speeds=SLOW)),
    ],
)
@pytest.mark.parametrize("seed", [3, None])
def test_a_run_that_is_resumed_is_the_same(tmp_path, method, made, seed):
    options = {"threads": 1, "participation": 4, "asynchronous": made}
    torch.manual_seed(11)
    whole = run(client(method), digits(6), rounds=6, seed=seed, **options)
    torch.manual_seed(11)
    part, saves = Federation(client(method), seed=seed, **options), trainer(3)
    saves.fit(part, datamodule=digits(6))
    saves.save_checkpoint(tmp_path / "three.ckpt")
    torch.load(tmp_path / "three.ckpt", weights_only=True)
    torch.manual_seed(12)
    again = Federation(client(method), seed=seed, **options)
    trainer(6).fit(again, datamodule=digits(6), ckpt_path=tmp_path / "three.ckpt")
    same(whole, again)
    assert_equal(whole.coordinator.state_dict(), again.coordinator.state_dict())
    other = Federation(client(method), seed=seed, **{**options, "asynchronous": FedBuff(3, exponent=0, speeds=SLOW)})
    with pytest.raises(ConfigError, match=r"federation.asynchronous: the checkpoint is of a run with Fed"):
        trainer(6).fit(other, datamodule=digits(6), ckpt_path=tmp_path / "three.ckpt")


@pytest.mark.seconds
def test_stacked_clients_come_to_nearly_the_same():
    from tiny import GroupNet

    options = {"rounds": 5, "participation": 4, "asynchronous": FedBuff(2, speeds=SLOW)}
    one, other = (run(client(FedAvg, backbone=GroupNet), digits(6), **options, engine=e) for e in (None, Stacked(4)))
    for k, state in weights(one).items():
        for name, tensor in weights(other)[k].items():
            torch.testing.assert_close(tensor, state[name], rtol=1e-3, atol=5e-5)
    assert one.traffic.state_dict() == other.traffic.state_dict()


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        (SimFed, {}, "SimFed.* uses single uploads"),
        (Scaffold, {}, "uses single uploads"),
        (FedKD, {}, "uploads to FedKDServer are no models"),
        (FedDyn, {}, "FedDyn adds its whole step to h_i, so that its upload must count in full; use FedBuff with exp"),
        (FedADMM, {"asynchronous": FedAsync()}, "FedADMM adds its whole step to y_i"),
        (FedSLR, {"local_epochs": 2}, "FedSLR adds its whole step to gamma_i"),
        (FedAvg, {"participation": Bernoulli(0.5)}, "federation.participation=Bernoulli.*number of clients that train"),
        (FedAvg, {"asynchronous": FedBuff(5)}, "buffer=5 is more than the 4 clients"),
        (FedAvg, {"deadline": Deadline(3)}, "does not go with federation.deadline"),
        (FedAvg, {"privacy": ClientPrivacy()}, "does not go with federation.privacy"),
    ],
)
def test_what_does_not_go_together(method, options, said):
    plain = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)} if method is Scaffold else {}
    with pytest.raises(ConfigError, match=said):
        run(client(method, **plain), rounds=1, **{"asynchronous": FedBuff(2), **options})


def test_what_server_and_clients_keep_of_each_other_stays_the_same_without_an_exponent():
    options = {"rounds": 6, "participation": 4, "asynchronous": FedBuff(2, exponent=0, speeds=SLOW)}
    federation = run(client(FedDyn), digits(6), **options)
    steps = [federation.timetable._schedule.step(i).staleness for i in range(6)]
    assert any(late for step in steps for late in step.values())
    server = federation.coordinator.server
    for name, deviation in server.deviation.items():
        own = torch.stack([member.deviation[name] for member in federation.clients.values()]).mean(0)
        torch.testing.assert_close(deviation, own, atol=1e-5, rtol=0)


def test_a_server_optimizer_of_single_uploads_is_refused():
    with pytest.raises(ConfigError, match=r"Server with ServerExtrapolation uses single uploads"):
        run(client(FedAvg, server_optimizer=ServerExtrapolation()), rounds=1, asynchronous=FedBuff(2))


@pytest.mark.seconds
def test_it_is_chosen_by_name(capsys):
    words = ["fit", *TINY, "--model", "FedAvg", "--data.permute_labels", "false",
             "--federation.asynchronous", "FedBuff", "--federation.asynchronous.buffer", "2",
             "--federation.asynchronous.speeds.spread", "0.5"]  # fmt: skip
    came = typed(capsys, *words, "--folder", "run")
    assert came.errors == []
    assert float(rows(Path("run/metrics.csv"))[0]["simulated_seconds"]) > 0
    wrong = typed(capsys, "fit", *TINY, "--federation.asynchronous", "FedBuf")
    assert "FedBuff" in wrong.errors[0]
