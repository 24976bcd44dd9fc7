"""Domains: groups of clients with classes of their own."""

import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from cli.typed import rows as read
from cli.typed import typed
from lit_pfl.cli import main
from lit_pfl.data import (
    CIFAR100,
    GROUPS,
    IID,
    BalancedDirichlet,
    ClassShards,
    ClientDirichlet,
    Dirichlet,
    Domains,
    ImageDataModule,
    ImageSet,
    Uniform,
    label_permutation,
)
from lit_pfl.data.domains import CIFAR100_FIVE, CIFAR100_SUPERCLASSES
from lit_pfl.errors import ConfigError
from lit_pfl.methods import FedAvg
from tiny import client, digits, run, weights

PARTS = ("train", "val", "test")

# Factorized-FL, Table 4: of every domain the class ids, and the label that each has at the domain's four clients.
TABLE_4 = [
    {
        5: [2, 5, 3, 0], 20: [8, 4, 1, 5], 22: [3, 0, 5, 3], 25: [5, 9, 0, 7], 39: [6, 2, 6, 9],
        40: [4, 1, 4, 8], 84: [9, 3, 2, 1], 86: [0, 7, 9, 4], 87: [1, 8, 7, 6], 94: [7, 6, 8, 2],
    },
    {
        0: [8, 2, 4, 4], 9: [1, 8, 1, 0], 10: [4, 9, 9, 5], 16: [9, 3, 8, 8], 28: [6, 5, 2, 1],
        51: [5, 6, 6, 6], 53: [2, 0, 3, 2], 57: [3, 7, 0, 3], 61: [7, 4, 5, 7], 83: [0, 1, 7, 9],
    },
    {
        47: [2, 2, 0, 6], 52: [9, 7, 7, 3], 54: [4, 1, 5, 5], 56: [7, 6, 2, 7], 59: [0, 9, 6, 1],
        62: [3, 4, 9, 4], 70: [6, 3, 3, 0], 82: [5, 0, 1, 2], 92: [8, 5, 8, 9], 96: [1, 8, 4, 8],
    },
    {
        8: [1, 8, 4, 0], 13: [6, 2, 0, 4], 41: [3, 0, 1, 6], 48: [8, 7, 6, 7], 58: [7, 3, 7, 5],
        69: [4, 4, 5, 9], 81: [5, 6, 2, 1], 85: [9, 5, 3, 2], 89: [0, 9, 8, 3], 90: [2, 1, 9, 8],
    },
    {
        3: [0, 6, 9, 7], 34: [1, 8, 1, 4], 42: [3, 7, 6, 5], 43: [4, 4, 3, 8], 63: [5, 3, 8, 9],
        64: [8, 1, 2, 0], 66: [7, 2, 5, 1], 75: [9, 5, 0, 6], 88: [6, 0, 7, 2], 97: [2, 9, 4, 3],
    },
]  # fmt: skip


class Fabricated(ImageDataModule):
    """Images of four pixels that hold, in base 256, the image's own position."""

    def __init__(self, sizes: list[int], **options):
        super().__init__(**{"num_clients": 4, "eval_batch_size": 1000, **options})
        self.sizes = sizes

    def load(self) -> ImageSet:
        labels = np.random.default_rng(8).permutation(np.repeat(np.arange(len(self.sizes)), self.sizes))
        pixels = np.arange(len(labels))[:, None] // 256 ** np.arange(4) % 256
        images = torch.from_numpy(pixels.astype(np.uint8)).view(-1, 1, 2, 2)
        return ImageSet(images, torch.from_numpy(labels), len(self.sizes), torch.zeros(1), torch.ones(1) / 255, 1)


def fabricated(sizes, groups, within=None, **options) -> Fabricated:
    data = Fabricated(sizes, partition=Domains(groups, within), **options)
    data.setup()
    return data


def labelled(loader) -> dict[int, int]:
    """Return what a client sees: the label of every image, by its position in the data set."""
    seen = {}
    for images, labels in loader:
        positions = (images.flatten(1).double().round() * 256 ** torch.arange(4)).sum(1).long()
        seen |= dict(zip(positions.tolist(), labels.tolist(), strict=True))
    return seen


# Table 4


@pytest.mark.parametrize("domain", range(5))
def test_seed_1234_gives_all_fifty_rows_of_the_paper(domain):
    for position, (class_id, row) in enumerate(sorted(TABLE_4[domain].items())):
        assert [label_permutation(4 * domain + k, 10)[position] for k in range(4)] == row, class_id


def test_the_five_groups_are_the_table_s():
    assert [sorted(rows) for rows in TABLE_4] == GROUPS["cifar100_five"] == list(CIFAR100_FIVE.values())


def test_the_table_was_copied_with_permutations():
    for rows in TABLE_4:
        assert [sorted(column) for column in zip(*rows.values(), strict=True)] == [list(range(10))] * 4


# The constants


def test_superclasses_are_a_partition_and_the_five_groups_are_two_each():
    superclasses = GROUPS["cifar100_superclasses"]
    assert sorted(c for group in superclasses for c in group) == list(range(100))
    assert [len(group) for group in superclasses] == [5] * 20
    for five in GROUPS["cifar100_five"]:
        assert sum(set(group) <= set(five) for group in superclasses) == 2


def test_superclasses_are_those_of_the_data(real_data):
    folder = real_data / "cifar-100-python"
    names = pickle.loads((folder / "meta").read_bytes())["coarse_label_names"]
    official = pickle.loads((folder / "test").read_bytes(), encoding="latin1")
    fine_of: list[set[int]] = [set() for _ in range(20)]
    for fine, coarse in zip(official["fine_labels"], official["coarse_labels"], strict=True):
        fine_of[coarse].add(fine)
    assert [sorted(classes) for classes in fine_of] == list(CIFAR100_SUPERCLASSES.values())
    assert [name.replace("_", " ") for name in names] == list(CIFAR100_SUPERCLASSES)


# The split of real data


def expected_parts(labels: np.ndarray, classes: list[int], sizes: list[int]) -> dict[str, list[int]]:
    """Deal a domain's samples as described: shuffled by Python's generator, then training, test, validation data."""
    members = [i for i, label in enumerate(labels) if label in set(classes)]
    random.seed(1234)
    random.shuffle(members)
    parts = np.split(members, np.cumsum(sizes)[:-1])
    return dict(zip(("train", "test", "val"), parts, strict=True))


@pytest.fixture(scope="module")
def cifar100(real_data):
    return CIFAR100(root=str(real_data)).load()


def split_cifar100(cifar100, monkeypatch, **options) -> CIFAR100:
    monkeypatch.setattr(CIFAR100, "load", lambda self: cifar100)
    data = CIFAR100(num_clients=20, **options)
    data.setup()
    return data


@pytest.mark.parametrize("permute_labels", [False, True])
def test_five_domains_of_four_clients(cifar100, monkeypatch, permute_labels):
    data = split_cifar100(cifar100, monkeypatch, partition=Domains(), permute_labels=permute_labels, evaluate_on="all")
    for domain, rows in enumerate(TABLE_4):
        expected = expected_parts(cifar100.labels.numpy(), list(rows), [4800, 600, 600])
        for k in range(4):
            own = data.client(4 * domain + k)
            assert (own.num_classes, own.labels_agree) == (10, False)
            indices = {part: data.indices[part][4 * domain + k] for part in PARTS}
            assert indices["train"].tolist() == expected["train"][1200 * k : 1200 * (k + 1)].tolist()
            assert indices["test"].tolist() == expected["test"].tolist()
            assert indices["val"].tolist() == expected["val"].tolist()
            labels = torch.cat([labels for _, labels in own.test])
            ids = cifar100.labels[torch.from_numpy(indices["test"])].tolist()
            new = {c: rows[c][k] for c in rows} if permute_labels else {c: i for i, c in enumerate(sorted(rows))}
            assert labels.tolist() == [new[c] for c in ids]


def test_twenty_superclasses_of_a_client_each(cifar100, monkeypatch):
    partition = Domains("cifar100_superclasses")
    data = split_cifar100(cifar100, monkeypatch, partition=partition, train_fraction=0.8, test_fraction=0.15)
    for k, classes in enumerate(CIFAR100_SUPERCLASSES.values()):
        expected = expected_parts(cifar100.labels.numpy(), classes, [2400, 450, 150])
        assert all(set(data.indices[part][k]) == set(expected[part]) for part in PARTS)
        assert [len(data.indices[part][k]) for part in PARTS] == [2400, 150, 450]
        own = data.client(k)
        assert (own.num_classes, own.labels_agree) == (5, False)
        for loader, part in ((own.val, "val"), (own.test, "test")):
            labels = torch.cat([labels for _, labels in loader]).tolist()
            ids = cifar100.labels[torch.from_numpy(data.indices[part][k])].tolist()
            assert labels == [classes.index(c) for c in ids]
            assert set(labels) == set(range(5))


# The split of fabricated labels

RAGGED = [[7, 2], [0, 5, 4], [1, 8, 3]]


@pytest.mark.parametrize("permute_labels", [False, True])
@pytest.mark.parametrize("evaluate_on", ["own", "all"])
@pytest.mark.parametrize(
    "within",
    [None, IID(), Dirichlet(0.3), BalancedDirichlet(0.3), ClientDirichlet(0.3), ClassShards(1)],
    ids=lambda within: type(within).__name__,
)
def test_clients_see_their_domain_s_classes_by_their_own_labels(within, evaluate_on, permute_labels):
    sizes = [80, 100, 120, 90, 70, 110, 50, 130, 60]
    options = {"num_clients": 18, "evaluate_on": evaluate_on, "permute_labels": permute_labels}
    data = fabricated(sizes, RAGGED, within, **options)
    ids = data.data.labels.tolist()
    seen = {part: [labelled(getattr(data.client(k), part)) for k in range(18)] for part in PARTS}
    for k in range(18):
        own, classes = data.client(k), sorted(RAGGED[k // 6])
        assert (own.num_classes, own.labels_agree) == (len(classes), False)
        order = label_permutation(k, len(classes)) if permute_labels else list(range(len(classes)))
        for part in PARTS:
            assert seen[part][k] == {i: order[classes.index(ids[i])] for i in seen[part][k]}
            assert seen[part][k]
    together = {part: set().union(*seen[part]) for part in PARTS}
    assert not together["train"] & together["test"]
    assert not together["train"] & together["val"]
    assert not together["test"] & together["val"]
    dealt = np.concatenate(data.indices["train"])
    assert len(np.unique(dealt)) == len(dealt)
    assert not {i for part in PARTS for i in together[part] if ids[i] == 6}  # in no group
    for domain, classes in enumerate(RAGGED):
        n = sum(sizes[c] for c in classes)
        mine = range(6 * domain, 6 * domain + 6)
        tested = [set(seen["test"][k]) for k in mine]
        if evaluate_on == "all":
            assert all(test == tested[0] for test in tested)
            assert len(tested[0]) == round(0.1 * n)
            assert len(seen["val"][mine[0]]) == n - round(0.8 * n) - round(0.1 * n)
        else:
            for k, test in zip(mine, tested, strict=True):
                assert {ids[i] for i in test} <= {ids[i] for i in seen["train"][k]}


def test_label_counts_are_by_class_of_the_data_set():
    data = fabricated([40, 50, 60, 30], [[3, 0], [1]])
    labels = data.data.labels.numpy()
    for k in range(4):
        counts = data.class_counts("train")[k].tolist()
        assert counts == np.bincount(labels[data.indices["train"][k]], minlength=4).tolist()
    assert data.class_counts("train").sum(0)[2] == 0
    assert data.class_counts("train").sum() == 56 + 40


def test_one_domain_of_all_classes_is_no_domain():
    sizes = [40, 30, 50]
    plain = Fabricated(sizes, partition=Dirichlet(0.4))
    plain.setup()
    one = fabricated(sizes, [[2, 0, 1]], Dirichlet(0.4))
    for part in PARTS:
        for a, b in zip(plain.indices[part], one.indices[part], strict=True):
            assert np.array_equal(a, b)
    assert plain.client(1).labels_agree
    assert one.client(1).labels_agree
    assert not fabricated(sizes, [[0, 1, 2]], permute_labels=True).client(1).labels_agree


def test_one_domain_of_some_classes_is_a_smaller_data_set_whose_heads_may_be_shared():
    data = fabricated([40, 30, 50], [[2, 1]])
    own = data.client(3)
    assert (own.num_classes, own.labels_agree) == (2, True)
    ids = data.data.labels.tolist()
    assert all(label == ids[i] - 1 for i, label in labelled(own.test).items())


def test_domains_draw_differently():
    """Each of two equal domains has proportions of its own."""
    data = fabricated([100] * 4, [[0, 1], [2, 3]], Dirichlet(0.5), num_clients=10)
    sizes = [len(indices) for indices in data.indices["train"]]
    assert sizes[:5] != sizes[5:]


def test_uniform_cuts_in_the_order_given():
    parts = Uniform().split(np.zeros(11), 4, np.random.default_rng(0))
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]


# Mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": [[0, 1], [2, 4]]}, r"data\.partition\.groups: there is no class 4; .* 0 to 3"),
        ({"groups": [[-1, 0]]}, r"data\.partition\.groups: there is no class -1"),
        ({"groups": [[0, 1], [2, 1]]}, r"data\.partition\.groups has class 1 twice"),
        ({"groups": [[0, 1, 0]]}, r"data\.partition\.groups has class 0 twice"),
        ({"groups": [[0, 1], []]}, r"data\.partition\.groups=\[\[0, 1\], \[\]\]: .*none empty"),
        ({"groups": []}, r"data\.partition\.groups=\[\]"),
        ({"groups": "cifar100_fife"}, r"cifar100_fife: .* one of cifar100_five, cifar100_superclasses"),
        ({"groups": [[0], [1]], "within": Domains([[0]])}, r"data\.partition\.within: "),
        ({"groups": [[0], [1], [2]], "num_clients": 7}, r"data\.num_clients=7 .* the 3 domains .* 6 or 9"),
        ({"groups": [[0], [1], [2]], "num_clients": 2}, r"data\.num_clients=2 .* the 3 domains .* such as 3\."),
        ({"groups": [[0], [1, 2]], "num_clients": 18}, r"data\.num_clients=18 .* the 16 .* at most 16"),
    ],
)
def test_mistakes_are_told_by_the_name_of_the_option(options, message):
    with pytest.raises(ConfigError, match=message) as error:
        fabricated([10, 20, 30, 40], **options)
    assert "\n" not in str(error.value)


# Federations of domains


def test_a_federation_of_domains_of_different_sizes_shares_bodies_and_no_heads():
    data = digits(4, partition=Domains([[9, 0, 1], [4, 5, 6, 7]]))
    federation = run(client(FedAvg), data, rounds=2)
    shared = [set(c.shared_parameters()) for c in federation.clients.values()]
    assert "backbone.body.0.weight" in shared[0]
    assert "backbone.head.weight" not in shared[0]
    assert shared == [shared[0]] * 4
    states = weights(federation)
    heads = [states[k]["backbone.head.weight"] for k in range(4)]
    assert [len(head) for head in heads] == [3, 3, 4, 4]
    assert not torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[2], heads[3])


@pytest.mark.seconds
@pytest.mark.parametrize("groups", ["[[0,1,2],[9,4,5]]", "[[0, 9]]"])
def test_domains_on_the_command_line(groups):
    main([
        "fit", "--model", "FedAvg", "--data", "Digits", "--data.num_clients", "4", "--data.partition", "Domains",
        "--data.partition.groups", groups, "--data.partition.within", "Dirichlet", "--data.partition.within.alpha", "9",
        "--trainer.max_epochs", "1", "--model.backbone", "MLP", "--data.permute_labels", "true",
    ])  # fmt: skip
    # validated, and tested in both states
    assert len(read(Path("runs/FedAvg-Digits/version_0/clients.csv"))) == 12


@pytest.mark.slow
@pytest.mark.parametrize("fragment", ["domains", "superclasses"])
def test_the_configurations_of_domains(fragment, real_data):
    config = Path(__file__).parents[2] / f"configs/data/{fragment}.yaml"
    main([
        "fit", "--model", "FedAvg", "--config", str(config), "--data.root", str(real_data), "--trainer.max_epochs", "1",
        "--model.backbone", "MLP", "--model.backbone.hidden", "4",
        "--federation.client_trainer.limit_train_batches", "1",
    ])  # fmt: skip
    sizes = {(row["split"], int(row["n"])) for row in read(Path("runs/FedAvg-CIFAR100/version_0/clients.csv"))}
    assert sizes == {"domains": {("val", 600), ("test", 600)}, "superclasses": {("val", 150), ("test", 450)}}[fragment]


def test_a_mistake_on_the_command_line_is_one_line(capsys):
    wrong = ["--data.partition", "Domains", "--data.partition.groups", "[[0,1],[1]]"]
    assert typed(capsys, "fit", "--model", "FedAvg", *wrong).errors == [
        "lit-pfl: error: data.partition.groups has class 1 twice; put each class into one domain.",
    ]
