"""Existing data modules, one a client."""

from collections import UserList

import lightning as L
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lit_pfl.data import FederatedDataModule, PerClient, in_order, labels_of
from lit_pfl.errors import ConfigError
from tiny import trainer


class Site(L.LightningDataModule):
    """Somebody's data module; it notes what it is asked for."""

    num_classes = 3

    def __init__(self, site: int = 0) -> None:
        super().__init__()
        self.site, self.calls, self.epoch = site, [], 0

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")
        self.prepared_by = self.trainer

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")
        x = torch.arange(10 * self.site, 10 * self.site + 9).float()
        if stage == "fit":
            self.train, self.val = (TensorDataset(part, part.long() % 3) for part in (x[:5], x[5:7]))
        if stage == "test":
            self.test = TensorDataset(x[7:], x[7:].long() % 3)

    def train_dataloader(self):
        self.calls.append("train")
        return DataLoader(self.train, 2, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, 2)

    def test_dataloader(self):
        return DataLoader(self.test, 2)

    def state_dict(self):
        return {"epoch": self.epoch} if self.epoch else {}

    def load_state_dict(self, state_dict) -> None:
        self.epoch = state_dict["epoch"]


class OnlyTrain(L.LightningDataModule):
    """The least that there can be."""

    def train_dataloader(self):
        return DataLoader(torch.arange(6).float(), 2)


def with_loaders(**loaders) -> L.LightningDataModule:
    made = {f"{part}_dataloader": lambda self, loader=loader: loader for part, loader in loaders.items()}
    return type("Made", (OnlyTrain,), made)()


def ready(*args, **options) -> PerClient:
    data = PerClient(*args, **options)
    data.prepare_data()
    data.setup("fit")
    return data


def samples(loader) -> list[int]:
    return [int(i) for x, _ in in_order(loader) for i in x]


def test_every_client_has_the_loaders_of_its_module():
    data = ready([Site(0), Site(7)])
    assert data.clients == [0, 1]
    for k, start in enumerate([0, 70]):
        client = data.client(k)
        assert samples(client.train) == list(range(start, start + 5))
        assert samples(client.val) == [start + 5, start + 6]
        assert samples(client.test) == [start + 7, start + 8]
        assert (client.num_samples, client.num_classes, client.labels_agree) == (5, 3, True)
        assert [part.tolist() for part in client.example] == [[start], [start % 3]]
        assert labels_of(client.test).tolist() == [(start + 7) % 3, (start + 8) % 3]


def test_modules_are_prepared_and_set_up_and_asked_for_their_loaders_once():
    data = ready([Site(), Site()])
    data.setup("test")
    first = data.client(1)
    assert data.client(1) is first
    for module in data.modules:
        assert module.calls == ["prepare_data", "setup fit", "setup test", "train"]


def test_modules_know_their_trainer_when_they_prepare_their_data():
    """As torch_geometric's, which ask it how many devices there are."""
    data = PerClient([Site(), Site()])
    data.trainer = trainer()
    data.prepare_data()
    assert {module.prepared_by for module in data.modules} == {data.trainer}


def test_modules_come_in_a_sequence_of_another_kind():
    """As Hydra's lists are."""
    assert [module.site for module in ready(UserList([Site(0), Site(7)])).modules] == [0, 7]


def test_modules_may_be_made_by_client():
    data = ready(Site, num_clients=3)
    assert [samples(data.client(k).train)[0] for k in data.clients] == [0, 10, 20]
    assert [module.site for module in ready(lambda k: Site(2 * k), 2).modules] == [0, 2]


@pytest.mark.parametrize(
    "modules",
    [
        ['--data.modules=[{"class_path": "own_site.Site", "init_args": {"n": 0}}, {"class_path": "own_site.Site"}]'],
        ["--data.modules", "own_site.Site", "--data.num_clients", "2"],
    ],
)
def test_modules_are_given_by_name_on_the_command_line(modules, tmp_path, monkeypatch):
    (tmp_path / "own_site.py").write_text(
        "import lightning as L\n"
        "class Site(L.LightningDataModule):\n"
        "    def __init__(self, n: int = 1):\n"
        "        super().__init__()\n"
        "        self.n = n\n"
        "    def train_dataloader(self): return None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    parser = ArgumentParser()
    parser.add_subclass_arguments(FederatedDataModule, "data")
    data = parser.instantiate(parser.parse_args(["--data", "PerClient", *modules])).data
    assert [module.n for module in data.modules] == [0, 1]


def test_a_module_without_validation_and_test_data():
    client = ready([OnlyTrain()]).client(0)
    assert list(client.val) == list(client.test) == []
    assert client.num_classes is None
    assert ready([with_loaders(val=None, test=[])]).client(0).val == ()
    [(x,)] = ready([with_loaders(val=[DataLoader(torch.zeros(1, 1))])]).client(0).val
    assert x.shape == (1,)


def test_what_is_said_of_classes_goes_before_what_modules_have():
    client = ready([Site()], num_classes=5, labels_agree=False).client(0)
    assert (client.num_classes, client.labels_agree) == (5, False)


def test_states_of_modules_are_kept():
    data = ready(Site, 3)
    data.modules[2].epoch = 4
    state = data.state_dict()
    assert state == {"2": {"epoch": 4}}
    again = ready(Site, 3)
    again.load_state_dict(state)
    assert [module.epoch for module in again.modules] == [0, 0, 4]


def test_the_trainer_is_the_modules_too():
    data = PerClient([Site()])
    trainer = L.Trainer(logger=False, enable_checkpointing=False)
    data.trainer = trainer
    data.setup("fit")
    assert data.modules[0].trainer is trainer


class Stream(IterableDataset):
    def __init__(self, n: int = 4) -> None:
        self.n = n

    def __iter__(self):
        return iter(torch.arange(self.n).float())


class Once(IterableDataset):
    def __init__(self) -> None:
        self.rows = iter(torch.arange(4).float())

    def __iter__(self):
        return self.rows


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PerClient([]), "give a data module for every client"),
        (lambda: PerClient({0: Site()}), "data.modules is a dict; give a list of LightningDataModules"),
        (lambda: PerClient(Site()), "data.modules is a Site; give a list of LightningDataModules"),
        (lambda: PerClient([Site(), torch.zeros(3)]), r"data.modules\[1\] is a Tensor; give a LightningDataModule"),
        (
            lambda: PerClient([L.LightningDataModule()]),
            "LightningDataModule has no train_dataloader",
        ),
        (lambda: PerClient(Site), "data.num_clients: say how many"),
        (lambda: PerClient([Site()], num_clients=3), "data.num_clients=3, but data.modules has 1; leave it out"),
        (lambda: ready([Site()]).client(1), "no client 1; data.modules has 1"),
        (lambda: ready([with_loaders(train=DataLoader(Stream(n=0)))]).client(0), "its train_dataloader has no samples"),
        (lambda: ready([with_loaders(train=[1, 2])]).client(0), "Made: .*of type list does not keep its samples apart"),
        (lambda: ready([with_loaders(train=None)]).client(0), "Made: its train_dataloader returns nothing"),
        (lambda: ready([with_loaders(train=DataLoader([]))]).client(0), "Made: its train_dataloader has no samples"),
        (
            lambda: ready([Site(), with_loaders(train=DataLoader(torch.zeros(5, 1), 8, drop_last=True))]).client(1),
            r"data.modules\[1\], Made: its train_dataloader makes no batch of its 5 samples; leave out drop_last=True",
        ),
        (
            lambda: ready([with_loaders(train=DataLoader(Once()))]).client(0),
            r"data.modules\[0\], Made: the training loader makes no batch a second time; give a dataset that begins",
        ),
        (
            lambda: ready([with_loaders(val=CombinedLoader([[1], [2]], "max_size"))]).client(0),
            r"data.modules\[0\], Made: its val_dataloader returns a CombinedLoader with mode='max_size'; give mode",
        ),
    ],
)
def test_bad_modules_are_one_line(make, message):
    with pytest.raises(ConfigError, match=message) as error:
        make()
    assert "\n" not in str(error.value)
