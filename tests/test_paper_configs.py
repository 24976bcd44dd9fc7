"""The papers' tables as configurations: every row, every column, and a cell that runs."""

import functools
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from jsonargparse import ArgumentParser, Namespace

from cli.typed import rows
from lit_pfl import methods
from lit_pfl.cli import main
from lit_pfl.cli.config_files import with_fragments
from lit_pfl.cli.federated_cli import FederatedCLI
from lit_pfl.data import GROUPS
from lit_pfl.data.eval_split import alike_samples
from lit_pfl.methods import FedSLR
from lit_pfl.models import VGG16, MobileNetV1

TESTS = Path(__file__).resolve().parent
PAPERS, REDUCED = TESTS.parent / "configs" / "paper", TESTS.parent / "configs" / "reduced"
TABLES = [
    (file.parent.name, name)
    for file in sorted(PAPERS.glob("*/tables.yaml"))
    for name in yaml.safe_load(file.read_text())
]
CELLS = [
    pytest.param(table, cell, expected, id=f"{table} {cell}")
    for table, cells in yaml.safe_load((TESTS / "paper_cells.yaml").read_text()).items()
    for cell, expected in cells.items()
]
#: batch size, what is scored, learning rate, momentum and weight decay of a paper
PROTOCOLS = {
    "factorized_fl": (256, ("all", "before"), (1e-3, 0.9, 1e-6)),
    "simfed": (128, ("all", "before"), (0.05, 0.0, 1e-4)),
    "fedslr": (20, ("alike", "after"), (0.1, 0.0, 1e-3)),
    "psi_net": (64, ("own", "global"), (0.01, 0.9, 1e-4)),
    "pfllib": (10, ("own", "before"), (0.05, 0.0, 1e-4)),
}
#: the weight decay of methods whose default is another than the others' 1e-4
OWN_DECAYS = {"FactorizedFL": 1e-6, "PFedHN": 5e-5, "PFedMe": 0.0}
#: those that have scales; PFLlib's setting is there in one size alone
SCALED = sorted({*PROTOCOLS} - {"pfllib"})


@pytest.fixture(scope="module")
def tables() -> Iterator[ModuleType]:
    """The module that reads the papers' tables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TESTS.parent / "examples" / "reproduce"))
        yield importlib.import_module("tables")
    del sys.modules["tables"]


@pytest.fixture(scope="module")
def make() -> Callable[..., Namespace]:
    """What makes the method, the data and the rest of files or YAML: once each, by one parser of the command line."""

    class Made(BaseException):
        pass

    def stop(cli: FederatedCLI, parser: ArgumentParser, args: object) -> None:
        raise Made(parser)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FederatedCLI, "parse_arguments", stop)
        with pytest.raises(Made) as made:
            main(["fit"])
    parser = made.value.args[0]

    @functools.cache
    def make(*configs: str | Path) -> Namespace:
        words = [f"--config={config}" for config in configs]
        return parser.instantiate_classes(parser.parse_args(["fit", *words])).fit

    return make


@pytest.fixture
def cell(tables, make) -> Callable[..., Namespace]:
    """What makes a cell of a paper's table: a row and a column, by default the first ones."""

    def of(place: str, row: str = "", column: str = "", scale: str = "paper") -> Namespace:
        paper, name = place.split()
        table = tables.Table(PAPERS / paper, name, scale)
        return make(table.cell(row or next(iter(table.rows)), column or next(iter(table.columns))).run.text)

    return of


def optimizer(method) -> tuple[float, ...]:
    group = method.make_optimizer([torch.nn.Parameter(torch.zeros(1))]).param_groups[0]
    return group["lr"], group["momentum"], group["weight_decay"]


def width(method) -> int:
    """The output channels of the first convolution."""
    return next(m for m in method.make_backbone(3, 10).modules() if isinstance(m, torch.nn.Conv2d)).out_channels


def leaves(part: Any, at: str = "") -> Iterator[str]:
    """The names of all options that a configuration sets."""
    for name, value in part.items():
        whole = at if name == "init_args" else f"{at}.{name}".removeprefix(".")
        yield from leaves(value, whole) if isinstance(value, dict) else [whole]


@pytest.mark.seconds
@pytest.mark.few(1)
@pytest.mark.parametrize(("paper", "name"), TABLES)
def test_every_row_and_every_column_makes_a_method_and_data(tables, make, paper, name):
    """Every row with some column and every column with some row; that they go together in any way is the next test."""
    table = tables.Table(PAPERS / paper, name)
    rows, columns = list(table.rows), list(table.columns)
    batch_size, scored, expected = PROTOCOLS[paper]
    for i in range(max(len(rows), len(columns))):
        run = table.cell(row := rows[i % len(rows)], columns[i % len(columns)]).run
        if run is None:
            continue
        config = make(run.text)
        assert (config.data.batch_size, config.data.evaluate_on, config.federation.evaluate) == (batch_size, *scored)
        own = {("fedslr", "Per-FedAvg"): (1e-3, *expected[1:])}
        own |= {("pfllib", name): (*expected[:2], decay) for name, decay in OWN_DECAYS.items()}
        assert optimizer(config.model) == own.get((paper, row), expected)
        if paper == "psi_net":
            assert config.data.split == "official"
        else:
            assert (width(config.model), config.model.share_head) == (32 if paper == "pfllib" else 64, None)


@pytest.mark.parametrize(("paper", "name"), TABLES)
def test_rows_and_columns_set_options_of_their_own(tables, paper, name):
    """So a row and a column that are right apart are right together: one has the method, and the other the protocol."""
    table = tables.Table(PAPERS / paper, name)
    entries = [*table.rows.values(), *table.columns.values()]
    words = {key: value for entry in entries for key, value in entry.items() if isinstance(value, str)}

    def options(entries: dict[str, dict]) -> list[set[str]]:
        runs = {tuple(part.format(**words) for part in entry.get("run", ())) for entry in entries.values()} - {()}
        return [set(leaves(tables.Run("paper", run, table._reader).configuration)) for run in runs]

    methods, protocols = options(table.rows), options(table.columns)
    if min(len(methods), len(protocols)) < 2:
        return  # the test above makes all cells
    if "model.class_path" not in methods[0]:
        methods, protocols = protocols, methods
    any_method = {
        "backbone",
        "channels_last",
        "factorization",
        "norm_stats",
        "optimizer",
        "scheduler",
        "scheduler_counts",
        "reset_optimizer",
    }
    for protocol in protocols:
        assert {option.split(".")[1] for option in protocol if option.startswith("model.")} <= any_method
        for method in methods:
            assert method.isdisjoint(protocol)
            assert all(option.startswith("model.") or option == "federation.local_epochs" for option in method)


@pytest.mark.slow
def test_every_file_of_the_papers_is_used(tables):
    """A file that no table names would go stale unseen."""
    used = {PAPERS / paper / "tables.yaml" for paper, _ in TABLES}
    for paper in PROTOCOLS:
        reader = tables.Reader(PAPERS / paper)
        runs = [run for p, name in TABLES if p == paper for run, _ in tables.Table(PAPERS / paper, name).runs()]
        names = {part for run in runs for part in run.parts if "=" not in part}
        names |= {"middle", "reduced"} if paper in SCALED else set()
        used |= {Path(file).resolve() for name in names for file in with_fragments(str(reader.path(name)))}
    assert set(PAPERS.rglob("*.yaml")) <= used


@pytest.mark.parametrize(("scale", "channels"), [("middle", 16), ("reduced", 8)])
@pytest.mark.parametrize("table", [f"{paper} table1" for paper in SCALED])
def test_a_scale_makes_any_cell_small(cell, table, scale, channels):
    paper, config = cell(table), cell(table, scale=scale)
    assert (width(config.model), config.data.image_size, config.federation.threads) == (channels, 16, 1)
    assert config.trainer.max_epochs <= paper.trainer.max_epochs
    assert config.data.train_fraction == paper.data.train_fraction
    assert (type(config.model), type(config.data.partition)) == (type(paper.model), type(paper.data.partition))


@pytest.mark.seconds
@pytest.mark.few(8)
@pytest.mark.parametrize("scale", ["middle", "reduced"])
@pytest.mark.parametrize(("paper", "name"), [(paper, name) for paper, name in TABLES if paper in SCALED])
def test_networks_have_room_for_the_images_of_any_scale(tables, make, paper, name, scale):
    seen: dict[str, str] = {}
    for run, _ in tables.Table(PAPERS / paper, name, scale).runs():
        sizes = [run.configuration["model"]["init_args"].get("backbone"), run.configuration["data"]["init_args"]]
        seen.setdefault(str([sizes[0], sizes[1].get("image_size")]), run.text)
    for config in map(make, seen.values()):
        size = config.data.image_size or 32
        config.model.make_backbone(3, 10)(torch.zeros(2, 3, size, size))


@pytest.mark.few(12)
@pytest.mark.parametrize(("table", "place", "expected"), CELLS)
def test_cells_are_what_the_papers_say(cell, make, table, place, expected):
    row, _, column = place.partition("|")
    reduced = REDUCED.parent / table / f"{place}.yaml"
    config = make(reduced) if reduced.exists() else cell(table, row.strip(), column.strip())

    def found(name: str) -> Any:
        value = attrgetter(name)(config)
        if isinstance(expected[name], list):
            return [factor for factor in ("u", "v", "mu") if factor in value]
        return type(value).__name__ if isinstance(expected[name], str) and not isinstance(value, str) else value

    assert {name: found(name) for name in expected} == expected


def test_psi_net_s_columns_name_their_nodes_and_classes(tables):
    """Where dealing in turn would give several nodes the same classes, they are mixed."""
    for name in ("table1", "table2", "fig3", "fig5", "fig6"):
        table = tables.Table(PAPERS / "psi_net", name)
        for column in table.columns:
            data = table.cell(next(iter(table.rows)), column).run.configuration["data"]
            partition = data["init_args"]["partition"]["init_args"]
            classes = partition["classes_per_client"]
            assert column == f"{data['init_args']['num_clients']}x{classes}"
            everything = {"CIFAR10": 10, "CIFAR100": 100}[data["class_path"]]
            assert (partition.get("deal") == "mixed") == (classes not in (3 * everything // 10, everything))


@pytest.mark.seconds
def test_networks_are_the_papers(cell):
    def network(*place: str):
        return cell(*place).model.make_backbone(3, 10)

    body = network("factorized_fl fig8h", "ResNet-18, 2 FC, BN").body
    assert [type(layer) for layer in body[-3:]] == [torch.nn.Linear, torch.nn.BatchNorm1d, torch.nn.ReLU]
    assert body[-3].out_features == 512
    body = network("factorized_fl fig8h", "ResNet-9, 2 FC").body
    assert [type(layer) for layer in body[-2:]] == [torch.nn.Linear, torch.nn.ReLU]
    assert {type(network(f"psi_net {table}")) for table in ("table3", "fig3", "fig6", "fig7")} == {VGG16}
    assert isinstance(network("psi_net table1", "MbNet Ours"), MobileNetV1)
    for row, normed in (("FedAvg", False), ("Ours, without norm", False), ("FedAvg+BN", True), ("Ours", True)):
        layers = network("psi_net fig5", row).modules()
        assert any(isinstance(layer, torch.nn.BatchNorm2d) for layer in layers) == normed
    mapping = cell("psi_net fig6", "20 groups, the superclasses").model.mapping
    assert [{mapping[c] for c in own} for own in GROUPS["cifar100_superclasses"]] == [{i} for i in range(20)]


@pytest.mark.seconds
def test_callbacks_measure_what_the_figures_show(cell):
    for column in ("CIFAR-10", "CIFAR-100"):
        callbacks = cell("psi_net fig7", column=column).trainer.callbacks
        assert [type(callback).__name__ for callback in callbacks] == ["FeatureAlignment"]
    config = cell("factorized_fl table1_domains", "Factorized-FL")
    [similarity] = config.trainer.callbacks
    names = [f"learner.backbone.{name}" for name in config.model.make_backbone(3, 10).state_dict()]
    last = max(name for name in names if ".body." in name and name.endswith(".0.weight")).removesuffix("weight")
    assert re.search(similarity.groups["v of the last convolution"], f"{last}v")


@pytest.mark.parametrize(
    ("data", "classes", "size", "train", "test", "fewest", "mean"),
    [
        ("CIFAR-10", 10, 11_173_952, 5000, 1000, 93, 95.5),
        ("CIFAR-100", 100, 11_220_032, 500, 100, 50, 60),
        ("TinyImagenet", 200, 11_279_112, 500, 50, 430, 450),
    ],
)
def test_fedslr_s_networks_and_iid_test_images(cell, data, classes, size, train, test, fewest, mean):
    """Rounded down for each of many classes: with 100 images Tiny-ImageNet's clients had six."""
    config = cell("fedslr table1", column=f"{data}, IID")
    assert config.data.num_classes == classes
    assert sum(p.numel() for p in config.model.make_backbone(3, classes).parameters()) == size
    scheduler = config.model.make_scheduler(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
    assert scheduler.gamma == 0.998
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(classes), train))
    split = config.data.partition.split(labels, config.data.num_clients, np.random.default_rng(1))
    shares = np.stack([np.bincount(labels[own], minlength=classes) for own in split])
    official = np.repeat(np.arange(classes), test)
    sizes = [len(own) for own in alike_samples(official, shares, config.data.eval_samples, np.random.default_rng(2))]
    assert fewest <= min(sizes) <= max(sizes) <= config.data.eval_samples
    assert np.mean(sizes) == pytest.approx(mean, abs=2)


@pytest.mark.seconds
def test_reduced_rows_of_psi_net_train_alike(make):
    for name in {file.stem for file in (REDUCED / "psi_net").glob("*.yaml")} - {"setting"}:
        method = make(REDUCED / f"psi_net/{name}.yaml").model
        assert optimizer(method)[:2] == (0.02, 0.9)
        normed = any(isinstance(module, torch.nn.BatchNorm2d) for module in method.make_backbone(3, 10).modules())
        assert normed == (name not in ("fedma", "fedavg_without_norm", "psi_without_norm"))


@pytest.mark.seconds
@pytest.mark.few(6)
@pytest.mark.parametrize("data", ["CIFAR-10", "CIFAR-100"])
@pytest.mark.parametrize(
    ("row", "of_paper"),
    [
        ("fedavg", "FedAvg"), ("ditto", "Ditto"), ("fedrep", "FedRep"), ("apfl", "APFL"), ("lg_fedavg", "LGFedAvg"),
        ("fedspa", "FedSpa"), ("fedslr", "FedSLR (mixed)"), ("lpgd", "LPGD"), ("gpgd", "GPGD"),
    ],
)  # fmt: skip
def test_fedslr_s_reduced_setting_is_the_papers_on_less(cell, make, row, of_paper, data):
    """Its own rows differ from the paper's in what depends on the number of rounds."""
    own = REDUCED / f"fedslr/{row}.yaml"
    name = own if own.exists() else PAPERS / f"fedslr/rows/{row}.yaml"
    config = make(name, REDUCED / f"fedslr/{data.lower().replace('-', '')}.yaml")
    full = cell(f"fedslr {'appendix' if row in ('lpgd', 'gpgd') else 'table1'}", of_paper, f"{data}, Non-IID")
    assert optimizer(config.model) == optimizer(full.model)
    assert (type(config.model), type(config.data)) == (type(full.model), type(full.data))
    same = ["data.split", "data.evaluate_on", "data.eval_samples", "data.batch_size", "federation.local_epochs"]
    for option in same:
        assert attrgetter(option)(config) == attrgetter(option)(full)
    assert vars(config.data.partition) == vars(full.data.partition)
    assert (config.federation.evaluate, config.model.scheduler_counts) == ("after", "rounds")
    if row == "fedspa":
        assert config.model.rounds == config.trainer.max_epochs
    if isinstance(config.model, FedSLR):
        assert (config.model.eta_g, config.model.solver) == (full.model.eta_g, full.model.solver)


def test_pfllib_s_setting_has_all_methods_but_few():
    rows = yaml.safe_load((PAPERS / "pfllib" / "tables.yaml").read_text())["table1"]["rows"]
    adapters = {"FedDPA", "FedIT", "FedSALoRA", "FFALoRA", "FlexLoRA"}
    assert {*methods.__all__} - {*rows} == adapters | {"FedBN"}  # which refuses a network without batch norm
    assert {*rows} < {*methods.__all__}


@pytest.mark.seconds
def test_a_cell_runs_to_its_end(tables):
    table = tables.Table(PAPERS / "factorized_fl", "table1")
    Path("cell.yaml").write_text(table.cell("Factorized-FL", "CIFAR-10, Permuted Non-IID").run.text)
    small = ["--data", "Digits", "--data.image_size", "16", "--data.num_clients", "3", "--model.backbone.width", "2"]
    main(["fit", "--config=cell.yaml", *small, "--trainer.max_epochs", "1", "--federation.local_epochs", "1"])
    tested = [row for row in rows(Path("runs/FactorizedFL-Digits/version_0/clients.csv")) if row["split"] == "test"]
    assert [row["n"] for row in tested] == ["180"] * 6  # all test images for each, as trained and as aggregated
