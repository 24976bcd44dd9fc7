"""FedAH against its formula."""

import pytest
import torch
from heads import skewed, whole_data

from lit_pfl.core.sharing import EVERYTHING
from lit_pfl.errors import ConfigError
from lit_pfl.methods import FedAH, FedRep
from lit_pfl.methods.partial.fedrep import FedRep as Rep
from tiny import assert_equal, client, run, weights


class Alternating(FedRep):
    """FedAvg of everything, with head and body trained in turn."""

    shares = EVERYTHING


def network(federation):
    return {k: {n: t for n, t in own.items() if n.startswith("backbone")} for k, own in weights(federation).items()}


@pytest.mark.seconds
def test_without_steps_the_head_is_the_averaged_one():
    a = run(client(FedAH, eta=0.0), skewed(), rounds=3, local_epochs=3)
    b = run(client(Alternating, body_epochs=2), skewed(), rounds=3, local_epochs=3)
    assert_equal(network(a), weights(b))
    assert_equal(a.coordinator.state_dict(), b.coordinator.state_dict())


@pytest.mark.seconds
def test_weights_of_zero_keep_the_own_head():
    class Own(FedAH):
        def configure_state(self):
            super().configure_state()
            self.share.zero_()

    a = run(client(Own, eta=0.0), skewed(), rounds=3, local_epochs=2)
    b = run(client(Rep), skewed(), rounds=3, local_epochs=2)
    assert_equal(network(a), weights(b))


def test_the_weights_and_the_head_equal_the_formula():
    federation = run(client(FedAH, eta=2.0), skewed(batch_size=1000), rounds=2, local_epochs=2)
    member = federation.clients[0]
    images, labels = whole_data(federation, 0)
    reply = federation.coordinator.server.reply(0)
    own = {name: x.detach().clone() for name, x in member.learner.named_parameters() if ".head." in name}
    share = {name: x.clone() for name, x in member.share.items()}
    assert any((x != 1).any() for x in share.values())
    member.download(reply)
    member.eval()
    head, body = member.backbone.head, member.backbone.body
    made = {name: x.detach().clone() for name, x in member.learner.named_parameters() if ".head." in name}
    at = {n: (own[n] + (reply[n] - own[n]) * share[n]).requires_grad_() for n in own}
    z = torch.nn.functional.linear(body(images).detach(), at["backbone.head.weight"], at["backbone.head.bias"])
    gradients = torch.autograd.grad(torch.nn.functional.cross_entropy(z, labels), list(at.values()))
    for name, gradient in zip(at, gradients, strict=True):
        expected = (share[name] - 2 * gradient * (reply[name] - own[name])).clamp(0, 1)
        torch.testing.assert_close(member.share[name], expected, atol=1e-6, rtol=1e-5)
        mixed = own[name] + (reply[name] - own[name]) * expected
        torch.testing.assert_close(made[name], mixed, atol=1e-6, rtol=1e-5)
    assert head.weight.requires_grad
    assert torch.equal(body[0].weight, reply["backbone.body.0.weight"])


def test_one_local_epoch_is_too_few():
    with pytest.raises(ConfigError, match=r"model.head_epochs=1 leaves none"):
        run(client(FedAH), skewed(), rounds=1, local_epochs=1)
