"""FedCP against its formulas."""

import numpy as np
import pytest
import torch
from heads import learners, skewed

from lit_pfl.errors import ConfigError
from lit_pfl.methods import FedCP, FedPer
from lit_pfl.methods.partial.fedcp import Gates, mmd
from lit_pfl_callbacks.tensors import tensors_of
from tiny import Parts, assert_equal, client, digits, run, weights


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
    federation = run(client(FedCP, lam=2.0), skewed(), rounds=2)
    member = federation.clients[0]
    images, labels = next(iter(member.data.train))
    member.download(federation.coordinator.server.reply(0))
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


def deep(channels, classes):
    return Parts(torch.nn.Flatten(), torch.nn.Sequential(torch.nn.Linear(64, 5), torch.nn.Linear(5, classes)))


def test_several_layers_of_a_head_are_one_context_taken_on_receipt():
    federation = run(client(FedCP, backbone=deep), digits(2, train_fraction=0.1), rounds=1)
    member = federation.clients[0]
    first, second = (layer.weight for layer in member.backbone.head)
    v = (second @ first).sum(0)
    expected = (v / v.norm()).detach()
    assert not torch.allclose(member.own["context"], expected)  # of the head before it trained
    member.download(federation.coordinator.server.reply(0))
    torch.testing.assert_close(member.own["context"], expected)


def test_the_received_body_is_in_the_mode_of_the_one_that_trains():
    """So two equal ones have an MMD of zero, with batch norm and dropout; and only one of them steps statistics."""
    member = run(client(FedCP), skewed(), rounds=2).clients[0]
    batch, losses, steps = next(iter(member.data.train)), {}, member.backbone.body[1].num_batches_tracked
    for training in (True, False):
        member.train(training)
        member.begin_round()  # with the default lam: B_g is the network as it is
        for member.lam in (0.0, 2.0):
            before = int(steps)
            torch.manual_seed(5)
            losses[member.lam] = member.objective(batch, 0)
            assert int(steps) - before == training
        torch.testing.assert_close(losses[2.0], losses[0.0], atol=1e-5, rtol=0)


def test_the_received_statistics_stay_what_they_were():
    member = run(client(FedCP), skewed(), rounds=2).clients[0]
    member.begin_round()
    before = {name: tensor.clone() for name, tensor in member.received.items()}
    member.train()
    member.objective(next(iter(member.data.train)), 0)
    assert_equal(member.received, before)


def test_it_has_no_global_model():
    federation = run(client(FedCP, norm_stats="averaged"), skewed())
    assert federation.coordinator.server.global_model() is None
    assert {row.state for row in federation.other_rows} == {"aggregated"}
    with pytest.raises(ConfigError, match=r"federation\.evaluate=global: FedCP has no global model"):
        run(client(FedCP, norm_stats="averaged"), skewed(), evaluate="global")
