"""Attacks: what the server sees, and what defenses make of it."""

import numpy as np
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from scipy import stats

from cli.typed import TINY, typed
from lit_pfl import Federation
from lit_pfl.core.robust import CoordinateMedian
from lit_pfl.core.updates import update_of
from lit_pfl.engines import Stacked
from lit_pfl.errors import ConfigError
from lit_pfl.federation import ALIE, InnerProduct, LabelFlip, ScaledUpdate, SignFlip
from lit_pfl.methods import IFCA, Ditto, FedAvg, FedKD, FedNTD, FedProto, FedSpa, Scaffold, SimFed, StandAlone
from tiny import assert_equal, client, digits, trainer, weights

ATTACKERS, HONEST = [1, 4], [0, 2, 3, 5]


def attacked(attack, method=None, rounds: int = 1, watch=None, **options) -> Federation:
    """Run a federation under an attack; somebody may look at what the server is handed."""
    federation = Federation(method or client(FedAvg), **{"seed": 3, "threads": 1, **options})
    callbacks = [callback for callback in (attack, watch) if callback is not None]
    trainer(rounds, callbacks=callbacks).fit(federation, datamodule=digits(6))
    return federation


class Seen(SignFlip):
    """Notes the updates that come to the server, and changes nothing."""

    def __init__(self) -> None:
        super().__init__(clients=[])
        self.updates: list[dict[int, np.ndarray]] = []

    def _forge(self, round, uploads):
        updates = {k: update_of(upload, self._coordinator.center(k, upload)) for k, upload in uploads.items()}
        self.updates.append({k: torch.cat([t.flatten() for t in u.values()]).numpy() for k, u in updates.items()})
        return uploads


def seen(attack, method=FedAvg, **options) -> dict[int, np.ndarray]:
    watch = Seen()
    attacked(attack, client(method, **options), watch=watch)
    return watch.updates[0]


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


@pytest.mark.seconds
@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("method", "options"),
    [
        (FedAvg, {}),
        (SimFed, {}),
        (FedSpa, {}),
        (Scaffold, {"optimizer": plain_sgd}),
        (FedKD, {"energy_start": 1.0}),
        (IFCA, {}),
    ],
)
@pytest.mark.parametrize(
    ("attack", "factor"),
    [(SignFlip(2.0, clients=ATTACKERS), -2), (ScaledUpdate(5.0, clients=ATTACKERS), 5)],
    ids=["flip", "scale"],
)
def test_updates_are_scaled_and_the_others_left_alone(method, options, attack, factor):
    honest, sent = seen(None, method, **options), seen(attack, method, **options)
    for k in HONEST:
        np.testing.assert_array_equal(sent[k], honest[k])
    for k in ATTACKERS:
        np.testing.assert_allclose(sent[k], factor * honest[k], rtol=1e-4, atol=1e-5)


@pytest.mark.seconds
@pytest.mark.parametrize("knows", ["own", "all"])
@pytest.mark.parametrize("deviations", [None, 1.5])
def test_alie_sends_the_mean_less_some_deviations(knows, deviations):
    honest, sent = seen(None), seen(ALIE(deviations, knows, clients=ATTACKERS))
    known = np.stack([honest[k] for k in (ATTACKERS if knows == "own" else HONEST)])
    z = max(0, stats.norm.ppf((4 - (4 - 2)) / 4)) if deviations is None else 1.5  # s = 6 // 2 + 1 - 2
    for k in ATTACKERS:
        np.testing.assert_allclose(sent[k], known.mean(0) - z * known.std(0), rtol=1e-4, atol=1e-5)


def test_inner_products_with_the_honest_mean_are_negative():
    honest, sent = seen(None), seen(InnerProduct(0.3, clients=ATTACKERS))
    mean = np.mean([honest[k] for k in HONEST], axis=0)
    for k in ATTACKERS:
        np.testing.assert_allclose(sent[k], -0.3 * mean, rtol=1e-4, atol=1e-5)


@pytest.mark.seconds
def test_attackers_that_flip_labels_train_on_them(monkeypatch):
    flipped, honest = attacked(LabelFlip(clients=ATTACKERS), client(StandAlone)), attacked(None, client(StandAlone))
    for k in HONEST:
        assert_equal(weights(flipped)[k], weights(honest)[k])
    for k in ATTACKERS:
        assert not torch.equal(weights(flipped)[k]["backbone.head.bias"], weights(honest)[k]["backbone.head.bias"])
        assert "training_step" not in vars(flipped.clients[k])
    module, flip, noted = flipped.clients[1], LabelFlip(clients=[1]), []
    flip.attackers = [1]
    flip.begin(flipped)
    monkeypatch.setattr(type(module), "training_step", lambda self, batch, i: noted.append(batch))
    module.training_step((torch.zeros(2), torch.tensor([0, 7])), 0)
    module.training_step({"image": torch.zeros(2), "label": torch.tensor([0, 7])}, 0)
    assert noted[0][1].tolist() == noted[1]["label"].tolist() == [9, 2]
    with pytest.raises(ConfigError, match="batches of client 1 are neither"):
        module.training_step({"x": torch.zeros(2)}, 0)
    with pytest.raises(ConfigError, match="LabelFlip changes single clients; give federation.engine=Local"):
        attacked(LabelFlip(clients=[1]), client(FedAvg, channels_last=False), engine=Stacked())
    with pytest.raises(ConfigError, match="LabelFlip flips labels in training steps only, but FedProto reads"):
        attacked(LabelFlip(clients=[1]), client(FedProto))
    attacked(LabelFlip(clients=[1]), client(FedNTD))


@pytest.mark.parametrize("attack", [ALIE(1.0, "all"), InnerProduct()])
def test_attackers_send_what_they_have_and_nothing_where_nobody_is_honest(attack):
    own = {"w": torch.ones(2)}
    assert attack.forge([0], {0: own, 1: {**own, "late": torch.ones(1)}})[0].keys() == own.keys()
    assert attack.forge([0], {0: own}) == {0: {}}


@pytest.mark.seconds
def test_attackers_are_drawn_by_share_and_seed():
    one, other, third = SignFlip(share=0.34, seed=1), SignFlip(share=0.34, seed=1), SignFlip(share=2, seed=2)
    attacked(one)
    attacked(other, seed=9)
    attacked(third)
    assert len(one.attackers) == len(third.attackers) == 2
    assert one.attackers == other.attackers


@pytest.mark.seconds
def test_a_resumed_attack_is_the_same(tmp_path):
    def fit(rounds, path=None):
        federation = Federation(client(Ditto, mean=CoordinateMedian()), seed=3, threads=1)
        fitting = trainer(rounds, callbacks=[ALIE(1.0, clients=ATTACKERS)])
        fitting.fit(federation, datamodule=digits(6), ckpt_path=path)
        return federation, fitting

    whole, _ = fit(3)
    _, first = fit(1)
    first.save_checkpoint(tmp_path / "one.ckpt")
    assert_equal(weights(whole), weights(fit(3, tmp_path / "one.ckpt")[0]))


def test_an_attack_ends_with_its_fit():
    assert attacked(SignFlip(3.0, clients=ATTACKERS)).coordinator.changes == []


def test_an_update_beyond_a_bound_is_refused_by_client():
    with pytest.warns(UserWarning, match=r"Client 1: its update has a norm of \S+, above federation.max_update_norm=9"):
        federation = attacked(ScaledUpdate(1e4, clients=ATTACKERS), max_update_norm=9)
    assert [refusal.client for refusal in federation.refused] == ATTACKERS
    assert attacked(None, max_update_norm=9).refused == []
    with pytest.raises(ConfigError, match="federation.max_update_norm=0: give a number above 0"):
        Federation(client(FedAvg), max_update_norm=0)


def test_what_cannot_be_attacked():
    with pytest.raises(ConfigError, match=r"SignFlip\(clients=\[7\]\): no client 7"):
        attacked(SignFlip(clients=[7]))
    with pytest.raises(ConfigError, match="federation.participation=9 is more than"):  # before there is a server
        attacked(SignFlip(), participation=9)
    with pytest.raises(ConfigError, match="share=1.5: give a share"):
        SignFlip(share=1.5)
    for attack, message in (
        (ALIE(knows="none"), "ALIE.knows='none': choose own, all"),
        (ALIE(deviations=-1), "ALIE.deviations=-1: give a number from 0"),
        (SignFlip(scale=float("nan")), "SignFlip.scale=nan: give a number above 0"),
        (SignFlip(share=9), "SignFlip.share=9 is more than the [0-9]+ clients"),
    ):
        with pytest.raises(ConfigError, match=message):
            attacked(attack)
    with pytest.raises(ConfigError, match="SignFlip attacks a Federation, not a BoringModel"):
        trainer(1, callbacks=[SignFlip()]).fit(BoringModel())


@pytest.mark.seconds
def test_an_attack_by_name_on_the_command_line(capsys, tmp_path):
    came = typed(capsys, "fit", *TINY, "--trainer.callbacks", "SignFlip", "--trainer.callbacks.clients", "[1]",
                 "--trainer.max_epochs", "1", "--folder", str(tmp_path / "run"))  # fmt: skip
    assert came.code == 0, came.errors
