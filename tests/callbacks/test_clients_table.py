"""The table of clients, and its file."""

from math import nan
from pathlib import Path

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from callbacks.plain import Group, Line, Score, batches, rows, trainer
from lit_pfl_callbacks import ClientsTable, resume_command


class Scored(Group):
    """Its clients' scores grow by a tenth of a point a round; a second model of theirs is worse."""

    def validation_step(self, batch, batch_idx):
        round = self.current_epoch + 1
        self.rows = [
            Score(
                client,
                round,
                "val",
                f"{model}:before",
                8,
                {"acc": 0.5 + client / 10 + round / 1000 - less, "loss": 1.0},
            )
            for client in range(3)
            for model, less in (("personalized", 0.0), ("other", 0.4))
        ]


def test_a_module_that_tells_no_scores_has_a_file_of_what_it_logs_and_no_table(tmp_path, capsys):
    trainer(tmp_path, 2, [ClientsTable()]).fit(Line(), batches(), batches())
    lines = rows(tmp_path / "run" / "clients.csv")
    assert [(x["client"], x["round"], x["split"], x["model"], x["n"]) for x in lines] == [
        ("", "1", "val", "own", "8"),
        ("", "2", "val", "own", "8"),
    ]
    assert float(lines[0]["acc"]) < float(lines[1]["acc"])
    assert "client" not in capsys.readouterr().out


def test_names_are_printed_as_they_are(tmp_path, capsys):
    class Named(Scored):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            self.rows = [row._replace(scores={"[acc]": 0.5, ":x:": 1.0}) for row in self.rows]

    folder = tmp_path / "[brackets]* :x:"
    fitting = trainer(folder, 1, [ClientsTable()])
    (folder / "run" / "checkpoints").mkdir(parents=True)
    for name in ("config.yaml", "checkpoints/last.ckpt"):
        (folder / "run" / name).touch()
    fitting.fit(Named(), batches(), batches())
    shown = capsys.readouterr().out
    assert f"Run folder: {folder}/run\n" in shown
    assert f"  {resume_command(folder / 'run')} --trainer.max_epochs 2\n" in shown
    assert shown.count(str(folder)) == 3
    assert "[acc]" in shown
    assert " :x: " in shown.partition("Run folder")[0]


def test_a_folder_that_begins_like_an_option_is_none_in_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("-dash")
    (folder / "checkpoints").mkdir(parents=True)
    for name in ("config.yaml", "checkpoints/last.ckpt"):
        (folder / name).touch()
    expected = "lit-pfl fit --config ./-dash/config.yaml --ckpt_path ./-dash/checkpoints/last.ckpt"
    assert resume_command(folder) == expected


@pytest.mark.parametrize(("start", "data"), [("fit", [batches(), batches()]), ("validate", [batches()])])
def test_code_that_is_only_tried_out_writes_no_file(start, data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # where a Trainer without a logger of its own has its root
    (tmp_path / "clients.csv").write_text("name,city\nAda,London\n")
    getattr(trainer(tmp_path, 1, [ClientsTable()], fast_dev_run=2), start)(Scored(), *data)
    assert (tmp_path / "clients.csv").read_text() == "name,city\nAda,London\n"
    assert "Run folder" not in capsys.readouterr().out


@pytest.mark.parametrize(("most", "shown"), [(4, "1 0 ... 4 5"), (1, "1 ..."), (0, "...")])
def test_of_many_the_worst_and_the_best_are_shown(most, shown, tmp_path, capsys):
    """NaN is worse than any number; no score at all is neither."""

    class Many(Scored):
        def validation_step(self, batch, batch_idx):
            values = [{"acc": 0.0}, {"acc": nan}, {"acc": 0.2}, {}, {"acc": 0.4}, {"acc": 0.5}]
            self.rows = [Score(k, 1, "val", "own:before", 8, scores) for k, scores in enumerate(values)]

    trainer(tmp_path, 1, [ClientsTable(most=most)]).fit(Many(), batches(), batches())
    lines = [line.split("│")[1].strip() for line in capsys.readouterr().out.splitlines() if line.count("│") > 2]
    assert " ".join(lines[: lines.index("mean")]) == shown


def test_scores_of_some_clients_replace_theirs_and_leave_the_others(tmp_path):
    trainer(tmp_path, 1, [ClientsTable()]).fit(Scored(), batches(), batches())
    before = rows(tmp_path / "run" / "clients.csv")

    class One(Scored):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            own = [row for row in self.rows if row.client == 1]
            self.rows = [row._replace(round=1, scores={"acc": 0.9, "loss": 1.0}) for row in own]

    trainer(tmp_path, 1, [ClientsTable()]).validate(One(), batches())
    expected = [{**line, "acc": "0.9"} if line["client"] == "1" else line for line in before]
    assert rows(tmp_path / "run" / "clients.csv") == expected


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("name,city\nAda,London\n", "has no column 'client'"),
        ("client,round,split,model,n\n0,1,val,own,8\n0,one,val,own,8\n", "line 3 has 'one' as 'round'"),
        ("client,round,split,model,n\n0,1,val,own,8,9\n", "line 2 has more fields"),
        ("client,round,split,model,n\n0,nan,val,own,8\n", "line 2 has 'nan' as 'round'"),
    ],
)
def test_a_damaged_file_is_refused_before_anything_is_computed(content, said, tmp_path):
    class Never(Scored):
        def on_train_start(self):
            raise AssertionError

        on_validation_start = on_train_start

    path = tmp_path / "run" / "clients.csv"
    path.parent.mkdir()
    path.write_text(content)
    for start in ("fit", "validate"):
        data = [batches()] * (1 + (start == "fit"))
        with pytest.raises(MisconfigurationException, match=f"{path}: {said}.*; mend it, or move it away"):
            getattr(trainer(tmp_path, 1, [ClientsTable()]), start)(Never(), *data)
        assert path.read_text() == content


def test_a_last_line_that_was_cut_off_does_not_count(tmp_path):
    path = tmp_path / "run" / "clients.csv"
    path.parent.mkdir()
    path.write_text("client,round,split,model,n,acc\n0,0,val,personalized:before,8,0.25\n1,0,val,pers")
    trainer(tmp_path, 1, [ClientsTable()]).fit(Scored(), batches(), batches())
    assert rows(path)[0]["acc"] == "0.25"
    assert len(rows(path)) == 1 + 6


def test_metrics_that_come_later_have_columns_of_their_own(tmp_path):
    class Changing(Scored):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            scores = [{"acc": 0.1, "loss": 1.0}, {"f1": 0.2, "acc": 0.3}, {"loss": 4.0}][self.current_epoch]
            self.rows = [row._replace(scores=scores) for row in self.rows[:2]]

    trainer(tmp_path, 3, [ClientsTable()]).fit(Changing(), batches(), batches())
    found = [(line["acc"], line["loss"], line["f1"]) for line in rows(tmp_path / "run" / "clients.csv")]
    assert found == [("0.1", "1.0", "")] * 2 + [("0.3", "", "0.2")] * 2 + [("", "4.0", "")] * 2


def test_a_metric_with_the_name_of_another_column_has_one_of_its_own(tmp_path):
    class Counting(Scored):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            self.rows = [row._replace(scores={"n": 0.5, "round": 0.25}) for row in self.rows[:2]]

    trainer(tmp_path, 2, [ClientsTable()]).fit(Counting(), batches(), batches())
    found = [
        (line["round"], line["n"], line["n_score"], line["round_score"]) for line in rows(tmp_path / "run/clients.csv")
    ]
    assert found == [(round, "8", "0.5", "0.25") for round in "1122"]


def test_another_run_of_the_same_callback_has_a_file_of_its_own(tmp_path):
    table = ClientsTable()
    for name in ("one", "two"):
        trainer(tmp_path / name, 2, [table]).fit(Scored(), batches(), batches())
    assert rows(tmp_path / "two" / "run" / "clients.csv") == rows(tmp_path / "one" / "run" / "clients.csv")
