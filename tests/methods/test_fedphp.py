"""FedPHP against its formulas."""

import numpy as np
import pytest
import torch
from heads import skewed, softmax
from torch import nn
from two_layers import (
    BODY,
    HEAD,
    SGD,
    Arrays,
    Batch,
    Recorded,
    assert_close,
    backward,
    by_logits,
    logits,
    network,
    scores,
)

from lit_pfl.errors import ConfigError
from lit_pfl.methods import FedAvg, FedPHP
from lit_pfl.methods.two_models.fedphp import discrepancy
from tiny import Parts, assert_equal, client, run


def test_rounds_equal_the_formula():
    rounds, epochs = 3, 2
    recorded = Recorded(FedPHP, local_epochs=epochs, rounds=rounds, lam=0.3, mu=0.8)
    start = recorded.start()
    private = {k: {name: value.copy() for name, value in start.items()} for k in recorded.members}
    optimizers = {k: SGD() for k in recorded.members}
    done = dict.fromkeys(recorded.members, 0)

    def train(k: int, epoch: int, w: Arrays, batches: list[Batch]) -> None:
        for images, labels in batches:
            z, teacher = logits(w, images), softmax(logits(private[k], images) / 4)
            g = 0.7 * by_logits(z, labels) + 0.3 * (softmax(z) - teacher) / len(z)
            optimizers[k].step(w, backward(w, images, g))
        if epoch == epochs - 1:
            stays = 0.8 * min(1, done[k] / 100)
            private[k] = {name: stays * private[k][name] + (1 - stays) * w[name] for name in w}
            done[k] += 1

    ends = recorded.averaged(train, (*BODY, *HEAD))
    for k, end in zip(recorded.members, ends, strict=True):
        assert_close(recorded.members[k].learner.backbone, end)
        assert_close(recorded.members[k].personal.backbone, private[k])


def test_the_private_model_keeps_its_share_at_last():
    federations = [run(client(FedPHP, mu=0.6, rounds=1), skewed(), rounds=rounds) for rounds in (1, 2)]
    first, second = (network(federation, "personal")[0] for federation in federations)
    trained = network(federations[1], "backbone")[0]
    torch.testing.assert_close(second["head.weight"], 0.6 * first["head.weight"] + 0.4 * trained["head.weight"])
    assert second["body.1.num_batches_tracked"] == trained["body.1.num_batches_tracked"]


def test_without_the_term_it_is_fedavg_and_without_mu_the_private_model_is_what_was_trained():
    ours, theirs = (run(client(kind, **more), skewed(), rounds=3) for kind, more in
                    ((FedPHP, {"lam": 0.0, "mu": 0.0}), (FedAvg, {})))  # fmt: skip
    for k, state in network(theirs, "backbone").items():
        assert_equal(network(ours, "backbone")[k], state)
        assert_equal(network(ours, "personal")[k], state)
    assert scores(ours) == scores(theirs)


def test_the_discrepancy_equals_the_formula():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(6, 3)), rng.normal(size=(6, 3)) + 1
    rows = np.concatenate([x, y])
    d = ((rows[:, None] - rows[None]) ** 2).sum(2)
    width = d.sum() / (144 - 12) / 4
    kernel = sum(np.exp(-d / (width * 2**i)) for i in range(5))
    expected = (kernel[:6, :6] + kernel[6:, 6:] - kernel[:6, 6:] - kernel[6:, :6]).mean()
    assert float(discrepancy(torch.tensor(x), torch.tensor(y))) == pytest.approx(expected)
    assert float(discrepancy(torch.tensor(x), torch.tensor(x))) == pytest.approx(0)


def test_either_term_is_added_to_the_loss():
    found = {}
    for transfer in ("kd", "mmd"):
        member = run(client(FedPHP, lam=0.4, transfer=transfer), skewed(), rounds=2).clients[0]
        member.eval()
        images, labels = next(iter(member.data.train))
        h, p = (one.backbone.body(images) for one in (member.learner, member.personal))
        z, q = member.learner.backbone.head(h), member.personal.backbone.head(p)
        term = -((q / 4).softmax(1) * z.log_softmax(1)).sum(1).mean() if transfer == "kd" else discrepancy(h, p)
        found[transfer] = member.objective((images, labels), 0)
        torch.testing.assert_close(found[transfer], 0.6 * nn.functional.cross_entropy(z, labels) + 0.4 * term)
        found[transfer].backward()
        assert all(weight.grad is None for weight in member.personal.parameters())


def test_a_network_without_a_head_module_is_refused():
    with pytest.raises(ConfigError, match=r"model\.head: FedPHP has to know which parameters"):
        run(client(FedPHP, backbone=lambda channels, classes: Parts(nn.Linear(8, classes), nn.Flatten())), rounds=1)
