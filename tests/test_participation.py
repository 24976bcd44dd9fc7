"""Who trains in a round, and who is there."""

import numpy as np
import pytest
import torch
from scipy import stats

from cli.typed import TINY, rows, typed
from lit_pfl import Federation
from lit_pfl.core.participation import (
    Bernoulli,
    BySize,
    Sampling,
    Share,
    Trace,
    participants,
    sampling_of,
)
from lit_pfl.data import Dirichlet
from lit_pfl.errors import ConfigError
from lit_pfl.methods import FedAvg, StandAlone
from lit_pfl.randomness import Draws
from tiny import assert_equal, client, digits, run, trainer, weights

SAMPLES = dict(zip(range(0, 40, 2), range(10, 210, 10), strict=True))  # 20 clients
DRAWS = Draws(5)


def rounds(participation, count: int = 400, samples=SAMPLES) -> list[list[int]]:
    return [participants(participation, completed, samples, DRAWS) for completed in range(count)]


def trace(folder, text: str) -> str:
    (folder / "trace.csv").write_text(text)
    return str(folder / "trace.csv")


@pytest.mark.parametrize("share", [0.3, 1.0, 6])
def test_a_share_is_the_number_alone(share):
    assert rounds(Share(share), 20) == rounds(share, 20)
    assert sampling_of(Share(share), 20) == sampling_of(share, 20)


def test_bernoulli_draws_everybody_independently():
    chosen = rounds(Bernoulli(0.3))
    taken = np.array([[client in one for client in SAMPLES] for one in chosen])
    assert stats.binomtest(int(taken.sum()), taken.size, 0.3).pvalue > 0.001
    assert stats.kstest(taken.sum(1), stats.binom(20, 0.3).cdf).statistic < 0.2
    pairs = np.corrcoef(taken.T)[~np.eye(20, dtype=bool)]
    assert abs(pairs.mean()) < 0.02
    assert all(one == sorted(set(one)) for one in chosen)


def test_bernoulli_never_draws_nobody():
    chosen = rounds(Bernoulli(0.001), 50)
    assert all(len(one) == 1 for one in chosen)
    assert len({one[0] for one in chosen}) > 5


def test_bernoulli_says_when_nobody_was_drawn():
    some = Bernoulli(0.05)
    none = [some.nobody_drawn(completed, SAMPLES, Draws(3)) for completed in range(400)]
    chosen = [some.choose(completed, SAMPLES, Draws(3)) for completed in range(400)]
    assert all(len(one) == 1 for one, nobody in zip(chosen, none, strict=True) if nobody)
    assert stats.binomtest(sum(none), 400, 0.95**20).pvalue > 0.001
    assert not Share(0.1).nobody_drawn(1, SAMPLES, Draws(3))


def test_large_clients_are_drawn_more_often():
    chosen = rounds(BySize(1), 4000)
    counts = np.array([sum(client in one for one in chosen) for client in SAMPLES])
    sizes = np.array(list(SAMPLES.values()))
    assert stats.chisquare(counts, 4000 * sizes / sizes.sum()).pvalue > 0.001
    assert all(len(set(one)) == 7 for one in rounds(BySize(7), 50))
    assert rounds(BySize(30), 3) == [list(SAMPLES)] * 3


def test_a_trace_says_who_is_there(tmp_path):
    file = trace(tmp_path, "round,client,what\n1,4,x\n1,0,x\n3,2,y\n3,2,again\n")
    chosen = Trace(file)
    assert chosen.choose(0, SAMPLES, DRAWS) == [0, 4]
    assert chosen.choose(2, SAMPLES, DRAWS) == [2]
    with pytest.raises(ConfigError, match=r"no client trains in round 2"):
        chosen.choose(1, SAMPLES, DRAWS)
    with pytest.raises(ConfigError, match=r"it ends with round 3; set federation.participation.repeat=true"):
        chosen.choose(3, SAMPLES, DRAWS)
    assert Trace(file, repeat=True).choose(3, SAMPLES, DRAWS) == [0, 4]
    with pytest.raises(ConfigError, match="there is no client 4"):
        chosen.check([0, 1, 2])


def test_a_trace_that_a_spreadsheet_has_written_is_read(tmp_path):
    assert Trace(trace(tmp_path, "\ufeffround,client\n1,4\n")).choose(0, SAMPLES, DRAWS) == [4]


def test_a_trace_with_too_few_rounds_is_refused_before_the_first(tmp_path):
    federation = Federation(client(FedAvg), participation=Trace(trace(tmp_path, "round,client\n1,0\n2,1\n")))
    with pytest.raises(ConfigError, match="it ends with round 2; "):
        trainer(3).fit(federation, datamodule=digits())
    assert federation.coordinator.round == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it has no row"),
        ("round,client\n0,3\n", "line 2: give a round from 1"),
        ("round;client\n1;3\n", "line 2: give a round from 1"),
        ("round,client\n1,3\n2,x\n", "line 3"),
        ("round,client\n1,3\n\n2,x\n", "line 4"),
    ],
)
def test_a_trace_that_is_none(tmp_path, text, said):
    with pytest.raises(ConfigError, match=said):
        Trace(trace(tmp_path, text))
    with pytest.raises(ConfigError, match="cannot be read"):
        Trace(str(tmp_path / "missing.csv"))


@pytest.mark.parametrize("kind", [Share, Bernoulli])
def test_clients_join_late_and_leave_for_good(kind):
    kind = kind(1.0, joins={4: 3, 8: 2, 6: 7}, leaves={8: 5, 6: 7, 10: 2})
    there = {client: [i + 1 for i, one in enumerate(rounds(kind, 8)) if client in one] for client in SAMPLES}
    always = [1, 2, 3, 4, 5, 6, 7, 8]
    assert there == dict.fromkeys(SAMPLES, always) | {4: always[2:], 8: [2, 3, 4, 5], 6: [7], 10: [1, 2]}
    with pytest.raises(ConfigError, match=r"federation.participation.joins: there is no client 4"):
        kind.check([0, 8])


def test_who_else_is_there_does_not_change_who_is_drawn():
    every, some = rounds(Bernoulli(0.4), 30), rounds(Bernoulli(0.4, joins={4: 100}), 30)
    assert [[c for c in one if c != 4] for one in every] == some


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Bernoulli(0), "probability=0: give one above 0"),
        (lambda: Bernoulli(1.5), "probability=1.5"),
        (lambda: Share(1.5), "participation.share=1.5"),
        (lambda: Share(1.0, joins={3: 0}), "joins: client 3: rounds count from 1"),
        (lambda: Share(1.0, joins={3: 5}, leaves={3: 4}), "client 3 leaves after round 4, before it joins in round 5"),
    ],
)
def test_what_cannot_be(make, said):
    with pytest.raises(ConfigError, match=said):
        make()


def test_what_privacy_may_gain_by_sampling():
    assert sampling_of(0.1, 20) == sampling_of(2, 20) == Sampling("fixed", 0.1)
    assert sampling_of(1.0, 20) == sampling_of(20, 20) == sampling_of(Bernoulli(1.0), 20) == Sampling()
    assert sampling_of(Bernoulli(0.1), 20) == Sampling("poisson", 0.1)
    # a client more displaces another, so that a sum moves by twice the clip norm
    assert sampling_of(BySize(3), 20) == sampling_of(Share(0.5, joins={1: 2}), 20) == Sampling("replaced")
    assert sampling_of(BySize(20), 20) == sampling_of(Share(1.0, joins={1: 2}), 20) == Sampling()


# In a federation


@pytest.mark.seconds
def test_clients_drawn_by_size_count_the_same_in_the_mean():
    federation = run(client(FedAvg), digits(5, partition=Dirichlet(0.5)), rounds=1, participation=BySize(2))
    drawn = federation.participants(0)
    assert len({federation.coordinator.server.num_samples[k] for k in drawn}) == 2
    first, second = (federation.clients[k].upload() for k in drawn)
    expected = {name: (first[name].double() + second[name].double()) / 2 for name in first}
    model = federation.coordinator.server.model
    for name, mean in expected.items():
        torch.testing.assert_close(model[name].double(), mean, atol=1e-6, rtol=0)
    everybody = run(client(FedAvg), digits(5, partition=Dirichlet(0.5)), rounds=1, participation=BySize(5))
    assert everybody.coordinator.server.weighting == "samples"


@pytest.mark.seconds
def test_a_run_with_any_number_of_clients_a_round():
    """Clients of StandAlone do not feel who else trains, so each equals itself in a run of its own rounds."""
    federation = run(client(StandAlone), digits(6), rounds=5, participation=Bernoulli(0.4, joins={2: 3}))
    chosen = [federation.participants(completed) for completed in range(5)]
    assert len({len(one) for one in chosen}) > 1
    assert federation.coordinator.round == 5
    for k, member in federation.clients.items():
        taken = sum(k in one for one in chosen)
        assert (member.trainer.current_epoch if taken else 0) == taken
    alone = run(client(StandAlone), digits(6), rounds=5, participation=Bernoulli(0.4, joins={2: 3}))
    assert_equal(weights(federation), weights(alone))


@pytest.mark.seconds
def test_more_clients_than_lists():
    federation = run(client(FedAvg, scheduler=None), digits(23), rounds=2, participation=Bernoulli(0.6))
    taken = {k for completed in range(2) for k in federation.participants(completed)}
    assert taken == federation.scores.trained


@pytest.mark.slow
def test_it_is_chosen_by_name_and_resumed(capsys, tmp_path):
    file = trace(tmp_path, "round,client\n1,0\n1,2\n2,1\n")
    words = ["fit", *TINY, "--federation.participation", "Trace", "--federation.participation.file", file]
    for name in ("whole", "part"):
        came = typed(
            capsys, *words, "--folder", str(tmp_path / name), "--trainer.max_epochs", "2" if name == "whole" else "1"
        )
        assert came.code == 0, came.errors
    part = tmp_path / "part"
    came = typed(capsys, "fit", "--config", str(part / "config.yaml"), "--ckpt_path",
                 str(part / "checkpoints/last.ckpt"), "--trainer.max_epochs", "2")  # fmt: skip
    assert came.code == 0, came.errors
    assert rows(part / "metrics.csv")[-1]["test/acc"] == rows(tmp_path / "whole" / "metrics.csv")[-1]["test/acc"]
    came = typed(capsys, "fit", *TINY, "--federation.participation", "Bernoulli",
                 "--federation.participation.joins", "{1: 2}", "--federation.participation.probability", "0.9",
                 "--folder", str(tmp_path / "third"))  # fmt: skip
    assert came.code == 0, came.errors
    wrong = typed(capsys, "fit", *TINY, "--federation.participation", "Bernouli")
    assert "Bernoulli" in wrong.errors[0]


def test_a_checkpoint_of_other_participation_is_refused(tmp_path):
    federation = Federation(client(FedAvg), seed=3, threads=1, participation=Bernoulli(0.5))
    fitting = trainer(1)
    fitting.fit(federation, datamodule=digits())
    fitting.save_checkpoint(tmp_path / "one.ckpt")
    other = Federation(client(FedAvg), seed=3, threads=1, participation=Bernoulli(0.6))
    with pytest.raises(ConfigError, match=r"federation.participation: .* Bernoulli\(probability=0.5\), not Bern"):
        trainer(2).fit(other, datamodule=digits(), ckpt_path=tmp_path / "one.ckpt")
