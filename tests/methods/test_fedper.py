"""FedPer: which layers are personal, and what it is without any."""

import pytest
from two_layers import ALL, BODY, SGD, Recorded, assert_close, gradient, scores

from lit_pfl.errors import ConfigError
from lit_pfl.methods import FedPer, StandAlone
from lit_pfl.models import CNN, ResNet9
from lit_pfl.nn.factorization import Factorization
from tiny import assert_equal, client, digits, run, spec, weights

CONVOLUTION = {"backbone.body.0.weight", "backbone.body.0.bias", "backbone.body.1.weight", "backbone.body.1.bias"}
STATISTICS = {f"backbone.body.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
HEAD = {"backbone.head.weight", "backbone.head.bias"}


@pytest.mark.parametrize(
    ("personal_layers", "permuted", "norm_stats", "expected"),
    [
        (1, False, "local", CONVOLUTION),
        (1, True, "local", CONVOLUTION),
        (0, False, "local", CONVOLUTION | HEAD),
        (0, True, "local", CONVOLUTION),
        (2, False, "averaged", set()),
        (1, False, "averaged", CONVOLUTION | STATISTICS),
        (["^1"], False, "averaged", {"backbone.body.0.weight", "backbone.body.0.bias"}),
        ([r"0\.bias", r"1\.bias"], False, "local", {"backbone.body.0.weight", "backbone.body.1.weight"}),
        ([], False, "local", CONVOLUTION),
    ],
)
def test_what_travels(personal_layers, permuted, norm_stats, expected):
    method = client(FedPer, personal_layers=personal_layers, norm_stats=norm_stats)
    federation = run(method, digits(2, permute_labels=permuted), rounds=1)
    assert set(federation.clients[0].upload()) == set(federation.coordinator.server.reply(0)) == expected


def test_last_layers_of_networks_of_several_kinds():
    def personal(backbone, layers, **options):
        member = FedPer(personal_layers=layers, backbone=backbone, **options).build(spec(channels=1, image_size=28))
        return {name.rpartition(".")[0] for name in member.private}

    assert personal(CNN, 2) == {"backbone.head", "backbone.body.7"}
    assert personal(CNN, 3) == {"backbone.head", "backbone.body.7", "backbone.body.3"}
    small = {"backbone.head", "backbone.body.6.0", "backbone.body.6.1"}
    assert personal(lambda channels, classes: ResNet9(channels, classes, width=2), 2) == small
    assert personal(lambda channels, classes: ResNet9(channels, classes, width=2), ["^6"]) == small
    assert personal(lambda *c: ResNet9(*c, width=2), 2, factorization=Factorization()) == small
    assert len(personal(lambda *c: ResNet9(*c, width=2), 4)) == 7


@pytest.mark.seconds
@pytest.mark.parametrize("permuted", [False, True])
def test_alone_it_does_not_matter_which_statistics_would_be_sent(permuted):
    """Which is why that table has one run of Stand-Alone for both."""
    local, averaged = (
        run(client(StandAlone, norm_stats=norm_stats), digits(permute_labels=permuted))
        for norm_stats in ("local", "averaged")
    )
    assert_equal(weights(local), weights(averaged))
    assert scores(local) == scores(averaged)


@pytest.mark.parametrize("personal_layers", [0, 1])
def test_two_rounds_equal_the_formulas(personal_layers):
    recorded = Recorded(FedPer, personal_layers=personal_layers)
    optimizers = [SGD() for _ in recorded.members]

    def train(k, epoch, w, batches):
        for batch in batches:
            optimizers[k].step(w, gradient(w, batch))

    expected = recorded.averaged(train, BODY if personal_layers else ALL)
    for k, member in recorded.members.items():
        assert_close(member.backbone, expected[k])


@pytest.mark.parametrize(
    ("personal_layers", "message"),
    [
        (3, r"model\.personal_layers=3: the learner has 2 layers; give 0 to 2"),
        (-1, r"model\.personal_layers=-1"),
        (["layer9"], r"nothing of the body is named like 'layer9'; it has 0\.weight, 0\.bias"),
    ],
)
def test_errors(personal_layers, message):
    with pytest.raises(ConfigError, match=message):
        client(FedPer, personal_layers=personal_layers).build(spec(channels=1, image_size=8))
