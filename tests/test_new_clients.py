"""Clients that are held out of the training, and scored as if they joined after it."""

import csv

import pytest
import torch
from torch.utils.data import TensorDataset

from lit_pfl import Federation
from lit_pfl.core.participation import Share
from lit_pfl.data import Dirichlet, PerClient
from lit_pfl.errors import ConfigError
from lit_pfl.methods import Ditto, FedAvg, FedRep, PFedHN, SimFed
from lit_pfl.testing.method_tester import SPEC
from lit_pfl_callbacks import ClientsTable
from tiny import Site, assert_equal, client, digits, trainer


def sites(number):
    draw = torch.Generator().manual_seed(0)
    images = torch.rand(number, 32, 1, 8, 8, generator=draw)
    labels = torch.randint(10, (number, 32), generator=draw)
    return [Site(TensorDataset(*samples), 16) for samples in zip(images, labels, strict=True)]


def fitted(method, data, rounds=2, **options):
    federation = Federation(client(method), seed=1, threads=1, **options)
    trainer(rounds).fit(federation, datamodule=data)
    return federation


def new_rows(federation):
    return {(row.client, row.state): row for row in federation.other_rows if row.split == "new"}


@pytest.mark.seconds
@pytest.mark.parametrize("method", [FedAvg, FedRep, Ditto, SimFed])
def test_training_is_as_if_they_were_not_there(method):
    without = fitted(method, PerClient(sites(4)[:3], num_classes=10))
    held_out = fitted(method, PerClient(sites(4), num_classes=10, new_clients=[3]))
    assert_equal(held_out.coordinator.state_dict(), without.coordinator.state_dict(), "server")
    assert held_out.rows == without.rows
    assert {key for key, _ in new_rows(held_out)} == {3}


@pytest.mark.seconds
@pytest.mark.parametrize("method", [FedAvg, FedRep, Ditto, SimFed])
def test_after_a_round_of_training_they_are_what_they_are_in_a_federation_that_they_join(method):
    new = new_rows(fitted(method, PerClient(sites(4), num_classes=10, new_clients=[3])))
    joined = fitted(method, PerClient(sites(4), num_classes=10), rounds=3, participation=Share(joins={3: 3}))
    [trained] = [row for row in joined.rows if (row.client, row.model.partition(":")[0]) == (3, "personalized")]
    assert new[3, "trained"].scores == trained.scores


def test_as_they_join_they_have_the_model_of_all():
    federation = fitted(FedAvg, PerClient(sites(4), num_classes=10, new_clients=[3]), evaluate="after")
    [of_all] = {k: v for k, v in new_rows(federation).items() if k == (3, "aggregated")}.values()
    assert of_all.model == "personalized:untrained"
    module = federation.prototype.build(SPEC).eval()
    module.learner.load_state_dict({**module.learner.state_dict(), **federation.coordinator.server.model})
    images, labels = federation.data.modules[3].samples.tensors
    with torch.no_grad():
        right = (module.learner(images).argmax(1) == labels).double().mean()
    assert of_all.scores["acc"] == pytest.approx(float(right))


@pytest.mark.seconds
def test_a_test_of_the_checkpoint_finds_the_same(tmp_path):
    def data():
        return digits(5, new_clients=2, partition=Dirichlet(alpha=0.5), permute_labels=False)

    def run(rounds, path=None):
        federation = Federation(client(FedAvg), seed=1)
        fitting = trainer(rounds, callbacks=[ClientsTable()], default_root_dir=str(tmp_path), logger=True)
        fitting.fit(federation, datamodule=data(), ckpt_path=path)
        fitting.save_checkpoint(tmp_path / "last.ckpt")
        return federation

    first = run(2)
    again = Federation(client(FedAvg), seed=1)
    tested = trainer(2).test(again, data(), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert new_rows(again) == new_rows(first)
    assert len(new_rows(first)) == 4
    scores = [row.scores["acc"] for (_, state), row in new_rows(first).items() if state == "trained"]
    assert tested[0]["new/trained/acc"] == pytest.approx(sum(scores) / 2)
    assert_equal(run(3, tmp_path / "last.ckpt").coordinator.state_dict(), run(3).coordinator.state_dict(), "server")


def test_a_checkpoint_can_be_asked_what_more_epochs_of_their_own_would_give(tmp_path):
    def data():
        return PerClient(sites(4), num_classes=10, new_clients=[3])

    fitting, federation = trainer(2), Federation(client(FedAvg), seed=1, threads=1)
    fitting.fit(federation, datamodule=data())
    fitting.save_checkpoint(tmp_path / "last.ckpt")
    longer = Federation(client(FedAvg), seed=1, threads=1, local_epochs=3)
    trainer(2).test(longer, data(), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    former, now = new_rows(federation), new_rows(longer)
    assert now[3, "aggregated"].scores == former[3, "aggregated"].scores
    assert now[3, "trained"].scores != former[3, "trained"].scores


def test_the_table_has_a_line_for_them(tmp_path, capsys):
    federation = Federation(client(FedAvg), seed=1)
    fitting = trainer(1, callbacks=[ClientsTable()], default_root_dir=str(tmp_path), logger=True)
    fitting.fit(federation, datamodule=digits(4, new_clients=[0, 2]))
    shown = capsys.readouterr().out
    assert shown.index("New clients (2), as they join, mean: accuracy ") < shown.index("(2), after a round of training")
    [path] = tmp_path.glob("**/clients.csv")
    rows = list(csv.DictReader(path.open()))
    assert [(row["client"], row["state"]) for row in rows if row["split"] == "new"] == [
        (client, state) for client in "02" for state in ("trained", "aggregated")
    ]
    assert {row["client"] for row in rows if row["split"] != "new"} == {"1", "3"}


def test_who_is_held_out():
    def held_out(**options):
        data = digits(10, **options)
        data.setup()
        assert sorted(data.clients + data.held_out) == list(range(10))
        return data.held_out

    assert held_out() == []
    assert held_out(new_clients=[7, 2]) == [2, 7]
    drawn = held_out(new_clients=4)
    assert len(drawn) == 4
    assert held_out(new_clients=4) == drawn
    assert held_out(new_clients=4, seed=5) != drawn


@pytest.mark.parametrize(
    ("method", "new_clients", "why"),
    [
        (FedAvg, [9], r"data.new_clients: there is no client 9 with training data\."),
        (FedAvg, 4, r"data.new_clients=4 leaves none of the 4 clients to train\."),
        (FedAvg, [0, 1, 2, 3], r"data.new_clients=\[0, 1, 2, 3\] leaves none of the 4 clients to train\."),
        (FedAvg, -1, r"data.new_clients=-1: give how many clients, or which\."),
        (PFedHN, [1], r"data.new_clients: PFedHNServer has nothing for a client that joins after the training"),
    ],
)
def test_what_cannot_be_is_refused(method, new_clients, why):
    with pytest.raises(ConfigError, match=why):
        fitted(method, digits(4, new_clients=new_clients, permute_labels=False))
