"""The papers' tables as configurations: every row, every column, and a cell that runs."""

import csv
import functools
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from jsonargparse import ArgumentParser, Namespace

from lit_pfl.cli import main
from lit_pfl.cli.config_files import with_fragments
from lit_pfl.cli.federated_cli import FederatedCLI
from lit_pfl.data import GROUPS, ResizedCropJitter
from lit_pfl.data.eval_split import alike_samples
from lit_pfl.methods import FactorizedFL, FedAvg, FedSLR, PsiNet, SimFed, StandAlone
from lit_pfl.models import VGG16, MobileNetV1

PAPERS = Path(__file__).parent.parent / "configs/paper"
FACTORIZED, SIMFED = PAPERS / "factorized_fl", PAPERS / "simfed"
PSI, SLR = PAPERS / "psi_net", PAPERS / "fedslr"
OVERLAY = [FACTORIZED / "rows/factorized_fl_domain.yaml", FACTORIZED / "released_code.yaml"]
RATE, REUSE = SLR / "per_fedavg_rate.yaml", SLR / "released_code_noniid.yaml"


def files(*folders: Path) -> list[Path]:
    found = [file for folder in folders for file in sorted(folder.glob("*.yaml"))]
    assert {file.parent for file in found} == set(folders)
    return found


TABLES = {
    "factorized_fl": (files(FACTORIZED / "rows", FACTORIZED / "fig8g"), files(FACTORIZED / "columns")),
    "fig8h": (files(FACTORIZED / "fig8h/rows"), files(FACTORIZED / "fig8h/columns")),
    "simfed": (files(SIMFED / "rows"), files(SIMFED / "columns")),
    "psi_net": (files(PSI / "rows"), files(PSI / "columns")),
    "fedslr": (files(SLR / "rows", *(SLR / f"table{n}" for n in range(3, 9))), files(SLR / "columns")),
}
# Every row with some column and every column with some row; that they go together in any way is a test of its own.
CELLS = [
    [rows[i % len(rows)], columns[i % len(columns)]]
    for rows, columns in TABLES.values()
    for i in range(max(len(rows), len(columns)))
]
CELLS += [[file] for file in files(FACTORIZED / "fig8i", PSI / "fig7")] + [
    [*OVERLAY, FACTORIZED / "columns/domains.yaml"],
    [SLR / "rows/per_fedavg.yaml", SLR / "columns/cifar100_noniid.yaml", RATE],
    [SLR / "rows/fedslr_released_code.yaml", SLR / "columns/cifar10_noniid.yaml", REUSE],
]
#: what may lie over a cell
OVER = [
    [OVERLAY[0], start, FACTORIZED / "fig8/similarity.yaml", FACTORIZED / "columns/domains.yaml"]
    for start in [*files(FACTORIZED / "starts"), FACTORIZED / "inert_penalty.yaml"]
] + [
    [SIMFED / "rows/simfed.yaml", SIMFED / over, SIMFED / "columns/superclasses.yaml"]
    for over in ("starts/paper.yaml", "low_threshold.yaml")
]
SCALES = [
    [paper / f"rows/{row}.yaml", paper / f"columns/{column}.yaml", paper / f"{scale}.yaml"]
    for scale in ("middle", "reduced")
    for paper, row, column in (
        (FACTORIZED, "factorized_fl_permuted", "cifar10_permuted_noniid"), (SIMFED, "simfed", "cifar10_permuted_iid"),
        (PSI, "vgg9_psi", "cifar10_10x3"), (SLR, "fedslr", "cifar10_noniid"),
    )
]  # fmt: skip


@pytest.fixture(scope="module")
def cells() -> Callable[[list[Path]], Namespace]:
    """What makes the configuration of a cell, its method and its data: once each, by one parser of the command line."""

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
    def make(*words: str) -> Namespace:
        return parser.instantiate_classes(parser.parse_args(["fit", *words])).fit

    return lambda cell: make(*options(cell))


@pytest.fixture
def made(cells) -> Callable[[str], Namespace]:
    """What returns the configuration of a cell in the row, or the column, of a name."""
    return lambda name: cells(next(cell for cell in CELLS if PAPERS / f"{name}.yaml" in cell))


def options(cell: list[Path]) -> list[str]:
    return [word for file in cell for word in ("--config", str(file))]


def optimizer(method) -> dict[str, float]:
    group = method.make_optimizer([torch.nn.Parameter(torch.zeros(1))]).param_groups[0]
    return {key: group[key] for key in ("lr", "momentum", "weight_decay")}


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(file.stem for file in cell))
def test_every_row_and_every_column_makes_a_method_and_data(cells, cell):
    config = cells(cell)
    if PSI in cell[0].parents:
        assert (config.data.batch_size, config.data.split, config.federation.evaluate) == (64, "official", "global")
        assert optimizer(config.model) == {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}
        return
    batch_size, evaluate_on, evaluate, expected = {
        FACTORIZED: (256, "all", "before", (1e-3, 0.9, 1e-6)),
        SIMFED: (128, "all", "before", (0.05, 0.0, 1e-4)),
        SLR: (20, "alike", "after", (0.1, 0.0, 1e-3)),
    }[next(paper for paper in (FACTORIZED, SIMFED, SLR) if paper in cell[0].parents)]
    assert config.data.batch_size == batch_size
    assert config.data.evaluate_on == evaluate_on
    assert config.federation.evaluate == evaluate
    assert tuple(optimizer(config.model).values()) == ((1e-3, *expected[1:]) if RATE in cell else expected)
    backbone = config.model.make_backbone(3, 10)
    assert next(layer for layer in backbone.modules() if isinstance(layer, torch.nn.Conv2d)).out_channels == 64
    assert config.model.share_head is None


def test_rows_and_columns_say_nothing_about_each_other():
    """So a row and a column that are right apart are right together."""

    def contents(file: Path) -> list[dict]:
        return [yaml.safe_load(Path(name).read_text()) for name in with_fragments(str(file))]

    for table, (rows, columns) in TABLES.items():
        for row in rows:
            own = {key for part in contents(row) for key in part} - {"fragments", "model"}
            assert own <= (
                {"federation"} if table == "fedslr" else set()
            )  # how many epochs depends on the method there
            models = [part.get("model", {}).get("init_args", {}) for part in contents(row)]
            assert not any("optimizer" in model for model in models)
        allowed = {"optimizer", "factorization"} if table == "fig8h" else {"optimizer", "backbone"}
        allowed |= {"scheduler", "scheduler_counts", "reset_optimizer"} if table == "fedslr" else set()
        for column in columns:
            for part in contents(column):
                assert "class_path" not in part.get("model", {})
                assert set(part.get("model", {}).get("init_args", {})) <= allowed


def test_every_file_of_the_papers_is_used_and_builds_on_others():
    """A file that no row or column is built on would go stale unseen."""
    cells = CELLS + OVER + SCALES
    used = {Path(name).resolve() for cell in cells for file in cell for name in with_fragments(str(file))}
    there = {file.resolve() for file in PAPERS.rglob("*.yaml")}
    assert {file for file in there if "printed" not in yaml.safe_load(file.read_text())} <= used


@pytest.mark.parametrize("cell", SCALES, ids=lambda cell: "-".join(file.stem for file in (cell[0], cell[2])))
def test_a_scale_makes_any_cell_small(cells, cell):
    config = cells(cell)
    width = {"middle": 16, "reduced": 8}[cell[2].stem]
    backbone = config.model.make_backbone(3, 10)
    assert next(layer for layer in backbone.modules() if isinstance(layer, torch.nn.Conv2d)).out_channels == width
    assert (config.data.image_size, config.federation.threads) == (16, 1)
    paper = cells(cell[:2])
    assert config.trainer.max_epochs <= paper.trainer.max_epochs
    assert type(config.model) is type(paper.model)
    assert config.data.train_fraction == paper.data.train_fraction
    assert type(config.data.partition) is type(paper.data.partition)


def test_what_goes_over_a_cell_changes_what_it_says(cells):
    starts = {cell[1].stem: cells(cell) for cell in OVER}
    assert {name: starts[name].model.factorization.start for name in ("dense", "released", "paper")} == {
        "dense": "dense", "released": "released", "paper": "paper"
    }  # fmt: skip
    assert [starts[name].model.factorization.l1_mode for name in ("paper", "inert_penalty")] == ["subgradient", "inert"]
    assert starts["dense"].model.rule.min_matches == 4
    assert (starts["low_threshold"].model.tau, starts["low_threshold"].model.alpha) == (0.0, 1.0)
    [similarity] = starts["dense"].trainer.callbacks
    names = [f"learner.backbone.{name}" for name in starts["dense"].model.make_backbone(3, 10).state_dict()]
    last = max(name for name in names if ".body." in name and name.endswith(".0.weight")).removesuffix("weight")
    assert re.search(similarity.groups["v of the last convolution"], f"{last}v")


@pytest.mark.parametrize(
    ("column", "data", "permuted", "partition", "rounds", "local_epochs"),
    [
        ("factorized_fl/columns/cifar10_standard_iid", "CIFAR10", False, "IID", 50, 5),
        ("factorized_fl/columns/svhn_permuted_noniid", "SVHN", True, "Dirichlet", 50, 5),
        ("factorized_fl/columns/domains", "CIFAR100", True, "Domains", 100, 5),
        ("simfed/columns/mnist_conventional_noniid", "MNIST", False, "Dirichlet", 100, 1),
        ("simfed/columns/cifar100_permuted_iid", "CIFAR100", True, "IID", 100, 1),
        ("simfed/columns/superclasses", "CIFAR100", False, "Domains", 100, 1),
    ],
)
def test_columns_are_the_papers_splits(made, column, data, permuted, partition, rounds, local_epochs):
    config = made(column)
    assert (type(config.data).__name__, config.data.permute_labels) == (data, permuted)
    assert type(config.data.partition).__name__ == partition
    assert (config.data.num_clients, config.data.image_size, config.data.seed) == (20, 32, 1234)
    assert (config.trainer.max_epochs, config.federation.local_epochs) == (rounds, local_epochs)
    assert isinstance(config.data.augment, ResizedCropJitter) == column.startswith("factorized_fl")
    if partition == "Dirichlet":
        assert (config.data.partition.alpha, config.data.partition.min_samples) == (0.5, 0)


def test_superclasses_are_cut_as_in_the_paper(made):
    data = made("simfed/columns/superclasses").data
    assert (data.train_fraction, data.test_fraction) == (0.8, 0.15)
    assert len(data.partition.domains(100)) == 20


@pytest.mark.parametrize(
    ("scenario", "tau", "epsilon", "matches"), [("standard", 0, 1, 20), ("permuted", 0, 1, 10), ("domain", 0.95, 20, 4)]
)
def test_factorized_fl_matches_as_its_scenario_has_it(made, scenario, tau, epsilon, matches):
    method = made(f"factorized_fl/rows/factorized_fl_{scenario}").model
    assert isinstance(method, FactorizedFL)
    assert (method.rule.tau, method.rule.epsilon, method.rule.min_matches) == (tau, epsilon, matches)
    assert (method.rule.mixing, method.rule.below_tau, method.rule.match) == ("simultaneous", "drop", "best")
    f = method.factorization
    assert (f.form, f.rank, f.mask, f.l1, f.threshold, f.l1_mode, f.pi, f.start, f.below_threshold) == (
        "FFxIO", 1, True, 5e-4, 5e-4, "subgradient", "spatial", "paper", "keep",
    )  # fmt: skip
    assert "mu" not in method.shares


def test_variants_of_factorized_fl_differ_from_it_as_their_names_say(made):
    def method(name: str):
        return made(f"factorized_fl/{name}").model

    beta = method("rows/factorized_fl_beta_permuted")
    assert beta.shares >= {"u", "v", "mu"}
    assert beta.rule.min_matches == 10
    assert method("fig8g/worst_matching").rule.match == "worst"
    assert method("fig8g/random_matching").rule.match == "random"
    fedavg, without = method("fig8g/factorized_fedavg"), method("fig8g/factorized_fedavg_without_mu")
    assert isinstance(fedavg, FedAvg)
    assert isinstance(without, FedAvg)
    assert [(m.factorization.form, m.factorization.mask, m.factorization.start) for m in (fedavg, without)] == [
        ("FFxIO", True, "paper"),
        ("FFxIO", False, "paper"),
    ]
    assert "mu" not in method("fig8g/factorized_fl_uv").shares
    assert "v" not in method("fig8g/factorized_fl_um").shares
    ratios = [method(f"rows/{name}").ratio for name in ("pfedpara", "pfedpara_domain")]
    assert ratios == [0.72, 0.78]
    assert method("rows/fedfomo").num_models == 10


def test_the_released_code_goes_on_top_of_a_row(made):
    method = made("factorized_fl/released_code").model
    assert method.rule.mixing == "sequential"
    f = method.factorization
    assert (f.form, f.pi, f.l1_mode, f.threshold) == ("FFxIO", "rawview", "inert", 5e-4)
    assert (f.start, f.below_threshold) == ("released", "send")
    assert (method.rule.tau, method.rule.min_matches) == (0.95, 4)


def test_a_single_client_of_figure_8h_and_8i(made):
    for file in TABLES["fig8h"][1]:
        config = made(f"factorized_fl/fig8h/columns/{file.stem}")
        assert isinstance(config.model, StandAlone)
        assert (config.data.num_clients, config.trainer.max_epochs, config.federation.local_epochs) == (1, 20, 1)
        assert round(config.data.train_fraction * 60_000) == 2_400
        f = config.model.factorization
        assert (f and f.form) == {"regular": None, "ifxof": "IFxOF", "ffxio": "FFxIO"}[file.stem]
    backbone = made("factorized_fl/fig8h/rows/resnet18_2fc_norm").model.make_backbone(3, 10)
    assert [type(layer) for layer in backbone.body[-3:]] == [torch.nn.Linear, torch.nn.BatchNorm1d, torch.nn.ReLU]
    assert backbone.head.in_features == 512
    backbone = made("factorized_fl/fig8h/rows/resnet9_2fc").model.make_backbone(3, 10)
    assert [type(layer) for layer in backbone.body[-2:]] == [torch.nn.Linear, torch.nn.ReLU]
    for exponent in ("1e-4", "3e-4", "5e-4", "7e-4", "1e-3"):
        f = made(f"factorized_fl/fig8i/lambda_{exponent}").model.factorization
        assert (f.l1, f.threshold, f.form, f.l1_mode) == (float(exponent), float(exponent), "FFxIO", "inert")
        assert f.start == "paper"


def test_variants_of_simfed_differ_from_it_as_their_names_say(made):
    def method(name: str):
        return made(f"simfed/rows/{name}").model

    for name in ("simfed", "similarity_matching", "worst_matching", "random_matching", "without_masks"):
        assert isinstance(method(name), SimFed)
        assert (method(name).tau, method(name).alpha) == (0.9, 30)
    f = method("simfed").factorization
    assert (f.form, f.l1, f.mask, f.start) == ("IFxOF", 1e-4, True, "dense")
    assert method("similarity_matching").factorization is None
    assert (method("worst_matching").match, method("random_matching").match) == ("worst", "random")
    assert (method("without_masks").factorization.form, method("without_masks").factorization.mask) == ("IFxOF", False)
    averaged = method("factorized_fedavg")
    assert isinstance(averaged, FedAvg)
    assert (averaged.factorization.form, averaged.factorization.mask) == ("IFxOF", True)


@pytest.mark.parametrize(
    ("column", "data", "clients", "classes", "epochs", "rounds"),
    [
        ("cifar10_10x3", "CIFAR10", 10, 3, 1, 100), ("cifar10_100x5", "CIFAR10", 100, 5, 1, 100),
        ("cifar100_10x50", "CIFAR100", 10, 50, 1, 100), ("cifar10_dirichlet_e70", "CIFAR10", 16, None, 70, 54),
    ],
)  # fmt: skip
def test_columns_of_psi_net_are_the_papers_splits(made, column, data, clients, classes, epochs, rounds):
    config = made(f"psi_net/columns/{column}")
    assert (type(config.data).__name__, config.data.num_clients, config.data.train_fraction) == (data, clients, 1)
    assert (config.federation.local_epochs, config.trainer.max_epochs) == (epochs, rounds)
    if classes is None:
        assert (type(config.data.partition).__name__, config.data.partition.alpha) == ("BalancedDirichlet", 0.5)
    else:
        assert config.data.partition.classes_per_client == classes


def test_rows_of_psi_net_are_the_papers_networks(made):
    def method(name: str):
        return made(f"psi_net/rows/{name}").model

    def network(name: str):
        return method(name).make_backbone(3, 10)

    depths = {"c1_2": 2, "c2_2": 4, "c3_2": 6, "c4_2": 9, "c5_2": 12, "fc": 13}
    for name, depth in depths.items():
        psi_net = method(f"vgg16_psi_{name}")
        assert (psi_net.groups, psi_net.depth, type(network(f"vgg16_psi_{name}"))) == (10, depth, VGG16)
    assert [method(f"vgg16_psi_{groups}_groups").groups for groups in (20, 100)] == [20, 100]
    assert (method("mobilenet_psi").depth, type(network("mobilenet_psi"))) == (13, MobileNetV1)
    mapping = method("vgg16_psi_superclasses").mapping
    assert [{mapping[c] for c in own} for own in GROUPS["cifar100_superclasses"]] == [{i} for i in range(20)]
    assert method("vgg9_fedavg_gn").structure == "dense"
    for name in ("vgg9_fedavg", "vgg9_psi_without_norm"):
        assert not any(isinstance(m, torch.nn.BatchNorm2d) for m in network(name).modules())
    for name in ("vgg9_psi", "vgg9_fedavg_gn", "mobilenet_psi", "vgg16_fedavg", "vgg9_fedavg_bn"):
        assert method(name).norm_stats == "averaged"


def test_reduced_rows_of_psi_net_differ_as_their_names_say(cells):
    folder = PAPERS.parent / "reduced/psi_net"
    made = {file.stem: cells([file]) for file in files(folder) if file.stem != "setting"}
    networks = {name: config.model.make_backbone(3, 10) for name, config in made.items()}
    for name, config in made.items():
        assert config.data.partition.deal == "mixed"
        assert (config.data.split, config.data.val_fraction, config.federation.evaluate) == ("official", 0.0, "global")
        [group] = config.model.make_optimizer([torch.nn.Parameter(torch.zeros(1))]).param_groups
        assert (group["lr"], group["momentum"], config.federation.threads) == (0.02, 0.9, 1)
        normed = any(isinstance(module, torch.nn.BatchNorm2d) for module in networks[name].modules())
        assert normed == (name not in ("fedma", "fedavg_without_norm", "psi_without_norm"))
        assert config.trainer.max_epochs == (9 if name == "fedma" else 10)
    psi = {name: config.model for name, config in made.items() if isinstance(config.model, PsiNet)}
    assert {name: (m.norm, m.structure, m.trim, m.boundary) for name, m in psi.items()} == {
        "psi": ("group", "grouped", True, "split"), "psi_whole": ("group", "grouped", False, "split"),
        "psi_bn": ("keep", "grouped", True, "split"), "psi_without_norm": ("keep", "grouped", True, "split"),
        "fedavg_gn": ("group", "dense", True, "split"), "psi_full": ("group", "grouped", True, "full"),
        "psi_depth_6": ("group", "grouped", True, "split"),
    }  # fmt: skip
    assert {name for name, method in psi.items() if method.depth == 6} == {"psi_depth_6"}
    assert {type(config.model).__name__ for name, config in made.items() if name not in psi} == {
        "FedAvg", "FedProx", "FedMA"
    }  # fmt: skip


def test_figure_7_measures_a_node_alone(made):
    for name in ("cifar10", "cifar100"):
        config = made(f"psi_net/fig7/{name}")
        assert (config.data.num_clients, config.trainer.max_epochs) == (1, 50)
        assert [type(callback).__name__ for callback in config.trainer.callbacks] == ["FeatureAlignment"]


@pytest.mark.parametrize("data", ["cifar10", "cifar100", "tiny_imagenet"])
@pytest.mark.parametrize("split", ["iid", "noniid"])
def test_columns_of_fedslr_are_the_papers_setting(made, data, split):
    config = made(f"fedslr/columns/{data}_{split}")
    classes = {"cifar10": 10, "cifar100": 100, "tiny_imagenet": 200}[data]
    assert (config.data.num_classes, config.data.split, config.data.train_fraction) == (classes, "official", 1)
    network = config.model.make_backbone(3, classes)
    sizes = {10: 11_173_952, 100: 11_220_032, 200: 11_279_112}
    assert sum(p.numel() for p in network.parameters()) == sizes[classes]
    assert (config.data.num_clients, config.trainer.max_epochs) == (100, 1000)
    assert config.data.eval_samples == (500 if (data, split) == ("tiny_imagenet", "iid") else 100)
    assert (config.federation.participation, config.federation.evaluate) == (10, "after")
    partition = config.data.partition
    assert type(partition).__name__ == {"iid": "Uniform", "noniid": "ClientDirichlet"}[split]
    assert split == "iid" or (partition.alpha, partition.exhausted) == (0.1, "redraw")
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    scheduler = config.model.make_scheduler(torch.optim.SGD(parameters, lr=0.1))
    assert (scheduler.gamma, config.model.scheduler_counts) == (0.998, "rounds")


@pytest.mark.parametrize(
    ("data", "classes", "train", "test", "fewest", "mean"),
    [
        ("cifar10", 10, 5000, 1000, 93, 95.5),
        ("cifar100", 100, 500, 100, 50, 60),
        ("tiny_imagenet", 200, 500, 50, 430, 450),
    ],
)
def test_a_client_s_test_images_in_fedslr_s_iid_columns(made, data, classes, train, test, fewest, mean):
    """Rounded down for each of many classes: with 100 images Tiny-ImageNet's clients had six."""
    config = made(f"fedslr/columns/{data}_iid").data
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(classes), train))
    split = config.partition.split(labels, config.num_clients, np.random.default_rng(1))
    shares = np.stack([np.bincount(labels[own], minlength=classes) for own in split])
    official = np.repeat(np.arange(classes), test)
    sizes = [len(own) for own in alike_samples(official, shares, config.eval_samples, np.random.default_rng(2))]
    assert fewest <= min(sizes) <= max(sizes) <= config.eval_samples
    assert np.mean(sizes) == pytest.approx(mean, abs=2)


def test_fedslr_s_released_code_deals_used_up_classes_anew(cells):
    config = cells([SLR / "rows/fedslr_released_code.yaml", SLR / "columns/cifar10_noniid.yaml", REUSE])
    partition = config.data.partition
    assert (type(partition).__name__, partition.alpha, partition.exhausted) == ("ClientDirichlet", 0.1, "reuse")
    assert config.model.p_init == "copy"


def test_variants_of_fedslr_differ_from_it_as_their_names_say(made):
    def settings(name: str) -> tuple[float, float, float, int]:
        config = made(f"fedslr/{name}")
        method = config.model
        assert isinstance(method, FedSLR)
        return method.lam, method.mu, method.eta_g, config.federation.local_epochs - method.personal_epochs

    assert settings("rows/fedslr") == (1e-4, 1e-3, 10, 2)
    for lam in ("1e-5", "5e-5", "1e-4", "5e-4", "1e-3"):
        assert settings(f"table3/lambda_{lam}") == (float(lam), 1e-3, 10, 2)
    for mu in ("1e-4", "5e-4", "1e-3", "5e-3", "1e-2"):
        assert settings(f"table4/mu_{mu}") == (1e-4, float(mu), 10, 2)
    for eta in (2, 10, 20, 100):
        assert settings(f"table5/eta_{eta}") == (1e-4, 1e-3, eta, 2)
    for epochs in (1, 2, 3, 4):
        assert settings(f"table6/epochs_{epochs}") == (1e-4, 1e-3, 10, epochs)
    for penalty in ("1e-3", "1e-4", "1e-5"):
        assert settings(f"table7/mu_{penalty}") == (10, float(penalty), 10, 2)
        assert made(f"fedslr/table7/mu_{penalty}").model.p_init == "copy"
        assert settings(f"table8/lambda_{penalty}") == (float(penalty), 1e3, 10, 2)
    assert made("fedslr/rows/fedslr_released_code").model.p_init == "copy"
    solvers = {name: made(f"fedslr/rows/{name}").model.solver for name in ("fedslr", "lpgd", "gpgd")}
    assert {name: (s.corrected, s.local) for name, s in solvers.items()} == {
        "fedslr": (True, False), "lpgd": (False, True), "gpgd": (False, False)
    }  # fmt: skip


@pytest.mark.parametrize("data", ["cifar10", "cifar100"])
@pytest.mark.parametrize(
    "row",
    ["fedavg", "ditto", "fedrep", "apfl", "lg_fedavg", "fedspa", "fedslr", "lpgd", "gpgd"],
)
def test_fedslr_s_reduced_setting_is_the_papers_on_less(cells, row, data):
    """Its own rows differ from the paper's in what depends on the number of rounds."""
    paper, reduced = SLR / f"rows/{row}.yaml", PAPERS.parent / "reduced/fedslr"
    own = reduced / f"{row}.yaml"
    config, full = (
        cells([own if own.exists() else paper, reduced / f"{data}.yaml"]),
        cells([paper, SLR / f"columns/{data}_noniid.yaml"]),
    )
    assert optimizer(config.model) == optimizer(full.model)
    assert (type(config.model), type(config.data)) == (type(full.model), type(full.data))
    for of_data in ("split", "evaluate_on", "eval_samples", "batch_size"):
        assert getattr(config.data, of_data) == getattr(full.data, of_data)
    assert vars(config.data.partition) == vars(full.data.partition)
    assert config.federation.local_epochs == full.federation.local_epochs
    assert (config.federation.evaluate, config.model.scheduler_counts) == ("after", "rounds")
    if row == "fedspa":
        assert config.model.rounds == config.trainer.max_epochs
    if isinstance(config.model, FedSLR):
        assert (config.model.eta_g, config.model.solver) == (full.model.eta_g, full.model.solver)


def test_a_cell_runs_to_its_end():
    cell = [FACTORIZED / "rows/factorized_fl_permuted.yaml", FACTORIZED / "columns/cifar10_permuted_noniid.yaml"]
    small = ["--data", "Digits", "--data.image_size", "16", "--data.num_clients", "3", "--model.backbone.width", "2"]
    main(["fit", *options(cell), *small, "--trainer.max_epochs", "1", "--federation.local_epochs", "1"])
    with Path("runs/FactorizedFL-Digits/version_0/clients.csv").open(newline="") as file:
        tested = [row for row in csv.DictReader(file) if row["split"] == "test"]
    assert [row["n"] for row in tested] == ["180"] * 3  # all test images for each
