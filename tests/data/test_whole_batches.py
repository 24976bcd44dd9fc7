"""Loaders whose samples nobody can tell apart, and those of which the dataset makes the batches."""

import random

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from lit_pfl import Federation
from lit_pfl.data import (
    PerClient,
    batch_size_of,
    example_of,
    has_batches,
    in_batches_of,
    in_order,
    labels_of,
    num_samples,
    part_of,
    samples_of,
)
from lit_pfl.data.batches import size_of
from lit_pfl.data.loaders import identity_of
from lit_pfl.errors import ConfigError
from lit_pfl.methods import (
    APFL,
    AgnosticFL,
    Ditto,
    FactorizedFL,
    FedAvg,
    FedDyn,
    FedFOMO,
    FedRep,
    FedSpa,
    PerFedAvg,
    Scaffold,
    SimFed,
    StandAlone,
)
from lit_pfl.randomness import random_state, same_state
from lit_pfl_callbacks.tensors import tensors_of
from tiny import Learner, run, trainer

N, BATCH = 10, 4


def rows(start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.arange(start, start + N).float()
    return torch.stack([x, x % 3, torch.ones(N)], 1), x.long() % 2


class Listed(Dataset):
    """Makes a batch of a list of numbers, with noise if it is told so."""

    def __init__(self, start: int = 0, noise: bool = False) -> None:
        self.x, self.y = rows(start)
        self.noise = noise

    def __len__(self) -> int:
        return N

    def __getitem__(self, numbers: list[int]):
        assert isinstance(numbers, list)
        return self.x[numbers] + (torch.rand(1) if self.noise else 0), self.y[numbers]


class AtOnce(Listed):
    """Makes a batch of a list of numbers where a DataLoader with a batch size asks for it, as a TensorDict does."""

    def __getitem__(self, number: int):
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: list[int]):
        return super().__getitem__(numbers)


class Ready(Dataset):
    """Batches, one under each number."""

    def __init__(self, start: int = 0) -> None:
        self.batches = list(zip(*(part.split(BATCH) for part in rows(start)), strict=True))

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int):
        return self.batches[number]


class Stream(IterableDataset):
    """Samples, or batches of them, in an order that is drawn anew, with noise of all three generators."""

    def __init__(self, start: int = 0, whole: bool = False) -> None:
        self.start, self.whole, self.passes = start, whole, 0

    def __iter__(self):
        self.passes += 1
        x, y = rows(self.start)
        order = torch.randperm(N)
        x = x + 1e-3 * (random.random() + np.random.rand() + torch.rand(1))  # noqa: NPY002
        pairs = zip(x[order], y[order], strict=True)
        return zip(x[order].split(BATCH), y[order].split(BATCH), strict=True) if self.whole else pairs


class Sized(Stream):
    def __len__(self) -> int:
        return N


class Known(Stream):
    num_samples = N


class Map(Dataset):
    """Samples that are found by a place, as torchgeo's are; its length is that of something else."""

    def __init__(self, start: int = 0) -> None:
        self.x, self.y = rows(start)

    def __len__(self) -> int:
        return 2

    def __getitem__(self, place: tuple[slice, slice]):
        here = place[0].start
        return self.x[here], self.y[here]


class Anywhere(Sampler):
    """Ten places of a map at random, alone or in batches."""

    def __init__(self, size: int | None = None) -> None:
        self.size = size

    def __len__(self) -> int:
        return N if self.size is None else -(-N // self.size)

    def __iter__(self):
        places = [(slice(int(i), int(i) + 1), slice(0, 1)) for i in torch.randperm(N)]
        yield from places if self.size is None else BatchSampler(places, self.size, False)


class Elsewhere:
    """A loader of another library."""

    def __init__(self, start: int = 0) -> None:
        self.inside = DataLoader(TensorDataset(*rows(start)), BATCH, shuffle=True)

    def __iter__(self):
        return iter(self.inside)


class Inside(DataLoader):
    """Has another loader for its dataset, and makes the batches by itself."""

    def __init__(self, start: int = 0) -> None:
        super().__init__(Elsewhere(start).inside)

    def __iter__(self):
        return iter(self.dataset)

    def __len__(self) -> int:
        return len(self.dataset)


def listed(start: int = 0, shuffle: bool = True, **options) -> DataLoader:
    dataset = Listed(start, **options)
    order = RandomSampler(dataset) if shuffle else SequentialSampler(dataset)
    return DataLoader(dataset, batch_size=None, sampler=BatchSampler(order, BATCH, drop_last=False))


def as_it_is(batch):
    return batch


KINDS = {
    "listed": listed,
    "at once": lambda start=0: DataLoader(AtOnce(start), BATCH, shuffle=True, collate_fn=as_it_is),
    "ready": lambda start=0: DataLoader(Ready(start), batch_size=None, shuffle=True),
    "stream": lambda start=0: DataLoader(Stream(start), BATCH),
    "sized stream": lambda start=0: DataLoader(Sized(start), BATCH),
    "known stream": lambda start=0: DataLoader(Known(start), BATCH),
    "stream of batches": lambda start=0: DataLoader(Stream(start, whole=True), batch_size=None),
    "places": lambda start=0: DataLoader(Map(start), BATCH, sampler=Anywhere()),
    "batches of places": lambda start=0: DataLoader(Map(start), batch_sampler=Anywhere(BATCH)),
    "elsewhere": Elsewhere,
    "inside": Inside,
}
ALL = pytest.mark.parametrize("kind", KINDS)


def numbers(loader) -> list[int]:
    return [int(row[0]) for x, _ in loader for row in x]


# ------------------------------------------------------------------------------------------- what is asked of loaders


@ALL
def test_samples_are_counted(kind):
    loader, before = KINDS[kind](), random_state()
    assert [num_samples(loader) for _ in range(2)] == [N, N]
    assert same_state(before, random_state())


@pytest.mark.parametrize(
    ("kind", "passes"), [("stream", 1), ("stream of batches", 1), ("sized stream", 0), ("known stream", 0)]
)
def test_a_stream_is_passed_over_once_to_be_counted_if_nobody_knows_its_length(kind, passes):
    loader = KINDS[kind]()
    for _ in range(3):
        num_samples(loader)
    assert loader.dataset.passes == passes


class Endless(Inside):
    """Begins again where its length ends."""

    def __iter__(self):
        while True:
            yield from self.dataset


def test_a_loader_that_never_ends_is_passed_over_to_its_length_as_by_a_trainer():
    loader = Endless()
    assert num_samples(loader) == N
    assert sorted(numbers(in_order(loader))) == list(range(N))


@ALL
def test_in_order_all_batches_are_the_same_every_time_and_nothing_is_drawn(kind):
    loader = KINDS[kind]()
    before = random_state()
    ordered = in_order(loader)
    first, second = ([x.tolist() for x, _ in ordered] for _ in range(2))
    assert first == second
    assert sorted(numbers(ordered)) == list(range(N))
    assert [len(x) for x, _ in ordered] == ([4, 4, 2])
    assert same_state(before, random_state())
    assert numbers(in_order(ordered)) == numbers(ordered)
    if kind in ("listed", "ready"):
        assert numbers(ordered) == list(range(N))
    orders = {str(numbers(loader)) for _ in range(8)}
    assert len(orders) > 1  # the loader itself still shuffles


def test_between_batches_the_consumer_draws_its_own_numbers():
    for draws in (lambda: torch.rand(1).item(), random.random, np.random.rand):
        torch.manual_seed(1), random.seed(1), np.random.seed(1)  # noqa: NPY002
        own = [draws() for _ in range(3)]
        torch.manual_seed(1), random.seed(1), np.random.seed(1)  # noqa: NPY002
        assert [draws() for _ in in_order(KINDS["stream"]())] == own


@ALL
def test_the_example_is_one_sample_where_it_can_be_had(kind):
    loader, before = KINDS[kind](), random_state()
    whole = kind in ("ready", "stream of batches", "elsewhere", "inside")
    x, y = example_of(loader)
    assert len(x) == len(y) == (BATCH if whole else 1)
    assert same_state(before, random_state())


@ALL
def test_labels_come_batch_by_batch(kind):
    loader = KINDS[kind]()
    assert labels_of(loader).tolist() == [i % 2 for i in numbers(in_order(loader))]


@ALL
def test_loaders_are_known_again(kind):
    one, again, other = KINDS[kind](), KINDS[kind](), KINDS[kind](3)
    assert identity_of(one) == identity_of(one) == identity_of(again) != identity_of(other)


@pytest.mark.parametrize("kind", ["listed", "stream", "places"])
def test_batches_of_another_size(kind):
    loader = KINDS[kind]()
    assert batch_size_of(loader) == BATCH
    other = in_batches_of(loader, 5)
    assert [len(x) for x, _ in other] == [5, 5]
    assert sorted(numbers(other)) == list(range(N))
    assert batch_size_of(other) == 5


def test_what_the_dataset_makes_of_a_list_of_numbers_has_parts():
    part = part_of(listed(), torch.tensor([8, 2, 5, 1, 0]))
    assert numbers(in_order(part)) == [8, 2, 5, 1, 0]
    assert [len(x) for x, _ in part] == [4]  # not the last, which would be alone
    assert len({str(numbers(part)) for _ in range(10)}) > 1
    assert samples_of(part_of(part, torch.tensor([2, 0]))).tolist() == [2, 0]
    assert numbers(part_of(listed(shuffle=False), torch.tensor([3, 1]))) == [3, 1]
    noisy = in_order(listed(noise=True))
    assert [x.tolist() for x, _ in noisy] == [x.tolist() for x, _ in noisy]
    chosen = SubsetRandomSampler([7, 3])
    some = DataLoader(Listed(), batch_size=None, sampler=BatchSampler(chosen, 2, False))
    assert (num_samples(some), numbers(in_order(some))) == (2, [7, 3])


REFUSED = {
    "ready": r"Ready makes whole batches \(batch_size=None\)",
    "stream": r"Stream is a stream \(IterableDataset\)",
    "stream of batches": r"Stream is a stream \(IterableDataset\)",
    "places": "Anywhere does not choose samples by their numbers",
    "batches of places": "Anywhere does not choose samples by their numbers",
    "elsewhere": "Elsewhere makes whole batches",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_needs_single_samples_is_refused_in_one_line(kind):
    with pytest.raises(ConfigError, match=f"{REFUSED[kind]}, whose samples are not separate; give a torch") as error:
        part_of(KINDS[kind](), torch.arange(2))
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="are not separate"):
        samples_of(KINDS[kind]())
    if kind not in ("stream", "places"):
        for ask in (batch_size_of, lambda loader: in_batches_of(loader, 2)):
            with pytest.raises(ConfigError, match="(are not separate|cannot be made with a Anywhere); give"):
                ask(KINDS[kind]())


def test_an_empty_loader_has_no_batches():
    assert not has_batches(())
    assert not has_batches(DataLoader([]))
    assert has_batches(DataLoader(Stream(), 2))
    assert num_samples(DataLoader(Map(), batch_sampler=[])) == 2  # as far as anybody can tell
    assert list(in_order(DataLoader([]))) == []


def test_somebody_who_waits_for_a_long_stream_is_told_why(monkeypatch):
    monkeypatch.setattr("lit_pfl.data.torch_loaders.MANY_BATCHES", 2)
    with pytest.warns(UserWarning, match="Stream: its samples are being counted, 10 so far; set its attribute num_sam"):
        num_samples(KINDS["stream"]())


# ------------------------------------------------------------------------------------------------------ in a federation


class Site(L.LightningDataModule):
    def __init__(self, kind: str, client: int) -> None:
        super().__init__()
        self.kind, self.client = kind, client

    def train_dataloader(self):
        return KINDS[self.kind](10 * self.client)

    def val_dataloader(self):
        return KINDS[self.kind](10 * self.client + 5)

    def test_dataloader(self):
        return KINDS[self.kind](10 * self.client + 6)


class Module(Learner):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.Linear(4, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = nn.functional.dropout(x / 10, 0.2, self.training)
        return nn.functional.mse_loss(self.head(self.body(x).tanh())[:, 0], y.float())

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.training_step(batch, batch_idx))


def federation(method, **options) -> Federation:
    torch.manual_seed(0)
    return Federation(method(learner=Module(), **options), local_epochs=1, seed=1)


def data(kind: str) -> PerClient:
    return PerClient([Site(kind, client) for client in range(2)])


def weights(fed: Federation) -> list[torch.Tensor]:
    return [tensor for client in fed.clients.values() for tensor in tensors_of(client).values()]


@pytest.mark.few(4)
@ALL
def test_a_run_that_is_resumed_is_the_same_run(kind, tmp_path):
    whole = federation(FedAvg)
    trainer(2).fit(whole, datamodule=data(kind))
    first = trainer(1)
    first.fit(federation(FedAvg), datamodule=data(kind))
    first.save_checkpoint(tmp_path / "one.ckpt")
    second = federation(FedAvg)
    outer = trainer(2)
    outer.fit(second, datamodule=data(kind), ckpt_path=tmp_path / "one.ckpt")
    assert all(map(torch.equal, weights(whole), weights(second)))
    assert outer.callback_metrics["val/loss"] > 0


@ALL
def test_it_makes_no_difference_who_else_trains(kind):
    both, alone = federation(StandAlone), federation(StandAlone)
    trainer(2).fit(both, datamodule=data(kind))
    trainer(2).fit(alone, datamodule=PerClient([Site(kind, 0)]))
    assert all(map(torch.equal, tensors_of(both.clients[0]).values(), tensors_of(alone.clients[0]).values()))


METHODS = [AgnosticFL, APFL, Ditto, FactorizedFL, FedDyn, FedRep, FedSpa, Scaffold, SimFed]


@pytest.mark.parametrize("method", METHODS)
def test_methods_that_need_no_single_samples_take_batches_as_they_come(method):
    for kind in ("stream of batches", "ready"):
        fed = run(method(learner=Module()), data(kind), rounds=1, seed=1)
        assert all(tensor.isfinite().all() for tensor in weights(fed))


@pytest.mark.parametrize(
    ("method", "kind", "message"),
    [
        (FedFOMO, kind, f"Client 0: FedFOMO holds back some of its training samples, which .*: {reason}, whose samples")
        for kind, reason in REFUSED.items()
    ]
    + [
        (PerFedAvg, kind, f"Client 0: PerFedAvg divides batches of 2 times the size, which its data does .*: {reason}")
        for kind, reason in REFUSED.items()
        if kind in ("ready", "stream of batches", "elsewhere")
    ]
    + [(PerFedAvg, "batches of places", "PerFedAvg divides .* cannot be made with a Anywhere; give the DataLoader a")],
)
def test_methods_that_need_single_samples_say_so_before_anybody_trains(method, kind, message):
    fed = federation(method)
    with pytest.raises(ConfigError, match=message) as error:
        trainer(1).fit(fed, datamodule=data(kind))
    assert "\n" not in str(error.value)
    assert fed.trainer.current_epoch == 0


@pytest.mark.parametrize(("method", "kind"), [(FedFOMO, "listed"), (PerFedAvg, "listed"), (PerFedAvg, "stream"), (PerFedAvg, "places")])  # fmt: skip # noqa: E501
def test_methods_that_need_single_samples_take_them_where_they_can_be_had(method, kind):
    fed = federation(method)
    trainer(2).fit(fed, datamodule=data(kind))
    assert all(tensor.isfinite().all() for tensor in weights(fed))


# ------------------------------------------------------------------------------------------------- batches of any kind


def test_clients_train_and_are_scored_on_the_length_of_a_loader_that_never_ends():
    class Site(L.LightningDataModule):
        def train_dataloader(self):
            return Endless()

        val_dataloader = test_dataloader = train_dataloader

    federation, fit = Federation(FedAvg(learner=Module()), seed=1, threads=1), trainer(1)
    fit.fit(federation, datamodule=PerClient([Site(), Site()]))
    assert fit.callback_metrics["val/loss"] > 0


class Graphs:
    """A batch of graphs as other libraries have them: no container, but it says how many graphs it holds."""

    def __init__(self, graphs: int) -> None:
        self.nodes, self.batch_size = torch.randn(5 * graphs, 3), graphs

    def to(self, device):
        return self


def test_a_batch_of_graphs_counts_its_graphs():
    assert size_of(Graphs(4)) == 4
    batch = Graphs(4)
    batch.batch_size = torch.Size([4])  # as tensordict has it, which is a mapping besides
    assert size_of(batch) == 1


def test_simfed_says_that_noise_has_no_place_in_a_batch_of_graphs():
    class Net(Module):
        def training_step(self, batch, batch_idx):
            return self.head(self.body(batch.nodes)).square().mean()

    class Site(L.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(range(8), 4, collate_fn=lambda numbers: Graphs(len(numbers)))

    method = SimFed(learner=Net(), encoder="body")
    with pytest.raises(ConfigError, match=r"^model\.learner: SimFed puts noise .* type Graphs has none") as error:
        trainer(1).fit(Federation(method, seed=1), datamodule=PerClient([Site(), Site()]))
    assert "\n" not in str(error.value)
