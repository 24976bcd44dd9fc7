"""Several loaders that a client trains on together, as a Trainer combines them."""

from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from data.seen_rows import ROWS, Module, Site, check_asleep, check_resumed
from lit_pfl import Federation
from lit_pfl.data import PerClient
from lit_pfl.errors import ConfigError
from lit_pfl.methods import FedALA, FedAvg
from lit_pfl.randomness import RandomStream
from tiny import trainer


class InOne(Site):
    """Trains on the batches of all its loaders as one."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        parts, _ = torch.utils._pytree.tree_flatten(batch)
        return torch.cat([part for part in parts if part is not None])


def loaders(kind: str):
    few, many = DataLoader(ROWS[:4], 2, shuffle=True), DataLoader(ROWS, 2, shuffle=True)
    if kind in ("list", "dict", "nested", "one"):
        named = {"dict": {"few": few, "many": many}, "nested": {"a": [few], "b": many}, "one": {"many": many}}
        return named.get(kind, [few, many])
    return CombinedLoader([few, many], kind)


def data(kind: str) -> PerClient:
    return PerClient([InOne(loaders(kind)) for _ in range(2)])


@pytest.mark.parametrize("kind", ["list", "dict", "nested", "one", "min_size", "max_size", "max_size_cycle"])
def test_one_client_is_a_trainer_s(kind):
    torch.manual_seed(0)
    alone = Module()
    with RandomStream(1, 0).active():
        L.Trainer.fit(trainer(3), alone, datamodule=InOne(loaders(kind)))
    torch.manual_seed(0)
    federation = Federation(FedAvg(learner=Module()), seed=1)
    trainer(3).fit(federation, datamodule=PerClient([InOne(loaders(kind))]))
    member = federation.clients[0]
    assert member.learner.seen == alone.seen
    assert len(alone.seen) == 3 * {"one": 8, "min_size": 8, "max_size": 12}.get(kind, 16)
    assert all(torch.equal(x, y) for x, y in zip(member.learner.parameters(), alone.parameters(), strict=True))
    assert member.trainer.global_step == 3 * (2 if kind == "min_size" else 4)


def test_a_resumed_run_is_the_same_run_and_clients_that_sleep_come_to_the_same(tmp_path):
    check_resumed(partial(data, "dict"), tmp_path)
    check_asleep(partial(data, "dict"))


def test_what_cannot_be_is_said():
    with pytest.raises(ConfigError, match=r"InOne: its train_dataloader returns a Combined.*sequential"):
        trainer(1).fit(Federation(FedAvg(learner=Module())), datamodule=data("sequential"))
    with pytest.raises(ConfigError, match=r"FedALA learns on some .* LoadersTogether makes whole batches"):
        trainer(1).fit(Federation(FedALA(learner=Module(), layers=1)), datamodule=data("list"))
