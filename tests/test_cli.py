"""The command line, from words to files."""

import os
import subprocess
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
import yaml

from cli.typed import ROOT, TINY, rows
from lit_pfl.cli import main

METRICS = {
    "round", "train/loss", "val/acc", "val/acc_std", "val/acc_worst10", "test/acc",
    "comm/up_bytes", "comm/down_bytes", "comm/total_bytes",
}  # fmt: skip


def test_fit_leaves_a_whole_run_folder_and_shows_a_table(capsys):
    main(["fit", *TINY])
    folder = Path("runs/SimFed-Digits/version_0")
    metrics, clients = rows(folder / "metrics.csv"), rows(folder / "clients.csv")
    assert set(metrics[0]) >= METRICS
    assert [row["round"] for row in metrics] == ["1", "2"]
    assert float(metrics[1]["comm/total_bytes"]) == sum(
        float(row[key]) for row in metrics for key in ("comm/up_bytes", "comm/down_bytes")
    )
    assert list(clients[0]) == ["client", "round", "split", "model", "state", "n", "acc", "loss"]
    assert [(row["round"], row["split"], row["state"]) for row in clients[::3]] == [
        ("1", "val", "trained"), ("2", "val", "trained"), ("2", "test", "trained"), ("2", "test", "aggregated")
    ]  # fmt: skip
    assert yaml.safe_load((folder / "config.yaml").read_text())["model"]["init_args"]["tau"] == 0.9
    assert (folder / "checkpoints/last.ckpt").exists()
    shown = capsys.readouterr().out
    for part in (
        "round 2/2",
        "Personalized models after round 2",
        "test data",
        "mean",
        "worst 10%",
        str(folder),
        "--ckpt_path",
    ):
        assert part in shown


@pytest.mark.slow
def test_the_printed_next_command_goes_on_in_the_same_folder(capsys):
    main(["fit", *TINY, "--trainer.max_epochs", "1"])
    command = capsys.readouterr().out.split("lit-pfl ")[-1].split("\n\n")[0].split()
    main(command)
    folder = Path("runs/SimFed-Digits/version_0")
    assert [row["round"] for row in rows(folder / "metrics.csv")] == ["1", "2"]
    assert not (folder.parent / "version_1").exists()
    main(["fit", *TINY])
    for name in ("metrics.csv", "clients.csv"):
        assert (folder.parent / "version_1" / name).read_text() == once_tested((folder / name).read_text(), name)


def once_tested(text: str, name: str) -> str:
    """The run of one round was tested after round 1 too; leave that out."""
    if name == "clients.csv":
        return "".join(line for line in text.splitlines(keepends=True) if ",1,test," not in line)
    head, first, *rest = text.splitlines(keepends=True)
    last = first.rstrip().split(",")
    empty = [
        v if not column.startswith("test/") else "" for column, v in zip(head.rstrip().split(","), last, strict=True)
    ]
    return "".join([head, ",".join(empty) + "\r\n", *rest]).replace("\r\n", "\n")


def test_validate_test_and_predict_from_a_checkpoint(capsys):
    main(["fit", *TINY])
    trained = rows(Path("runs/SimFed-Digits/version_0/metrics.csv"))[-1]
    checkpoint = ["--ckpt_path", "runs/SimFed-Digits/version_0/checkpoints/last.ckpt"]
    main(["test", *TINY, *checkpoint])
    main(["validate", *TINY, *checkpoint])
    main(["predict", *TINY, *checkpoint])
    assert rows(Path("runs/SimFed-Digits/version_0/metrics.csv"))[-1] == trained
    assert [folder.name for folder in Path("runs/SimFed-Digits").iterdir()] == ["version_0"]


def test_fit_with_nothing_but_names():
    main(["fit", "--model", "FedAvg", "--data", "Digits", "--trainer.max_epochs", "1", "--model.backbone", "MLP"])
    assert rows(Path("runs/FedAvg-Digits/version_0/metrics.csv"))


@pytest.mark.seconds
def test_a_class_path_of_one_s_own_module():
    Path("somebodys_methods.py").write_text("from lit_pfl.methods import FedAvg\n\nclass Mine(FedAvg):\n    pass\n")
    main(["fit", *TINY, "--model", "somebodys_methods.Mine"])
    assert rows(Path("runs/Mine-Digits/version_0/metrics.csv"))


@pytest.mark.slow
def test_data_fragments_fit_any_method(capsys):
    fragments = sorted((ROOT / "configs/data").glob("*.yaml"))
    assert fragments
    for fragment in fragments:
        with pytest.raises(SystemExit):
            main(["fit", "--config", str(ROOT / "configs/fedavg.yaml"), "--config", str(fragment), "--print_config"])
        assert yaml.safe_load(capsys.readouterr().out)["model"]["class_path"].endswith("FedAvg")


@pytest.mark.slow
def test_dirichlet_on_cifar100(real_data):
    main([
        "fit", "--model", "FedAvg", "--data", "CIFAR100", "--data.num_clients", "20", "--data.partition", "Dirichlet",
        "--data.partition.alpha", "0.5", "--data.root", str(real_data), "--trainer.max_epochs", "1",
        "--model.backbone", "ResNet9", "--model.backbone.width", "2",
        "--federation.client_trainer.limit_train_batches", "2",
    ])  # fmt: skip
    assert len(rows(Path("runs/FedAvg-CIFAR100/version_0/clients.csv"))) == 60  # validated, and tested in both states


def written(**files: str) -> None:
    for name, text in files.items():
        path = Path(name.replace("__", "/") + ".yaml")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def printed(arguments: list[str], capsys) -> dict:
    with pytest.raises(SystemExit) as caught:
        main(["fit", *arguments, "--print_config"])
    assert caught.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)


@pytest.mark.seconds
@pytest.mark.parametrize("option", [["--config", "top.yaml"], ["--config=top.yaml"], ["-c", "top.yaml"]])
def test_a_config_is_read_after_its_fragments_and_theirs(option, capsys):
    written(
        top="fragments: [parts/middle.yaml, parts/last.yaml]\nmodel: {init_args: {tau: 0.3}}",
        parts__middle="fragments: [base.yaml]\nmodel: {init_args: {tau: 0.2, alpha: 2.0}}",
        parts__base="model: {class_path: SimFed, init_args: {tau: 0.1, alpha: 1.0, match: worst}}",
        parts__last="model: {init_args: {alpha: 3.0}}",
    )
    config = printed(option, capsys)
    chosen = {key: config["model"]["init_args"][key] for key in ("tau", "alpha", "match")}
    assert chosen == {"tau": 0.3, "alpha": 3.0, "match": "worst"}
    assert config["fragments"] is None
    assert printed([*option, "--model.tau", "0.7"], capsys)["model"]["init_args"]["tau"] == 0.7


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"top": "fragments: [a.yaml]", "a": "fragments: [b.yaml]", "b": "fragments: [a.yaml]"}, "b.yaml: fragments: "),
        ({"top": "fragments: [top.yaml]"}, "top.yaml: fragments: top.yaml is built on this very file"),
        ({"top": "fragments: [a.yaml]", "a": "fragments: [no.yaml]"}, "a.yaml: fragments: there is no file no.yaml"),
        ({"top": "fragments: no.yaml"}, "top.yaml: fragments: give a list of files"),
    ],
)
def test_a_cycle_and_a_missing_fragment_are_named_in_one_line(files, named, capsys):
    written(**files)
    with pytest.raises(SystemExit) as caught:
        main(["fit", "--config", "top.yaml"])
    assert caught.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"lit-pfl: error: {named}")


@pytest.mark.seconds
def test_a_run_of_fragments_is_repeated_from_its_saved_config():
    written(sub__top=f"fragments: ['{ROOT}/tests/conf/tiny.yaml', few.yaml]", sub__few="trainer: {max_epochs: 1}")
    main(["fit", "--config", "sub/top.yaml"])
    folder = Path("runs/SimFed-Digits")
    assert "fragments" not in yaml.safe_load((folder / "version_0/config.yaml").read_text())
    main(["fit", "--config", str(folder / "version_0/config.yaml")])
    assert (folder / "version_1/metrics.csv").read_text() == (folder / "version_0/metrics.csv").read_text()


@pytest.mark.parametrize("chosen", [["--data", "MNIST"], ["--config", str(ROOT / "configs/data/mnist.yaml")]])
@pytest.mark.parametrize("before", [["--model", "FedAvg"], ["--config", str(ROOT / "configs/simfed.yaml")]])
def test_another_data_set_does_not_get_the_defaults_of_digits(before, chosen, capsys):
    data = printed([*before, *chosen], capsys)["data"]["init_args"]
    assert (data["image_size"], data["batch_size"], data["num_clients"]) == (32, 128, 20)


@pytest.mark.parametrize(
    ("given", "found"), [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_threads_that_wait_give_their_core_away_unless_the_user_says_otherwise(monkeypatch, given, found):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("lit_pfl.cli.run.run", lambda args: None)
    main(["fit"])
    assert os.environ.get("GOMP_SPINCOUNT") == found


@pytest.mark.seconds
def test_a_terminal_without_a_sign_ends_no_run(monkeypatch):
    ascii_only = TextIOWrapper(BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", ascii_only)
    main(["fit", *TINY, "--trainer.max_epochs", "1", "--trainer.enable_progress_bar", "true"])
    assert b"round 1/1 ? " in ascii_only.buffer.getvalue()


def test_an_error_that_is_no_mistake_of_the_user_keeps_its_traceback():
    Path("faulty.py").write_text(
        "import lit_pfl.data\n"
        "class Partition(lit_pfl.data.IID):\n"
        "    def __init__(self, n: int = 2):\n"
        "        raise KeyError('n')\n"
    )
    with pytest.raises(ValueError, match="Union"):
        main(["fit", "--model", "FedAvg", "--data.partition", "faulty.Partition"])


LEARNER = """
import lightning as L, torch
class Line(L.LightningModule):
    def __init__(self, width: int = 1):
        super().__init__()
        self.out = torch.nn.Linear(10, width)
    def training_step(self, batch, batch_idx):
        return (self.out(batch[0]).mean(1) - batch[1]).square().mean()
    def validation_step(self, batch, batch_idx):
        self.log("val_mse", self.training_step(batch, batch_idx))
    def predict_step(self, batch, batch_idx):
        return self.out(batch[0]).mean(1)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""


@pytest.mark.seconds
def test_somebodys_own_module_of_the_current_folder_is_trained_resumed_scored_and_predicts(capsys, monkeypatch):
    import sys

    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.delitem(sys.modules, "their_module", raising=False)
    Path("their_module.py").write_text(LEARNER)
    quiet = ["--trainer.enable_progress_bar", "false"]
    data = ["--data", "Table", "--data.name", "diabetes", "--trainer.max_epochs", "2"]
    main(["fit", "--model", "Ditto", "--model.learner", "their_module.Line", *data, *quiet])
    run = Path("runs/Ditto-Table/version_0")
    resumed = ["--config", str(run / "config.yaml"), "--ckpt_path", str(run / "checkpoints/last.ckpt")]
    for command in ("test", "predict"):
        main([command, *resumed])
    main(["fit", *resumed, "--trainer.max_epochs", "3"])
    metrics = rows(run / "metrics.csv")
    assert [row["round"] for row in metrics] == ["1", "2", "3"]
    assert all(float(row["val/mse"]) > 0 for row in metrics)
    predicted = rows(run / "predictions.csv")
    assert predicted
    assert all(float(row["prediction"]) and row["probability"] == "" for row in predicted)
    with pytest.raises(SystemExit):
        main(["fit", "--model", "Ditto", "--model.learner", "their_module.Nobody", *data])
    assert capsys.readouterr().err.strip().endswith("model.learner: module 'their_module' has no attribute 'Nobody'.")


@pytest.mark.slow
def test_a_module_of_the_current_folder_comes_before_an_installed_one_of_its_name(tmp_path):
    for folder, content in (("installed", ""), ("here", "from lit_pfl.data import Digits\nclass Own(Digits): ...\n")):
        (tmp_path / folder / "mine").mkdir(parents=True)
        (tmp_path / folder / "mine" / "data.py").write_text(content)
    paths = os.pathsep.join([str(tmp_path / "installed"), *sys.path, str(tmp_path / "here")])
    typed = ["fit", "--model", "FedAvg", "--data", "mine.data.Own", "--print_config"]
    came = subprocess.run(  # -P: as where `lit-pfl` is typed, the current folder is not there by itself
        [sys.executable, "-P", "-c", f"from lit_pfl.cli import main; main({typed})"],
        cwd=tmp_path / "here", env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True,
    )  # fmt: skip
    assert came.returncode == 0, came.stderr
    assert "class_path: mine.data.Own" in came.stdout
