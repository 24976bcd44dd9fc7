"""FedProto against its formula."""

import numpy as np
import pytest
import torch
from heads import features, skewed, whole_data

from lit_pfl.core.payload import Payload
from lit_pfl.data import Digits
from lit_pfl.errors import ConfigError
from lit_pfl.methods import FedProto
from lit_pfl.methods.knowledge.fedproto import COUNTS, PROTOTYPES, FedProtoServer, Nearest, mean_prototypes
from lit_pfl.models import CNN
from tiny import Parts, assert_equal, client, digits, run


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_prototypes_equal_the_formula(weighting):
    federation = run(client(FedProto, weighting=weighting), skewed(), rounds=2)
    own, counts = np.zeros((3, 10, 16)), np.zeros((3, 10), int)
    for k in federation.clients:
        h, y = features(federation, k), whole_data(federation, k)[1].numpy()
        for c in set(y):
            own[k, c], counts[k, c] = h[y == c].mean(0), (y == c).sum()
        np.testing.assert_allclose(federation.clients[k].upload()[PROTOTYPES], own[k], atol=1e-6)
    by = counts if weighting == "samples" else (counts > 0) * 1.0
    model = federation.coordinator.server.model
    assert (model[COUNTS].numpy() == counts.sum(0)).all()
    for c in range(10):
        expected = np.average(own[:, c], axis=0, weights=by[:, c]) if counts[:, c].any() else 0
        np.testing.assert_allclose(model[PROTOTYPES][c], expected, atol=1e-6)


def test_samples_that_the_learner_skips_do_not_count(monkeypatch):
    member = run(client(FedProto), skewed(), rounds=1).clients[0]
    means, counts = member.class_means()
    step, full = member.learner.training_step, member.training_data()
    monkeypatch.setattr("lit_pfl.core.classifying.in_order", lambda data: [*full.in_order(8)])
    monkeypatch.setattr(member.learner, "training_step", lambda batch, i: None if i == 0 else step(batch, i))
    fewer_means, fewer = member.class_means()
    labels = next(iter(full.in_order(8)))[1]
    assert torch.equal(counts - fewer, torch.bincount(labels, minlength=10))
    seen = fewer > 0
    assert (fewer_means.norm(dim=1)[seen] > 0.5 * means.norm(dim=1)[seen]).all()
    monkeypatch.setattr(member.learner, "training_step", lambda batch, i: None)
    assert not member.class_means()[1].any()
    with pytest.raises(ConfigError, match=r"^Client 0: FedProto takes features .* ImageClassifier skips every batch"):
        member.all_embedded()


def test_the_term_is_the_mean_squared_distance_where_there_is_a_prototype():
    member = run(client(FedProto, lam=2.0), skewed(), rounds=2).clients[0]
    images, labels = next(iter(member.data.train))
    member.eval()
    loss = float(member.objective((images, labels), 0).detach())
    member.common[COUNTS][0] = 0
    h, g = member.backbone.body(images).detach(), member.common[PROTOTYPES]
    known = member.common[COUNTS][labels] > 0
    expected = sum(float((h[i] - g[y]).square().mean()) for i, y in enumerate(labels) if known[i]) / len(labels)
    with_term, member.lam = float(member.objective((images, labels), 0).detach()), 0.0
    plain = float(member.objective((images, labels), 0).detach())
    assert with_term - plain == pytest.approx(2 * expected, rel=1e-4)
    assert loss > plain


def test_the_nearest_prototype_predicts():
    member = run(client(FedProto), skewed(), rounds=2).clients[0]
    images, _ = next(iter(member.data.val))
    member.eval()
    with torch.no_grad(), member.personalized() as learner:
        h, g, known = member.backbone.body(images), member.common[PROTOTYPES], member.common[COUNTS] > 0
        nearest = [min(range(10), key=lambda c: (h_i - g[c]).square().mean() if known[c] else 9e9) for h_i in h]
        assert learner(images).argmax(1).tolist() == nearest


def test_a_class_of_its_own_that_nobody_sent_has_the_client_s_prototype():
    member = run(client(FedProto), skewed(), rounds=2).clients[0]
    images, _ = next(iter(member.data.val))
    member.eval()
    [own, *others] = member.own[COUNTS].nonzero()[:, 0].tolist()
    member.common[COUNTS][own] = 0
    with torch.no_grad(), member.personalized() as learner:
        logits = learner(images)
        expected = (member.backbone.body(images) - member.own[PROTOTYPES][own]).square().mean(1)
    torch.testing.assert_close(logits[:, own], -expected)
    assert others


def test_bytes_are_classes_times_features():
    federation = run(client(FedProto), skewed(), rounds=1)
    upload = federation.clients[0].upload()
    assert upload.nbytes - 10 * 16 * 4 - 10 * 8 < 250  # the header


def test_a_class_that_nobody_sends_has_no_prototype():
    assert_equal(mean_prototypes(torch.ones(2, 3, 4), torch.tensor([[1.0, 0, 2], [3, 0, 0]]))[1], torch.zeros(4))


def test_networks_may_differ_features_may_not():
    server = FedProtoServer()
    info = {k: type("Info", (), {"num_samples": 1, "initial": Payload({PROTOTYPES: torch.zeros(10, 4 + k),
            COUNTS: torch.zeros(10, dtype=torch.int64)})})() for k in (0, 1)}  # fmt: skip
    with pytest.raises(ConfigError, match="Client 1: its prototypes are"):
        server.start(info)


def test_labels_that_differ_are_refused():
    with pytest.raises(ConfigError, match="FedProto averages prototypes of classes, and labels differ"):
        run(client(FedProto), digits(permute_labels=True))


def test_a_convolutional_head_is_refused():
    convolution = torch.nn.Sequential(torch.nn.Conv2d(1, 10, 8), torch.nn.Flatten())
    with pytest.raises(ConfigError, match="FedProto needs a head with a linear layer"):
        run(client(FedProto, backbone=lambda *_: Parts(torch.nn.Identity(), convolution)), skewed())


def test_a_larger_network_on_larger_images():
    data = Digits(num_clients=2, image_size=16, train_fraction=0.05, test_fraction=0.9)
    assert run(client(FedProto, backbone=CNN), data, rounds=1).rows


def test_a_class_without_a_prototype_is_never_the_nearest():
    nearest = Nearest(torch.tensor([[0.0, 0.0], [500.0, 0.0], [1e6, 0.0]]), torch.tensor([False, True, True]))
    for dtype in (torch.float32, torch.bfloat16):
        assert int(nearest(torch.tensor([[200.0, 300.0]], dtype=dtype), torch.empty(0)).argmax()) == 1
