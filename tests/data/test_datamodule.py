"""Data modules and their batches, on real images."""

import hashlib
import pickle
import random
import shutil
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from scipy.io import savemat

from lit_pfl.data import (
    CIFAR10,
    CIFAR100,
    MNIST,
    SVHN,
    BatchLoader,
    Digits,
    Dirichlet,
    FashionMNIST,
    ImageSet,
    Partition,
    TinyImageNet,
    Uniform,
    label_permutation,
)
from lit_pfl.data.federated import ClientSets
from lit_pfl.data.sources import _resized
from lit_pfl.errors import ConfigError
from tiny import digits

PARTS = ("train", "val", "test")


def ready(num_clients=4, **options):
    data = digits(num_clients, **options)
    data.setup()
    return data


def positions(data, *parts):
    return np.concatenate([indices for part in parts for indices in data.indices[part]])


def same_split(a, b) -> bool:
    return all(np.array_equal(x, y) for part in PARTS for x, y in zip(a.indices[part], b.indices[part], strict=True))


def numbered(n: int, channels: int = 1) -> ImageSet:
    """Images of one pixel whose batches hold the image's position."""
    images = torch.arange(n, dtype=torch.uint8).view(n, 1, 1, 1).repeat(1, channels, 1, 1)
    return ImageSet(images, torch.arange(n), n, torch.zeros(channels), torch.full((channels,), 1 / 255), channels)


def seen(loader: BatchLoader) -> list[list[int]]:
    """Positions of the images in every batch; their labels must agree."""
    batches = []
    for images, labels in loader:
        assert images.dtype == torch.float32
        assert labels.dtype == torch.int64
        batches.append(images.flatten().round().int().tolist())
        assert batches[-1] == labels.tolist()
    assert len(batches) == len(loader)
    return batches


def epoch(loader: BatchLoader) -> list[int]:
    return list(chain.from_iterable(seen(loader)))


# The split


def test_digits_are_split_80_10_10():
    data = ready(partition=Dirichlet(100.0))
    assert [len(positions(data, part)) for part in PARTS] == [1438, 179, 180]
    assert sorted(positions(data, *PARTS)) == list(range(1797))


@pytest.mark.parametrize("evaluate_on", ["own", "all", "alike"])
@pytest.mark.parametrize("partition", [None, Dirichlet(0.5)])
def test_no_image_leaks_from_one_part_to_another(partition, evaluate_on):
    data = ready(8, partition=partition, evaluate_on=evaluate_on)
    train, val, test = (set(positions(data, part).tolist()) for part in PARTS)
    assert not train & val
    assert not train & test
    assert not val & test
    assert len(train) == len(positions(data, "train"))  # nor from one client to another


class Numbered(Digits):
    """Forty images of one pixel, of four classes in turn; the last ten are for testing."""

    def load(self):
        images = numbered(40)
        return replace(images, labels=images.labels % 4, num_classes=4, num_train=30)


@pytest.mark.parametrize("evaluate_on", ["own", "all"])
@pytest.mark.parametrize(("train_fraction", "sizes"), [(1.0, (30, 0)), (0.8, (24, 6))])
def test_the_official_test_data_are_for_testing_and_nothing_else(train_fraction, sizes, evaluate_on):
    data = Numbered(
        num_clients=3, split="official", train_fraction=train_fraction, partition=Uniform(), evaluate_on=evaluate_on
    )
    data.setup()
    order = list(range(30))
    random.Random(1234).shuffle(order)
    assert positions(data, "train").tolist() == order[: sizes[0]]
    assert sorted(set(positions(data, "val"))) == sorted(order[sizes[0] :])
    assert sorted(set(positions(data, "test"))) == list(range(30, 40))
    assert len(positions(data, "test")) == (10 if evaluate_on == "own" else 30)
    assert data.everything("test").dataset.tolist() == list(range(30, 40))
    assert sorted(data.everything("val").dataset.tolist()) == sorted(order[sizes[0] :])


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"split": "official", "train_fraction": 0.4, "val_fraction": 0.2}, (12, 6, 10)),
        ({"split": "official", "train_fraction": 0.4, "val_fraction": 0.0}, (12, 0, 10)),
        ({"train_fraction": 0.4, "test_fraction": 0.3, "val_fraction": 0.1}, (16, 4, 12)),
        ({"train_fraction": 0.4, "test_fraction": 0.3, "val_fraction": 0.3}, (16, 12, 12)),
    ],
)
def test_some_of_the_samples_may_be_left_unused(options, sizes):
    data, all_used = (
        Numbered(num_clients=2, partition=Uniform(), **{**options, **more}) for more in ({}, {"val_fraction": None})
    )
    for module in (data, all_used):
        module.setup()
    assert tuple(len(positions(data, part)) for part in PARTS) == sizes
    for part in ("train", "test"):
        assert positions(data, part).tolist() == positions(all_used, part).tolist()
    assert set(data.whole["val"]) <= set(all_used.whole["val"])


@pytest.mark.parametrize(
    "options", [{"val_fraction": 0.2}, {"val_fraction": -0.1}, {"split": "official", "val_fraction": 0.3}]
)
def test_a_share_for_validation_must_be_there(options):
    with pytest.raises(ConfigError, match=r"data.val_fraction=.*(0\.1|0\.2) is left"):
        digits(**options)


def test_everything_has_the_labels_of_the_data_set():
    data = Numbered(num_clients=2, permute_labels=True, partition=Dirichlet(0.1), train_fraction=0.5, test_fraction=0.3)
    data.setup()
    [(images, labels)] = data.everything("test")
    assert (images.flatten().round().long() % 4).tolist() == labels.tolist()
    assert len(labels) == 12


def test_digits_have_no_official_split():
    with pytest.raises(ConfigError, match=r"data.split=official: Digits"):
        ready(split="official")
    with pytest.raises(ConfigError, match=r"data.train_fraction=1.5"):
        digits(split="official", train_fraction=1.5)


@pytest.mark.parametrize("size", [100_000, 10**9, 10**19])
def test_images_that_do_not_fit_into_memory_are_refused(size):
    with pytest.raises(ConfigError, match=f"data.image_size={size}: there is not enough memory"):
        Digits(num_clients=2, image_size=size).setup()
    with pytest.raises(ConfigError, match=f"data.image_size={size}0: there is not enough memory"):
        _resized(torch.zeros(9, 3, 32, 32, dtype=torch.uint8), size * 10)


def test_own_evaluation_data_is_divided_and_all_of_it_is_shared():
    own, everything = ready(), ready(evaluate_on="all")
    for part, size in (("val", 179), ("test", 180)):
        assert len(np.unique(positions(own, part))) == len(positions(own, part)) == size
        assert all(set(indices) == set(positions(own, part)) for indices in everything.indices[part])
        assert all(len(indices) == size for indices in everything.indices[part])
    assert same_split(ready(evaluate_on="all"), everything)
    assert all(np.array_equal(a, b) for a, b in zip(own.indices["train"], everything.indices["train"], strict=True))


def test_own_evaluation_data_has_the_classes_of_the_training_data():
    data = ready(6, partition=Dirichlet(0.1))
    labels = data.data.labels.numpy()
    for k in range(6):
        trained = np.bincount(labels[data.indices["train"][k]], minlength=10)
        assert (trained == data.class_counts("train")[k]).all()
        assert len(data.indices["test"][k])
        assert trained[labels[data.indices["test"][k]]].all()


@pytest.mark.parametrize("evaluate_on", ["own", "all", "alike"])
def test_permuted_labels_are_those_of_the_client_in_every_part(evaluate_on):
    plain, permuted = ready(evaluate_on=evaluate_on), ready(evaluate_on=evaluate_on, permute_labels=True)
    for k in range(4):
        new = torch.tensor(label_permutation(k, 10))
        for part in PARTS:
            torch.manual_seed(1)
            expected = list(getattr(plain.client(k), part))
            torch.manual_seed(1)
            for (images, labels), (same, own) in zip(expected, getattr(permuted.client(k), part), strict=True):
                assert torch.equal(images, same)
                assert torch.equal(new[labels], own)
    assert plain.client(0).labels_agree
    assert not permuted.client(0).labels_agree


@pytest.mark.parametrize("partition", [None, Dirichlet(0.5)])
def test_the_split_depends_on_the_seed_only(partition):
    first = ready(partition=partition)
    np.random.seed(99)  # noqa: NPY002
    assert same_split(first, ready(partition=partition))
    assert same_split(first, ready(partition=partition, permute_labels=True))
    assert not same_split(first, ready(partition=partition, seed=7))


def test_setup_again_changes_nothing():
    data = ready()
    held, indices = data.data, data.indices
    data.setup("test")
    assert data.data is held
    assert data.indices is indices


def test_too_many_clients_are_refused_by_the_name_of_the_option():
    with pytest.raises(ConfigError, match=r"data\.num_clients=1439 .* at most 1438"):
        ready(1439)
    data = ready(1438)
    assert {len(indices) for indices in data.indices["train"]} == {1}
    assert min(len(indices) for part in ("val", "test") for indices in data.indices[part]) == 1
    assert data.clients == list(range(1438))


@pytest.mark.parametrize("fractions", [(0.0, 0.1), (1.0, 0.1), (0.8, 0.0), (0.8, 0.3)])
def test_fractions_that_do_not_add_up_are_refused(fractions):
    with pytest.raises(ConfigError, match=r"data\.train_fraction"):
        digits(train_fraction=fractions[0], test_fraction=fractions[1])


@pytest.mark.parametrize("client", [-1, 4])
def test_a_client_that_does_not_exist_is_refused(client):
    with pytest.raises(ConfigError, match=f"no client {client}"):
        ready().client(client)


def test_clients_left_empty_by_the_partition_take_no_part():
    data = ready(40, partition=Dirichlet(0.01, min_samples=0))
    lengths = [len(data.client(k).train.dataset) for k in range(40)]
    assert 0 in lengths
    assert data.clients == [k for k in range(40) if lengths[k]]
    assert list(chain.from_iterable(data.test_dataloader())) == data.clients
    assert all(len(data.client(k).test) == 0 for k in range(40) if not lengths[k])


class Deals(Partition):
    """Deals what it is told to, by what makes it from the number of samples."""

    needs_labels = False

    def __init__(self, make):
        self.make = make

    def split(self, labels, num_clients, rng):
        return self.make(len(labels))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda n: [np.arange(5)] * 2, "Deals deals 2 parts to 3 clients"),
        (lambda n: [np.arange(5)] * 4, "Deals deals 4 parts to 3 clients"),
        (lambda n: [np.arange(5), np.arange(n - 1, n + 1), np.arange(5)], "gives client 1 sample 1438; .* 0 to 1437"),
        (lambda n: [np.arange(5), np.arange(5), -np.arange(5)], "gives client 2 sample -4; .* 0 to 1437"),
        (lambda n: [np.arange(5.0)] * 3, r"gives client 0 an array float64 \(5,\); it must be a list of positions"),
        (lambda n: [np.zeros(5, bool)] * 3, r"gives client 0 an array bool \(5,\)"),
        (lambda n: [np.zeros((5, 1), int)] * 3, r"gives client 0 an array int64 \(5, 1\)"),
    ],
)
def test_what_a_partition_cannot_deal_is_said_in_a_line(make, message):
    with pytest.raises(ConfigError, match=f"data.partition: .*{message}") as error:
        ready(3, partition=Deals(make))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("make", "sizes"),
    [
        (lambda n: [list(range(30)), list(range(20, 60)), [7, 7]], [30, 40, 2]),  # in common, and twice
        (lambda n: [torch.arange(30), np.arange(n) < 20, (n - 1,)], [30, 20, 1]),
        (lambda n: [[], np.arange(30), np.array([])], [0, 30, 0]),
    ],
)
def test_positions_may_be_held_in_anything_and_be_several_clients(make, sizes):
    assert [len(own) for own in ready(3, partition=Deals(make)).indices["train"]] == sizes


# Batches


@pytest.mark.parametrize(
    ("n", "batch_size", "left_out"),
    [(10, 4, 0), (8, 4, 0), (9, 4, 1), (9, 8, 1), (1, 4, 0), (4, 4, 0), (5, 1, 0), (1, 1, 0), (3, 2, 1)],
)
def test_only_a_single_last_training_image_is_left_out(n, batch_size, left_out):
    batches = seen(BatchLoader(numbered(20), torch.arange(n), batch_size, shuffle=True))
    images = list(chain.from_iterable(batches))
    assert len(images) == len(set(images)) == n - left_out
    assert set(images) <= set(range(n))
    assert all(len(batch) == batch_size for batch in batches[:-1])
    assert epoch(BatchLoader(numbered(20), torch.arange(n), batch_size)) == list(range(n))  # as for evaluation


def test_every_epoch_shuffles_the_training_images_anew():
    loader = BatchLoader(numbered(20), torch.arange(3, 19), 8, shuffle=True)
    epochs = [epoch(loader) for _ in range(3)]
    assert all(sorted(order) == list(range(3, 19)) != order for order in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_no_image_is_left_out_for_ever():
    loader = BatchLoader(numbered(20), torch.arange(17), 8, shuffle=True)
    missing = [set(range(17)) - set(epoch(loader)) for _ in range(20)]
    assert {len(images) for images in missing} == {1}
    assert len(set.union(*missing)) > 5


def test_a_shuffled_epoch_repeats_with_the_seed():
    loader = ready().client(1).train
    epochs = []
    for _ in range(2):
        torch.manual_seed(4)
        epochs.append(torch.cat([labels for _, labels in loader]))
    assert torch.equal(*epochs)


def test_digits_train_shuffled_and_evaluate_in_order():
    data = ready(3, batch_size=32, eval_batch_size=50)
    for k in range(3):
        client = data.client(k)
        trained = torch.cat([labels for _, labels in client.train])
        expected = data.data.labels[data.indices["train"][k]]
        assert torch.equal(trained.sort().values, expected.sort().values)
        assert not torch.equal(trained, expected)
        for part in ("val", "test"):
            tested = torch.cat([labels for _, labels in getattr(client, part)])
            assert torch.equal(tested, data.data.labels[data.indices[part][k]])
        images, _ = next(iter(client.test))
        assert images.shape[1:] == client.example[0].shape[1:]
        assert images.shape == (50, 1, 8, 8)


@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_normalised_channel_by_channel(channels):
    images = torch.randint(256, (6, channels, 5, 5), dtype=torch.uint8)
    mean, std = torch.tensor([0.1, 0.5, 0.7])[:channels], torch.tensor([0.2, 0.3, 0.9])[:channels]
    expected = (images.numpy() / 255 - mean.view(-1, 1, 1).numpy()) / std.view(-1, 1, 1).numpy()
    data = ImageSet(images.clone(), torch.arange(6), 6, mean, std, channels)
    for shuffle in (False, True):
        for batch, chosen in BatchLoader(data, torch.tensor([4, 1, 3]), 2, shuffle=shuffle):
            np.testing.assert_allclose(batch.numpy(), expected[chosen.numpy()], atol=1e-6)
    assert torch.equal(data.images, images)  # the set is never written to


def test_grey_images_become_colour_ones_only_in_batches():
    images = torch.randint(256, (7, 1, 5, 5), dtype=torch.uint8)
    data = ImageSet(images, torch.zeros(7).long(), 10, torch.tensor([0.5]), torch.tensor([0.5]), channels=3)
    batch, _ = next(iter(BatchLoader(data, torch.arange(7), 7)))
    assert data.images.data_ptr() == images.data_ptr()
    assert data.images.shape == (7, 1, 5, 5)
    assert batch.shape == (7, 3, 5, 5)
    for channel in range(3):
        torch.testing.assert_close(batch[:, channel], (images[:, 0] / 255 - 0.5) / 0.5)


# Sources


@pytest.mark.parametrize("source", [CIFAR10, CIFAR100, FashionMNIST, MNIST, SVHN, TinyImageNet])
def test_a_missing_data_set_is_told_in_one_line(source, tmp_path):
    data = source(root=str(tmp_path / "nowhere"))
    data.prepare_data()  # fetches nothing unasked
    with pytest.raises(ConfigError, match=rf"{source.__name__} is not in .*nowhere.*--data\.download") as error:
        data.setup()
    assert "\n" not in str(error.value)
    assert not (tmp_path / "nowhere").exists()


def check_source(data, n: int, shape: tuple[int, ...], classes: int, channels: int) -> None:
    """See that all images are there, of all classes, and that normalised batches are about standard."""
    data.setup()
    assert data.data.images.shape == (n, *shape)
    assert data.data.images.dtype == torch.uint8
    counts = torch.bincount(data.data.labels)
    assert len(counts) == data.data.num_classes == classes
    assert counts.min() > 0
    sizes = [len(np.unique(positions(data, part))) for part in ("val", "test")]
    assert sizes == [n - round(0.8 * n) - round(0.1 * n), round(0.1 * n)]
    client = data.client(19)
    images, labels = next(iter(client.test))
    assert images.shape == (min(512, len(client.test.dataset)), channels, *shape[1:])
    assert labels.max() < classes == client.num_classes
    assert abs(images.mean()) < 0.3
    assert 0.7 < images.std() < 1.3


def test_cifar10(real_data):
    data = CIFAR10(root=str(real_data), verify=not (real_data / "cifar-10-batches-py" / "checksums.json").exists())
    check_source(data, 60_000, (3, 32, 32), 10, channels=3)
    # the split of Factorized-FL's generator: shuffled, cut, and of every class a twentieth of the training data
    order = list(range(60_000))
    random.seed(1234)
    random.shuffle(order)
    train, test, val = order[:48_000], order[48_000:54_000], order[54_000:]
    labels = data.data.labels.tolist()
    of_class = [[i for i in train if labels[i] == c] for c in range(10)]
    assert sorted(positions(data, "test")) == sorted(test)
    assert sorted(positions(data, "val")) == sorted(val)
    for k in range(20):
        shares = [members[k * round(len(members) / 20) : (k + 1) * round(len(members) / 20)] for members in of_class]
        assert sorted(data.indices["train"][k]) == sorted(chain.from_iterable(shares))
    # where a class is no multiple of 20, the last client gets what is left
    assert [len(indices) for indices in data.indices["train"]] == [2400] * 19 + [2385]


def test_files_with_other_checksums_are_named_and_may_be_accepted(tmp_path):
    """Files of CIFAR-10's lay-out, in none of which there is what is in the official one."""
    folder, rng = tmp_path / "cifar-10-batches-py", np.random.default_rng(0)
    folder.mkdir()
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    for name in names:
        images = rng.integers(0, 256, (20, 3072), dtype=np.uint8)
        (folder / name).write_bytes(pickle.dumps({"data": images, "labels": [i % 10 for i in range(20)]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    md5 = hashlib.md5((folder / "data_batch_1").read_bytes()).hexdigest()
    with pytest.raises(ConfigError, match=rf"CIFAR10 is not the .*data_batch_1' is {md5}, not c99.*--data\.verify"):
        CIFAR10(root=str(tmp_path), num_clients=2).setup()
    data = CIFAR10(root=str(tmp_path), num_clients=2, verify=False)
    data.setup()
    assert data.data.images.shape == (120, 3, 32, 32)
    (folder / "data_batch_3").unlink()
    with pytest.raises(ConfigError, match=r"CIFAR10 is not all in .*, which has no data_batch_3"):
        CIFAR10(root=str(tmp_path), num_clients=2, verify=False).setup()


def test_cifar10_of_another_source(real_data):
    if not (real_data / "cifar-10-batches-py" / "checksums.json").exists():
        pytest.skip("the files are the official ones")
    with pytest.raises(ConfigError, match=r"CIFAR10 is not the official one: .*data_batch_1'"):
        CIFAR10(root=str(real_data)).setup()
    data = CIFAR10(root=str(real_data), verify=False)
    data.setup()
    assert len(data.data.images) == 60_000


@pytest.mark.seconds
def test_cifar100(real_data):
    data = CIFAR100(root=str(real_data))
    check_source(data, 60_000, (3, 32, 32), 100, channels=3)
    assert (torch.bincount(data.data.labels) == 600).all()
    official = CIFAR100(root=str(real_data), split="official", train_fraction=1.0)
    official.setup()
    assert sorted(official.everything("test").dataset.tolist()) == list(range(50_000, 60_000))
    assert max(positions(official, "train")) < 50_000


@pytest.mark.seconds
def test_colour_images_keep_their_pixels_and_order(real_data):
    official = torchvision.datasets.CIFAR100(real_data, train=False)
    data = CIFAR100(root=str(real_data)).load()
    assert torch.equal(data.images[50_007].permute(1, 2, 0), torch.from_numpy(official.data[7]))
    assert data.labels[50_000:].tolist() == official.targets


@pytest.mark.parametrize(("options", "shape"), [({}, (1, 32, 32)), ({"image_size": 28, "channels": 1}, (1, 28, 28))])
def test_mnist(real_data, options, shape):
    data = MNIST(root=str(real_data), **options)
    check_source(data, 70_000, shape, 10, channels=options.get("channels", 3))
    official = torchvision.datasets.MNIST(real_data, train=False)
    assert torch.equal(data.data.labels[data.data.num_train :], official.targets)
    if shape[1] == 28:
        assert torch.equal(data.data.images[60_000:, 0], official.data)


def test_fashion_mnist(fashion_mnist):
    data = FashionMNIST(root=str(fashion_mnist), image_size=28)
    check_source(data, 70_000, (1, 28, 28), 10, channels=3)
    assert (torch.bincount(data.data.labels) == 7000).all()


def test_svhn(tmp_path):
    """Files of SVHN's lay-out, with 10 for the digit 0; the train part comes first."""
    generator, made = np.random.default_rng(0), {}
    for part, n in (("train", 60), ("test", 40)):
        images, digit = generator.integers(0, 256, (n, 3, 32, 32), dtype=np.uint8), np.arange(n) % 10
        savemat(tmp_path / f"{part}_32x32.mat", {
            "X": images.transpose(2, 3, 1, 0), "y": np.where(digit == 0, 10, digit).astype(np.uint8)[:, None],
        })  # fmt: skip
        made[part] = images, digit
    with pytest.raises(ConfigError, match=r"SVHN is not the official one: .*train_32x32\.mat'"):
        SVHN(root=str(tmp_path), num_clients=2).setup()
    data = SVHN(root=str(tmp_path), num_clients=2, verify=False)
    data.setup()
    assert np.array_equal(data.data.images.numpy(), np.concatenate([made["train"][0], made["test"][0]]))
    assert np.array_equal(data.data.labels.numpy(), np.concatenate([made["train"][1], made["test"][1]]))
    assert data.data.labels.dtype == torch.int64
    assert data.data.num_train == 60
    assert data.client(0).example[0].shape[1] == 3


NAMES = ["n02", "n10", "n01"]  # in no order, as in the official file


def fabricate_tiny_imagenet(root: Path) -> tuple[list[int], list[int]]:
    """Write images of one colour each in the official lay-out; return the colours and classes in the order read."""
    folder = root / "tiny-imagenet-200"
    (folder / "val/images").mkdir(parents=True)
    (folder / "wnids.txt").write_text("\n".join(NAMES) + "\n")
    colours, classes, annotations = [], [], []

    def write(file: Path, c: int) -> None:
        colours.append(20 + 10 * len(colours))
        classes.append(c)
        grey = len(colours) % 2  # some of the official images are grey
        image = torch.full((1 if grey else 3, 64, 64), colours[-1], dtype=torch.uint8)
        torchvision.io.write_jpeg(image, str(file), quality=100)

    for c, name in enumerate(sorted(NAMES)):
        images = folder / "train" / name / "images"
        images.mkdir(parents=True)
        (folder / "train" / name / f"{name}_boxes.txt").write_text("no image\n")
        for i in range(4):
            write(images / f"{name}_{i}.JPEG", c)
    for i, c in enumerate([2, 0, 1, 2]):
        write(folder / f"val/images/val_{i}.JPEG", c)
        annotations.append(f"val_{i}.JPEG\t{sorted(NAMES)[c]}\t0\t32\t44\t62\n")
    (folder / "val/val_annotations.txt").write_text("".join(annotations))
    return colours, classes


@pytest.mark.parametrize("image_size", [64, 32])
def test_tiny_imagenet(tmp_path, image_size):
    colours, classes = fabricate_tiny_imagenet(tmp_path)
    data = TinyImageNet(root=str(tmp_path), num_clients=2, **({} if image_size == 64 else {"image_size": image_size}))
    data.setup()
    images = data.data.images
    assert images.shape == (16, 3, image_size, image_size)
    assert images.dtype == torch.uint8
    assert (images.int() - torch.tensor(colours).view(-1, 1, 1, 1)).abs().max() <= 1
    assert data.data.labels.tolist() == classes
    assert data.data.num_train == 12
    client = data.client(1)
    assert client.example[0].shape == (1, 3, image_size, image_size)
    assert client.num_classes == 200
    batch, _ = next(iter(client.test))
    expected = torch.tensor([(colours[i] / 255 - 0.5) / 0.5 for i in data.indices["test"][1]])
    torch.testing.assert_close(batch.mean((1, 2, 3)), expected, atol=0.01, rtol=0)


def test_tiny_imagenet_keeps_the_pixels_in_place(tmp_path):
    fabricate_tiny_imagenet(tmp_path)
    picture = (torch.arange(64 * 64) % 251).view(1, 64, 64).repeat(3, 1, 1).byte()
    torchvision.io.write_png(picture, str(tmp_path / "tiny-imagenet-200/val/images/val_3.JPEG"))
    data = TinyImageNet(root=str(tmp_path)).load()
    assert torch.equal(data.images[15], picture)


def test_tiny_imagenet_is_fetched_once(tmp_path, monkeypatch):
    fetched = []

    def fetch(address: str, root: str, md5: str) -> None:
        fetched.append((address, len(md5)))
        fabricate_tiny_imagenet(Path(root))

    monkeypatch.setattr(torchvision.datasets.utils, "download_and_extract_archive", fetch)
    data = TinyImageNet(root=str(tmp_path), download=True, num_clients=2)
    data.prepare_data()
    data.setup()
    assert fetched == [("http://cs231n.stanford.edu/tiny-imagenet-200.zip", 32)]


def test_damaged_tiny_imagenet_is_told(tmp_path):
    fabricate_tiny_imagenet(tmp_path)
    folder = tmp_path / "tiny-imagenet-200"
    (folder / "val/images/val_1.JPEG").write_bytes(b"no image")
    with pytest.raises(ConfigError, match=r"TinyImageNet in .* is damaged: .*remove the folder"):
        TinyImageNet(root=str(tmp_path)).setup()
    (folder / "val/images/val_1.JPEG").unlink()
    with pytest.raises(ConfigError, match=r"TinyImageNet in .* is damaged: .*val_1\.JPEG"):
        TinyImageNet(root=str(tmp_path)).setup()
    shutil.rmtree(folder / "train/n10")
    with pytest.raises(ConfigError, match=r"TinyImageNet is not in "):
        TinyImageNet(root=str(tmp_path)).setup()


def test_an_empty_part_has_no_batches():
    data = digits(train_fraction=0.8, test_fraction=0.2)
    data.setup()
    val = data.client(0).val
    assert (len(val), list(val)) == (0, [])


@pytest.mark.parametrize("train_fraction", [0.5, 0.8])
def test_training_and_test_data_that_are_all_there_are_leave_nothing_for_validation(train_fraction):
    """Not even one of 1797 images, of which both halves would be rounded down; clients would be scored on that one."""
    data = digits(train_fraction=train_fraction, test_fraction=1 - train_fraction)
    data.setup()
    assert len(data.whole["val"]) == 0


@pytest.mark.parametrize(("clients", "lists", "longest"), [(1, 1, 1), (10, 10, 1), (11, 6, 2), (100, 10, 10)])
def test_a_round_of_many_clients_is_a_few_lists(clients, lists, longest):
    """A Trainer's hooks at every list would take as long as small clients do."""
    sets = ClientSets(lambda completed: list(range(clients)))
    found = list(sets)
    assert (len(found), len(sets), max(map(len, found))) == (lists, lists, longest)
    assert [client for each in found for client in each] == list(range(clients))
    assert list(ClientSets(lambda completed: list(range(clients)), all_at_once=True)) == [list(range(clients))]


def test_a_batch_larger_than_a_client_s_data_has_all_of_them():
    data = digits(2, batch_size=10**24)
    data.setup()
    [batch] = data.client(0).train
    assert len(batch[0]) == data.client(0).num_samples
