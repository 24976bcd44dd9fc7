"""pFedSim against its formulas."""

import numpy as np
import pytest
import torch
from heads import skewed
from torch import nn

from lit_pfl.core import ClientInfo, Payload
from lit_pfl.errors import ConfigError
from lit_pfl.methods import PFedSim
from lit_pfl.methods.similarity.pfedsim import PFedSimServer, similarity_of_rows, weights_by_similarity
from tiny import Parts, assert_equal, client, digits, run

BODY, HEAD = "body.weight", "head.weight"


def expected_similarity(a: np.ndarray, b: np.ndarray) -> float:
    cosines = [x @ y / np.linalg.norm(x) / np.linalg.norm(y) for x, y in zip(a, b, strict=True)]
    return max(0.0, float(np.mean(cosines)))


def test_rounds_equal_the_formula():
    """Two rounds of averaging, then rounds in which some take part: who has met keeps the similarity of then."""
    rng, counts = np.random.default_rng(0), [10, 20, 30, 40]
    server = PFedSimServer(2, HEAD, frozenset({HEAD}))

    def sent() -> dict[str, np.ndarray]:
        return {BODY: rng.normal(size=(3, 2)), HEAD: rng.normal(size=(5, 3)) + 1}

    def payload(tensors: dict[str, np.ndarray]) -> Payload:
        return Payload({name: torch.tensor(value) for name, value in tensors.items()})

    server.start({k: ClientInfo(n, payload(sent())) for k, n in enumerate(counts)})
    latest, similarity = {}, np.zeros((4, 4))
    for round, taking in enumerate([[0, 1, 2, 3], [0, 2], [1, 2, 3], [0, 1], [0, 3]], 1):
        uploads = {k: sent() for k in taking}
        server.aggregate(round, {k: payload(upload) for k, upload in uploads.items()})
        if round <= 2:
            shares = np.array([counts[k] for k in taking]) / sum(counts[k] for k in taking)
            common = {name: sum(s * uploads[k][name] for s, k in zip(shares, taking, strict=True)) for name in
                      (BODY, HEAD)}  # fmt: skip
            for k in range(4):
                assert server.reply(k).keys() == {BODY, HEAD}
                np.testing.assert_allclose(server.reply(k)[HEAD], common[HEAD])
            continue
        latest |= uploads
        for i in taking:
            for j in taking:
                similarity[i, j] = expected_similarity(uploads[i][HEAD], uploads[j][HEAD])
        for k in range(4):
            if k not in latest:
                np.testing.assert_allclose(server.reply(k)[BODY], common[BODY])
                continue
            a = {j: -np.log(1 - (0.9999 if j == k else similarity[k, j])) for j in latest}
            mixture = sum(a[j] * latest[j][BODY] for j in latest) / sum(a.values())
            assert server.reply(k).keys() == {BODY}
            np.testing.assert_allclose(server.reply(k)[BODY], mixture, rtol=1e-12)


def test_two_clients_weigh_each_other_by_the_logarithms():
    weights = weights_by_similarity(torch.tensor([[0.0, 0.5], [0.5, 0.0]], dtype=torch.float64))
    assert float(weights[0, 0] / weights[0, 1]) == pytest.approx(np.log(1e-4) / np.log(0.5))
    assert torch.equal(weights_by_similarity(torch.zeros(3, 3)), torch.eye(3))
    assert torch.allclose(weights_by_similarity(torch.ones(2, 2)), torch.full((2, 2), 0.5))


def test_opposite_and_empty_rows_are_not_similar():
    head = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
    found = similarity_of_rows([head, -head, torch.eye(2)])
    assert found[0, 1] == 0
    assert float(found[0, 2]) == pytest.approx(0.5 / 5**0.5)


def test_clients_with_nobody_alike_train_alone_and_heads_stay_at_home(monkeypatch):
    monkeypatch.setattr("lit_pfl.methods.similarity.pfedsim.similarity_of_rows", lambda w: torch.eye(len(w)).double())
    ours = run(client(PFedSim, warmup_rounds=1), skewed(), rounds=3)
    for k, member in ours.clients.items():
        reply = ours.coordinator.server.reply(k)
        assert not [name for name in reply if "head" in name]
        assert_equal(dict(reply), {name: t for name, t in member.upload().items() if "head" not in name})


@pytest.mark.parametrize("options", [{"share_head": False}, {"local": "head"}])
def test_a_head_that_stays_at_home_is_refused(options):
    with pytest.raises(ConfigError, match="PFedSim compares the rows of a linear layer in the heads that clients send"):
        run(client(PFedSim, **options), rounds=1)


def test_labels_that_differ_and_an_unknown_head_are_refused():
    with pytest.raises(ConfigError, match="PFedSim compares heads class by class, and labels differ"):
        run(client(PFedSim), digits(2, permute_labels=True), rounds=1)
    empty = client(PFedSim, backbone=lambda channels, classes: Parts(nn.Linear(8, classes), nn.Flatten()))
    with pytest.raises(ConfigError, match="model.head"):
        run(empty, rounds=1)
