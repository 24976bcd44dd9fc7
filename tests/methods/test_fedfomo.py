"""FedFOMO: whose models a client is sent, how it weighs them, and what it does when none helps."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from quadratic import chosen, flat, softmax_regression, unequal

from lit_pfl import Payload
from lit_pfl.core.server import ClientInfo
from lit_pfl.data import CropFlip, Digits, part_of
from lit_pfl.errors import ConfigError
from lit_pfl.learners.scoring import mean_loss
from lit_pfl.methods import FedFOMO, StandAlone
from lit_pfl.methods.similarity import fedfomo
from lit_pfl.methods.similarity.fedfomo import FedFOMOServer, gains_per_distance
from lit_pfl.methods.similarity.ifca import by_number
from lit_pfl.nn.factorization import Factorization
from lit_pfl_callbacks.tensors import tensors_of
from tiny import assert_equal, client, digits, run, spec, weights

# ------------------------------------------------------------------------------------------------------ the client


def arrays(batches) -> tuple[np.ndarray, np.ndarray]:
    parts = list(batches)
    images, labels = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    return images.flatten(1).double().numpy(), labels.numpy()


def log_probabilities(w: np.ndarray, images: np.ndarray) -> np.ndarray:
    logits = images @ w[:640].reshape(10, 64).T + w[640:]
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def loss(w: np.ndarray, images: np.ndarray, labels: np.ndarray) -> float:
    return float(-log_probabilities(w, images)[np.arange(len(labels)), labels].mean())


def gradient(w: np.ndarray, images: np.ndarray, labels: np.ndarray) -> np.ndarray:
    by_logit = (np.exp(log_probabilities(w, images)) - np.eye(10)[labels]) / len(images)
    return np.concatenate([(by_logit.T @ images).ravel(), by_logit.sum(0)])


@pytest.mark.parametrize(("norm", "order"), [("l2", 2), ("l1", 1)])
def test_rounds_equal_the_formulas(norm, order):
    """Four clients of softmax regression, everybody sent everybody's model, a gradient step of 0.1 a round."""
    rounds = 5
    federation = run(softmax_regression(FedFOMO, num_models=3, norm=norm), unequal(), rounds=rounds)
    members = federation.clients.values()
    train = [arrays(member.training_data()) for member in members]
    held = [arrays(member.held_back()) for member in members]
    with federation.draws.default_generators("weights"):
        start = flat(federation.prototype.build(federation.clients[0].spec).learner.state_dict())

    theta, base, p = [start] * 4, [start] * 4, np.zeros((4, 4))
    for round in range(rounds):
        new = list(theta)
        for i in range(4) if round else ():
            others = [n for n in range(4) if n != i]
            gain = np.array([
                (loss(base[i], *held[i]) - loss(theta[n], *held[i])) / np.linalg.norm(theta[n] - base[i], order)
                for n in [*others, i]
            ])  # fmt: skip
            p[i, others] += gain[:-1] / abs(gain.sum())
            w = np.maximum(gain, 0) / np.maximum(gain, 0).sum()
            new[i] = base[i] + sum(x * (theta[n] - base[i]) for x, n in zip(w, [*others, i], strict=True))
        base = new
        theta = [w - 0.1 * gradient(w, *train[i]) for i, w in enumerate(new)]
    server = federation.coordinator.server
    for i in range(4):
        np.testing.assert_allclose(flat(server.latest[i]), theta[i], atol=1e-6)
        np.testing.assert_allclose(flat(weights(federation)[i]), theta[i], atol=1e-6)
    np.testing.assert_allclose(server.affinity.numpy(), p, rtol=1e-3)


def test_gains():
    gains = gains_per_distance(1.0, [0.5, 1.5, 1.0, 0.2, float("nan"), float("inf")], [2.0, 0.5, 1.0, 0.0, 1.0, 1.0])
    assert gains.tolist() == [0.25, -1.0, 0.0, 0.0, 0.0, 0.0]


class Noisy(Digits):
    """Digits whose client 1 has labels at random."""

    def client(self, client):
        data = super().client(client)
        if client == 1:
            labels = torch.randint(10, data.train.data.labels.shape, generator=torch.Generator().manual_seed(0))
            for part in (data.train, data.val, data.test):
                part.data = replace(part.data, labels=labels)
        return data


def recorded(monkeypatch) -> list[list[float]]:
    """Return the list that the weights of every mixture will be in: those of others by id, then of the own model."""
    seen = []
    mean = fedfomo.weighted_mean

    def record(payloads, weights):
        seen.append(weights)
        return mean(payloads, weights)

    monkeypatch.setattr(fedfomo, "weighted_mean", record)
    return seen


def test_a_client_trained_on_noise_gets_no_weight(monkeypatch):
    data = Noisy(num_clients=4, image_size=8, batch_size=32)
    federation = run(softmax_regression(FedFOMO, num_models=3), data, rounds=4)
    server, seen = federation.coordinator.server, recorded(monkeypatch)
    for k in (0, 2, 3):
        federation.clients[k].download(server.reply(k))
    assert [len(of_others) for of_others in seen] == [4, 4, 4]
    for of_others, noise in zip(seen, (0, 1, 1), strict=True):
        assert of_others.pop(noise) == 0
        assert min(of_others) > 0.2
    assert server.affinity[[0, 2, 3], 1].max() < 0 < server.affinity[[0, 2, 3], [3, 3, 2]].min()


class Alike(Digits):
    """Digits of which every client has the same part."""

    def client(self, client):
        return super().client(0)


def test_among_clients_that_are_alike_a_client_stays_put(monkeypatch):
    monkeypatch.setattr(FedFOMO, "_parts", lambda self: 2 * (torch.arange(len(self.data.train.dataset)),))
    data = Alike(num_clients=3, image_size=8, batch_size=2000)
    federation = run(softmax_regression(FedFOMO), data, rounds=3)
    before = weights(federation)
    seen = recorded(monkeypatch)
    for k, member in federation.clients.items():
        member.download(federation.coordinator.server.reply(k))
        for name, tensor in member.shared_parameters().items():
            torch.testing.assert_close(tensor, before[k][name], atol=1e-6, rtol=0)
    np.testing.assert_allclose(seen, 1 / 3, atol=1e-3)


def test_a_model_that_is_where_the_client_started_has_no_weight(monkeypatch):
    federation = run(softmax_regression(FedFOMO), digits(2), rounds=2)
    member, seen = federation.clients[0], recorded(monkeypatch)
    member.download({f"1/{name}": member.base[name] for name in member.shared_parameters()})
    assert seen == [[0.0, 1.0]]


def test_where_no_model_helps_a_client_goes_back_to_where_it_started():
    """All of it, with the head that does not travel, and its running statistics."""
    federation = run(client(FedFOMO), digits(3, permute_labels=True), rounds=2)
    member = federation.clients[1]
    with torch.no_grad():
        member.backbone.head.weight.mul_(-3)
    trained = weights(federation)[1]
    member.download(federation.coordinator.server.reply(1))
    for name, value in tensors_of(member.learner).items():
        assert torch.equal(value, member.base[name])
        assert not torch.equal(value, trained[name])


def test_others_are_tried_with_the_own_head_and_running_statistics(monkeypatch):
    federation = run(client(FedFOMO), digits(3, permute_labels=True), rounds=2)
    member, others, states = federation.clients[0], federation.clients, []

    def watched(learner, batches):
        states.append({name: t.clone() for name, t in learner.state_dict().items()})
        return mean_loss(learner, batches)

    monkeypatch.setattr("lit_pfl.methods.similarity.fedfomo.mean_loss", watched)
    trained, theirs = weights(federation)[0], weights(federation)
    reply = federation.coordinator.server.reply(0)
    shared = set(member.upload()) - {"affinity"}
    assert set(reply) == {f"{k}/{name}" for k in (1, 2) for name in shared}
    assert shared == {
        "backbone.body.0.weight",
        "backbone.body.0.bias",
        "backbone.body.1.weight",
        "backbone.body.1.bias",
    }
    member.download(reply)
    assert len(states) == 1 + len(others)  # where it started, the others, itself
    for state, whose in zip(states[1:], (1, 2, 0), strict=True):
        for name in tensors_of(member.learner):
            assert torch.equal(state[name], theirs[whose][name] if name in shared else trained[name])
    for name in tensors_of(member.learner):
        assert torch.equal(states[0][name], member.base[name])
        if name not in shared:
            assert torch.equal(member.learner.state_dict()[name], trained[name])


def test_averaged_running_statistics_are_mixed_too():
    federation = run(client(FedFOMO, norm_stats="averaged"), digits(3), rounds=3)
    name = "backbone.body.1.running_var"
    server, member = federation.coordinator.server, federation.clients[0]
    uploads = torch.stack([model[name] for model in server.latest.values()])
    member.download(server.reply(0))
    mixed = member.learner.get_buffer(name)
    assert ((uploads.amin(0) <= mixed) & (mixed <= uploads.amax(0))).all()
    assert name not in member.shared_weights()


# ------------------------------------------------------------------------------------------------- what is held back


def test_a_fifth_of_the_training_data_is_held_back():
    federation = run(client(FedFOMO), digits(4, augment=CropFlip()), rounds=1)
    parts = []
    for k, member in federation.clients.items():
        whole = federation.data.client(k).train.dataset
        train, held = member.training_data(), member.held_back()
        assert len(held.dataset) == round(len(whole) / 5)
        assert sorted([*train.dataset.tolist(), *held.dataset.tolist()]) == sorted(whole.tolist())
        assert train.augment is not None
        assert train.shuffle
        assert held.augment is None
        assert not held.shuffle
        assert torch.equal(member.held_back().dataset, held.dataset)
        parts.append((held.dataset[:, None] == whole).nonzero()[:, 1].tolist())
        assert member.trainer.global_step == len(train)
    assert parts[0] != parts[1]


@pytest.mark.parametrize(("samples", "train", "held"), [(1, 1, 1), (2, 1, 1), (3, 2, 1), (10, 8, 2), (13, 10, 3)])
def test_small_clients_hold_something_back_and_train_on_something(samples, train, held):
    member = client(FedFOMO).build(spec(channels=1, image_size=8))
    data = digits(1)
    data.setup()
    member.data = data.client(0)
    member.data.train.dataset = member.data.train.dataset[:samples]
    assert [len(part) for part in member._parts()] == [train, held]


# ------------------------------------------------------------------------------------------------------- the server


def server(num_clients: int, num_models: int = 2, epsilon: float = 0.3, decay: float = 0.05, seed: int = 0):
    made = FedFOMOServer(num_models, epsilon, decay, seed)
    made.start({k: ClientInfo(10, upload(k, num_models)) for k in range(num_clients)})
    return made


def upload(k: int, num_models: int = 2, affinity=()) -> Payload:
    told = torch.zeros(num_models)
    told[: len(affinity)] = torch.tensor(affinity)
    return Payload({"w": torch.full((3,), float(k)), "affinity": told})


def test_nobody_is_sent_anything_before_having_trained():
    made = server(4)
    assert made.reply(0).nbytes == 0
    made.aggregate(1, {k: upload(k) for k in (0, 1)})
    assert set(made.reply(0)) == {"1/w"}
    assert made.reply(2).nbytes == 0
    made.aggregate(2, {2: upload(2)})
    assert set(made.reply(2)) == {"0/w", "1/w"}
    assert torch.equal(made.reply(2)["1/w"], torch.ones(3))


def test_those_that_help_most_are_sent():
    made = server(5, epsilon=0.0)
    made.aggregate(1, {k: upload(k) for k in range(5)})
    assert made.chosen(0) == made.chosen(0)
    first = made.chosen(0)
    rest = [k for k in range(1, 5) if k not in first]
    made.aggregate(2, {k: upload(k, affinity=[0.5, -0.25] if k == 0 else ()) for k in range(5)})
    assert made.affinity[0].tolist() == [{first[0]: 0.5, first[1]: -0.25}.get(k, 0.0) for k in range(5)]
    assert not made.affinity[1:].any()
    second = made.chosen(0)
    assert second != first
    assert first[0] in second
    assert set(second) & set(rest)
    told = [2.0, 2.0]
    made.aggregate(3, {0: upload(0, affinity=told)})
    assert made.chosen(0) == second
    expected = {k: {first[0]: 0.5, first[1]: -0.25}.get(k, 0.0) + 2.0 * (k in second) for k in range(5)}
    assert made.affinity[0].tolist() == [expected[k] for k in range(5)]


def shares_of_choices(made: FedFOMOServer, rounds: range) -> np.ndarray:
    """Return how often each client is sent to client 0."""
    counts = np.zeros(len(made.row))
    for made.round in rounds:
        assert made.chosen(0) == sorted(set(made.chosen(0)) - {0})
        counts[made.chosen(0)] += 1
    return counts / len(rounds)


@pytest.mark.seconds
def test_equal_ones_and_exploration_are_left_to_chance():
    made = server(6, epsilon=0.0)
    made.aggregate(1, {k: upload(k) for k in range(6)})
    np.testing.assert_allclose(shares_of_choices(made, range(2000)), [0, *5 * [0.4]], atol=0.05)
    made.affinity[0] = torch.tensor([9.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    assert shares_of_choices(made, range(50)).tolist() == [0, 1, 1, 0, 0, 0]
    made.epsilon, made.epsilon_decay = 1.0, 0.0
    np.testing.assert_allclose(shares_of_choices(made, range(2000)), [0, *5 * [0.4]], atol=0.05)
    # One of two draws explores with probability 0.3: the second best is left out when it is not drawn
    made.epsilon = 0.3
    best, second, *others = shares_of_choices(made, range(4000))[1:]
    assert best == pytest.approx(0.7 + 0.3 * 0.2 + 0.3 * 0.8 * (0.7 + 0.3 / 4), abs=0.03)
    assert others == pytest.approx([others[0]] * 3, abs=0.03)
    assert best > second > others[0] > 0


def test_exploration_ends():
    made = server(6, epsilon=0.3, decay=0.05)
    made.aggregate(1, {k: upload(k) for k in range(6)})
    made.affinity[0] = torch.tensor([9.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    assert shares_of_choices(made, range(6, 300)).tolist() == [0, 1, 1, 0, 0, 0]
    choices = []
    for made.seed in range(200):
        made.round = 5
        choices.append(made.chosen(0))
    assert 0.01 < np.mean([choice != [1, 2] for choice in choices]) < 0.3


def test_models_are_kept_as_they_were_uploaded():
    made, mine = server(2), upload(1)
    made.aggregate(1, {0: upload(0), 1: mine})
    mine["w"].add_(100)
    assert made.reply(0)["1/w"].tolist() == [1, 1, 1]


def test_a_reply_is_read_in_the_order_of_ids_however_it_travelled():
    made = server(13, num_models=12)
    made.aggregate(1, {k: upload(k, 12) for k in range(13)})
    models = by_number(Payload.from_bytes(made.reply(0).to_bytes()))
    assert list(models) == list(range(1, 13))
    assert models[10]["w"].tolist() == [10, 10, 10]


# ------------------------------------------------------------------------------------------------------- federations


@pytest.mark.parametrize(("num_clients", "rounds"), [(1, 3), (4, 1)])
def test_without_models_it_is_stand_alone_bit_for_bit(num_clients, rounds):
    fomo = run(client(FedFOMO), digits(num_clients), rounds=rounds)

    class Alone(StandAlone):
        """Stand-Alone on what FedFOMO trains on."""

        def training_data(self):
            trained_on, _ = fomo.clients[self.spec.client_id]._parts()
            return part_of(super().training_data(), trained_on)

    alone = run(client(Alone), digits(num_clients), rounds=rounds)
    for k, state in weights(alone).items():
        assert_equal(state, {name: weights(fomo)[k][name] for name in state})
    assert fomo.traffic.total == sum(up for up, _ in fomo.traffic.clients.values())


@pytest.mark.parametrize("num_models", [2, 10])
def test_traffic_is_that_of_the_models(num_models):
    """M models down and one up, and as many numbers: with 10 models 11 times the model a round."""
    rounds, num_clients = 3, num_models + 2
    federation = run(softmax_regression(FedFOMO, num_models=num_models), digits(num_clients), rounds=rounds)
    up, down = 650 + num_models, num_models * 650
    assert federation.traffic.elements == num_clients * (rounds * up + (rounds - 1) * down)
    payload_sizes = federation.traffic.clients[0]
    for size, count in zip(payload_sizes, (rounds * up, (rounds - 1) * down), strict=True):
        assert 0 <= size - 4 * count < 0.15 * 4 * count  # names and shapes


def test_who_does_not_take_part_stays_as_it_is_and_is_sent_to_others():
    federation = run(client(FedFOMO), digits(4), rounds=4, participation=0.5)
    part = chosen(federation, 4)
    assert len({k for clients in part for k in clients}) > 2
    latest = federation.coordinator.server.latest
    assert set(latest) == {k for clients in part for k in clients}
    for k, model in latest.items():
        for name, tensor in model.items():
            assert torch.equal(tensor, weights(federation)[k][name])


def test_factorized_models_are_mixed_too():
    federation = run(client(FedFOMO, factorization=Factorization(threshold=1e-3)), digits(3), rounds=3)
    assert "1/backbone.body.0.mu" in federation.coordinator.server.reply(0).sparse


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_errors(share):
    with pytest.raises(ConfigError, match=r"model\.val_fraction="):
        FedFOMO(val_fraction=share)
