"""Rounds, order, evaluation, bad uploads."""

import copy
import math
import os
import pickle
import random

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lit_pfl import Federation, Payload
from lit_pfl.core.scores import Row, summary
from lit_pfl.data import Dirichlet
from lit_pfl.engines import Local, Stacked
from lit_pfl.errors import ConfigError, UploadError
from lit_pfl.federation.trainer import refuse_processes
from lit_pfl.learners.scoring import score
from lit_pfl.lightning_internals import LastCheckpoint
from lit_pfl.methods import FedAvg, FedMA, SimFed, StandAlone
from lit_pfl_callbacks import ClientsTable, RunLogger
from lit_pfl_callbacks.run_folder import read_rows
from tiny import Learner, TinyNet, assert_equal, client, digits, momentum_sgd, run, trainer, weights

METHODS = [StandAlone, FedAvg, SimFed]


@pytest.mark.seconds
def test_other_clients_in_the_process_do_not_matter():
    alone = run(client(FedAvg))

    class RunsAnotherFederation(L.Callback):
        def on_train_batch_start(self, *args):
            trainer(1).fit(Federation(client(SimFed), seed=9, threads=1), datamodule=digits(3))

    beside = Federation(client(FedAvg), seed=3, threads=1)
    trainer(2, callbacks=[RunsAnotherFederation()]).fit(beside, datamodule=digits())
    assert_equal(weights(alone), weights(beside))


@pytest.mark.seconds
def test_clients_of_stand_alone_do_not_depend_on_who_else_is_there():
    """Client 1 among 4 equals client 1 in a federation where only two of the four ever train."""
    every, some = run(client(StandAlone), rounds=1), run(client(StandAlone), rounds=1, participation=2)
    trained = some.participants(0)
    assert len(trained) == 2
    for k in trained:
        assert_equal(weights(every)[k], weights(some)[k])


@pytest.mark.seconds
def test_a_trainer_s_summary_says_what_clients_are_like(notes):
    for shown in (True, False):
        fitting = trainer(1, enable_model_summary=shown)
        fitting.fit(Federation(client(FedAvg), seed=3, threads=1), datamodule=digits(permute_labels=True))
    said = [message for message in notes.messages if "clients of" in message]
    assert said == ["4 clients of FedAvg; each has 218 parameters and shares 48 numbers of its ImageClassifier."]


def test_the_outside_random_state_is_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    run(client(FedAvg), rounds=1)
    assert torch.equal(torch.rand(3), expected)


def test_same_seed_same_run_other_seed_other_run():
    assert_equal(weights(run(client(FedAvg))), weights(run(client(FedAvg))))
    first, other = weights(run(client(FedAvg))), weights(run(client(FedAvg), seed=4))
    assert not torch.equal(first[0]["backbone.head.weight"], other[0]["backbone.head.weight"])


def test_all_clients_start_from_the_same_weights_and_train_on_their_own_batches():
    federation = run(client(StandAlone), rounds=1)
    states = weights(federation)
    assert not torch.equal(states[0]["backbone.head.weight"], states[1]["backbone.head.weight"])
    with federation.draws.default_generators("weights"):
        a = federation.prototype.build(federation.clients[0].spec)
    with federation.draws.default_generators("weights"):
        b = federation.prototype.build(federation.clients[1].spec)
    assert_equal(a.state_dict(), b.state_dict())


class DrawnElsewhere(TinyNet):
    """Draws its head by NumPy and Python."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        drawn = np.random.standard_normal(self.head.weight.shape) + random.random()  # noqa: NPY002
        self.head.weight.data.copy_(torch.from_numpy(drawn))


def test_weights_that_numpy_and_python_draw_are_common_too():
    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    federation = run(StandAlone(backbone=DrawnElsewhere), rounds=1)
    assert before == (random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
    heads = [federation._work.fresh(client).learner.backbone.head.weight for client in (0, 1)]
    assert torch.equal(*heads)
    assert_equal(weights(federation), weights(run(StandAlone(backbone=DrawnElsewhere), rounds=1)))


@pytest.mark.seconds
def test_participation_is_seeded_by_round():
    federation = run(client(FedAvg), digits(10), rounds=1, participation=0.3)
    rounds = [federation.participants(r) for r in range(6)]
    assert all(len(chosen) == 3 for chosen in rounds)
    assert len({tuple(chosen) for chosen in rounds}) > 1
    assert rounds == [run(client(FedAvg), digits(10), rounds=1, participation=3).participants(r) for r in range(6)]


@pytest.mark.seconds
def test_local_epochs_and_rounds_are_counted_rightly():
    federation = run(client(FedAvg), rounds=3, local_epochs=2)
    assert federation.coordinator.round == 3
    for member in federation.clients.values():
        assert member.trainer.current_epoch == 6
        assert member.trainer.global_step == 6 * len(federation.data.client(0).train)


def test_metrics_of_a_round():
    federation = Federation(client(FedAvg), seed=3, threads=1)
    fitting = trainer(2)
    fitting.fit(federation, datamodule=digits())
    metrics = fitting.callback_metrics
    one_way = federation.clients[0].upload().nbytes * 4
    assert metrics["round"] == 2
    assert metrics["comm/up_bytes"] == metrics["comm/down_bytes"] == one_way
    assert metrics["comm/total_bytes"] == 4 * one_way
    for name in ("train/loss", "val/acc", "val/acc_std", "val/acc_worst10", "test/acc", "test/acc_worst10"):
        assert math.isfinite(metrics[name])
    assert 0 <= metrics["val/acc_worst10"] <= metrics["val/acc"] <= 1


def test_summary_counts_clients_equally_and_leaves_empty_ones_out():
    found = enumerate([(1, 0.2), (99, 0.8), (0, float("nan"))])
    rows = [Row(k, 1, "val", "", n, {"acc": acc, "loss": 1.0}) for k, (n, acc) in found]
    metrics = summary(rows, "val", {"acc": True})
    assert metrics["val/acc"] == pytest.approx(0.5)
    assert metrics["val/acc_std"] == pytest.approx(0.3)
    assert metrics["val/acc_worst10"] == 0.2
    twenty = [Row(k, 1, "val", "", 1, {"acc": k / 20, "loss": 1.0}) for k in range(20)]
    assert summary(twenty, "val", {"acc": True})["val/acc_worst10"] == pytest.approx((0 + 1 / 20) / 2)


@pytest.mark.parametrize(("bad", "worst"), [(float("nan"), "nan"), (float("inf"), "inf")])
@pytest.mark.parametrize("place", range(3))
def test_a_client_whose_score_is_no_number_is_the_worst(bad, worst, place):
    values = [0.5, 0.9]
    values.insert(place, bad)
    rows = [Row(k, 1, "val", "", 1, {"rmse": value}) for k, value in enumerate(values)]
    metrics = summary(rows, "val", {"rmse": False})
    assert str(metrics["val/rmse"]) == str(metrics["val/rmse_worst10"]) == worst
    assert math.isnan(metrics["val/rmse_std"])


@pytest.mark.seconds
def test_evaluation_before_and_after_aggregation():
    """After aggregation all clients of FedAvg have the server's model, before it each its own. The run is the same."""
    before, after = run(client(FedAvg), evaluate="before"), run(client(FedAvg), evaluate="after")
    assert_equal(weights(before), weights(after))
    assert {row.model for row in after.rows} == {"personalized:after"}
    member = after.clients[2]
    assert not torch.equal(member.backbone.head.weight, after.coordinator.server.model["backbone.head.weight"])
    member.download(after.coordinator.server.reply(2))
    expected = score(member.learner, after.data.client(2).test, "test")
    row = next(row for row in after.rows if row.client == 2)
    assert row.scores.keys() == {"acc", "loss"}
    assert (row.n, row.scores) == (expected.n, expected.values)
    assert [row.scores["acc"] for row in before.rows] != [row.scores["acc"] for row in after.rows]


def test_clients_that_never_trained_are_scored_as_they_would_join_now(tmp_path, capsys):
    """With two clients a round, the others have the server's model, and clients.csv and the table say so."""
    federation = Federation(client(FedAvg), seed=3, threads=1, participation=2)
    table, logger = ClientsTable(), RunLogger(str(tmp_path), name="", version="run")
    trainer(1, callbacks=[table], logger=logger).fit(federation, datamodule=digits())
    trained = federation.participants(0)
    assert len(trained) == 2
    for row in federation.rows:
        member = federation.clients[row.client]
        assert row.model == f"personalized:{'before' if row.client in trained else 'untrained'}"
        if row.client not in trained:
            kept = weights(federation)[row.client]
            member.download(federation.coordinator.server.reply(row.client))
        expected = score(member.learner, federation.data.client(row.client).test, "test")
        assert (row.n, row.scores) == (expected.n, expected.values)
        if row.client not in trained:
            assert not torch.equal(kept["backbone.head.weight"], member.backbone.head.weight)
    assert "Clients that have never trained, scored as they would join now: 2." in capsys.readouterr().out
    lines = read_rows(tmp_path / "run" / "clients.csv")
    untrained = [(line["split"], line["state"]) for line in lines if line["model"] == "personalized:untrained"]
    assert untrained == [("val", "trained")] * 2 + [("test", "trained")] * 2 + [("test", "aggregated")] * 2


@pytest.mark.seconds
def test_evaluating_a_sample_of_clients():
    federation, seen = Federation(client(FedAvg), seed=3, threads=1, evaluate_clients=0.3), []

    class Watch(L.Callback):
        def on_validation_end(self, trainer, pl_module):
            seen.append([row.client for row in pl_module.rows])

    fitting = trainer(3, callbacks=[Watch()])
    fitting.fit(federation, datamodule=digits(10))
    assert len(seen[0]) == 3
    assert seen == [seen[0]] * 3
    assert [row.client for row in federation.rows] == list(range(10))  # tested are all
    everybody = run(client(FedAvg), digits(10), rounds=3)
    assert_equal(weights(federation), weights(everybody))
    trainer().validate(federation, datamodule=digits(10), verbose=False)
    assert len(federation.rows) == 10


def test_everybody_is_tested_where_a_sample_is_validated_on_test_data(tmp_path):
    federation = Federation(client(FedAvg), seed=3, threads=1, evaluate_clients=2)
    logger = RunLogger(str(tmp_path), name="", version="run")
    data = digits(5, train_fraction=0.5, val_fraction=0.0, test_fraction=0.5)
    trainer(2, logger=logger, callbacks=[ClientsTable(show=False)]).fit(federation, datamodule=data)
    assert [row.client for row in federation.rows] == list(range(5))
    lines = read_rows(tmp_path / "run" / "clients.csv")
    assert [line["round"] for line in lines] == ["1"] * 2 + ["2"] * 10
    assert [line["state"] for line in lines] == ["trained"] * 7 + ["aggregated"] * 5
    accuracies = [float(line["acc"]) for line in lines[2:7]]
    assert float(read_rows(tmp_path / "run" / "metrics.csv")[-1]["test/acc"]) == pytest.approx(sum(accuracies) / 5)


@pytest.mark.seconds
def test_validate_test_and_predict_on_a_finished_federation():
    federation, tests = run(client(FedAvg)), trainer()
    [tested] = tests.test(federation, datamodule=federation.data, verbose=False)
    assert tested["test/acc"] == pytest.approx(summary(federation.rows, "test", {"acc": True})["test/acc"])
    scored = federation.rows[1]
    [validated] = trainer().validate(federation, datamodule=digits(), verbose=False)
    assert 0 <= validated["val/acc"] <= 1
    logits = {k: v for part in trainer().predict(federation, datamodule=digits()) for k, v in part.items()}
    assert logits[1].shape == (scored.n, 10)


@pytest.mark.seconds
def test_a_second_fit_goes_on_where_the_first_ended():
    """Two fits of 2 rounds end as one of 4: momentum, schedule, random streams and server go on."""
    federation = Federation(client(SimFed), seed=3, threads=1)
    first = trainer(2)
    first.fit(federation, datamodule=digits())
    first.fit_loop.max_epochs = 4
    first.fit(federation, datamodule=digits())
    assert_equal(weights(federation), weights(run(client(SimFed), rounds=4)))


@pytest.mark.seconds
def test_a_federation_that_has_run_goes_on_from_a_checkpoint_like_a_new_one(tmp_path):
    """Of what it did meanwhile nothing is left, not even of clients that had not trained yet in the checkpoint."""

    def federation():
        return Federation(client(FedAvg), seed=3, threads=1, participation=0.25)

    first = federation()
    trainer(1, callbacks=[LastCheckpoint(tmp_path)], enable_checkpointing=True).fit(first, datamodule=digits())
    new, used = federation(), federation()
    trainer(6).fit(used, datamodule=digits())
    for one in (new, used):
        trainer().test(one, datamodule=digits(), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert [row.model for row in new.rows].count("personalized:untrained") == 3
    assert used.rows == new.rows
    for one in (new, used):
        trainer(6).fit(one, datamodule=digits(), ckpt_path=tmp_path / "last.ckpt")
    assert used.rows == new.rows
    assert_equal(weights(used), weights(new))


@pytest.mark.parametrize("options", [{"seed": 5}, {"evaluate_on": "all"}, {"num_clients": 3}, {"num_clients": 5}])
def test_other_data_than_the_clients_were_made_with_are_refused(options):
    """They would be scored on the former data under the latter's name."""
    federation = run(client(FedAvg), rounds=1)
    with pytest.raises(ConfigError, match="datamodule: the clients of this federation were made with other data"):
        trainer().test(federation, datamodule=digits(**options), verbose=False)


class Sampling(Learner):
    """Is scored by what it draws."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))

    def validation_step(self, batch, batch_idx):
        self.log("drawn", torch.rand(()) + random.random() + np.random.rand())  # noqa: NPY002

    def predict_step(self, batch, batch_idx):
        return torch.rand(len(batch[0]), 10)


def test_what_a_learner_draws_when_it_is_scored_is_its_own():
    """The same in every evaluation, so that a resumed run is the same run, whoever else is scored."""
    federation = Federation(FedAvg(learner=Sampling()), seed=3, threads=1)
    trainer(1).fit(federation, datamodule=digits())
    drawn = {row.client: row.scores["drawn"] for row in federation.rows}
    assert len(set(drawn.values())) == 4
    before = torch.get_rng_state()
    trainer().validate(federation, datamodule=digits(), verbose=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert {row.client: row.scores["drawn"] for row in federation.rows} == pytest.approx(drawn)
    first, again = (trainer().predict(federation, datamodule=digits()) for _ in range(2))
    assert_equal(again, first)


class Broken(FedAvg):
    """Client 2 uploads NaN in round 2."""

    def upload(self):
        payload = super().upload()
        if self.spec.client_id == 2 and self.current_epoch == 1:
            return Payload({name: tensor * float("nan") for name, tensor in payload.items()})
        return payload


def test_too_few_usable_uploads_end_the_run():
    with pytest.raises(UploadError, match="fewer than the quorum"), pytest.warns(UserWarning, match="Client 2"):
        run(client(Broken), rounds=3, quorum=1.0)


def test_an_error_in_a_client_names_the_client():
    class Failing(FedAvg):
        def training_step(self, batch, batch_idx):
            if self.spec.client_id == 1:
                raise ArithmeticError("no")
            return super().training_step(batch, batch_idx)

    with pytest.raises(ArithmeticError) as caught:
        run(client(Failing))
    assert caught.value.__notes__ == ["(in the fit of client 1)"]


@pytest.mark.seconds
def test_empty_clients_take_no_part():
    data = digits(40, partition=Dirichlet(0.02, min_samples=0))
    federation = run(client(FedAvg), data, rounds=1)
    assert 0 < len(federation.clients) < 40
    assert [row.client for row in federation.rows] == list(federation.clients)


def test_mixed_precision_is_that_of_the_last_test_too():
    federation, data = Federation(client(StandAlone), seed=1, threads=1), digits()
    fitting = trainer(1, precision="bf16-mixed")
    fitting.fit(federation, datamodule=data)
    at_the_end = federation.rows
    fitting.test(federation, datamodule=data, verbose=False)
    assert federation.rows == at_the_end


@pytest.mark.seconds
def test_mixed_precision_does_not_reuse_stale_weights():
    federation = Federation(client(FedAvg), seed=3, threads=1)
    trainer(2, precision="bf16-mixed").fit(federation, datamodule=digits())
    full = run(client(FedAvg))
    for k, state in weights(federation).items():
        head = weights(full)[k]["backbone.head.weight"]
        assert not torch.equal(state["backbone.head.weight"], head)
        torch.testing.assert_close(state["backbone.head.weight"], head, atol=0.05, rtol=0.1)


class Listens(L.Callback):
    """A callback of the user's, for whom every hook must be called."""


@pytest.mark.seconds
@pytest.mark.parametrize("method", METHODS)
def test_the_short_way_through_a_batch_ends_where_the_trainer_s_own_does(method):
    short = run(client(method), rounds=3)
    own = run(client(method), rounds=3, client_trainer={"callbacks": [Listens()]})
    loops = [type(f.clients[0].trainer.fit_loop.epoch_loop).__name__ for f in (short, own)]
    assert loops == ["LeanEpochLoop", "_TrainingEpochLoop"]
    assert_equal(weights(short), weights(own))
    for k in short.clients:
        a, b = (f.clients[k].trainer for f in (short, own))
        assert (a.global_step, a.current_epoch) == (b.global_step, b.current_epoch)
        assert_equal(*[f.engine._restored[k]["lr_schedulers"] for f in (short, own)])
    assert_equal(short.coordinator.state_dict(), own.coordinator.state_dict())
    assert short.rows == own.rows


class Answers(FedAvg):
    """A method whose training step returns a dict, and skips the first batch of every epoch."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 0 else {"loss": loss, "more": 1}


def test_the_short_way_takes_what_a_training_step_may_return():
    short = run(client(Answers))
    own = run(client(Answers), client_trainer={"callbacks": [Listens()]})
    assert_equal(weights(short), weights(own))


def test_a_method_that_uses_a_hook_of_a_batch_gets_it():
    class Counts(FedAvg):
        steps = 0

        def on_before_optimizer_step(self, optimizer):
            Counts.steps += 1

    federation = run(client(Counts), rounds=1)
    assert Counts.steps == sum(member.trainer.global_step for member in federation.clients.values()) > 0


@pytest.mark.seconds
def test_gradient_clipping_and_further_trainer_options_reach_the_clients():
    free, clipped = (
        run(client(FedAvg), rounds=1),
        run(client(FedAvg), rounds=1, client_trainer={"gradient_clip_val": 1e-9}),
    )
    with free.draws.default_generators("weights"):
        start = free.prototype.build(free.clients[0].spec).backbone.head.weight.detach()
    moved = [(weights(f)[0]["backbone.head.weight"] - start).norm() for f in (free, clipped)]
    assert moved[1] < 1e-6 < moved[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"participation": 0}, "federation.participation=0"),
        ({"participation": 1.5}, "federation.participation=1.5"),
        ({"participation": 5}, "more than the 4 clients"),
        ({"evaluate_clients": 0}, "federation.evaluate_clients=0"),
        ({"evaluate_clients": 5}, "federation.evaluate_clients=5 is more than the 4 clients"),
        ({"quorum": 2}, "federation.quorum=2"),
        ({"local_epochs": [1]}, r"federation.local_epochs=\[1\]: give a whole number above 0"),
        ({"client_trainer": {"foo": 1}}, "federation.client_trainer: .*foo"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ConfigError, match=message):
        run(client(FedAvg), **options)


def test_a_plain_data_module_is_refused():
    with pytest.raises(ConfigError, match="federated data module.*PerClient"):
        trainer().fit(Federation(client(FedAvg)), datamodule=L.LightningDataModule())


class DrawsOnDownload(FedAvg):
    """Learns from a few samples of its own, drawn at random, how to take a reply, as FedALA does."""

    def download(self, reply):
        x, _ = next(iter(self.training_data()))
        drawn = float(x.mean()) + float(torch.rand(()))
        super().download({name: t + 0.01 * drawn if t.is_floating_point() else t for name, t in reply.items()})


@pytest.mark.seconds
@pytest.mark.parametrize("evaluate", ["before", "after"])
def test_what_a_reply_draws_when_a_client_is_scored_is_its_own(evaluate):
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        federation = run(client(DrawsOnDownload), participation=0.5, evaluate=evaluate)
        found.append((federation.rows, [*federation.standalone(0).parameters()]))
        assert torch.equal(torch.get_rng_state(), before)
    (one, network), (other, same) = found
    assert one == other
    assert all(torch.equal(a, b) for a, b in zip(network, same, strict=True))


def test_heads_cannot_be_sent_under_permuted_labels():
    with pytest.raises(ConfigError, match="share_head"):
        run(client(FedAvg, share_head=True), digits(permute_labels=True))


@pytest.mark.seconds
def test_what_is_to_stay_at_home_does():
    """FedBN: FedAvg but for what belongs to normalisation layers."""
    federation = run(client(FedAvg, local="norm", norm_stats="averaged"))
    norm = {"backbone.body.1.weight", "backbone.body.1.bias"}
    shared = federation.clients[0].shared_parameters()
    assert "backbone.body.1.running_mean" in shared
    for member in federation.clients.values():
        member.download(federation.coordinator.server.reply(0))
    one, other = (state for k, state in weights(federation).items() if k < 2)
    assert {name for name in one if not torch.equal(one[name], other[name])} == norm == set(one) - set(shared)


@pytest.mark.parametrize(
    ("local", "message"),
    [
        ("nothing", r"model\.local='nothing' is found in no name of ImageClassifier, which has backbone\.body\.0\."),
        ("[", r"model\.local='\[' is not a regular expression"),
        ("backbone", r"model\.local='backbone': no tensor is left to share"),
    ],
)
def test_what_cannot_stay_at_home(local, message):
    with pytest.raises(ConfigError, match=message):
        run(client(FedAvg, local=local), rounds=1)
    with pytest.raises(ConfigError, match=r"model\.local: FedMA"):
        FedMA(local="head")


@pytest.mark.parametrize("norm_stats", ["local", "averaged"])
def test_running_statistics_travel_only_when_asked_to(norm_stats):
    federation = run(client(FedAvg, norm_stats=norm_stats))
    shared = federation.clients[0].shared_parameters()
    assert "backbone.body.1.weight" in shared
    assert ("backbone.body.1.running_mean" in shared) == (norm_stats == "averaged")
    for member in federation.clients.values():
        member.download(federation.coordinator.server.reply(0))
    means = [member.backbone.body[1].running_mean for member in federation.clients.values()]
    assert torch.equal(means[0], means[1]) == (norm_stats == "averaged")


@pytest.mark.seconds
def test_what_fedavg_trains_does_not_depend_on_whose_running_statistics_it_has():
    """Batch norm does not read them while it trains, so they are a choice of what is scored."""
    local, averaged = (weights(run(client(FedAvg, norm_stats=kind))) for kind in ("local", "averaged"))
    differ = {name for id in local for name, tensor in local[id].items() if not torch.equal(tensor, averaged[id][name])}
    assert differ == {"backbone.body.1.running_mean", "backbone.body.1.running_var"}


@pytest.mark.seconds
def test_channels_last_where_it_pays():
    """Wide convolutions are laid out channels last on CPU; results are those of the other lay-out, but for rounding."""
    runs = [run(client(FedAvg, backbone=wide, channels_last=x), rounds=1) for x in (None, False)]
    assert [f.clients[0].learner.channels_last for f in runs] == [True, False]
    for k, state in weights(runs[0]).items():
        torch.testing.assert_close(state, weights(runs[1])[k], atol=1e-3, rtol=1e-3)
    assert run(client(FedAvg), rounds=1).clients[0].learner.channels_last is False


def wide(channels, classes):
    return TinyNet(channels, classes, width=64)


def test_defaults_of_a_prototype_are_shared_by_no_one():
    federation = run(client(FedAvg), rounds=1)
    memory = [p.data_ptr() for member in federation.clients.values() for p in member.parameters()]
    assert len(set(memory)) == len(memory)
    assert list(federation.prototype.parameters()) == []
    assert list(federation.parameters()) == []
    assert federation.prototype.make_backbone is TinyNet
    assert federation.prototype.make_optimizer is momentum_sgd


def test_what_is_no_engine_is_refused():
    with pytest.raises(ConfigError, match=r"^federation\.engine\.size=0: give a whole number above 0\.$"):
        Stacked(size=0)
    with pytest.raises(ConfigError, match=r"^federation\.engine='stacked': give an engine, such as Local\(\)"):
        Federation(client(FedAvg), engine="stacked")


@pytest.mark.seconds
def test_an_engine_is_as_good_for_another_federation():
    engine = Local()
    one, other = (run(client(FedAvg), rounds=1, engine=engine) for _ in range(2))
    assert_equal(weights(one), weights(other))
    assert not engine.clients


def test_several_processes_are_answered_by_the_options_that_there_are(monkeypatch):
    with pytest.raises(ConfigError, match=r"^trainer\.devices=2: .* federation\.engine=Ray and .*engine\.workers=2, "):
        refuse_processes(trainer(1, devices=2))
    with pytest.raises(ConfigError, match=r"^trainer\.strategy=DDPStrategy: one process runs .* its default, auto; "):
        refuse_processes(trainer(1, strategy="ddp"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "1")
    refuse_processes(trainer(1))
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"torchrun has started 4 processes, each of which would run this federation"):
        refuse_processes(trainer(1))


@pytest.mark.parametrize(
    ("monitor", "near"), [("val/ac", "val/acc"), ("val_loss", "val/loss"), ("train/los", "train/loss")]
)
def test_a_misspelt_monitor_is_told_before_the_first_round(monitor, near):
    rounds = []
    callbacks = [EarlyStopping(monitor), LambdaCallback(on_train_epoch_start=lambda *_: rounds.append(1))]
    with pytest.raises(ConfigError, match=rf"EarlyStopping\(monitor={monitor}\): .* Did you mean {near}\?"):
        trainer(1, callbacks=callbacks).fit(Federation(client(FedAvg), seed=1, threads=1), datamodule=digits(3))
    assert not rounds


@pytest.mark.seconds
@pytest.mark.parametrize("evaluate", ["before", "after", "global"])
def test_to_see_what_can_be_monitored_changes_nothing(evaluate):
    def run(*callbacks):
        federation = Federation(client(FedAvg, norm_stats="averaged"), seed=1, threads=1, evaluate=evaluate)
        trainer(2, callbacks=[*callbacks]).fit(federation, datamodule=digits(3))
        return federation

    watched, alone = run(EarlyStopping("val/loss", patience=5)), run()
    assert_equal(weights(watched), weights(alone))
    assert watched.rows == alone.rows


@pytest.mark.seconds
def test_a_federation_is_copied_and_pickled_before_it_has_clients_and_says_so_afterwards():
    federation = Federation(client(FedAvg), seed=1, threads=1)
    for other in (copy.deepcopy(federation), pickle.loads(pickle.dumps(federation))):
        trainer(1).fit(other, datamodule=digits(3))
    assert other.rows
    for way in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="that has clients cannot be copied or pickled"):
            way(other)


@pytest.mark.seconds
def test_a_learning_rate_monitor_may_watch_a_federation(tmp_path):
    monitor = LearningRateMonitor(log_momentum=True, log_weight_decay=True)
    logger = CSVLogger(tmp_path)
    watched = trainer(2, callbacks=[monitor], logger=logger)
    watched.fit(Federation(client(FedAvg), seed=3), datamodule=digits())
    assert watched.callback_metrics["lr-ServerStep"] == 1


def test_a_script_with_a_logger_is_not_warned_of_rare_logs(tmp_path, recwarn):
    fitting = trainer(1, logger=CSVLogger(tmp_path))
    fitting.fit(Federation(client(FedAvg), seed=3, threads=1), datamodule=digits())
    assert not [one for one in recwarn if "logging interval" in str(one.message)]


class NoBatch(L.Callback):
    """Lets a client's Trainer train on nothing."""

    def setup(self, trainer, pl_module, stage):
        trainer.limit_train_batches = 0


def test_a_client_without_a_batch_is_named():
    message = "Client 0: its fit ended before it had joined. Its training loader must give a batch"
    with pytest.raises(ConfigError, match=message) as error:
        run(client(FedAvg), client_trainer={"callbacks": [NoBatch()]})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("given", [L.LightningModule(), L.LightningModule])
def test_a_module_without_a_method_is_told_how(given):
    with pytest.raises(ConfigError, match=r"^LightningModule is not a method; .*Federation\(FedAvg\(learner=Light"):
        Federation(given)


def test_classes_in_place_of_what_they_make():
    with pytest.raises(ConfigError, match=r"^FedAvg is a class; .*Federation\(FedAvg\(...\)\)"):
        Federation(FedAvg)
    with pytest.raises(ConfigError, match="^model.learner: LightningModule is a class; pass a module"):
        run(FedAvg(learner=L.LightningModule))


def test_what_is_sent_on_joining_is_made_once():
    made = []

    class Counted(FedAvg):
        def initial(self):
            made.append(self.spec.client_id)
            return super().initial()

    run(client(Counted), digits(3), rounds=2)
    assert sorted(made) == [0, 0, 1, 2]  # the first time of one that stands for all, to see what the data need


def test_clients_that_are_not_there_are_named():
    federation = Federation(client(FedAvg), seed=3, threads=1)
    with pytest.raises(ConfigError, match=r"^There is no client 0 yet; clients are there once this is fitted or test"):
        federation.standalone(0)
    trainer(1).fit(federation, datamodule=digits(2))
    with pytest.raises(ConfigError, match=r"^There is no client '0'; ids are whole numbers\.$"):
        federation.standalone("0")
    with pytest.raises(ConfigError, match=r"^There is no client 2; there are 0, 1\.$"):
        federation.standalone(2)


def test_threads_are_as_many_as_are_given():
    assert run(client(FedAvg), digits(2), rounds=1, threads=3).threads == 3


@pytest.mark.seconds
def test_threads_that_wait_for_each_other_beside_other_processes_are_told_of_once(notes, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (os.cpu_count() + 1.0, 0.0, 0.0))
    run(client(FedAvg), digits(2), rounds=2, threads=2)
    assert notes.text.count("so that 2 threads wait for each other. federation.threads=1 is faster then.") == 1
    notes.clear()
    run(client(FedAvg), digits(2), rounds=2, threads=1)
    assert "wait for each other" not in notes.text
