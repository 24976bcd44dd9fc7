"""Datasets that every sample moves on: a look at one, before the training begins, leaves it where it was."""

from collections import deque

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from lit_pfl import Federation
from lit_pfl.data import PerClient, example_of, fixed, identity_of, in_order
from lit_pfl.methods import FedAvg
from tiny import Learner, assert_equal, trainer


class Queue(Dataset):
    """Gives patches of a few images at a time and then fills up again, as torchio's does."""

    def __init__(self, kind=list):
        self.patches, self.filled = kind(), 0

    def __len__(self):
        return 16

    def __getitem__(self, index):
        if not self.patches:
            self.patches.extend(torch.randperm(8).tolist())
            self.filled += 1
        draw = torch.Generator().manual_seed(self.patches.pop())
        return torch.randn(4, generator=draw), torch.randint(3, (), generator=draw)


KINDS = {
    "a queue": Queue,
    "a deque": lambda: Queue(deque),
    "part of one": lambda: Subset(Queue(), range(16)),
    "several": lambda: ConcatDataset([Subset(Queue(), range(8)), Subset(Queue(), range(8))]),
}


def module():
    torch.manual_seed(0)
    return Learner(nn.Identity(), nn.Linear(4, 3))


class Data(L.LightningDataModule):
    def __init__(self, make):
        super().__init__()
        self.dataset = make()

    def train_dataloader(self):
        return DataLoader(self.dataset, 4)


def fit(make, rounds, folder, path=None):
    federation, fitting = Federation(FedAvg(learner=module()), seed=0, threads=1), trainer(rounds)
    fitting.fit(federation, datamodule=PerClient([Data(make)]), ckpt_path=path)
    fitting.save_checkpoint(folder / "last.ckpt")
    return federation.clients[0].learner.state_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_trained_on_is_what_a_stock_trainer_trains_on(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "randperm", lambda n: torch.arange(n))  # draws are not what this is about
    stock = module()
    trainer(3).fit(stock, datamodule=Data(KINDS[kind]))
    assert_equal(fit(KINDS[kind], 3, tmp_path), stock.state_dict())


def test_a_queue_that_is_empty_after_every_epoch_resumes_to_the_same(tmp_path):
    straight = fit(Queue, 3, tmp_path)
    fit(Queue, 1, tmp_path)
    assert_equal(fit(Queue, 3, tmp_path, tmp_path / "last.ckpt"), straight)


@pytest.mark.parametrize("kind", KINDS)
def test_data_that_have_moved_on_are_still_the_same_data(kind, tmp_path):
    data = PerClient([Data(KINDS[kind])])
    first = trainer(1)
    first.fit(Federation(FedAvg(learner=module()), seed=0, threads=1), datamodule=data)
    first.save_checkpoint(tmp_path / "last.ckpt")
    again = trainer(2)
    again.fit(
        Federation(FedAvg(learner=module()), seed=0, threads=1), datamodule=data, ckpt_path=tmp_path / "last.ckpt"
    )
    assert again.current_epoch == 2


class Lazy(Dataset):
    """Reads its samples once somebody asks, and counts how often that was."""

    loaded = 0

    def __init__(self):
        self.samples, self.file, self.is_open, self.mean = [], None, False, 0.0

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if not self.is_open:
            Lazy.loaded += 1
            self.file, self.is_open = torch.randn(4, 3), True
            self.samples.extend(range(4))
            self.mean = self.file.mean(0)
        return self.file[self.samples[index]]


def test_what_is_loaded_stays_loaded():
    loader = DataLoader(Lazy(), 2)
    for look in (example_of, identity_of, lambda loader: list(in_order(loader))):
        look(loader)
    assert Lazy.loaded == 1


def test_a_dataset_too_long_to_be_put_back_is_left_alone(monkeypatch):
    monkeypatch.setattr(fixed, "MANY", 3)
    queue = Queue()
    queue.patches.extend(range(8))
    queue.filled = 5
    example_of(DataLoader(queue, 4))
    assert len(queue.patches) == 7


def test_a_dataset_that_counts_its_reads_is_known_by_its_samples():
    class Counts(Dataset):
        def __init__(self, first):
            self.first, self.reads = first, 0

        def __len__(self):
            return 4

        def __getitem__(self, index):
            self.reads += 1
            return torch.tensor([self.first + index])

    one, same, other = (DataLoader(Counts(first), 2) for first in (0, 0, 1))
    assert identity_of(one) == identity_of(same) != identity_of(other)
