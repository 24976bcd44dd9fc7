"""Which runs belong together, and what is made of their numbers; computed once more with NumPy."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from lit_pfl.cli.report import read, run_folders
from lit_pfl.errors import ConfigError
from lit_pfl.report import Group, Run, check, grouped, main_metric, paired, paired_by_state, summary, validated
from lit_pfl.report.charts import SPARSITY, client_by_client, distributions, layers, losses, over_rounds
from lit_pfl.report.maps import similarities
from lit_pfl.report.numbers import Metric, best_validated, curve, last_scores
from lit_pfl.report.tables import options_in_common, options_that_differ, runs_there, written
from lit_pfl_callbacks.run_folder import latest_config
from lit_pfl_callbacks.scores_shown import byte_unit, human_bytes
from report.made import make_run, make_runs, write

ACC = Metric("acc", "val/acc", "test/acc")


@pytest.fixture(scope="module")
def groups(tmp_path_factory) -> list[Group]:
    folder = tmp_path_factory.mktemp("runs")
    make_runs(folder, ["SimFed", "FedAvg", "StandAlone"], clients=12, rounds=4)
    return grouped([read(one) for one in run_folders(folder)])


def column(run: Run, name: str) -> list[str]:
    """Read a column of metrics.csv without the code that is tested."""
    head, *lines = (run.folder / "metrics.csv").read_text().splitlines()
    return [line.split(",")[head.split(",").index(name)] for line in lines]


def last(groups: list[Group], name: str) -> np.ndarray:
    return np.array([[float(column(run, name)[-1]) for run in group.runs] for group in groups])


def test_runs_that_differ_in_the_seed_only_are_a_group(groups):
    assert [(group.name, [run.seed for run in group.runs]) for group in groups] == [
        ("FedAvg", [1, 2, 3]), ("SimFed", [1, 2, 3]), ("StandAlone", [1, 2, 3]),
    ]  # fmt: skip


def run_with(folder: str, **options: object) -> Run:
    return Run(Path(folder), {"model": "lit_pfl.methods.SimFed", "seed_everything": 1, **options})


def test_what_differs_names_runs_of_one_method():
    runs = [
        run_with("a", **{"model.tau": 0.5, "data.partition.alpha": 1}),
        run_with("b", **{"model.tau": 0.9, "data.partition.alpha": 1}),
    ]
    assert [group.name for group in grouped(runs)] == ["SimFed, tau=0.5", "SimFed, tau=0.9"]


def test_what_belongs_to_a_method_does_not_name_another_one():
    runs = [run_with("a", **{"model.tau": 0.5}), run_with("b", model="lit_pfl.methods.FedAvg")]
    assert [group.name for group in grouped(runs)] == ["SimFed", "FedAvg"]


def test_what_is_not_the_methods_names_all():
    runs = [run_with("a", **{"data.alpha": 1}), run_with("b", model="lit_pfl.methods.FedAvg", **{"data.alpha": 2})]
    assert [group.name for group in grouped(runs)] == ["SimFed, data.alpha=1", "FedAvg, data.alpha=2"]


def test_runs_without_a_configuration_go_by_their_folders():
    assert [group.name for group in grouped([Run(Path("a/x"), {}), Run(Path("a/y"), {})])] == ["x", "y"]


def test_a_run_without_a_configuration_differs_from_no_other_one():
    options = {"model.tau": 0.5, "data.alpha": 1}
    runs = [Run(Path("a/x"), {}), run_with("a", **options), run_with("b", **options | {"model.tau": 0.9})]
    groups = grouped(runs)
    assert [group.name for group in groups] == ["x", "SimFed, tau=0.5", "SimFed, tau=0.9"]
    assert [row[0] for row in options_that_differ(groups).rows] == ["model.tau"]
    common = options_in_common(groups)
    assert common.title == "What all with a configuration have in common"
    assert ["data.alpha", "1"] in common.rows


def test_the_table_is_what_numpy_says(groups):
    table = summary(groups, ACC)
    scores = {
        "accuracy (%)": "test/acc",
        "deviation over clients": "test/acc_std",
        "worst 10 % of clients": "test/acc_worst10",
    }
    assert table.columns == ["method", "seeds", *scores, "sent, both ways"]
    for place, name in enumerate(scores.values(), start=2):
        values = last(groups, name) * 100
        expected = [f"{m:.2f} ± {d:.2f}" for m, d in zip(values.mean(1), values.std(1, ddof=1), strict=True)]
        assert [row[place] for row in table.rows] == expected
    assert [row[-1] for row in table.rows] == ["28.80 MB", "38.40 MB", "0 B"]  # 12 clients x 4 rounds x 2 x 0.3 MB, ...


def test_differences_are_paired_by_seed(groups):
    table = paired(groups, ACC)
    values = last(groups, "test/acc") * 100
    for i, row in enumerate(table.rows):
        for j, cell in enumerate(row[1:]):
            difference = values[i] - values[j]
            assert cell == ("" if i == j else f"{difference.mean():+.2f} ± {difference.std(ddof=1):.2f}")


def test_only_common_seeds_are_paired(tmp_path):
    runs = [
        make_run(tmp_path / f"{m}{s}", m, s) for m, s in (("SimFed", 1), ("SimFed", 2), ("FedAvg", 2), ("FedAvg", 3))
    ]
    groups = grouped([read(run) for run in runs])
    difference = last(groups, "test/acc")[0, 1] - last(groups, "test/acc")[1, 0]
    assert paired(groups, ACC).rows[0][2] == f"{100 * difference:+.2f}"
    assert paired(groups[:1] + [Group("other", groups[1].runs[1:])], ACC) is None


@pytest.mark.parametrize("seed", [{}, {"seed_everything": None}, {"seed_everything": False}])
def test_runs_whose_seed_nobody_knows_are_tabled_and_not_paired(tmp_path, seed):
    folders = [make_run(tmp_path / m, m, 1) for m in ("SimFed", "FedAvg")]
    groups = [Group(folder.name, [Run(folder, seed), Run(folder, seed)]) for folder in folders]
    assert paired(groups, ACC) is None
    assert [row[1] for row in summary(groups, ACC).rows] == ["2", "2"]
    assert summary(groups, ACC).rows[0][2] == f"{100 * last(groups, 'test/acc')[0, 0]:.2f} ± 0.00"


def test_a_copy_of_a_run_counts_nowhere_and_is_listed(tmp_path):
    """Of a seed that is there twice, the last one counts."""
    for seed in (1, 2):
        make_run(tmp_path / f"{seed}", "FedAvg", seed)
    shutil.copytree(tmp_path / "2", tmp_path / "1_copy")
    config = tmp_path / "1_copy" / "config.yaml"
    config.write_text(config.read_text().replace("seed_everything: 2", "seed_everything: 1"))
    (group,) = groups = grouped([read(one) for one in run_folders(tmp_path)])
    assert [run.folder.name for run in group.runs] == ["1_copy", "2"]
    assert [row[1] for row in (summary(groups, ACC).rows[0], validated(groups, ACC).rows[0])] == ["2", "2"]
    assert all(row["low"] == row["high"] for row in curve(group, "val/acc"))
    assert [(row[1], Path(row[3]).name) for row in runs_there(groups).rows] == [
        ("1", "1_copy"), ("2", "2"), ("1, does not count: another run has it", "1"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("file", "columns", "row", "column"),
    [
        ("clients.csv", "round split model acc", ["abc", "val", "personalized:before", 0.5], "round"),
        ("clients.csv", "client round split model acc", [0, 4, "val", "personalized:before", "hello"], "acc"),
        ("times.csv", "round phase seconds", [1, "training", ""], "seconds"),
        ("partition.csv", "client class split count", [0, "cat", "train", 3], "class"),
        ("similarity.csv", "round client other cosine", [1, 0, 1, ""], "cosine"),
    ],
)
def test_a_cell_that_is_no_number_is_named(tmp_path, file, columns, row, column):
    write(tmp_path / "metrics.csv", "round val/acc", [[1, 0.5]])
    write(tmp_path / file, columns, [row])
    with pytest.raises(ConfigError, match=f"{tmp_path}/{file} has '.*' as '{column}', which must be a number"):
        Run(tmp_path, {}).table(file, *columns.split())


@pytest.mark.parametrize("value", ["1.5", "nan", "inf"])
def test_a_round_that_is_no_whole_number_is_named(tmp_path, value):
    write(tmp_path / "similarity.csv", "round client other cosine", [["1.0", 0, 1, 0.5], [value, 0, 1, 0.5]])
    with pytest.raises(ConfigError, match=f"similarity.csv has '{value}' as 'round', which must be a whole number"):
        Run(tmp_path, {}).table("similarity.csv", "round", "client", "other", "cosine")


def test_files_that_a_spreadsheet_has_written(tmp_path):
    file = tmp_path / "metrics.csv"
    file.write_bytes(b"\xef\xbb\xbfround,val/acc\r\n1.0,0.5\r\n")
    assert Run(tmp_path, {}).metrics == [{"round": 1.0, "val/acc": 0.5}]
    file.write_text("round;val/acc\n1;0,5\n")
    with pytest.raises(ConfigError, match=r"metrics.csv has semicolons between its columns; write commas"):
        Run(tmp_path, {}).metrics  # noqa: B018


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([2.1e-5, 3.4e-5], "0.00002750 ± 0.00000919"),
        ([1.2e9, 1.3e9], "1250000000 ± 70710678"),
        ([0.5, 0.7], "0.6000 ± 0.1414"),
        ([0.0, 0.0], "0.0000 ± 0.0000"),
        ([12.344, 12.348], "12.3460 ± 0.0028"),
        ([0.25], "0.2500"),
    ],
)
def test_small_and_large_numbers_are_written_with_the_digits_that_matter(values, text):
    assert written(values) == text


def test_a_copy_of_a_configuration_is_none_that_a_run_had(tmp_path):
    for name in ("config", "config.resumed_2", "config.resumed_10", "config.resumed_3 (copy)", "config.resumed_x"):
        (tmp_path / f"{name}.yaml").touch()
    assert latest_config(tmp_path).name == "config.resumed_10.yaml"


def test_a_layer_without_a_rank_is_shown(tmp_path):
    write(tmp_path / "metrics.csv", "round val/acc", [[1, 0.5]])
    write(tmp_path / "sparsity.csv", " ".join(SPARSITY), [[1, "body.0", 3, 4, ""]])
    assert layers([Group("FedAvg", [Run(tmp_path, {})])])


def test_a_last_line_without_its_end_was_cut_off(tmp_path):
    (tmp_path / "times.csv").write_text("round,phase,seconds\n1,training,2.5\n2,training,1")
    assert [row["seconds"] for row in Run(tmp_path, {}).table("times.csv", "round", "seconds")] == ["2.5"]


@pytest.mark.parametrize("round", ["nan", "inf", 1.5])
def test_rounds_are_whole_numbers(tmp_path, round):
    write(tmp_path / "metrics.csv", "round val/acc", [[round, 0.5]])
    with pytest.raises(ConfigError, match=r"metrics\.csv has a 'round' that is not a whole number"):
        check([Run(tmp_path, {})])


@pytest.mark.parametrize("config", [b"trainer: {max_epochs: two}\n1: 2\n", "model: Ü".encode("latin-1")])
def test_a_configuration_of_anything_is_read_or_refused(tmp_path, config):
    write(tmp_path / "metrics.csv", "round test/acc", [[1, 0.5]])
    (tmp_path / "config.yaml").write_bytes(config)
    if b"two" in config:
        assert read(tmp_path).finished
    else:
        with pytest.raises(ConfigError, match=r"config\.yaml is not YAML"):
            read(tmp_path)


@pytest.mark.parametrize("part", ["init_args", "dict_kwargs"])
def test_options_without_names_are_refused(tmp_path, part):
    write(tmp_path / "metrics.csv", "round test/acc", [[1, 0.5]])
    (tmp_path / "config.yaml").write_text(f"model: {{class_path: FedAvg, {part}: 3}}\n")
    with pytest.raises(ConfigError, match=rf"^runs: .*config\.yaml: model\.{part}=3: give options by their names"):
        read(tmp_path)


def test_a_seed_that_is_no_number_is_not_known():
    runs = [run_with("a", seed_everything=[1]), run_with("b", seed_everything=[1])]
    assert [len(group.runs) for group in grouped(runs)] == [2]


def test_attacked_runs_are_apart(tmp_path):
    attacked, clean = (make_run(tmp_path / name, "FedAvg", 1) for name in ("attacked", "clean"))
    for folder, callbacks in ((attacked, "[{class_path: a.SignFlip, init_args: {scale: 3}}]"), (clean, "null")):
        path = folder / "config.yaml"
        path.write_text(path.read_text().replace("trainer:\n", f"trainer:\n  callbacks: {callbacks}\n"))
    names = [group.name for group in grouped([read(attacked), read(clean)])]
    assert names == ["FedAvg, trainer.callbacks=[SignFlip(scale=3)]", "FedAvg, trainer.callbacks=null"]


def test_a_seed_of_zero_is_one(tmp_path):
    folders = [make_run(tmp_path / m, m, 0) for m in ("SimFed", "FedAvg")]
    assert paired(grouped([read(folder) for folder in folders]), ACC) is not None


def test_markdown_and_latex_hold_the_same_cells(groups):
    table = summary(groups, ACC)
    markdown = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.markdown().splitlines()]
    assert [markdown[0], *markdown[2:]] == [list(table.columns), *map(list, table.rows)]
    latex = table.latex().splitlines()
    assert latex[0] == r"\begin{tabular}{lrrrrr}"
    assert latex[2].startswith(r"method & seeds & accuracy (\%)")
    cells = [line.removesuffix(r" \\").split(" & ") for line in latex[4:-2]]
    assert [[cell.strip("$").replace(r" \pm ", " ± ") for cell in row] for row in cells] == [
        list(row) for row in table.rows
    ]


def test_the_curve_is_mean_and_deviation_over_seeds(groups):
    rows = curve(groups[1], "val/acc", 100.0)
    values = np.array([column(run, "val/acc") for run in groups[1].runs], dtype=float) * 100
    np.testing.assert_allclose([row["mean"] for row in rows], values.mean(0))
    np.testing.assert_allclose([row["high"] - row["low"] for row in rows], 2 * values.std(0, ddof=1))
    np.testing.assert_allclose([row["bytes"] for row in rows], [2 * 12 * 400_000 * r for r in range(1, 5)])


@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_a_run_that_came_to_no_number_is_reported(tmp_path, bad):
    pytest.importorskip("altair")
    for seed in (1, 2):
        make_run(tmp_path / str(seed), "SimFed", seed, rounds=2)
    path = tmp_path / "1" / "metrics.csv"
    head, first, last = path.read_text().splitlines()
    names, cells = head.split(","), last.split(",")
    for name in ("train/loss", "val/acc", "test/acc"):
        cells[names.index(name)] = bad
    path.write_text("\n".join([head, first, ",".join(cells)]) + "\n")
    groups = grouped([read(tmp_path / seed) for seed in ("1", "2")])
    assert f"| {bad} ± nan |" in summary(groups, ACC).markdown()
    assert str(curve(groups[0], "val/acc")[-1]["mean"]) == bad
    assert losses(groups) is not None
    assert over_rounds(groups, ACC) is not None


def test_a_client_whose_score_is_no_number_hides_no_other_one(tmp_path):
    pytest.importorskip("altair")
    make_run(tmp_path / "run", "SimFed", 1)
    path = tmp_path / "run" / "clients.csv"
    *lines, last = path.read_text().splitlines()
    path.write_text("\n".join([*lines, last.rpartition(",")[0].rpartition(",")[0] + ",nan,1.0"]) + "\n")
    groups = grouped([read(tmp_path / "run")])
    picture = distributions(groups, ACC)
    known = [score for score in last_scores(groups[0].runs[0], ACC).values() if score == score]
    box = next(iter(picture.chart.to_dict()["datasets"].values())).splitlines()[1].split(",")
    assert [float(cell) for cell in box[1:]] == pytest.approx(np.quantile(known, [0, 0.25, 0.5, 0.75, 1]), rel=1e-5)
    for one in (picture, client_by_client(groups, ACC)):
        assert one.says.endswith("Not drawn, since they are no numbers: 1 of 5 scores.")


def test_the_last_scores_are_those_on_test_data(groups):
    scores = last_scores(groups[0].runs[0], ACC)
    assert len(scores) == 12
    assert np.mean(list(scores.values())) == pytest.approx(100 * float(column(groups[0].runs[0], "test/acc")[-1]))


def test_of_several_models_the_first_is_shown(tmp_path):
    make_run(tmp_path / "a", "FedAvg", 1, clients=2)
    rows = [[k, 6, "test", m, 5, a] for k in (0, 1) for m, a in (("personalized:before", 0.5), ("global:before", 0.1))]
    write(tmp_path / "a/clients.csv", "client round split model n acc", rows)
    assert last_scores(read(tmp_path / "a"), ACC) == {0: 50.0, 1: 50.0}


@pytest.mark.parametrize(
    ("evaluate", "shown"), [("before", [50.0, 30.0]), ("after", [90.0, 30.0]), ("global", [70.0]), (None, [50.0, 30.0])]
)
def test_a_later_test_of_another_state_does_not_change_whose_scores_are_shown(tmp_path, evaluate, shown):
    made = read(make_run(tmp_path / "a", "FedAvg", 1, clients=2))
    rows = [
        [1, 6, "test", "personalized:untrained", 5, 0.3],
        [0, 6, "test", "personalized:before", 5, 0.5],
        [0, 6, "test", "personalized:after", 5, 0.9],
        [-1, 6, "test", "global", 5, 0.7],
    ]
    write(tmp_path / "a/clients.csv", "client round split model n acc", rows)
    run = Run(made.folder, {**made.options, "federation.evaluate": evaluate})
    assert sorted(last_scores(run, ACC).values(), reverse=True) == shown


def test_an_earlier_test_and_other_data_are_not_the_last_scores(tmp_path):
    """A run of 6 rounds, tested after 3 and interrupted later: shown are none, or its validation where tables are."""
    make_run(tmp_path / "a", "FedAvg", 1, clients=2)
    rows = [[k, 3, "test", "personalized:before", 5, 0.4] for k in (0, 1)]
    rows += [[k, r, "val", "personalized:before", 5, r / 10] for r in (5, 6) for k in (0, 1)]
    write(tmp_path / "a/clients.csv", "client round split model n acc", rows)
    run = read(tmp_path / "a")
    assert last_scores(run, ACC) == {}
    assert last_scores(run, Metric("acc", "val/acc", "val/acc")) == {0: 60.0, 1: 60.0}


def test_charts_of_clients_say_on_which_data_and_how_many_runs_are_left_out(tmp_path):
    runs = [make_run(tmp_path / f"seed_{seed}", "FedAvg", seed) for seed in (1, 2, 3)]
    drawn = (distributions, client_by_client)
    groups = grouped([read(run) for run in runs])
    for draw in drawn:
        assert "on test data" in draw(groups, ACC).says
        assert "Left out" not in draw(groups, ACC).says
    for name in ("metrics.csv", "clients.csv"):  # interrupted before its test
        path = runs[1] / name
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:6]))
    for draw in drawn:
        assert "Left out, without such scores of the last round: 1 of 3 runs." in draw(groups, ACC).says


@pytest.mark.parametrize(
    ("columns", "chosen"),
    [
        ("val/loss val/acc test/loss test/acc", Metric("acc", "val/acc", "test/acc")),
        ("test/loss test/acc", Metric("acc", "test/acc", "test/acc")),
        ("val/loss val/f1 val/auc val/auc_worst10", Metric("auc", "val/auc", "val/auc")),
        ("val/loss val/global/acc val/mae val/mae_std", Metric("mae", "val/mae", "val/mae")),
        ("val/loss", Metric("loss", "val/loss", "val/loss")),
        ("train/loss", None),
    ],
)
def test_the_metric_to_compare_by(tmp_path, columns, chosen):
    write(tmp_path / "a/metrics.csv", f"round {columns}", [[1, *[0.5] * len(columns.split())]])
    assert main_metric([read(tmp_path / "a")]) == chosen


def test_runs_without_a_test_of_their_last_round_are_compared_by_validation(tmp_path):
    write(tmp_path / "a/metrics.csv", "round val/acc test/acc", [[1, 0.5, 0.4], [2, 0.6, ""]])
    assert main_metric([read(tmp_path / "a")]) == Metric("acc", "val/acc", "val/acc")


def test_a_run_that_is_not_finished_is_not_in_the_table(tmp_path):
    runs = [make_run(tmp_path / f"seed_{seed}", "FedAvg", seed) for seed in (1, 2)]
    path = runs[1] / "metrics.csv"
    path.write_text("\n".join(path.read_text().splitlines()[:4]) + "\n")
    (group,) = grouped([read(run) for run in runs])
    assert [run.finished for run in group.runs] == [True, False]
    assert summary([group], ACC).rows[0][1] == "1"


@pytest.mark.parametrize(
    ("content", "said"), [("", "no round"), ("round,val/acc\n", "no round"), ("step,a\n1,2\n", "'round'")]
)
def test_a_folder_without_rounds_is_named(tmp_path, content, said):
    (tmp_path / "metrics.csv").write_text(content)
    with pytest.raises(ConfigError, match=f"{tmp_path}.*{said}"):
        check([read(tmp_path)])


def test_what_is_no_number_is_named(tmp_path):
    write(tmp_path / "metrics.csv", "round val/acc", [[1, "much"]])
    with pytest.raises(ConfigError, match=f"{tmp_path}/metrics.csv: .*'much'"):
        check([read(tmp_path)])


@pytest.mark.parametrize(
    ("lines", "said"), [("1,0.5\n2,0.5,0.7\n", "a line of more columns than its first"), ("1,0.5\n,0.6\n", "'round'")]
)
def test_lines_that_do_not_fit_are_named(tmp_path, lines, said):
    (tmp_path / "metrics.csv").write_text("round,val/acc\n" + lines)
    with pytest.raises(ConfigError, match=f"{tmp_path}/metrics.csv has .*{said}"):
        check([read(tmp_path)])


def test_scores_of_a_trainer_that_is_nobody_s_client_are_no_client_s(tmp_path):
    write(tmp_path / "metrics.csv", "round test/acc", [[1, 0.5]])
    write(tmp_path / "clients.csv", "client round split model acc", [["", 1, "test", "personalized:before", 0.5]])
    assert last_scores(read(tmp_path), ACC) == {}


@pytest.mark.parametrize(
    ("rounds", "tested", "finished"), [(2, False, True), (2, True, True), (1, True, True), (1, False, False)]
)
def test_a_run_is_finished_with_its_rounds_or_its_test(tmp_path, rounds, tested, finished):
    """One may go without a test, and one may be ended by its privacy budget, and is tested then."""
    lines = [[r, 0.5, 0.5 if tested and r == rounds else ""] for r in range(1, rounds + 1)]
    write(tmp_path / "metrics.csv", "round val/acc test/acc", lines)
    assert Run(tmp_path, {"trainer.max_epochs": 2}).finished == finished


@pytest.mark.parametrize(("rounds", "finished"), [(1, False), (2, True)])
def test_a_run_that_is_tested_every_round_is_finished_with_its_rounds(tmp_path, rounds, finished):
    """As one without validation data."""
    write(tmp_path / "metrics.csv", "round test/acc", [[r, 0.5] for r in range(1, rounds + 1)])
    assert Run(tmp_path, {"trainer.max_epochs": 2}).finished == finished
    assert Run(tmp_path, {}).finished
    assert Run(tmp_path, {"trainer.max_epochs": -1}).finished


def test_what_is_no_table_is_named(tmp_path):
    (tmp_path / "metrics.csv").write_bytes(b"round,val/acc\n1,\xff\xfe\n")
    with pytest.raises(ConfigError, match=f"{tmp_path}/metrics.csv is not a CSV file"):
        check([read(tmp_path)])


def test_a_file_without_its_columns_is_named(tmp_path):
    make_run(tmp_path, "FedAvg", 1)
    write(tmp_path / "clients.csv", "who acc", [[1, 0.5]])
    with pytest.raises(ConfigError, match="clients.csv has no column 'client'"):
        last_scores(read(tmp_path), ACC)


@pytest.mark.seconds
def test_of_clients_that_were_not_measured_nothing_is_drawn(tmp_path):
    vl_convert = pytest.importorskip("vl_convert")
    folder = make_run(tmp_path / "run", "SimFed", 1)
    pairs = [(1, 0, 1, 0.5), (1, 0, 2, "nan"), (5, 1, 2, -0.25)]  # two of three took part in round 5
    lines = [[round, "update", *others] for round, *others in pairs]
    write(folder / "similarity.csv", "round group client other cosine", lines)
    picture = similarities(grouped([read(folder)]))
    chart = picture.chart.to_dict()
    for cells in ("100 50 - 50 100 - - - 100", "100 - - - 100 -25 - -25 100"):
        assert cells in str(chart)
    drawn = vl_convert.vegalite_to_svg(chart).count('aria-roledescription="rect mark"')
    assert drawn == 3 + 2  # of the last round


def test_units_of_bytes():
    assert [byte_unit(size)[0] for size in (0, 999, 1e3, 2.5e6, 1e9, 1e15)] == ["B", "B", "kB", "MB", "GB", "TB"]
    assert [human_bytes(size) for size in (999, 999_994, 999_996)] == ["999 B", "999.99 kB", "1.00 MB"]


def both_states(folder: Path, seed: int = 1, evaluate: str = "before", **more: float) -> Run:
    """A run of two rounds that was tested in two states."""
    folder.mkdir(parents=True)
    names = ["round", "val/acc", "val/acc_worst10", "test/acc", "test/acc_worst10", *more]
    rows = [[1, 0.8, 0.7, *[""] * (2 + len(more))], [2, 0.7, 0.6, 0.6, 0.5, *more.values()]]
    write(folder / "metrics.csv", " ".join(names), rows)
    options = {"model": f"lit_pfl.methods.{folder.parent.name}", "seed_everything": seed}
    return Run(folder, {**options, "federation.evaluate": evaluate})


def test_states_stand_side_by_side(tmp_path):
    aggregated = {"test/aggregated/acc": 0.3, "test/aggregated/acc_worst10": 0.2, "test/aggregated/GKR/acc": 0.1}
    groups = grouped([
        both_states(tmp_path / "FedAvg/1", **aggregated, **{"test/global/acc": 0.4, "new/aggregated/acc": 0.25}),
        both_states(tmp_path / "Ditto/1", evaluate="after", **{"test/trained/acc": 0.9}),
        both_states(tmp_path / "FedProx/1"),
    ])  # fmt: skip
    table = summary(groups, ACC)
    acc = "accuracy (%)"
    assert list(table.columns[2:]) == [
        f"{acc}, as trained", f"{acc}, as aggregated", f"{acc}, global model",
        "worst 10 % of clients, as trained", "worst 10 % of clients, as aggregated",
        f"{acc}, GKR model, as aggregated", f"{acc} of new clients, as they join",
    ]  # fmt: skip
    assert [list(row[2:]) for row in table.rows] == [
        ["60.00", "30.00", "40.00", "50.00", "20.00", "10.00", "25.00"],
        ["90.00", "60.00", "–", "–", "50.00", "–", "–"],  # noqa: RUF001
        ["60.00", "–", "–", "50.00", "–", "–", "–"],  # noqa: RUF001
    ]
    trained, after = paired_by_state(groups, ACC)  # one group alone has a global model
    assert trained.title.startswith("Accuracy (%), as trained: by how much")
    assert trained.rows[0][1:] == ["", "-30.00", "+0.00"]
    assert after.title.startswith("Accuracy (%), as aggregated: ")
    assert after.rows[0][1:] == ["", "-30.00", "–"]  # noqa: RUF001


def test_the_best_validated_round_stands_beside_the_last_where_every_round_was_validated(tmp_path):
    groups = grouped([both_states(tmp_path / f"FedAvg/{seed}", seed) for seed in (1, 2)])
    table = validated(groups, ACC)
    assert table.title.endswith("of the last round and of the best one, which these data choose")
    assert list(table.rows[0]) == ["FedAvg", "2", "70.00 ± 0.00", "80.00 ± 0.00", "1, 1"]
    made = make_run(tmp_path / "made", "FedAvg", 1)
    lines = [line.split(",") for line in (made / "metrics.csv").read_text().splitlines()]
    lines[2][2] = ""  # a round that was not validated
    (made / "metrics.csv").write_text("".join(",".join(line) + "\n" for line in lines))
    assert validated(grouped([read(made)]), ACC) is None
    one = both_states(tmp_path / "FedAvg/3")
    write(one.folder / "metrics.csv", "round test/acc", [[1, 0.9], [2, 0.1]])
    assert validated(grouped([one]), ACC) is None, "test data choose no round"


@pytest.mark.parametrize(("name", "best"), [("rmse", 2), ("f1", 1), ("loss", 2), ("unknown", None)])
def test_which_end_of_a_metric_is_good_is_seen_at_its_worst_tenth(tmp_path, name, best):
    worst = {"rmse": 0.2, "f1": -0.2}.get(name)
    columns = ["round", f"val/{name}", *([f"val/{name}_worst10"] if worst else [])]
    write(tmp_path / "metrics.csv", " ".join(columns), [
        [r, v, *([v + worst] if worst else [])] for r, v in ((1, 0.8), (2, 0.7))
    ])  # fmt: skip
    found = best_validated(Run(tmp_path, {}), Metric(name, f"val/{name}", f"val/{name}"))
    assert (found and found[0]) == best


@pytest.mark.parametrize(
    ("values", "best"), [(("nan", 0.5, 0.9), (3, 0.9)), ((0.5, "nan", 0.9), (3, 0.9)), (("nan", "nan", "inf"), None)]
)
@pytest.mark.parametrize("name", ["acc", "r2"])
def test_a_round_without_a_finite_score_is_not_the_best(tmp_path, name, values, best):
    lines = [[r, v, v if isinstance(v, str) else v - 0.2] for r, v in enumerate(values, 1)]
    write(tmp_path / "metrics.csv", f"round val/{name} val/{name}_worst10", lines)
    assert best_validated(Run(tmp_path, {}), Metric(name, f"val/{name}", f"val/{name}")) == best
