"""Configurations that come with lit-pfl: found by name anywhere, listed, copied, and part of the wheel."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from cli.typed import ROOT, typed
from lit_pfl.cli.compare import make_jobs
from lit_pfl.cli.config_files import FOLDER, find, names, with_fragments
from lit_pfl.cli.configs import about, copied


def test_a_checkout_has_them_where_they_are_and_each_begins_with_what_it_is():
    assert FOLDER == ROOT / "configs"
    assert names()[0] == "agnosticfl"
    assert {"simfed", "logger/wandb", "paper/simfed/rows/simfed"} < set(names())
    assert all(map(about, names()))


@pytest.mark.parametrize("name", ["simfed", "simfed.yaml", "configs/simfed.yaml", "configs/simfed"])
def test_a_name_is_of_the_user_s_own_file_first(name):
    assert find(name) == ROOT / "configs/simfed.yaml"
    Path("configs").mkdir()
    own = Path(name.removesuffix(".yaml") + ".yaml")
    own.touch()
    assert find(name) == own


def test_a_run_by_names(capsys):
    Path("my").mkdir()
    Path("my/own.yaml").write_text("fragments: [logger/tensorboard]\nmodel: {init_args: {tau: 0.25}}")
    came = typed(capsys, "fit", "--config", "simfed", "--config", "my/own", "--print_config")
    options = yaml.safe_load(came.out)
    assert options["model"]["class_path"] == "lit_pfl.methods.SimFed"
    assert options["model"]["init_args"]["tau"] == 0.25
    assert "TensorBoardLogger" in str(options["trainer"]["logger"])


def test_a_comparison_by_names():
    Path("quick.yaml").write_text("trainer: {max_epochs: 1}")
    one, other = make_jobs(["simfed", "FedAvg"], [1], ["quick", "logger/mlflow"], Path("out"))
    assert one.folder == Path("out/simfed/seed_1")
    shared = ("--config", "quick.yaml", "--config", str(ROOT / "configs/logger/mlflow.yaml"))
    assert one.arguments[:6] == ("--config", str(ROOT / "configs/simfed.yaml"), *shared)
    assert other.arguments[:6] == ("--model", "FedAvg", *shared)


NONE = "there is no such file, and no configuration of this name."


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("fit --config simfd", f"config=simfd: {NONE} Did you mean simfed?"),
        ("fit --config configs/SimFed.yml", f"config=configs/SimFed.yml: {NONE} Did you mean simfed?"),
        ("fit --config wandbb", f"config=wandbb: {NONE} Did you mean logger/wandb?"),
        ("fit --config ?", f"config=?: {NONE} `lit-pfl configs` lists all."),
        ("fit --config top.yaml", "top.yaml: fragments: there is no file simfd. Did you mean simfed?"),
        ("configs simfd", "configs: there is no configuration 'simfd'. Did you mean simfed?"),
        ("compare --methods simfd.yaml", "--methods: there is no file simfd.yaml. Did you mean simfed?"),
        ("compare --methods FedAvg --config quik", f"config=quik: {NONE} Did you mean quick?"),
    ],
)
def test_an_unknown_name_gets_one_line_with_a_suggestion(words, said, capsys):
    Path("top.yaml").write_text("fragments: [simfd]")
    came = typed(capsys, *words.split())
    assert (came.code, came.errors) == (2, [f"lit-pfl: error: {said}"])


def test_they_are_listed_and_deeper_folders_are_counted(capsys):
    lines = typed(capsys, "configs").out.splitlines()
    assert [line.split()[0] for line in lines[:-4]] == [name for name in names() if name.count("/") < 2]
    assert next(line for line in lines if line.startswith("simfed ")).endswith(
        " SimFed among 20 clients that each number the digits in their own way"
    )
    deep = sum(name.startswith("paper/") and name.count("/") > 1 for name in names())
    assert lines[-4].split() == ["paper/", str(deep), "more:", "lit-pfl", "configs", "paper"]
    within = typed(capsys, "configs", "configs/paper/simfed/").out.splitlines()
    assert [line.split()[0] for line in within[:-2]] == [name for name in names() if name.startswith("paper/simfed/")]


def test_one_is_copied_and_nothing_is_overwritten(capsys):
    came = typed(capsys, "configs", "logger/wandb")
    assert came.out == "Copied to wandb.yaml. Run it: lit-pfl fit --config wandb.yaml\n"
    assert Path("wandb.yaml").read_text() == (ROOT / "configs/logger/wandb.yaml").read_text()
    Path("wandb.yaml").write_text("mine")
    came = typed(capsys, "configs", "logger/wandb.yaml")
    assert (came.code, came.errors) == (
        2, ["lit-pfl: error: configs: wandb.yaml already exists in this folder; rename or move it first."]
    )  # fmt: skip
    assert Path("wandb.yaml").read_text() == "mine"


def test_a_copy_builds_on_what_its_original_builds_on():
    for original in (file for file in FOLDER.rglob("*.yaml") if "\nfragments:" in file.read_text()):
        name, copy = original.relative_to(FOLDER).with_suffix("").as_posix(), Path("copy.yaml")
        copy.write_text(copied(name))
        one, other = (list(map(os.path.realpath, with_fragments(str(file))[:-1])) for file in (copy, original))
        assert one == other, name
        one, other = (yaml.safe_load(file.read_text()) for file in (copy, original))
        assert {**one, "fragments": None} == {**other, "fragments": None}


@pytest.mark.slow
def test_what_is_installed_runs_from_anywhere(tmp_path):
    """The unpacked wheel contains them; an editable install contains only the path to the repository."""
    for package in ("hatchling", "editables"):
        pytest.importorskip(package)
    build = "import sys, hatchling.build as b; b.build_wheel(sys.argv[1]); b.build_editable(sys.argv[2])"
    subprocess.run([sys.executable, "-c", build, tmp_path / "wheel", tmp_path / "editable"], cwd=ROOT, check=True)
    [wheel], [editable] = ((tmp_path / kind).glob("*.whl") for kind in ("wheel", "editable"))
    assert not [file for file in zipfile.ZipFile(editable).namelist() if file.endswith(".yaml")]
    zipfile.ZipFile(wheel).extractall(tmp_path / "there")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "there")}

    def run(*words: str) -> str:
        command = [sys.executable, "-P", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    where = "from importlib.resources import files; print(files('lit_pfl') / 'configs/simfed.yaml')"
    assert Path(run("-c", where).strip()).read_text() == (ROOT / "configs/simfed.yaml").read_text()
    assert run("-m", "lit_pfl", "configs").splitlines()[0].startswith("agnosticfl ")
    run("-m", "lit_pfl", "fit", "--config", "quick", "--model", "FedAvg", "--trainer.max_epochs", "1")
    assert Path("runs/FedAvg-Digits/version_0/clients.csv").is_file()
