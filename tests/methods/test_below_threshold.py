"""What becomes of entries of mu below the threshold where mu travels, and how a federation's weights start."""

import lightning as L
import numpy as np
import pytest
import torch

from lit_pfl import Client, Federation
from lit_pfl.core.server import ClientInfo
from lit_pfl.export import to_dense
from lit_pfl.methods import Ditto, FactorizedFL, FedAvg, FedFOMO, FedProx, SimFed, StandAlone
from lit_pfl.nn import factorized_layers
from lit_pfl.nn.factorization import Factorization
from tiny import assert_equal, client, digits, run, spec, trainer, weights

THRESHOLD = 0.06
MIXES_ALL = {"mixes": "uvm", "tau": -1.0}


def kind(below: str = "keep", threshold: float = THRESHOLD, **options) -> Factorization:
    return Factorization(**{"form": "FFxIO", "l1": 1e-3, "threshold": threshold, "below_threshold": below, **options})


def beta(below: str = "keep", **options) -> Client:
    return client(FactorizedFL, **MIXES_ALL, factorization=kind(below, **options))


def masks(member: Client) -> dict[str, torch.Tensor]:
    return {f"{name}.mu": layer.mu.detach() for name, layer in factorized_layers(member.backbone)}


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (FactorizedFL, MIXES_ALL),
        (FactorizedFL, {"mixes": "um"}),
        (SimFed, {}),
        (FedAvg, {}),
        (FedProx, {}),
        (Ditto, {}),
    ],
    ids=["beta", "um", "SimFed", "FedAvg", "FedProx", "Ditto"],
)
def test_one_client_trains_as_if_there_were_no_threshold(method, options):
    without, kept = (
        run(client(method, factorization=kind(threshold=threshold), **options), digits(1), rounds=3)
        for threshold in (0.0, THRESHOLD)
    )
    assert_equal(weights(kept), weights(without))
    small = sum(int((mu.abs() < THRESHOLD).sum()) for mu in masks(kept.clients[0]).values())
    assert small > 20
    upload, whole = kept.clients[0].upload(), without.clients[0].upload()
    assert whole.elements - upload.elements == small - sum(
        int((mu == 0).sum()) for mu in masks(kept.clients[0]).values()
    )
    assert len(upload.to_bytes()) == upload.nbytes  # what is counted is what is sent
    assert kept.traffic.elements < without.traffic.elements


@pytest.mark.parametrize("below", ["keep", "send"])
def test_a_client_loads_the_mixture_and_what_it_did_not_send(below):
    federation = run(beta(below), digits(3), rounds=2)
    own = {
        k: {name: mu.double().numpy().copy() for name, mu in masks(c).items()} for k, c in federation.clients.items()
    }
    server = federation.coordinator.server
    mixing = server.weights.numpy()
    for k, member in federation.clients.items():
        member.download(server.reply(k))
        for name, mu in masks(member).items():
            sent = [np.where((abs(own[j][name]) >= THRESHOLD) | (below == "send"), own[j][name], 0) for j in own]
            expected = sum(w * values for w, values in zip(mixing[k], sent, strict=True))
            if below == "keep":
                expected = expected + own[k][name] - sent[k]
            np.testing.assert_allclose(mu, expected, atol=1e-6)


@pytest.mark.parametrize(("below", "sent"), [("keep", [False, True]), ("send", [True, True])])
def test_an_entry_that_trains_grows_until_it_is_sent(below, sent):
    member = beta(below, start="paper").build(spec(channels=1, image_size=8))
    name, seen = "backbone.body.0.mu", []
    for _ in sent:
        member.learner.get_parameter(name).detach()[0, 0, 0, 0] += 0.6 * THRESHOLD  # what training adds in a round
        upload = member.upload()
        seen.append(bool(upload[name][0, 0, 0, 0]))
        member.download(upload)
    assert seen == sent


def test_what_travels_whole_is_used_sparse():
    member = run(beta("send"), rounds=1).clients[0]
    layer = member.backbone.body[0]
    assert torch.equal(member.upload()["backbone.body.0.mu"], layer.mu)
    kept = layer.mu * (layer.mu.abs() >= THRESHOLD)
    assert torch.equal(layer.eval().sparse_mu, kept)
    assert not torch.equal(kept, layer.mu)


def test_a_client_whose_training_ran_away_recovers_with_the_reply():
    federation = run(beta(), digits(2), rounds=1)
    member, reply = federation.clients[0], federation.coordinator.server.reply(0)
    with torch.no_grad():
        member.backbone.body[0].mu[0, 0] = torch.tensor([[torch.nan, torch.inf, -torch.inf]])
    member.download(reply)
    assert torch.equal(member.backbone.body[0].mu[0, 0, 0], reply["backbone.body.0.mu"][0, 0, 0])


def test_a_mu_that_stays_at_home_is_left_alone():
    federation = run(client(FactorizedFL, factorization=kind()), digits(2), rounds=1)
    before = {name: mu.clone() for name, mu in masks(federation.clients[0]).items()}
    federation.clients[0].download(federation.coordinator.server.reply(0))
    assert_equal(masks(federation.clients[0]), before)


def test_fedfomo_mixes_what_others_sent_and_keeps_its_own_small_entries(monkeypatch):
    """With all the weight on another client's model, what is left of the own one is what was not sent."""
    federation = run(client(FedFOMO, factorization=kind()), digits(2), rounds=2)
    member, reply = federation.clients[0], federation.coordinator.server.reply(0)
    own = member.backbone.body[0].mu.detach().clone()
    monkeypatch.setattr("lit_pfl.methods.similarity.fedfomo.gains_per_distance", lambda *_: torch.tensor([1.0, 0.0]))
    member.download(reply)
    expected = reply["1/backbone.body.0.mu"] + own * (own.abs() < THRESHOLD)
    torch.testing.assert_close(member.backbone.body[0].mu.detach(), expected)


# The start of a federation


@pytest.mark.parametrize("options", [{}, {"form": "IFxOF", "rank": 2}, {"pi": "rawview"}, {"rank": 40}], ids=str)
def test_a_dense_start_is_the_dense_network_of_the_same_seed_at_every_client(options):
    initial: list[dict] = []

    class Watch(L.Callback):
        def on_train_start(self, trainer, pl_module):
            initial.append({k: to_dense(c.backbone).state_dict() for k, c in pl_module.clients.items()})

    for factorization in (None, kind(threshold=0.0, start="dense", **options)):
        federation = Federation(client(FedAvg, factorization=factorization), seed=3, threads=1)
        trainer(1, callbacks=[Watch()]).fit(federation, datamodule=digits(3))
    dense, factorized = initial
    assert_equal(factorized[1], factorized[0])
    assert_equal(factorized[2], factorized[0])
    for name, tensor in dense[0].items():
        torch.testing.assert_close(factorized[0][name], tensor, atol=1e-6, rtol=0, msg=name)


def test_the_first_reply_takes_nothing_from_a_dense_start():
    """It holds no entry of mu below the threshold; clients have those themselves."""
    member = beta(start="dense").build(spec(channels=1, image_size=8))
    before = {name: tensor.clone() for name, tensor in member.state_dict().items()}
    upload = member.upload()
    assert 0 < (upload["backbone.body.0.mu"] == 0).sum() < upload["backbone.body.0.mu"].numel()
    member.download(upload)
    assert_equal(member.state_dict(), before)


@pytest.mark.parametrize("below", ["keep", "send"])
@pytest.mark.parametrize("method", [FactorizedFL, SimFed, FedAvg, FedFOMO])
def test_every_client_begins_with_the_whole_of_a_dense_start(method, below):
    options = MIXES_ALL if method is FactorizedFL else {}
    members = {}
    for k in range(2):  # as a federation builds them, from the same random numbers
        torch.manual_seed(5)
        factorization = kind(below, start="dense")
        members[k] = client(method, factorization=factorization, **options).build(spec(channels=1, image_size=8))
    before = {name: mu.clone() for name, mu in masks(members[1]).items()}
    assert all(0 < (mu.abs() < THRESHOLD).sum() < mu.numel() for mu in before.values())
    server = members[0].configure_server()
    server.start({k: ClientInfo(10, member.initial()) for k, member in members.items()})
    assert server.model.sparse == members[0].upload().sparse  # what counts as sparse does not change
    for k, member in members.items():
        member.download(server.reply(k))
        assert_equal(masks(member), before)
    assert (members[1].upload()["backbone.body.0.mu"] == 0).any() == (below != "send")  # later ones are sparse


def test_defaults():
    """Factorized-FL's paper says that mu starts at zero, SimFed's nothing."""
    assert SimFed().factorization.start == "dense"
    assert FactorizedFL().factorization.start == "paper"
    assert client(StandAlone, factorization=Factorization()).factorization.below_threshold == "keep"
