"""LG-FedAvg: the classifier is everybody's, or nothing is."""

import pytest
from two_layers import HEAD, SGD, Recorded, assert_close, gradient

from lit_pfl.errors import ConfigError
from lit_pfl.methods import LGFedAvg
from lit_pfl.models import ResNet18
from tiny import client, digits, run, spec

BODY = {"backbone.body.0.weight", "backbone.body.0.bias", "backbone.body.1.weight", "backbone.body.1.bias"}
CLASSIFIER = {"backbone.head.weight", "backbone.head.bias"}


@pytest.mark.parametrize(
    ("options", "permuted", "expected"),
    [
        ({}, False, CLASSIFIER),
        ({}, True, set()),
        ({"share_head": False}, False, set()),
        ({"share_head": True}, False, CLASSIFIER),
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


@pytest.mark.parametrize("classes", [10, 100])
def test_it_sends_what_fedslr_counts(classes):
    """FedSLR, Table 2: 5,120 elements of ResNet-18 on CIFAR-10, 51,200 on CIFAR-100."""
    member = LGFedAvg(backbone=lambda c, n: ResNet18(c, n, norm="group", bias=False)).build(spec(num_classes=classes))
    assert member.upload().elements == 512 * classes


def test_errors():
    with pytest.raises(ConfigError, match=r"model\.shared_layers=3: the learner has 2 layers"):
        client(LGFedAvg, shared_layers=3).build(spec(channels=1, image_size=8))
