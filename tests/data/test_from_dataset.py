"""Datasets of PyTorch, dealt by partitions and by natural groups."""

import random
from collections import Counter

import lightning as L
import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from torchmetrics.functional.classification import binary_auroc
from torchvision.datasets import FakeData

from lit_pfl.data import (
    ClassShards,
    Dirichlet,
    Domains,
    FederatedDataModule,
    FromDataset,
    TensorLoader,
    example_of,
    in_order,
    label_permutation,
    labels_of,
)
from lit_pfl.errors import ConfigError
from lit_pfl.randomness import random_state, same_state
from tiny import trainer

N = 203
PARTS = ("train", "val", "test")


class Numbers(Dataset):
    """Sample i is i and its class i % 5."""

    def __init__(self, n: int = N, noise: bool = False, ragged: bool = False) -> None:
        self.targets = [i % 5 for i in range(n)]
        self.writers = [f"writer {chr(ord('a') + i * i % 7)}" for i in range(n)]
        self.noise, self.ragged = noise, ragged
        self.counted = {"reads": 0}  # not a number of its own, which would be put back after a look

    @property
    def reads(self) -> int:
        return self.counted["reads"]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, i):
        self.counted["reads"] += 1
        x = torch.full((1 + (i % 3 if self.ragged else 0),), float(i))
        return x + (0.1 * random.random() if self.noise else 0), self.targets[i]


class OwnDraws(Numbers):
    """Augments one sample in four, from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = random.Random(0)

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x + (self.draws.random() if self.draws.random() < 0.25 else 0), y


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


class ThirdLast(Numbers):
    """Samples end with something else than their label, which is the same for a while."""

    def __getitem__(self, i):
        return *super().__getitem__(i), torch.tensor(i % 3)


DOMAINS = Domains([[0, 1], [2, 3]])


def ready(dataset=None, **options) -> FromDataset:
    data = FromDataset(Numbers() if dataset is None else dataset, **{"num_clients": 4, "batch_size": 8, **options})
    data.setup()
    return data


def seen(loader) -> list[int]:
    return [int(value) for x, _ in loader for value in x]


def of(data, client, part) -> list[int]:
    return seen(getattr(data.client(client), part))


def pad(samples):
    return nn.utils.rnn.pad_sequence([x for x, _ in samples], True), torch.tensor([y for _, y in samples])


@pytest.mark.parametrize("in_memory", [True, False])
def test_every_sample_goes_to_one_part_of_one_client(in_memory):
    data = ready(in_memory=in_memory)
    parts = {
        part: [seen(in_order(getattr(data.client(k), part))) for k in range(4)] for part in ("train", "val", "test")
    }
    assert sorted(i for lists in parts.values() for part in lists for i in part) == list(range(N))
    assert [len(part) for part in parts["train"]] == [41, 41, 40, 40]
    assert sum(map(len, parts["test"])) == 20
    assert data.clients == [0, 1, 2, 3]
    assert [data.client(k).num_samples for k in range(4)] == [41, 41, 40, 40]
    assert data.client(0).num_classes is None
    assert data.client(0).labels_agree


def test_samples_are_read_once_and_held():
    dataset = Numbers()
    data = ready(dataset, num_clients=2)
    for _ in range(2):
        list(data.client(0).train)
    assert isinstance(data.client(0).train, TensorLoader)
    assert dataset.reads == N + 16 + 2  # the first one also to see what it is made of, and as the example
    assert data.client(0).train.samples[0].data_ptr() == data.client(1).train.samples[0].data_ptr()


@pytest.mark.parametrize(
    "options",
    [
        {"dataset": Numbers(), "in_memory": False},
        {"dataset": Numbers(noise=True)},
        {"dataset": OwnDraws()},
        {"dataset": Numbers(ragged=True), "collate_fn": pad},
        {"dataset": Numbers(ragged=True)},
        {"dataset": [(torch.tensor(float(i)), "text") for i in range(N)]},
    ],
)
def test_samples_that_cannot_be_held_come_through_data_loaders(options):
    data = ready(**options)
    assert isinstance(data.client(0).train, DataLoader)
    assert data.client(0).train.num_workers == 0


@pytest.mark.parametrize("in_memory", [True, False])
def test_held_or_not_the_batches_are_the_same_but_for_the_order_of_training(in_memory):
    data = ready(in_memory=in_memory, num_clients=5, batch_size=8, train_fraction=165 / N)
    train = data.client(0).train
    assert len(train.dataset) == 33
    sizes = [[len(x) for x, _ in train] for _ in range(3)]
    assert sizes == [[8, 8, 8, 8]] * 3  # not the last, which would be alone
    assert len(train) == 4
    orders = [seen(train) for _ in range(2)]
    assert orders[0] != orders[1]
    assert [y.tolist() for _, y in data.client(0).test] == [[i % 5 for i in of(data, 0, "test")]]
    assert of(data, 0, "test") == data.indices["test"][0].tolist()


@pytest.mark.parametrize("in_memory", [True, False])
def test_training_is_decided_by_the_default_generators_alone(in_memory):
    epochs = []
    for _ in range(2):
        train = ready(Numbers(noise=not in_memory), in_memory=in_memory).client(1).train
        torch.manual_seed(3)
        random.seed(3)
        epochs.append([[x.tolist() for x, _ in train], torch.rand(1).item(), random.random()])
    assert epochs[0] == epochs[1]


@pytest.mark.parametrize(
    "labels", ["targets", lambda sample: sample[1], [i % 5 for i in range(N)], np.arange(N) % 5, torch.arange(N) % 5]
)
def test_a_partition_deals_by_labels(labels):
    data = ready(labels=labels, partition=ClassShards(2), num_clients=5)
    for k in range(5):
        client = data.client(k)
        assert client.num_classes == 5
        assert len(set(labels_of(client.train).tolist())) == 2
        assert set(labels_of(client.test).tolist()) == set(labels_of(client.train).tolist())
    assert data.class_counts("train").sum() == sum(data.client(k).num_samples for k in range(5))


def test_functions_and_datasets_are_given_by_name_on_the_command_line(tmp_path, monkeypatch):
    (tmp_path / "own_data.py").write_text(
        "import torch\n"
        "class Rows(torch.utils.data.Dataset):\n"
        "    targets = [i % 2 for i in range(40)]\n"
        "    def __len__(self): return 40\n"
        "    def __getitem__(self, i): return torch.tensor([float(i)]), i % 2\n"
        "def half(sample): return int(sample[0]) // 20\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    parser = ArgumentParser()
    parser.add_subclass_arguments(FederatedDataModule, "data")
    options = ["--data", "FromDataset", "--data.dataset", "own_data.Rows", "--data.labels", "targets"]
    data = parser.instantiate(parser.parse_args([*options, "--data.groups", "own_data.half"])).data
    data.setup()
    assert data.names == [0, 1]
    assert data.client(1).num_classes == 2
    assert min(of(data, 1, "train")) >= 20


def own_labels(data, client) -> torch.Tensor:
    return data._label_map(client, list(range(data.data.num_classes)), data.data)


class Scans(Dataset):
    """Samples as torchgeo and MONAI have them: dicts of tensors and names."""

    def __init__(self, n: int = 40, named: bool = False) -> None:
        self.n, self.named = n, named

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int):
        name = {"path": f"{i}.tif"} if self.named else {}
        return {"image": torch.full((1, 2, 2), float(i)), "label": torch.tensor(i % 4), "site": i // 10, **name}


@pytest.mark.parametrize("named", [False, True])
def test_labels_and_groups_are_keys_of_samples_that_are_dicts(named):
    data = ready(dataset=Scans(named=named), labels="label", groups="site", permute_labels=True)
    assert data.names == [0, 1, 2, 3]
    for client in data.clients:
        for batch in data.client(client).train:
            there = batch["image"][:, 0, 0, 0].long()
            assert torch.equal(there // 10, torch.as_tensor(batch["site"]))
            assert torch.equal(batch["label"], own_labels(data, client)[there % 4])


def test_dicts_without_such_a_key_are_told_which_they_have():
    with pytest.raises(ConfigError, match="data.groups='hospital': Scans .* key; it has image, label, site"):
        ready(dataset=Scans(), groups="hospital")
    named = [{"x": float(i), "kind": "ab"[i % 2]} for i in range(40)]
    with pytest.raises(ConfigError, match="permute_labels=true: samples must have their label, a number, under 'kind'"):
        ready(dataset=named, labels="kind", permute_labels=True)


def test_dicts_with_two_labels_are_not_dealt_by_one_and_trained_on_the_other():
    message = "data.labels='site': the samples also have 'label', which networks and methods take for the class; leave"
    with pytest.raises(ConfigError, match=message):
        ready(dataset=Scans(), labels="site", partition=ClassShards(1))
    assert ready(dataset=Scans(), labels=lambda scan: scan["site"], partition=ClassShards(1)).client(0).num_classes == 4


@pytest.mark.parametrize("format", [None, "numpy"])
def test_a_dataset_of_hugging_face_has_columns(format):
    huggingface = pytest.importorskip("datasets")
    rows = {"x": [[i % 4, i] for i in range(40)], "letter": list("abcd") * 10, "writer": [i // 10 for i in range(40)]}
    data = ready(dataset=huggingface.Dataset.from_dict(rows).with_format(format), groups="writer", labels="letter")
    assert data.names == [0, 1, 2, 3]
    assert data.client(0).num_classes == 4
    batch = next(iter(data.client(1).train))
    assert set(batch["writer"].tolist()) == {1}
    assert batch["x"].shape[1:] == (2,)
    assert set(batch["letter"]) <= set("abcd")


def test_labels_of_hugging_face_s_own_type_can_be_permuted():
    huggingface = pytest.importorskip("datasets")
    kinds = huggingface.Features(x=huggingface.Value("float32"), y=huggingface.ClassLabel(names=["cat", "dog"]))
    rows = {"x": [float(i) for i in range(40)], "y": [i % 2 for i in range(40)]}
    own = huggingface.Dataset.from_dict(rows, features=kinds)
    data = ready(dataset=lambda: own, labels="y", num_clients=2, permute_labels=True)
    for client in data.clients:
        for batch in data.client(client).train:
            assert torch.equal(batch["y"], own_labels(data, client)[batch["x"].long() % 2])


def test_labels_may_be_names():
    data = ready(labels=[("cat", "ant", "bee")[i % 3] for i in range(N)], partition=ClassShards(1), num_clients=3)
    assert data.client(0).num_classes == 3
    assert [len({i % 3 for i in of(data, k, "train")}) for k in range(3)] == [1, 1, 1]


def test_names_of_classes_stand_in_the_order_of_the_samples_own_numbers():
    names = ("zebra", "cat", "dog", "ant", "bee")
    data = ready(labels=lambda sample: names[int(sample[1])])
    assert data.label_names(0) == list(names)
    halves = ready(labels=[("even", "odd")[i % 2] for i in range(N)])  # no numbers of these classes
    assert halves.label_names(0) == ["0", "1"]


def parity(sample) -> int:
    return int(sample[0]) % 2


def test_a_function_is_found_by_its_name():
    """As the command line writes it into ``config.yaml``."""
    data = ready(labels=f"{__name__}.parity", partition=ClassShards(1), num_clients=2)
    assert [len({i % 2 for i in of(data, k, "train")}) for k in range(2)] == [1, 1]


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.int32])
def test_labels_may_be_of_any_whole_type(kind):
    labels = (torch.arange(30) % 3).to(kind)
    data = ready(TensorDataset(torch.randn(30, 2), labels), labels=labels)
    assert data.client(0).num_classes == 3


def test_domains_number_their_classes():
    data = ready(labels="targets", partition=Domains([[0, 4], [1, 3]]), num_clients=2)
    for k, classes in enumerate([[0, 4], [1, 3]]):
        client = data.client(k)
        assert (client.num_classes, client.labels_agree) == (2, False)
        for x, y in client.train:
            assert [classes[label] for label in y] == [int(i) % 5 for i in x]


def test_the_example_s_label_is_one_of_everybody_s():
    """Whose domain the first sample is of makes no difference."""
    data = ready(TensorDataset(torch.zeros(N), 4 - torch.arange(N) % 5), labels=(4 - np.arange(N) % 5),
                 partition=Domains([[0, 1], [2, 3, 4]]), num_clients=2)  # fmt: skip
    assert [data.client(k).example[-1].tolist() for k in range(2)] == [[0], [0]]


@pytest.mark.parametrize("in_memory", [True, False])
def test_permuted_labels_are_the_clients_own(in_memory):
    data = ready(labels="targets", permute_labels=True, in_memory=in_memory)
    for k in range(4):
        own = label_permutation(k, 5, 1234)
        for part in ("train", "test"):
            for x, y in getattr(data.client(k), part):
                assert y.tolist() == [own[int(i) % 5] for i in x]
        assert not data.client(k).labels_agree


@pytest.mark.parametrize("groups", ["writers", lambda sample: int(sample[0]) ** 2 % 7, [i * i % 7 for i in range(N)]])
def test_every_natural_group_is_a_client_divided_by_itself(groups):
    data = ready(groups=groups)
    squares = [0, 1, 2, 4]  # modulo 7
    assert len(data.names) == len(data.clients) == data.num_clients == 4
    if groups == "writers":
        assert data.names == ["writer a", "writer b", "writer c", "writer e"]
    for k, square in enumerate(squares):
        members = [i for i in range(N) if i * i % 7 == square]
        own = {part: seen(in_order(getattr(data.client(k), part))) for part in PARTS}
        assert sorted(own["train"] + own["val"] + own["test"]) == members
        assert len(own["train"]) == round(0.8 * len(members))
        assert len(own["test"]) == round(0.1 * len(members))


def test_natural_groups_evaluated_on_all():
    data = ready(groups="writers", evaluate_on="all")
    tests = [seen(data.client(k).test) for k in range(4)]
    assert tests[0] == tests[1] == tests[3]
    own = ready(groups="writers")
    assert sorted(tests[0]) == sorted(i for k in range(4) for i in seen(own.client(k).test))


def test_a_group_of_one_sample_trains_on_it_and_has_no_other_part():
    data = ready(groups=[0] * (N - 1) + [1])
    assert data.clients == [0, 1]
    assert of(data, 1, "train") == [N - 1]
    assert of(data, 1, "val") == of(data, 1, "test") == []
    assert list(in_order(data.client(1).test)) == []


def test_groups_that_train_on_nothing_take_no_part():
    data = ready(groups=[0] * (N - 1) + [1], train_fraction=0.3)
    assert data.clients == [0]


@pytest.mark.seconds
def test_many_groups_are_divided_quickly():
    n = 20_000
    data = ready(TensorDataset(torch.arange(n)), groups=np.arange(n) // 5)
    assert data.num_clients == 4_000
    positions = np.concatenate([indices for part in PARTS for indices in data.indices[part]])
    assert np.array_equal(np.sort(positions), np.arange(n))


def test_random_transforms_are_fixed_for_evaluation():
    client = ready(Numbers(noise=True)).client(0)
    state = random_state()
    first, second = ([x.tolist() for x, _ in client.test] for _ in range(2))
    assert first == second
    assert same_state(state, random_state())
    first, second = (sorted(float(i) for x, _ in client.train for i in x) for _ in range(2))
    assert first != second


def test_the_example_is_one_sample_and_draws_nothing():
    for data in (ready(), ready(in_memory=False), ready(Numbers(noise=True))):
        state = torch.get_rng_state()
        x, y = data.client(0).example
        assert x.shape == (1, 1)
        assert y.shape == (1,)
        assert torch.equal(torch.get_rng_state(), state)


def test_the_split_depends_on_the_seed_only():
    first, again, other = ready(), ready(), ready(seed=1)
    assert of(first, 2, "test") == of(again, 2, "test") != of(other, 2, "test")


# ------------------------------------------------------------------------------------------------- other kinds of tasks


class Detector(L.LightningModule):
    """Somebody's binary classifier of dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(30, 1)

    def training_step(self, batch, batch_idx):
        return nn.functional.binary_cross_entropy_with_logits(self.net(batch["x"])[:, 0], batch["y"].float())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


@pytest.mark.parametrize("in_memory", [True, False])
def test_batches_may_be_dicts(in_memory):
    from sklearn.datasets import load_breast_cancer

    table = load_breast_cancer()
    x = (table.data - table.data.mean(0)) / table.data.std(0)
    rows = [{"x": np.float32(row), "y": int(y)} for row, y in zip(x, table.target, strict=True)]
    data = ready(rows, labels=lambda row: row["y"], partition=Dirichlet(1.0), num_clients=2, in_memory=in_memory)
    client, module = data.client(0), Detector()
    assert client.example["x"].shape == (1, 30)
    trainer(3).fit(module, client.train)
    with torch.no_grad():
        scores = torch.cat([module.net(batch["x"])[:, 0] for batch in client.test])
    assert binary_auroc(scores, labels_of(client.test)) > 0.95


def test_masks_are_samples_like_others():
    images = torch.rand(40, 1, 8, 8)
    data = ready(TensorDataset(images, (images > 0.5).long()), num_clients=2)
    for x, mask in data.client(0).train:
        assert torch.equal(mask, (x > 0.5).long())
    with pytest.raises(ConfigError, match="no class labels"):
        labels_of(data.client(0).train)


def test_batches_of_a_single_tensor():
    data = ready(torch.arange(N).float())
    assert sorted(float(x) for batch in in_order(data.client(0).train) for x in batch) == sorted(
        data.indices["train"][0]
    )


def test_a_class_makes_the_dataset():
    module = FromDataset(Numbers, num_clients=2)
    module.setup()
    assert len(module.dataset) == N


def test_a_subset_is_a_dataset():
    data = ready(Subset(Numbers(), range(50)), labels=lambda sample: sample[1], num_clients=2)
    assert sorted(i for part in PARTS for k in range(2) for i in of(data, k, part)) == list(range(50))
    assert data.client(0).num_classes == 5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_held_samples_move_to_the_device():
    data = ready(labels="targets", permute_labels=True)
    data.move_to(torch.device("cuda"))
    assert {tensor.device.type for batch in data.client(0).train for tensor in batch} == {"cuda"}


# ---------------------------------------------------------------------------------------------------------- bad options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"partition": Dirichlet(0.5)},
            "Dirichlet deals by class labels, and this FromDataset has none; choose U",
        ),
        ({"partition": Domains([[0]])}, "Domains deals by class labels"),
        ({"permute_labels": True}, "say with data.labels which classes"),
        (
            {"labels": "classes"},
            "data.labels='classes': Numbers has no such column, attribute or key; give one",
        ),
        (
            {"groups": "hospital"},
            "data.groups='hospital': Numbers has no such column, attribute or key; give one",
        ),
        ({"labels": [1, 2]}, r"one for each of the 203 samples, not an array of shape \(2,\)"),
        ({"groups": np.zeros((N, 2))}, r"data.groups: .* shape \(203, 2\)"),
        ({"labels": [-1] * N}, "numbered from 0; there is a -1"),
        ({"labels": [0.5] * N}, "not fractions"),
        ({"groups": [None, 1] * 101 + [2]}, "data.groups: they have no order"),
        ({"groups": [0, 1] * 101 + [2], "evaluate_on": "alike"}, "data.evaluate_on=alike: groups have evaluation sam"),
        ({"dataset": {"train": [1], "test": [2]}}, r"this dict holds \['train', 'test'\]; give one of them"),
        ({"dataset": Stream()}, "Stream cannot be split over clients; give a map-style Dataset"),
        ({"dataset": TensorDataset(torch.zeros(0))}, "this TensorDataset is empty"),
        ({"num_clients": 200}, "more than the 162 training samples of FromDataset; choose at most 162"),
        ({"labels": [4] * N, "permute_labels": True}, r"first sample of class 4 ends with 0"),
        ({"dataset": torch.zeros(N), "labels": [0] * N, "permute_labels": True}, "samples must end with their label"),
        (
            {"dataset": TensorDataset(torch.arange(N) % 3), "labels": [i % 5 for i in range(N)], "partition": DOMAINS},
            "data.partition: samples must end with their label, a number, and the dataset's first sample of class 0 e",
        ),
        (
            {"dataset": ThirdLast(), "labels": "targets", "partition": DOMAINS},
            r"data.partition: samples must end with .* first sample of class 3 ends with tensor\(0\)",
        ),
        ({"train_fraction": 1.5}, "must be above 0"),
        (
            {"dataset": FakeData(N)},
            "^data.dataset: no batches can be made of samples of FakeData; give it a transform .* found .*PIL.Image",
        ),
    ],
)
def test_bad_options_are_one_line(options, message):
    with pytest.raises(ConfigError, match=message) as error:
        ready(**options)
    assert "\n" not in str(error.value)


def test_there_is_no_client_beyond_the_last():
    for client in (-1, 4):
        with pytest.raises(ConfigError, match=f"no client {client}"):
            ready().client(client)


def test_counts_of_labels_are_those_of_the_training_data():
    data = ready(labels="targets", groups="writers")
    for k in range(4):
        assert dict(Counter(i % 5 for i in seen(in_order(data.client(k).train)))) == {
            c: n for c, n in enumerate(data.class_counts("train")[k]) if n
        }


def test_the_example_of_a_loader_is_its_first_sample():
    train = ready(labels="targets").client(2).train
    assert example_of(train)[0].item() == ready(labels="targets").indices["train"][2][0]
