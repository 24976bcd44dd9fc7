"""Ditto: a common model that is FedAvg's, and personal ones held near it."""

import pytest
import torch
from two_layers import (
    ALL,
    SGD,
    Recorded,
    arrays,
    assert_close,
    combine,
    gradient,
    network,
    scores,
)

from lit_pfl.errors import ConfigError
from lit_pfl.methods import Ditto, FedAvg, StandAlone
from lit_pfl.nn.factorization import Factorization
from tiny import TinyNet, assert_equal, client, digits, run, spec

TRAINERS = [
    {},
    {"gradient_clip_val": 0.3},
    {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
    {"accumulate_grad_batches": 2},
]


@pytest.mark.parametrize("options", [{}, {"weighting": "uniform"}, {"weighting": "samples"}], ids=str)
@pytest.mark.parametrize("lam", [0.0, 1.0, 3.0])
def test_two_rounds_equal_the_formulas(lam, options):
    """v <- v - eta (grad f(v) + lam (v - w_t)), w as in FedAvg with equal weights or as said, on the same batches."""
    recorded = Recorded(Ditto, lam=lam, **options)
    common, personal = ([SGD() for _ in recorded.members] for _ in range(2))
    v = [recorded.start() for _ in recorded.members]
    start = {}

    def train(k, epoch, w, batches):
        if epoch == 0:
            start[k] = dict(w)
        for batch in batches:
            personal[k].step(v[k], combine(1, gradient(v[k], batch), lam, combine(1, v[k], -1, start[k])))
            common[k].step(w, gradient(w, batch))

    expected = recorded.averaged(train, ALL, uniform=options.get("weighting") != "samples")
    for k, member in recorded.members.items():
        assert_close(member.backbone, expected[k])
        assert_close(member.personal.backbone, v[k])


@pytest.mark.parametrize("personal_epochs", [1, 2])
def test_separate_personal_epochs_equal_the_formulas(personal_epochs):
    """FedSLR's: w first; then v, pulled after each step from where it stepped to."""
    recorded = Recorded(Ditto, local_epochs=3, lam=2.0, schedule="separate", personal_epochs=personal_epochs)
    common, personal = ([SGD() for _ in recorded.members] for _ in range(2))
    v = [recorded.start() for _ in recorded.members]
    start = {}

    def train(k, epoch, w, batches):
        if epoch == 0:
            start[k] = dict(w)
        for batch in batches:
            if epoch < 3 - personal_epochs:
                common[k].step(w, gradient(w, batch))
            else:
                personal[k].step(v[k], gradient(v[k], batch))
                v[k] = combine(1 - 0.1 * 2.0, v[k], 0.1 * 2.0, start[k])

    expected = recorded.averaged(train, ALL, uniform=True)
    for k, member in recorded.members.items():
        assert_close(member.backbone, expected[k])
        assert_close(member.personal.backbone, v[k])


@pytest.mark.few(1)
@pytest.mark.parametrize("client_trainer", TRAINERS)
@pytest.mark.parametrize("permuted", [False, True])
def test_the_common_model_is_fedavg_s_bit_for_bit(client_trainer, permuted):
    """With dropout, momentum, a schedule, several batches; clipping cuts each network by itself."""
    ditto, fedavg = (
        run(method, digits(3, permute_labels=permuted), rounds=3, client_trainer=client_trainer)
        for method in (client(Ditto, weighting="samples"), client(FedAvg))
    )
    assert_equal(network(ditto, "backbone"), network(fedavg, "backbone"))
    assert ditto.traffic.state_dict() == fedavg.traffic.state_dict()


@pytest.mark.few(2)
@pytest.mark.parametrize("client_trainer", TRAINERS)
@pytest.mark.parametrize("batch_size", [2000, 64], ids=["full batches", "batches"])
def test_without_the_pull_it_is_stand_alone_bit_for_bit(client_trainer, batch_size):
    ditto, alone = (
        run(method, digits(3, batch_size=batch_size), rounds=3, client_trainer=client_trainer)
        for method in (client(Ditto, lam=0.0), client(StandAlone))
    )
    assert_equal(network(ditto, "personal"), network(alone, "backbone"))
    assert scores(ditto) == scores(alone)


@pytest.mark.seconds
def test_clipping_does_bite_there():
    plain, clipped = (
        run(client(StandAlone), digits(2), client_trainer=options) for options in (TRAINERS[0], TRAINERS[1])
    )
    assert not torch.equal(plain.clients[0].backbone.head.weight, clipped.clients[0].backbone.head.weight)


@pytest.mark.seconds
@pytest.mark.few(1)
@pytest.mark.parametrize("l1_mode", ["subgradient", "proximal"])
def test_factorized_models_are_those_of_fedavg_and_stand_alone(l1_mode):
    factorization = Factorization(l1=1e-2, l1_mode=l1_mode)
    ditto, fedavg, alone = (
        run(client(method, factorization=factorization, **options), digits(2))
        for method, options in ((Ditto, {"lam": 0.0, "weighting": "samples"}), (FedAvg, {}), (StandAlone, {}))
    )
    assert_equal(network(ditto, "backbone"), network(fedavg, "backbone"))
    assert_equal(network(ditto, "personal"), network(alone, "backbone"))


@pytest.mark.seconds
@pytest.mark.parametrize("schedule", ["interleaved", "separate"])
def test_the_personal_model_never_travels_and_starts_as_the_common_one(schedule):
    member = client(Ditto, schedule=schedule).build(spec(channels=1, image_size=8, local_epochs=2))
    assert_equal(dict(member.personal.state_dict()), dict(member.learner.state_dict()))
    assert not {id(p) for p in member.personal.parameters()} & {id(p) for p in member.learner.parameters()}
    federation = run(client(Ditto, schedule=schedule), digits(2, permute_labels=True), local_epochs=2)
    for member in federation.clients.values():
        assert set(member.upload()) == {f"backbone.body.{i}.{leaf}" for i in (0, 1) for leaf in ("weight", "bias")}
        assert member.received == {}  # a sleeping client holds two networks, not three
        images, _ = next(iter(member.data.test))
        member.eval()
        with member.personalized() as learner:
            assert torch.equal(learner(images), member.personal.backbone(images))
            assert not torch.equal(learner(images), member.backbone(images))


def test_errors():
    task = spec(channels=1, image_size=8)
    with pytest.raises(ConfigError, match=r"model\.personal_epochs=1 leaves none of federation\.local_epochs=1"):
        client(Ditto, schedule="separate").build(task)


def test_initial_weights_are_those_of_fedavg():
    """The second network draws nothing."""
    states = []
    for method in (Ditto, FedAvg):
        torch.manual_seed(5)
        states.append(arrays(client(method, backbone=TinyNet).build(spec(channels=1, image_size=8)).backbone))
    for name in states[0]:
        assert (states[0][name] == states[1][name]).all()
