"""``trainer.default_root_dir``: where run folders are, unless a logger says it."""

from pathlib import Path

import pytest
import yaml

from cli.test_compare import fit  # noqa: F401 - a fixture
from cli.typed import TINY, rows, typed
from lit_pfl.cli.compare import _root

FIT = ["fit", *TINY, "--trainer.max_epochs", "1", "--model", "FedAvg"]


@pytest.mark.seconds
def test_run_folders_are_below_it_and_a_resume_goes_on_there(capsys):
    came = typed(capsys, *FIT, "--trainer.default_root_dir", "mine")
    folder = Path("mine/FedAvg-Digits/version_0")
    assert (came.code, Path("runs").exists()) == (0, False)
    assert f"Run folder: {folder}\n" in came.out
    command = next(line for line in came.out.splitlines() if line.startswith("  lit-pfl fit")).split()[1:]
    assert command == [
        "fit", "--config", f"{folder}/config.yaml", "--ckpt_path", f"{folder}/checkpoints/last.ckpt",
        "--trainer.max_epochs", "2",
    ]  # fmt: skip
    assert typed(capsys, *command).code == 0
    assert [row["round"] for row in rows(folder / "metrics.csv")] == ["1", "2"]
    assert [path.name for path in folder.parent.iterdir()] == ["version_0"]
    # the configuration of a run serves for another one elsewhere
    came = typed(capsys, "fit", "--config", f"{folder}/config.yaml", "--trainer.default_root_dir", "other")
    assert "Run folder: other/FedAvg-Digits/version_0\n" in came.out
    assert not Path("runs").exists()


@pytest.mark.seconds
def test_a_test_of_a_checkpoint_writes_into_its_run(capsys):
    typed(capsys, *FIT, "--trainer.default_root_dir", "mine")
    folder = Path("mine/FedAvg-Digits/version_0")
    checkpoint = ["--ckpt_path", f"{folder}/checkpoints/last.ckpt"]
    came = typed(capsys, "test", *FIT[1:], "--trainer.default_root_dir", "elsewhere", *checkpoint)
    assert came.code == 0
    assert "test" in {row["split"] for row in rows(folder / "clients.csv")}
    assert not Path("elsewhere").exists()
    assert not Path("runs").exists()


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("words", "folder"),
    [
        ([], "runs/FedAvg-Digits/version_0"),
        (["--trainer.default_root_dir", "mine", "--trainer.logger.save_dir", "own"], "own/FedAvg-Digits/version_0"),
        (["--trainer.default_root_dir", "mine", "--folder", "one"], "one"),
        (["--trainer.default_root_dir", "~/mine"], "home/mine/FedAvg-Digits/version_0"),
        (["--trainer.default_root_dir", "mine", "--trainer.logger", "true"], "mine/lightning_logs/version_0"),
    ],
)
def test_a_logger_s_own_folder_and_the_one_by_name_win(words, folder, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(Path("home").absolute()))
    came = typed(capsys, *FIT, *words)
    assert (came.code, came.errors) == (0, [])
    assert len(rows(Path(folder) / "clients.csv")) == 9  # three validated, and tested in both states
    assert {path.name for path in Path().iterdir()} == {Path(folder).parts[0]}


def test_a_folder_of_another_machine_is_refused(capsys):
    [error] = typed(capsys, *FIT, "--trainer.default_root_dir", "s3://bucket/runs").errors
    assert "trainer.default_root_dir=s3://bucket/runs: run folders are files of this machine; give a path." in error
    assert not list(Path().iterdir())


@pytest.mark.slow
def test_a_comparison_is_below_it(fit, capsys):  # noqa: F811
    Path("common.yaml").write_text(yaml.safe_dump({"trainer": {"default_root_dir": "mine"}}))
    came = typed(capsys, "compare", "--methods", "FedAvg", "--seeds", "1", "--config", "common.yaml")
    assert came.code == 0
    assert "Report: mine/compare/report.html" in came.out
    assert not Path("runs").exists()


def test_the_last_folder_that_a_comparison_s_configurations_have_in_common_counts():
    assert _root([]) is _root(["trainer: null", "{trainer: {max_epochs: 1}}"]) is None
    assert _root(["{trainer: {default_root_dir: one}}", "{trainer: {default_root_dir: two}}", "data: Digits"]) == "two"
