"""The command line, from words to files."""

import csv
import json
from pathlib import Path

import pytest
import wandb
import yaml
from wandb.proto import wandb_internal_pb2

from lit_pfl.cli import main

ROOT = Path(__file__).parent.parent
TINY = ["--config", str(ROOT / "tests/conf/tiny.yaml")]
METRICS = {
    "round", "train/loss", "val/acc", "val/acc_std", "val/acc_worst10", "test/acc",
    "comm/up_bytes", "comm/down_bytes", "comm/total_bytes",
}  # fmt: skip


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_fit_leaves_a_whole_run_folder_and_shows_a_table(capsys):
    main(["fit", *TINY])
    folder = Path("runs/SimFed-Digits/version_0")
    metrics, clients = rows(folder / "metrics.csv"), rows(folder / "clients.csv")
    assert set(metrics[0]) >= METRICS
    assert [row["round"] for row in metrics] == ["1", "2"]
    assert float(metrics[1]["comm/total_bytes"]) == sum(
        float(row[key]) for row in metrics for key in ("comm/up_bytes", "comm/down_bytes")
    )
    assert list(clients[0]) == ["client", "round", "split", "model", "n", "acc", "loss"]
    assert [(row["round"], row["split"]) for row in clients[::3]] == [("1", "val"), ("2", "val"), ("2", "test")]
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
    assert rows(Path("runs/SimFed-Digits/version_1/metrics.csv"))[0]["test/acc"] == trained["test/acc"]
    assert rows(Path("runs/SimFed-Digits/version_2/metrics.csv"))[0]["val/acc"] == trained["val/acc"]


def test_fit_with_nothing_but_names():
    main(["fit", "--model", "FedAvg", "--data", "Digits", "--trainer.max_epochs", "1", "--model.backbone", "MLP"])
    assert rows(Path("runs/FedAvg-Digits/version_0/metrics.csv"))


def test_a_class_path_of_one_s_own_module():
    Path("somebodys_methods.py").write_text("from lit_pfl.methods import FedAvg\n\nclass Mine(FedAvg):\n    pass\n")
    main(["fit", *TINY, "--model", "somebodys_methods.Mine"])
    assert rows(Path("runs/Mine-Digits/version_0/metrics.csv"))


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_runs_with_every_fragment_of_data_it_can_have(config):
    tiny = ["--trainer.max_epochs", "1", "--data.num_clients", "2", "--federation.local_epochs", "1"]
    main(["fit", "--config", str(config), *tiny, "--model.backbone.width", "2"])
    [folder] = Path("runs").glob("*/version_0")
    assert set(rows(folder / "metrics.csv")[0]) >= METRICS


def test_data_fragments_fit_any_method(capsys):
    fragments = sorted((ROOT / "configs/data").glob("*.yaml"))
    assert fragments
    for fragment in fragments:
        with pytest.raises(SystemExit):
            main(["fit", "--config", str(ROOT / "configs/fedavg.yaml"), "--config", str(fragment), "--print_config"])
        assert yaml.safe_load(capsys.readouterr().out)["model"]["class_path"].endswith("FedAvg")


@pytest.mark.parametrize("data", ["CIFAR100"])
def test_dirichlet_on_cifar100(real_data, data):
    main([
        "fit", "--model", "FedAvg", "--data", data, "--data.num_clients", "20", "--data.partition", "Dirichlet",
        "--data.partition.alpha", "0.5", "--data.root", str(real_data), "--trainer.max_epochs", "1",
        "--model.backbone", "ResNet9", "--model.backbone.width", "2",
        "--federation.client_trainer.limit_train_batches", "2",
    ])  # fmt: skip
    assert len(rows(Path("runs/FedAvg-CIFAR100/version_0/clients.csv"))) == 40


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "FedAwg"], "model: there is no 'FedAwg'; choose one of "),
        (["--model", "FedAvg", "--data", "Digitz"], "data: there is no 'Digitz'; choose one of "),
        (
            ["--model", "FedAvg", "--data.partition", "Dirichlet", "--data.partition.alpha", "-1"],
            "data.partition.alpha: Not of type PositiveFloat: -1",
        ),
        (["--model", "FedAvg", "--data.num_clients", "5000"], "data.num_clients=5000 is more than the 1438 training"),
        (["--model", "FedAvg", "--nonsense", "3"], "unrecognized arguments: --nonsense 3"),
        (["--model", "FedAvg", "--model.lr", "3"], "model: Option 'lr' is not accepted"),
        (["--model", "FedAvg", "--trainer.logger.save_dir", "/proc/no"], "The run folder cannot be written"),
        (["--model", "FedAvg", "--data", "CIFAR100"], "CIFAR100 is not in "),
        (["--model", "FedAvg", "--ckpt_path", "no.ckpt"], "Checkpoint file not found: no.ckpt"),
        (["--model", "FedAvg", "--federation.participation", "1.5"], "federation.participation=1.5"),
        (["--config", "no.yaml"], "File does not exist"),
        ([], "the following arguments are required: fit.model"),
    ],
)
def test_mistakes_get_one_clear_line_and_exit_code_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["fit", *arguments])
    assert caught.value.code == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lit-pfl: error: ")]
    assert len(errors) == 1
    assert message in errors[0]


def leveldb_records(log: bytes):
    """Cut an offline run's file into records: LevelDB's log format, in blocks of 32 KiB after a header of 7 bytes."""
    position, record = 7, b""
    while position + 7 <= len(log):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        length, kind = int.from_bytes(log[position + 4 : position + 6], "little"), log[position + 6]
        record += log[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or last part
            yield record
            record = b""


def wandb_history(run: Path) -> tuple[list[dict[str, object]], dict[str, str]]:
    """Read an offline run back: the rows of its history, and each metric's x-axis."""
    history, axes, names = [], {}, {}
    for data in leveldb_records(run.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            history.append(
                {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            )
        elif record.WhichOneof("record_type") == "metric":
            names[len(names) + 1] = record.metric.name
            axes[record.metric.name] = record.metric.step_metric or names.get(record.metric.step_metric_index, "")
    return history, axes


def test_wandb_offline_has_the_metrics_by_name_against_round():
    main(["fit", *TINY, "--config", str(ROOT / "configs/logger/wandb.yaml")])
    wandb.finish()
    [run] = Path("runs/wandb").glob("offline-run-*/*.wandb")
    history, axes = wandb_history(run)
    written = [row for row in history if "val/acc" in row]
    assert [row["round"] for row in written] == [1, 2]
    expected = rows(Path("runs/SimFed-Digits/version_0/metrics.csv"))
    assert [float(row["val/acc"]) for row in written] == [float(row["val/acc"]) for row in expected]
    assert {name for row in history for name in row} >= METRICS
    assert {name: axes[name] for name in METRICS - {"round"}} == dict.fromkeys(METRICS - {"round"}, "round")
    assert (Path("runs/SimFed-Digits/version_0") / "config.yaml").exists()
    main(["fit", *TINY, "--config", str(ROOT / "configs/logger/wandb.yaml"), "--trainer.max_epochs", "1"])
    wandb.finish()
