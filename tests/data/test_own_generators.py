"""Loaders and transforms that draw from generators of their own, as in PyTorch's page on reproducibility and MONAI."""

import multiprocessing
import random
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from seen_rows import ROWS, Module, Site, check_asleep, check_resumed, check_resumed_site, federation, weights
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

from lit_pfl import Federation
from lit_pfl.data import FromDataset, PerClient, example_of, in_order, num_samples
from lit_pfl.data.federated import ClientData
from lit_pfl.engines import Local
from lit_pfl.methods import AgnosticFL, FedAvg, StandAlone
from lit_pfl_callbacks.generators import OwnGenerators, plain
from lit_pfl_callbacks.sampler_state import SamplerState
from tiny import assert_equal, trainer


class Seeded(Sampler):
    """As libraries write one to be reproducible."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __len__(self) -> int:
        return len(ROWS)

    def __iter__(self):
        order = list(range(len(ROWS)))
        self.rng.shuffle(order)
        return iter(order)


class InPlace(Seeded):
    """As chemprop's and many others: it shuffles the order that it had."""

    def __init__(self, rng: Any, order: Any) -> None:
        super().__init__(rng)
        self.order = order

    def __iter__(self):
        self.rng.shuffle(self.order)
        return iter([int(row) for row in self.order])


class ByClass(Sampler):
    """Shuffles the rows of every class, in the order of its number of epochs."""

    def __init__(self) -> None:
        self.rows, self.epoch = {"even": [0, 2, 4, 6], "odd": [1, 3, 5, 7]}, 0

    def __len__(self) -> int:
        return len(ROWS)

    def __iter__(self):
        self.epoch += 1
        for rows in self.rows.values():
            np.random.default_rng(self.epoch).shuffle(rows)
            yield from rows


class Stream(IterableDataset):
    """Rows in an order of its own."""

    def __init__(self, client: int) -> None:
        self.rng = np.random.default_rng(client)

    def __iter__(self):
        return iter(ROWS[self.rng.permutation(len(ROWS))])


class Noise:
    """A random transform as MONAI and Albumentations have them; the first number of a row says which it is."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __call__(self, row: torch.Tensor) -> torch.Tensor:
        return row + torch.tensor([0, *self.rng.normal(size=2)], dtype=torch.float32)


class Transformed(Dataset):
    """Rows that pass random transforms."""

    def __init__(self, *transforms: Any) -> None:
        self.transforms = transforms

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, position: int) -> torch.Tensor:
        row = ROWS[position]
        for transform in self.transforms:
            row = transform(row)
        return row


class Pipeline(IterableDataset):
    """A stream of stages, of which one shuffles, as in WebDataset."""

    def __init__(self, *stages: Any) -> None:
        self.stages = stages

    def __iter__(self):
        rows = iter(ROWS)
        for stage in self.stages:
            rows = stage(rows)
        return rows


def shuffled(rows: Any, rng: Any) -> Any:
    rows = list(rows)
    rng.shuffle(rows)
    return iter(rows)


LOADERS: dict[str, Callable[[int], DataLoader]] = {
    "generator=": lambda k: DataLoader(ROWS, 3, shuffle=True, generator=torch.Generator().manual_seed(k)),
    "sampler": lambda k: DataLoader(ROWS, 3, sampler=RandomSampler(ROWS, generator=torch.Generator().manual_seed(k))),
    "NumPy": lambda k: DataLoader(ROWS, 3, sampler=Seeded(np.random.default_rng(k))),
    "NumPy's old one": lambda k: DataLoader(ROWS, 3, sampler=Seeded(np.random.RandomState(k))),
    "Python": lambda k: DataLoader(ROWS, 3, sampler=Seeded(random.Random(k))),
    "in place": lambda k: DataLoader(ROWS, 3, sampler=InPlace(np.random.default_rng(k), np.arange(8))),
    "in place, list": lambda k: DataLoader(ROWS, 3, sampler=InPlace(random.Random(k), [*range(8)])),
    "counts": lambda k: DataLoader(ROWS, 3, sampler=ByClass()),
    "stream": lambda k: DataLoader(Stream(k), 3),
    "pipeline": lambda k: DataLoader(Pipeline(partial(shuffled, rng=random.Random(k))), 3),
    "transform": lambda k: DataLoader(Transformed(Noise(np.random.RandomState(k))), 3),
}
ALL = pytest.mark.parametrize("kind", LOADERS)


def site_of(kind: str, client: int) -> Site:
    return Site(LOADERS[kind](client))


def data(kind: str, clients: int = 2) -> PerClient:
    return PerClient([site_of(kind, client) for client in range(clients)])


@ALL
def test_epochs_are_those_that_the_loader_makes_without_a_federation(kind):
    fed = federation(local_epochs=2)
    trainer(2).fit(fed, datamodule=data(kind))
    for client in range(2):
        alone = LOADERS[kind](client)
        expected = [row for _ in range(4) for batch in alone for row in batch[:, 0].int().tolist()]
        assert fed.clients[client].learner.seen == expected


@ALL
def test_a_resumed_run_is_the_same_run_also_in_the_same_process(kind, tmp_path):
    check_resumed(partial(data, kind), tmp_path)


@ALL
def test_clients_that_sleep_come_to_the_same(kind):
    check_asleep(partial(data, kind))


@ALL
def test_methods_that_look_at_all_samples_draw_nothing(kind):
    seen = []
    for method in (StandAlone, AgnosticFL):
        fed = federation(method)
        trainer(2).fit(fed, datamodule=data(kind))
        seen.append([client.learner.seen for client in fed.clients.values()])
    assert seen[0] == seen[1]


@ALL
def test_a_look_draws_nothing(kind):
    loader = LOADERS[kind](0)
    own = OwnGenerators(loader)
    num_samples(loader)
    example_of(loader)
    first, again = ([batch.tolist() for batch in in_order(loader)] for _ in range(2))
    assert first == again
    iter(in_order(loader)).__next__()
    assert not own.have_drawn


@pytest.mark.parametrize("kind", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_every_generator_of_numpy_is_restored(kind):
    loader = DataLoader(ROWS, sampler=Seeded(np.random.Generator(getattr(np.random, kind)(3))))
    own, rng = OwnGenerators(loader), loader.sampler.rng
    rng.normal(size=3)
    rng.integers(5, dtype=np.uint32)  # which draws a number in advance
    state = own.states()
    expected = rng.integers(1000, size=9, dtype=np.uint32).tolist()
    own.restore(state)
    assert rng.integers(1000, size=9, dtype=np.uint32).tolist() == expected


class Grouped(Sampler):
    """Makes batches of an order that it shuffles in place; its size of batches is an option of the run."""

    def __init__(self, batch_size: int) -> None:
        self.order, self.batch_size, self.weights = [*range(len(ROWS))], batch_size, np.ones(len(ROWS))

    def __len__(self) -> int:
        return len(ROWS) // self.batch_size

    def __iter__(self):
        random.shuffle(self.order)
        size = self.batch_size
        yield from (self.order[i : i + size] for i in range(0, len(ROWS), size))


def test_of_a_sampler_only_what_changes_is_kept_and_not_its_options(tmp_path):
    runs = []
    for rounds, size, path in ((1, 2, None), (2, 4, tmp_path / "one.ckpt")):
        fitting, fed, site = trainer(rounds), federation(), site_of("generator=", 0)
        site.loader = DataLoader(ROWS, batch_sampler=Grouped(size))
        fitting.fit(fed, datamodule=PerClient([site]), ckpt_path=path, weights_only=True)
        fitting.save_checkpoint(tmp_path / "one.ckpt")
        runs.append((site.loader.batch_sampler.batch_size, fed.clients[0].trainer.global_step))
        [state] = fed.engine.state_dict()["streams"][0]["own"]
        assert [*state] == ["order"]
    assert runs == [(2, 4), (4, 6)]


def of_one_sampler() -> PerClient:
    rng, sites = torch.Generator().manual_seed(5), [site_of("generator=", client) for client in range(2)]
    for site in sites:
        site.loader = DataLoader(ROWS, 3, shuffle=True, generator=rng)
    return PerClient(sites)


def of_one_transform() -> PerClient:
    transform, sites = Noise(np.random.default_rng(5)), [site_of("generator=", client) for client in range(2)]
    for site in sites:
        site.loader = DataLoader(Transformed(transform), 3)
    return PerClient(sites)


def of_one_dataset() -> FromDataset:
    return FromDataset(Transformed(Noise(np.random.default_rng(5))), num_clients=2, batch_size=3, in_memory=False)


@pytest.mark.seconds
@pytest.mark.parametrize("data", [of_one_sampler, of_one_transform, of_one_dataset])
def test_of_a_generator_that_clients_share_each_has_its_own_draws(data, tmp_path):
    whole, modules = federation(participation=1), data()
    trainer(4).fit(whole, datamodule=modules)
    generators = [modules.client(client).generators for client in range(2)]
    assert_equal(*map(plain, (own.states() for own in generators)))  # they are where they were
    with pytest.raises(AssertionError):  # but from there each goes its own way
        assert_equal(*(plain(own.initial) for own in generators))
    first = trainer(2)
    first.fit(federation(participation=1), datamodule=data())
    first.save_checkpoint(tmp_path / "two.ckpt")
    for datamodule, engine in ((data(), None), (modules, Local(awake=1))):
        resumed = federation(participation=1, engine=engine)
        trainer(4).fit(resumed, datamodule=datamodule, ckpt_path=tmp_path / "two.ckpt", weights_only=True)
        assert_equal(resumed.coordinator.state_dict(), whole.coordinator.state_dict())


def test_random_transforms_of_validation_data_are_the_same_at_every_scoring():
    class Scored(Module):
        def validation_step(self, batch, batch_idx):
            self.log("sum", batch.sum(), on_epoch=True)

    class WithValidation(Site):
        def val_dataloader(self) -> DataLoader:
            return LOADERS["transform"](3)

    def sums(rounds: int, **options: Any) -> Any:
        fed = Federation(FedAvg(learner=Scored()), seed=1, **options)
        trainer(rounds).fit(fed, datamodule=PerClient([WithValidation(LOADERS["transform"](0))]))
        return fed.trainer.callback_metrics["val/sum"]

    assert sums(1) == sums(3) == sums(2, client_trainer={"callbacks": [EarlyStopping("sum", patience=9)]})


def test_those_of_several_loaders_are_found():
    loaders = {"a": LOADERS["generator="](0), "b": [LOADERS["NumPy"](0), LOADERS["sampler"](0)]}
    assert len(OwnGenerators(loaders).states()) == 3
    assert len(ClientData(loaders["a"], (), (), None).generators.states()) == 1  # of the loader and its sampler


class Slotted:
    __slots__ = "empty", "rng"

    def __init__(self, rng: Any) -> None:
        self.rng = rng


class OfTheClass:
    R = np.random.RandomState(3)


class Closing:
    """Nobody may call anything of it."""

    def __init__(self, rng: Any) -> None:
        self._rng = rng

    @property
    def rng(self) -> Any:
        raise AssertionError

    def draw(self) -> Any:
        return self._rng.random()


RNG = np.random.default_rng(3)
HOLDERS = {
    "slot": Slotted(RNG),
    "class": OfTheClass(),
    "partial": partial(shuffled, rng=RNG),
    "method": Closing(RNG).draw,
    "closure": (lambda rng: lambda row: rng.random())(RNG),
    "default": lambda row, rng=RNG: rng.random(),
    "keyword": (lambda row, *, rng=RNG: rng.random()),
    "containers": {"a": [({"b": Closing(RNG)},)]},
    "data module": type("Data", (L.LightningDataModule,), {"collate": lambda self, rows: rows})().collate,
    "module": nn.Sequential(nn.Identity()),
}
HOLDERS["module"].rng = HOLDERS["data module"].__self__.rng = RNG


@pytest.mark.parametrize("holder", HOLDERS)
def test_it_is_found_wherever_it_is(holder):
    loader = DataLoader(Transformed(HOLDERS[holder]))
    assert len(OwnGenerators(loader).states()) == 1


class Lazy(dict):
    def values(self):
        raise AssertionError

    __iter__ = __getitem__ = values


class Evasive:
    def __getattribute__(self, name):
        raise AssertionError


class EvasiveSampler(Sampler):
    def __init__(self, rng: Any) -> None:
        cyclic: list[Any] = [1]
        cyclic.append(cyclic)
        self.cyclic, self.rng, self.order = cyclic, rng, [*range(8)]

    def __getattribute__(self, name):
        if name in ("__class__", "__init__"):
            return super().__getattribute__(name)
        raise AssertionError


def test_a_sampler_is_looked_into_without_calling_anything():
    states = OwnGenerators([sampler := EvasiveSampler(RNG)]).states()
    assert len(states) == 2  # the generator, and what the sampler has
    own = object.__getattribute__(sampler, "__dict__")
    state = SamplerState(sampler)
    own["order"].reverse()
    assert state.get() == {"order": [*range(7, -1, -1)]}
    state.set({"order": "nonsense", "unknown": 1, "cyclic": 3})
    assert own["order"] == [*range(7, -1, -1)]
    assert "unknown" not in own
    state.set({})
    assert own["order"] == [*range(8)]


def test_nothing_is_called_to_find_them():
    gone = weakref.proxy(Closing(RNG))
    assert len(OwnGenerators([gone, Lazy(a=RNG), Evasive(), Closing(RNG)]).states()) == 1


def test_those_of_the_process_belong_to_nobody():
    defaults = [torch.default_generator, np.random.mtrand._rand, random._inst, random.SystemRandom()]
    cyclic = Closing(defaults)
    cyclic.self, cyclic.many = cyclic, [RNG] * 1000
    assert OwnGenerators([cyclic, Module()]).states() == []
    fed = federation()
    site = site_of("generator=", 0)
    site.loader = DataLoader(ROWS, 3, shuffle=True, generator=torch.default_generator)
    trainer(2).fit(fed, datamodule=PerClient([site]))
    [client] = fed.clients.values()
    assert client.learner.seen[:8] != client.learner.seen[8:]


@ALL
def test_a_site_that_resumes_is_the_same(kind, tmp_path):
    check_resumed_site(partial(site_of, kind), tmp_path)


def test_a_run_that_goes_on_with_another_kind_of_loader_begins_its_draws(tmp_path):
    first = trainer(1)
    first.fit(federation(), datamodule=data("NumPy"))
    first.save_checkpoint(tmp_path / "one.ckpt")
    for kind in ("Python", "generator=", "NumPy's old one"):
        resumed = federation()
        trainer(2).fit(resumed, datamodule=data(kind), ckpt_path=tmp_path / "one.ckpt", weights_only=True)
        alone = [row for batch in LOADERS[kind](1) for row in batch[:, 0].int().tolist()]
        assert resumed.clients[1].learner.seen == alone


class Noisy(Dataset):
    """Draws in the process that reads it."""

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, position):
        return ROWS[position] + torch.rand(3)


class NoisyStream(IterableDataset):
    """A stream that does."""

    def __iter__(self):
        return iter(ROWS + torch.rand(8, 3))


@pytest.mark.seconds
@pytest.mark.parametrize("rows", [Noisy, NoisyStream])
@pytest.mark.parametrize("kind", [DataLoader, type("AsOthersMakeIt", (DataLoader,), {})])
def test_workers_end_with_every_epoch(kind, rows, tmp_path):
    def made() -> PerClient:
        site = site_of("generator=", 0)
        shuffle = {"shuffle": True} if rows is Noisy else {}
        site.loader = kind(rows(), 3, num_workers=1, persistent_workers=True, **shuffle)
        return PerClient([site])

    data, whole, resumed = made(), federation(), federation()
    data.setup()
    assert not data.client(0).train.persistent_workers
    assert data.modules[0].loader.persistent_workers  # which is the user's
    assert not multiprocessing.active_children()  # no look at the samples has left any
    trainer(2).fit(whole, datamodule=data)
    first = trainer(1)
    first.fit(federation(), datamodule=made())
    first.save_checkpoint(tmp_path / "one.ckpt")
    trainer(2).fit(resumed, datamodule=made(), ckpt_path=tmp_path / "one.ckpt", weights_only=True)
    assert not multiprocessing.active_children()
    assert_equal(weights(resumed), weights(whole))
