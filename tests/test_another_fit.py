"""A federation that is fitted more than once: after a failure, with other data, under another Trainer."""

import lightning as L
import pytest
import torch

from lit_pfl import Federation
from lit_pfl.core.asynchronous import FedAsync, FedBuff
from lit_pfl.core.privacy import ClientPrivacy
from lit_pfl.errors import ConfigError
from lit_pfl.lightning_internals import LastCheckpoint
from lit_pfl.methods import FedAvg, Scaffold
from tiny import assert_equal, client, digits, run, trainer, weights


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


class Stops(L.Callback):
    """An error in a round."""

    def __init__(self, round: int) -> None:
        self.round = round

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch + 1 == self.round:
            raise RuntimeError("full")


@pytest.mark.seconds
def test_after_an_error_clients_do_not_begin_again_without_a_word(tmp_path):
    saving = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    federation = Federation(client(FedAvg), seed=3, threads=1)
    first = trainer(3, callbacks=[LastCheckpoint(tmp_path), Stops(2)], **saving)
    with pytest.raises(RuntimeError, match="full"):
        first.fit(federation, datamodule=digits())
    for _ in range(2):  # a refusal is an error in a fit itself
        with pytest.raises(ConfigError, match=r"^The last fit was ended by an error or by hand, .*; continue from it"):
            trainer(3).fit(federation, datamodule=digits())
    trainer(3).fit(federation, datamodule=digits(), ckpt_path=tmp_path / "last.ckpt")
    assert_equal(weights(federation), weights(run(client(FedAvg), rounds=3)))


@pytest.mark.seconds
def test_what_is_refused_before_the_first_round_leaves_no_clients():
    federation = Federation(client(FedAvg), seed=3, threads=1, asynchronous=FedBuff(5))
    with pytest.raises(ConfigError, match="buffer=5 is more than the 4 clients"):
        trainer(1).fit(federation, datamodule=digits(4))
    trainer(2).fit(federation, datamodule=digits(6))
    assert_equal(weights(federation), weights(run(client(FedAvg), digits(6), asynchronous=FedBuff(5))))


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("method", "options"),
    [(FedAvg, {"participation": 0.5}), (FedAvg, {"participation": 2, "asynchronous": FedAsync()}), (Scaffold, {})],
    ids=["sampled", "asynchronous", "all"],
)
def test_another_trainer_goes_on_with_the_rounds(tmp_path, method, options):
    """Who trains when is that of one fit, also where the second one is resumed."""
    made = lambda: client(method, optimizer=sgd, scheduler=None)  # noqa: E731
    whole = run(made(), rounds=5, **options)
    federation = run(made(), **options)
    drawn = [federation.participants(t) for t in range(2, 5)]
    second = trainer(2, enable_checkpointing=True, callbacks=[LastCheckpoint(tmp_path)], default_root_dir=tmp_path)
    second.fit(federation, datamodule=digits())
    assert [federation.participants(t) for t in range(3)] == drawn
    resumed = Federation(made(), seed=3, threads=1, **options)
    trainer(3).fit(resumed, datamodule=digits(), ckpt_path=tmp_path / "last.ckpt")
    assert [resumed.participants(t) for t in range(3)] == drawn
    assert resumed.coordinator.round == 5
    assert resumed.coordinator.clock == whole.coordinator.clock
    assert_equal(resumed.traffic.state_dict(), whole.traffic.state_dict())


@pytest.mark.seconds
def test_the_same_trainer_with_more_epochs_goes_on_with_the_rounds():
    whole, federation = (Federation(client(FedAvg), seed=3, threads=1, participation=0.5) for _ in range(2))
    trainer(5).fit(whole, datamodule=digits())
    fitting = trainer(2)
    fitting.fit(federation, datamodule=digits())
    fitting.fit_loop.max_epochs = 5
    fitting.fit(federation, datamodule=digits())
    assert federation.coordinator.round == 5
    assert federation.traffic.clients == whole.traffic.clients


def test_federations_of_one_privacy_have_each_a_clip_of_its_own():
    pytest.importorskip("dp_accounting")
    privacy = ClientPrivacy(clip=1.0, noise_multiplier=1.0, quantile=0.5, count_noise=1.0)
    one, other = (
        Federation(client(FedAvg, norm_stats="local", local="norm"), seed=3, threads=1, privacy=privacy)
        for _ in range(2)
    )
    trainer(2).fit(one, datamodule=digits())
    clip = one.privacy.clip
    trainer(1).fit(other, datamodule=digits())
    assert one.privacy.clip == clip != other.privacy.clip
    assert privacy.clip == 1.0
