"""Loaders with a state of their own, which count their epochs: those of litdata, and torchdata's StatefulDataLoader."""

from functools import partial
from itertools import count, islice
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from seen_rows import ROWS, Site, check_asleep, check_resumed, check_resumed_site, federation
from torch.utils.data import DataLoader, IterableDataset

from lit_pfl import Federation
from lit_pfl.data import PerClient, example_of, in_order, num_samples
from lit_pfl.errors import ConfigError
from lit_pfl.lightning_internals import LateLoader
from lit_pfl.methods import AgnosticFL, StandAlone
from tiny import trainer


class Rows(IterableDataset):
    """A stream that shuffles by its number of epochs."""

    num_samples = len(ROWS)

    def __init__(self, client: int) -> None:
        self.client, self.epoch = client, 0

    def __iter__(self):
        order = np.random.default_rng([self.client, self.epoch]).permutation(len(ROWS))
        self.epoch += 1
        yield from ROWS[order]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]


class Streaming(DataLoader):
    """As litdata has one; it refuses a state of another number of samples a batch."""

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.dataset.epoch, "batch_size": self.batch_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["batch_size"] != self.batch_size:
            raise ValueError(f"The state is of batches of {state['batch_size']},\nnot of {self.batch_size}.")
        self.dataset.load_state_dict(state)


class Forward(DataLoader):
    """As MosaicML has one: from the state at the end of an epoch it makes no batch first; no state leads it back."""

    epoch, over = -1, False

    def __iter__(self):
        self.epoch += not self.over
        order = np.random.default_rng([self.dataset.client, self.epoch]).permutation(len(ROWS))
        if not self.over:
            yield from ROWS[order].split(3)
        self.over = False

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["epoch"] > self.epoch:
            self.epoch, self.over = state["epoch"], True


def torchdata(rows: Any, **options: Any) -> DataLoader:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return module.StatefulDataLoader(rows, 3, **options)


LOADERS = {
    "litdata": lambda k: Streaming(Rows(k), 3),
    "MosaicML": lambda k: Forward(Rows(k), 3),
    "torchdata": lambda k: torchdata(ROWS, shuffle=True),
    "torchdata, generator": lambda k: torchdata(ROWS, shuffle=True, generator=torch.Generator().manual_seed(k)),
    "torchdata, stream": lambda k: torchdata(Rows(k)),
    "torchdata, workers": lambda k: torchdata(Rows(k), num_workers=1),
}
SLOW, FORWARD = ["torchdata, workers"], ["MosaicML"]
ALL = pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] * (k in SLOW)) for k in LOADERS])
BACKWARD = pytest.mark.parametrize("kind", [one for one in ALL.args[1] if one.values[0] not in FORWARD])


def site_of(kind: str, client: int) -> Site:
    torch.manual_seed(client)  # of which torchdata makes a generator
    return Site(LOADERS[kind](client))


def data(kind: str) -> PerClient:
    return PerClient([site_of(kind, client) for client in range(2)])


class Making(Site):
    """Makes its loader when it is asked for one."""

    def train_dataloader(self) -> DataLoader:
        return torchdata(self.loader, shuffle=True)


def seen(federation: Federation) -> list[list[int]]:
    return [client.learner.seen for client in federation.clients.values()]


def test_epochs_are_those_that_the_loader_makes_without_a_federation():
    fed = federation(local_epochs=2)
    trainer(2).fit(fed, datamodule=data("litdata"))
    for client, rows in enumerate(seen(fed)):
        alone = LOADERS["litdata"](client)
        assert rows == [row for _ in range(4) for batch in alone for row in batch[:, 0].int().tolist()]


def test_a_loader_that_draws_a_seed_when_it_is_made_draws_it_from_the_federations():
    runs = []
    for of_the_process in (1, 2):
        fed = federation()
        torch.manual_seed(of_the_process)
        trainer(2).fit(fed, datamodule=PerClient([Making(ROWS), Making(ROWS)]))
        runs.append(seen(fed))
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


@ALL
def test_a_resumed_run_is_the_same_run_also_in_the_same_process(kind, tmp_path):
    check_resumed(partial(data, kind), tmp_path)


@BACKWARD
def test_a_second_run_with_the_same_data_is_the_same_run(kind):
    modules, runs = data(kind), [federation(), federation()]
    for fed in runs:
        trainer(3).fit(fed, datamodule=modules)
    assert seen(runs[0]) == seen(runs[1])


@ALL
def test_clients_that_sleep_come_to_the_same(kind):
    check_asleep(partial(data, kind))


@BACKWARD
def test_methods_that_look_at_all_samples_begin_no_epoch(kind):
    runs = [federation(StandAlone), federation(AgnosticFL)]
    for fed in runs:
        trainer(2).fit(fed, datamodule=data(kind))
    assert seen(runs[0]) == seen(runs[1])


@BACKWARD
def test_a_look_is_not_counted(kind):
    loaders = [site_of(kind, 0).loader for _ in range(2)]
    for loader in loaders[1:]:
        assert num_samples(loader) == len(ROWS)
        example_of(loader)
        first, again = ([batch.tolist() for batch in in_order(loader)] for _ in range(2))
        assert first == again
        iter(in_order(loader)).__next__()
    torch.manual_seed(0)
    expected = [batch.tolist() for batch in loaders[0]]
    torch.manual_seed(0)
    assert [batch.tolist() for batch in loaders[1]] == expected


@ALL
def test_a_site_that_resumes_is_the_same(kind, tmp_path):
    check_resumed_site(partial(site_of, kind), tmp_path)


def test_another_loader_that_does_not_take_the_state_is_refused_and_one_without_a_state_begins(tmp_path):
    first = trainer(1)
    first.fit(federation(), datamodule=data("litdata"))
    first.save_checkpoint(tmp_path / "one.ckpt")
    other, plain = data("litdata"), data("litdata")
    for client in range(2):
        other.modules[client].loader = Streaming(Rows(client), 4)
        plain.modules[client].loader = DataLoader(Rows(client), 3)
    with pytest.raises(MisconfigurationException, match=r"does not take .* wrote it\. The state is of .* 3, not"):
        trainer(2).fit(federation(), datamodule=other, ckpt_path=tmp_path / "one.ckpt", weights_only=True)
    resumed = federation()
    trainer(2).fit(resumed, datamodule=plain, ckpt_path=tmp_path / "one.ckpt", weights_only=True)
    assert len(seen(resumed)[0]) == len(ROWS)


def test_lightning_sees_whether_a_late_loader_has_a_state():
    late = LateLoader(LOADERS["litdata"](0))
    assert isinstance(late, _Stateful)
    assert {"state_dict", "load_state_dict"} <= {*dir(type(late))}  # as Python 3.12 looks for them
    assert late.batch_size == 3
    for loader in (DataLoader(ROWS), Rows(0)):
        assert not isinstance(LateLoader(loader), _Stateful)


class GoesOn(IterableDataset):
    """An endless stream that a library cuts into epochs: each begins where the last one has ended."""

    def __init__(self) -> None:
        self.rows = count()

    def __iter__(self):
        return (torch.full((3,), float(row)) for row in islice(self.rows, 5))


def test_a_checkpoint_takes_nothing_of_a_stream_that_goes_on(tmp_path):
    def seen(**options):
        fed = federation()
        trainer(3, **options).fit(fed, datamodule=PerClient([Site(DataLoader(GoesOn(), 1))]))
        return fed.clients[0].learner.seen

    without = seen()
    saving = ModelCheckpoint(tmp_path, save_top_k=-1)
    assert without == [*range(without[0], without[0] + 15)]
    assert seen(enable_checkpointing=True, callbacks=[saving]) == without
    resumed = federation()
    data = PerClient([Site(DataLoader(GoesOn(), 1))])
    trainer(3).fit(resumed, datamodule=data, ckpt_path=next(tmp_path.glob("epoch=0*.ckpt")))
    assert resumed.clients[0].learner.seen == without[:10]  # nothing holds how far the stream was


class AtItsEnd(IterableDataset):
    """As a stream of Hugging Face's: it says where the last pass has ended until the next one begins."""

    given = now = 0

    def __iter__(self):
        self.now, self.given = self.given, 0
        for row in ROWS[self.now :]:
            self.now += 1
            yield row

    def state_dict(self):
        return {"now": self.now}

    def load_state_dict(self, state):
        self.given = state["now"]


def test_a_loader_whose_state_leaves_it_at_its_end_is_refused_by_that():
    class Loader(DataLoader):
        def state_dict(self):
            return self.dataset.state_dict()

        def load_state_dict(self, state):
            self.dataset.load_state_dict(state)

    with pytest.raises(ConfigError, match=r"Site: the training loader makes no batch a second time; give a plain Data"):
        trainer(1).fit(federation(), datamodule=PerClient([Site(Loader(AtItsEnd(), 2))]))
