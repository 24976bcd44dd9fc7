"""FedCP against its formulas."""

import numpy as np
import pytest
import torch
from heads import learners, skewed

from lit_pfl.methods import FedCP, FedPer
from lit_pfl.methods.partial.fedcp import Gates, mmd
from lit_pfl_callbacks.tensors import tensors_of
from tiny import assert_equal, client, digits, run, weights


def test_gates_sum_to_one_and_both_heads_get_their_part():
    torch.manual_seed(0)
    policy, common = torch.nn.Linear(4, 8), torch.nn.Linear(4, 3)
    gates, h, z = Gates(policy, common, torch.ones(4)), torch.randn(5, 4), torch.randn(5, 3)
    for gates.draws in (True, False):
        personal = gates.personal(h)
        torch.testing.assert_close(personal + gates._others, h)
        torch.testing.assert_close(gates.add_common(h, z), z + common(h - personal))
    made = policy(h).view(5, 2, 4)
    torch.testing.assert_close(gates.personal(h), h * made.softmax(1)[:, 0])


def test_mmd():
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64) + 1
    assert float(mmd(x, x)) == pytest.approx(0, abs=1e-12)

    def k(a, b):
        return sum(np.exp(-(((a - b) ** 2).sum()) / (2 * w)) for w in (10, 15, 20, 50))

    expected = np.mean([[k(a, b) + k(c, d) - k(a, d) - k(a, d) for b, d in zip(x.numpy(), y.numpy(), strict=True)]
                        for a, c in zip(x.numpy(), y.numpy(), strict=True)])  # fmt: skip
    assert float(mmd(x, y)) == pytest.approx(expected, rel=1e-6)


def test_with_all_for_the_personal_head_it_is_fedper(monkeypatch):
    monkeypatch.setattr(Gates, "personal", lambda self, features: features)
    monkeypatch.setattr(Gates, "add_common", lambda self, features, logits: logits)
    a, b = run(client(FedCP, lam=0.0), skewed(), rounds=3), run(client(FedPer), skewed(), rounds=3)
    own, other = learners(a), weights(b)
    for k in other:
        for name in other[k]:
            assert torch.equal(own[k][name], other[k][name]), name


def test_the_objective_and_the_prediction_equal_the_formula():
    member = run(client(FedCP, lam=2.0), skewed(), rounds=2).clients[0]
    images, labels = next(iter(member.data.train))
    member.begin_round()
    with torch.no_grad():
        for weight in member.backbone.body.parameters():
            weight += 0.1
    member.eval()
    h = member.backbone.body(images)
    now = {name: x.clone() for name, x in tensors_of(member.learner).items()}
    member.learner.load_state_dict(member.received)
    before = member.backbone.body(images).detach()
    member.learner.load_state_dict(now)
    w = member.backbone.head.weight
    v = w.sum(0) / w.sum(0).norm()
    torch.manual_seed(5)
    gates = torch.nn.functional.gumbel_softmax(member.extra["policy"](v * h).view(len(h), 2, -1), dim=1)
    z = member.backbone.head(h * gates[:, 0]) + member.common_head(h * gates[:, 1])
    torch.manual_seed(5)
    expected = torch.nn.functional.cross_entropy(z, labels) + 2 * mmd(h, before)
    torch.testing.assert_close(member.objective((images, labels), 0), expected)
    with torch.no_grad(), member.personalized() as learner:
        made = learner(images)
        gates = member.extra["policy"](member.own["context"] * h).view(len(h), 2, -1).softmax(1)
    torch.testing.assert_close(
        made, member.backbone.head(h * gates[:, 0]) + member.common_head(h * gates[:, 1]), atol=1e-5, rtol=1e-4
    )


def test_the_head_that_is_sent_is_the_mean_of_both():
    member = run(client(FedCP), skewed(), rounds=2).clients[0]
    received = {name: x.clone() for name, x in member.common_head.state_dict().items()}
    member.begin_round()
    member.end_round()
    mean = (member.backbone.head.weight + received["weight"]) / 2
    assert_equal(dict(member.common_head.state_dict()), received)  # with which it has trained, and is scored
    torch.testing.assert_close(member.upload()["backbone.head.weight"], mean.detach())
    own = member.backbone.head.weight.detach().clone()
    member.download({name: torch.zeros_like(x) for name, x in member.upload().items()})
    assert torch.equal(member.backbone.head.weight, own)
    assert not member.common_head.weight.any()


def test_several_layers_of_a_head_are_one_context():
    def deep(channels, classes):
        from tiny import Parts

        head = torch.nn.Sequential(torch.nn.Linear(64, 5), torch.nn.Linear(5, classes))
        return Parts(torch.nn.Flatten(), head)

    member = run(client(FedCP, backbone=deep), digits(2, train_fraction=0.1), rounds=1).clients[0]
    first, second = (layer.weight for layer in member.backbone.head)
    member.begin_round()
    v = (second @ first).sum(0)
    torch.testing.assert_close(member.own["context"], (v / v.norm()).detach())
