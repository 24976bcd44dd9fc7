"""What methods ask of loaders: the same of ours and of PyTorch's."""

import copy
import random
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lit_pfl.data import (
    BatchLoader,
    CropFlip,
    ImageSet,
    example_of,
    in_batches_of,
    in_order,
    labels_of,
    num_samples,
    part_of,
)
from lit_pfl.data.batches import tensors_in
from lit_pfl.data.loaders import identity_of
from lit_pfl.errors import ConfigError
from lit_pfl.lightning_internals import LateLoader
from lit_pfl.randomness import random_state, same_state

N = 17  # so that batches of 4 leave one sample alone


def images(n: int = N + 5, **options) -> ImageSet:
    pixels = torch.arange(n, dtype=torch.uint8).view(n, 1, 1, 1)
    return ImageSet(pixels, torch.arange(n) % 3, 3, torch.zeros(1), torch.full((1,), 1 / 255), 1)


def ours(n: int = N, batch_size: int = 4, shuffle: bool = True, **options) -> BatchLoader:
    return BatchLoader(images(), torch.arange(n), batch_size, torch.arange(3), shuffle, **options)


def theirs(n: int = N, batch_size: int = 4, shuffle: bool = True, **options) -> DataLoader:
    pixels = torch.arange(n, dtype=torch.float32).view(n, 1, 1, 1)
    return DataLoader(TensorDataset(pixels, torch.arange(n) % 3), batch_size, shuffle=shuffle, **options)


class Augmented(Dataset):
    """Samples with noise of all three generators."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        if not 0 <= i < 6:
            raise IndexError(i)
        return i + torch.rand(1) + random.random() + np.random.rand(), i  # noqa: NPY002


def batches(loader) -> list[list[int]]:
    return [x.flatten().round().int().tolist() for x, _ in loader]


def samples(loader) -> list[int]:
    return list(chain.from_iterable(batches(loader)))


KINDS = pytest.mark.parametrize("kind", [ours, theirs])


@KINDS
def test_samples_are_counted_also_those_that_an_epoch_leaves_out(kind):
    assert num_samples(kind()) == N
    assert num_samples(kind(1)) == 1


@KINDS
@pytest.mark.parametrize("batch_size", [None, 5, 100])
def test_in_order_all_samples_come_once_and_nothing_is_drawn(kind, batch_size):
    loader = kind()
    before = random_state()
    ordered = in_order(loader, batch_size)
    for _ in range(2):
        got = batches(ordered)
        assert list(chain.from_iterable(got)) == list(range(N))
        assert {len(batch) for batch in got[:-1]} <= {batch_size or 4}
    assert same_state(before, random_state())
    assert samples(loader) != sorted(samples(loader))  # the loader itself still shuffles


def test_in_order_images_are_not_augmented():
    loader = ours(augment=CropFlip(1, crop_probability=1.0))
    assert samples(in_order(loader)) == list(range(N))
    assert loader.augment is not None


def test_in_order_a_random_transform_is_the_same_every_time_and_draws_nothing():
    loader = DataLoader(Augmented(), 4, shuffle=True)
    ordered, before = in_order(loader), random_state()
    first, second = ([x.tolist() for x, _ in ordered] for _ in range(2))
    assert first == second
    # independent of the size of batches
    assert [x.item() for x, _ in in_order(loader, 1)] == [x for batch in first for [x] in batch]
    assert same_state(before, random_state())
    assert len({round(x - int(x), 4) for batch in first for [x] in batch}) == 6  # the draws differ by sample
    assert [x.tolist() for x, _ in loader] != [x.tolist() for x, _ in loader]


@KINDS
def test_a_part_is_shuffled_and_in_batches_as_before(kind):
    chosen = torch.tensor([2, 16, 5, 9, 11, 0, 3, 4, 8])
    part = part_of(kind(), chosen)
    assert num_samples(part) == 9
    assert samples(in_order(part)) == chosen.tolist()
    epochs = [batches(part) for _ in range(20)]
    for epoch in epochs:
        assert [len(batch) for batch in epoch] == [4, 4]  # not the last, which would be alone
        assert set(chain.from_iterable(epoch)) < set(chosen.tolist())
    assert set(chain.from_iterable(chain.from_iterable(epochs))) == set(chosen.tolist())
    assert len({str(epoch) for epoch in epochs}) == 20


@KINDS
def test_parts_of_parts_have_positions_of_their_own(kind):
    part = part_of(part_of(kind(), torch.tensor([3, 5, 7, 9])), torch.tensor([2, 0]))
    assert samples(in_order(part)) == [7, 3]


@KINDS
def test_a_part_of_an_ordered_loader_stays_ordered_and_whole(kind):
    assert batches(part_of(kind(shuffle=False, batch_size=2), torch.arange(5))) == [[0, 1], [2, 3], [4]]
    assert samples(part_of(kind(), torch.arange(0))) == []


@KINDS
def test_batches_of_another_size_leave_one_out_only_where_it_would_be_alone(kind):
    loader = kind()
    assert [len(batch) for batch in batches(in_batches_of(loader, 8))] == [8, 8]
    assert [len(batch) for batch in batches(in_batches_of(loader, 6))] == [6, 6, 5]
    assert [len(batch) for batch in batches(in_batches_of(loader, 1))] == [1] * 17
    assert [len(batch) for batch in batches(in_batches_of(kind(1), 8))] == [1]
    assert samples(in_batches_of(kind(shuffle=False), 8)) == list(range(17))
    assert loader.batch_size == 4


@KINDS
def test_labels_come_in_order(kind):
    assert labels_of(kind()).tolist() == [i % 3 for i in range(N)]
    assert labels_of(kind()).dtype == torch.int64
    assert labels_of(part_of(kind(), torch.tensor([4, 3]))).tolist() == [1, 0]


def test_labels_are_those_of_the_client():
    loader = BatchLoader(images(), torch.arange(4), 2, torch.tensor([2, 0, 1]), shuffle=True)
    assert labels_of(loader).tolist() == [2, 0, 1, 2]


@pytest.mark.parametrize("name", ["labels", "target", "y"])
def test_labels_of_batches_that_are_dicts(name):
    data = [{"x": torch.zeros(2), name: i} for i in range(5)]
    assert labels_of(DataLoader(data, 2, shuffle=True)).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "data",
    [
        TensorDataset(torch.zeros(4, 2)),
        TensorDataset(torch.zeros(4, 2), torch.zeros(4)),
        torch.zeros(4, 2),
        TensorDataset(torch.zeros(4, 2), torch.zeros(4, 2, dtype=torch.int64)),
        [{"x": 1}],
    ],
)
def test_data_without_class_labels_says_so(data):
    with pytest.raises(ConfigError, match=r"no class labels: batches must end with an integer tensor \(B,\)"):
        labels_of(DataLoader(data, 2))


@KINDS
def test_the_example_is_the_first_sample_and_draws_nothing(kind):
    loader, before = kind(), random_state()
    x, y = example_of(loader)
    assert x.shape == (1, 1, 1, 1)
    assert (x.item(), y.tolist()) == (0, [0])
    assert same_state(before, random_state())


def test_an_epoch_of_a_data_loader_is_decided_by_the_default_generator_alone():
    loader = in_batches_of(part_of(theirs(), torch.arange(15)), 3)
    epochs = []
    for _ in range(2):
        torch.manual_seed(5)
        epochs.append([batches(loader), batches(loader), torch.rand(1).item()])
    assert epochs[0] == epochs[1]
    assert epochs[0][0] != epochs[0][1]


def test_a_late_loader_draws_nothing_before_its_first_batch():
    for loader in (theirs(num_workers=0), ours()):
        late, state = LateLoader(loader), random_state()
        iterator = iter(late)
        assert same_state(state, random_state())
        torch.manual_seed(2)
        first = [x.tolist() for x, _ in iterator]
        torch.manual_seed(2)
        assert first == [x.tolist() for x, _ in loader]
        assert len(late) == len(loader)
        assert late.batch_size == 4
        assert late.dataset is loader.dataset
        with pytest.raises(AttributeError):
            _ = late.nothing
    copy.copy(late)


def test_samplers_of_a_subset_have_the_samples_that_they_choose_from():
    loader = DataLoader(theirs().dataset, 2, sampler=SubsetRandomSampler([8, 2, 5]))
    assert num_samples(loader) == 3
    assert samples(in_order(loader)) == [8, 2, 5]
    assert samples(in_order(part_of(loader, torch.tensor([1, 2])))) == [2, 5]
    assert sorted(samples(in_batches_of(loader, 3))) == [2, 5, 8]
    assert labels_of(loader).tolist() == [2, 2, 2]


OTHER_SAMPLERS = [
    WeightedRandomSampler([1.0] * N, N),
    RandomSampler(range(N), replacement=True),
    RandomSampler(range(N), num_samples=3),
]


@pytest.mark.parametrize("sampler", OTHER_SAMPLERS)
def test_samplers_of_other_kinds_are_kept_and_have_no_parts(sampler):
    loader = DataLoader(theirs().dataset, 4, sampler=sampler)
    assert num_samples(loader) == N
    assert samples(in_order(loader)) == list(range(N))
    assert in_batches_of(loader, 3).sampler is sampler
    with pytest.raises(ConfigError, match=f"through a {type(sampler).__name__}; give the DataLoader a Dataset with sh"):
        part_of(loader, torch.arange(2))


def test_a_batch_sampler_keeps_its_batches():
    loader = DataLoader(theirs().dataset, batch_sampler=[[0, 5], [3]])
    assert num_samples(loader) == 3
    assert samples(in_order(loader)) == [0, 3, 5]
    for change in (lambda: in_batches_of(loader, 2), lambda: part_of(loader, torch.arange(2))):
        with pytest.raises(ConfigError, match="with a list; give the DataLoader a batch_size"):
            change()


def test_settings_of_a_data_loader_are_kept():
    loader = theirs(collate_fn=lambda rows: (torch.stack([x for x, _ in rows]) + 100, None), drop_last=True)
    assert samples(in_order(loader))[:2] == [100, 101]
    assert min(samples(part_of(loader, torch.arange(4)))) == 100
    assert [len(x) for x in batches(in_batches_of(loader, 15))] == [15]


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([(torch.zeros(2), 1)], "of type list does not keep its samples apart; give a torch.utils.data.DataLoader"),
        ((), "of type tuple does not keep"),
        (CombinedLoader([DataLoader(range(3))]), "of type CombinedLoader does not keep"),
        (iter([torch.zeros(2)]), "of type list_iterator does not keep"),
        (torch.nn.Linear(1, 1), "of type Linear does not keep"),
    ],
)
def test_loaders_of_other_kinds_say_what_they_lack(loader, message):
    for ask in (num_samples, in_order, labels_of, example_of):
        with pytest.raises(ConfigError, match=message) as error:
            ask(loader)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.complex64, torch.bool, torch.int8]
)
def test_samples_of_every_type_are_known_again(dtype):
    def loader(values):
        return DataLoader(TensorDataset(torch.tensor(values).to(dtype), torch.ones(2, 0)), batch_size=2)

    one, same, other = (identity_of(loader(values)) for values in ([0.0, 1.0], [0.0, 1.0], [1.0, 1.0]))
    assert one == same != other


@dataclass(frozen=True)
class Pair:
    left: torch.Tensor
    right: object


def test_tensors_are_found_in_their_order_whatever_holds_them():
    one, two, three, four = (torch.full((), float(i)) for i in range(4))
    held = [{"x": (one, "a name", None), "y": Pair(two, [three, 3])}, four]
    assert [int(x) for x in tensors_in(held)] == [0, 1, 2, 3]


def test_packed_sequences_are_known_again():
    def packed(last: float) -> DataLoader:
        rows = [torch.ones(3), torch.ones(2), torch.tensor([last])]
        return DataLoader(rows, 2, collate_fn=lambda rows: pack_sequence(rows, enforce_sorted=False))

    assert identity_of(packed(1.0)) == identity_of(packed(1.0))
    assert identity_of(packed(1.0)) != identity_of(packed(2.0))
