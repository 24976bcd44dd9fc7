"""A test scores models as trained, as aggregated and, where there is one, the global model, in one go."""

from functools import partial
from pathlib import Path

import pytest
from torch import nn

from cli.typed import rows
from lit_pfl import Federation
from lit_pfl.engines import Local
from lit_pfl.methods import Ditto, FedAvg, FedPer, FedSLR, PsiNet, StandAlone
from lit_pfl.testing import MethodTester
from lit_pfl_callbacks import ClientsTable, RunLogger
from methods.test_every_method import METHODS, configured
from tiny import Learner, always_first, client, digits, run, trainer


def fitted(folder: Path, evaluate: str, method=FedAvg, data=None, callbacks=(), **options) -> Federation:
    """Run a federation with a run folder."""
    federation = Federation(client(method), seed=3, threads=1, evaluate=evaluate, **options)
    logger = RunLogger(str(folder.parent), name="", version=folder.name)
    trainer(2, logger=logger, callbacks=[ClientsTable(), *callbacks]).fit(
        federation, datamodule=data or digits(permute_labels=True)
    )
    return federation


def metrics(folder: Path, prefix: str = "test/") -> dict[str, str]:
    """Return the last round's test metrics, but for those of further states."""
    last = rows(folder / "metrics.csv")[-1]
    cut = {name.removeprefix(prefix): value for name, value in last.items() if name.startswith(prefix)}
    return {name: value for name, value in cut.items() if "/" not in name}


def test_one_run_has_what_two_runs_have(tmp_path, capsys):
    """FedAvg with permuted labels: the same numbers, bit for bit, in every file and in what is printed."""
    both = {evaluate: fitted(tmp_path / evaluate, evaluate) for evaluate in ("before", "after")}
    printed = capsys.readouterr().out
    for one, other, state in (("before", "after", "aggregated"), ("after", "before", "trained")):
        assert both[one].other_rows == both[other].rows
        assert metrics(tmp_path / one, f"test/{state}/") == metrics(tmp_path / other)
        assert {row.state for row in both[one].other_rows} == {state}
    clients = [
        sorted(tuple(row.items()) for row in rows(tmp_path / evaluate / "clients.csv") if row["split"] == "test")
        for evaluate in both
    ]
    assert clients[0] == clients[1]
    assert {dict(row)["state"] for row in clients[0]} == {"trained", "aggregated"}
    accuracies = [f"{float(metrics(tmp_path / evaluate)['acc']):.4f}" for evaluate in both]
    assert accuracies[0] != accuracies[1]
    [first, second] = [line.split("│") for line in printed.splitlines() if " mean " in line]
    assert [cell.strip() for cell in first[3:5]] == accuracies
    assert [cell.strip() for cell in second[3:5]] == accuracies[::-1]
    assert "as trained" not in printed.splitlines()[0]  # the title, since both are there
    validated = {row["state"] for row in rows(tmp_path / "after" / "clients.csv") if row["split"] == "val"}
    assert validated == {"aggregated"}


@pytest.mark.seconds
@pytest.mark.few(2)
@pytest.mark.parametrize("name", always_first(METHODS))
def test_every_method_has_in_one_run_what_it_has_in_two(name):
    tester = MethodTester(partial(configured, name))
    before, after = (tester.run(digits(3), rounds=2, evaluate=evaluate) for evaluate in ("before", "after"))
    aggregated = [row for row in before.other_rows if row.state == "aggregated"]
    assert aggregated == after.rows
    assert [row for row in after.other_rows if row.state == "trained"] == before.rows


def test_who_has_never_trained_is_in_both_states_as_it_would_start(tmp_path):
    federation = fitted(tmp_path / "run", "before", participation=2)
    untrained = [row for row in federation.rows if row.model == "personalized:untrained"]
    assert untrained
    assert [row._replace(state="aggregated") for row in untrained] == [
        row for row in federation.other_rows if row.model == "personalized:untrained"
    ]
    assert [row.client for row in federation.other_rows] == [0, 1, 2, 3]
    assert len(rows(tmp_path / "run" / "clients.csv")) == 2 * 4 + 2 * 4


@pytest.mark.parametrize(("method", "scored"), [(FedAvg, 6), (Ditto, 6), (StandAlone, 3)])
def test_it_costs_one_more_scoring_where_something_is_sent(method, scored, monkeypatch):
    seen = []
    ask = Local.ask

    def counted(self, question, replies):
        _, split = question.args
        seen.extend([split] * len(replies))
        return ask(self, question, replies)

    monkeypatch.setattr(Local, "ask", counted)
    run(client(method), digits(3, permute_labels=True))
    assert [seen.count(split) for split in ("val", "test")] == [6, scored]  # of two rounds, and of the last one


@pytest.mark.seconds
def test_a_second_model_has_its_scores_in_both_states(tmp_path):
    fitted(tmp_path / "run", "after", FedSLR, digits(3))
    assert metrics(tmp_path / "run", "test/trained/GKR/").keys() == metrics(tmp_path / "run", "test/GKR/").keys()
    last = rows(tmp_path / "run" / "metrics.csv")[-1]
    assert {"model/parameters", "model/trained/GKR/parameters"} <= last.keys()


@pytest.mark.seconds
def test_the_global_model_is_scored_where_there_is_one():
    made = client(FedAvg, norm_stats="averaged")
    federation = run(made, digits(3), evaluate="before")
    alone = run(made, digits(3), evaluate="global")
    assert [row for row in federation.other_rows if row.state == "global"] == alone.rows
    assert [row.state for row in alone.other_rows] == ["trained", "aggregated"] * 3
    assert [row for row in alone.other_rows if row.state == "trained"] == federation.rows
    assert federation.trainer.callback_metrics["test/global/acc"] == alone.rows[0].scores["acc"]
    assert "test/global/acc_std" not in federation.trainer.callback_metrics
    assert "test/trained/acc_worst10" in alone.trainer.callback_metrics


@pytest.mark.parametrize("made", [client(FedAvg), client(FedPer, norm_stats="averaged"), client(StandAlone)])
def test_without_a_whole_global_model_there_is_no_score_of_one(made):
    assert {row.state for row in run(made, digits(3)).other_rows} == {"aggregated"}


def test_an_untrained_federation_has_one_state():
    federation = Federation(client(PsiNet), seed=3, threads=1)
    trainer().test(federation, datamodule=digits(3), verbose=False)
    assert len(federation.rows) == 3
    assert federation.other_rows == []


def test_what_a_client_s_trainer_shows_is_of_the_run_s_own_state():
    federation = run(client(FedAvg), digits(3))
    shown = [float(federation.clients[row.client].trainer.callback_metrics["acc"]) for row in federation.rows]
    assert shown == pytest.approx([row.scores["acc"] for row in federation.rows])


def test_of_scores_of_which_none_knows_what_is_better_the_first_has_both_states(tmp_path, capsys):
    class Plain(Learner):
        def validation_step(self, batch, batch_idx):
            for name in ("val_loss", "val_again"):
                self.log(name, nn.functional.cross_entropy(self(batch[0]), batch[1]))

    federation = Federation(FedAvg(learner=Plain(nn.Flatten(), nn.Linear(64, 10))), seed=3, threads=1)
    trainer(2, callbacks=[ClientsTable()], default_root_dir=tmp_path).fit(federation, datamodule=digits())
    title, *table = capsys.readouterr().out.partition("Personalized ")[2].splitlines()
    assert title.strip() == "models after round 2, on each client's test data"
    headings = " ".join(table[:5])
    assert (headings.count("loss as"), headings.count("again")) == (2, 1)


@pytest.mark.seconds
def test_the_best_validated_round_is_said_and_marked(tmp_path, capsys):
    fitted(tmp_path / "run", "before", data=digits(3))
    scores = [float(row["val/acc"]) for row in rows(tmp_path / "run" / "metrics.csv")]
    best = max(scores)
    assert (
        f"On validation data, accuracy: {scores[-1]:.4f} after round 2, the last; {best:.4f} after round "
        f"{scores.index(best) + 1}, the best by these data.\n"
    ) in capsys.readouterr().out
    fitted(tmp_path / "other", "before", data=digits(3, train_fraction=0.5, val_fraction=0.0, test_fraction=0.5))
    assert "the best" not in capsys.readouterr().out  # test data choose no round
