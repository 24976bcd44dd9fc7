"""LG-FedAvg: the classifier is everybody's, or nothing is."""

import pytest
from two_layers import HEAD, SGD, Recorded, assert_close, gradient, scores

from lit_pfl.errors import ConfigError
from lit_pfl.methods import FedAvg, LGFedAvg, StandAlone
from lit_pfl.models import ResNet18
from tiny import assert_equal, client, digits, run, spec, weights

BODY = {"backbone.body.0.weight", "backbone.body.0.bias", "backbone.body.1.weight", "backbone.body.1.bias"}
CLASSIFIER = {"backbone.head.weight", "backbone.head.bias"}


@pytest.mark.parametrize(
    ("options", "permuted", "expected"),
    [
        ({}, False, CLASSIFIER),
        ({}, True, set()),
        ({"share_head": False}, False, set()),
        ({"norm_stats": "averaged"}, False, CLASSIFIER),
        ({"shared_layers": 2}, False, CLASSIFIER | BODY),
        ({"shared_layers": 2}, True, BODY),
    ],
)
def test_what_travels(options, permuted, expected):
    federation = run(client(LGFedAvg, **options), digits(2, permute_labels=permuted), rounds=1)
    assert set(federation.clients[0].upload()) == set(federation.coordinator.server.reply(0)) == expected


@pytest.mark.parametrize("options", [{}, {"weighting": "uniform"}, {"weighting": "samples"}], ids=str)
def test_two_rounds_equal_the_formulas(options):
    """Heads are averaged with equal weights unless samples are to count."""
    recorded = Recorded(LGFedAvg, **options)
    optimizers = [SGD() for _ in recorded.members]

    def train(k, epoch, w, batches):
        for batch in batches:
            optimizers[k].step(w, gradient(w, batch))

    expected = recorded.averaged(train, HEAD, uniform=options.get("weighting") != "samples")
    for k, member in recorded.members.items():
        assert_close(member.backbone, expected[k])


def test_under_permuted_labels_it_is_stand_alone_bit_for_bit():
    lg, alone = (run(client(method), digits(3, permute_labels=True)) for method in (LGFedAvg, StandAlone))
    assert_equal(weights(lg), weights(alone))
    assert scores(lg) == scores(alone)


def test_with_all_layers_shared_it_is_fedavg_bit_for_bit():
    lg = client(LGFedAvg, shared_layers=2, weighting="samples")
    assert_equal(weights(run(lg)), weights(run(client(FedAvg))))


@pytest.mark.parametrize("classes", [10, 100])
def test_it_sends_what_fedslr_counts(classes):
    """FedSLR, Table 2: 5,120 elements of ResNet-18 on CIFAR-10, 51,200 on CIFAR-100."""
    member = LGFedAvg(backbone=lambda c, n: ResNet18(c, n, norm="group", bias=False)).build(spec(num_classes=classes))
    assert member.upload().elements == 512 * classes


def test_errors():
    with pytest.raises(ConfigError, match=r"model\.shared_layers=3: the learner has 2 layers"):
        client(LGFedAvg, shared_layers=3).build(spec(channels=1, image_size=8))
