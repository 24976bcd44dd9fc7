"""FedSpa: which weights a client trains, what travels, and what the server makes of it."""

import math

import lightning as L
import numpy as np
import pytest
import torch
from quadratic import chosen, equal, sgd, softmax_regression, unequal
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_pfl import Payload
from lit_pfl.core.server import ClientInfo
from lit_pfl.data import PerClient
from lit_pfl.errors import ConfigError
from lit_pfl.methods import FedAvg, FedSpa
from lit_pfl.methods.factorized.fedspa import MASKS, FedSpaServer
from lit_pfl.models import Backbone, ResNet9
from lit_pfl.nn.factorization import Factorization
from lit_pfl.ops import erk_densities, pack_bits
from tiny import assert_equal, client, digits, run, spec, weights

CONV, HEAD = "backbone.body.0.weight", "backbone.head.weight"


def masks(federation, k: int) -> dict[str, torch.Tensor]:
    return {name: mask.clone() for name, mask in federation.clients[k].masks.items()}


class Watched(FedSpa):
    """Notes every round: masks before and after, and the state of weights and optimizer after training."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.notes = []
        self.ended = ()

    def end_round(self) -> None:
        before = {name: mask.clone() for name, mask in self.masks.items()}
        weights = {name: self.learner.get_parameter(name) for name in before}
        state = {name: weight.detach().clone() for name, weight in weights.items()}
        super().end_round()
        optimizer = self.trainer.optimizers[0].state
        buffers = {
            name: [value.clone() for value in optimizer[weight].values() if value.dim()]
            for name, weight in weights.items()
        }
        after = {name: mask.clone() for name, mask in self.masks.items()}
        self.ended = (int(self.round_number), before, after, state, buffers)

    def upload(self) -> Payload:
        upload = super().upload()
        if self.ended:
            self.notes.append((*self.ended, upload))
            self.ended = ()
        return upload


# --------------------------------------------------------------------------------------------------------- whole rounds


class TwoLayers(Backbone):
    def __init__(self, channels: int, classes: int) -> None:
        body = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh())
        super().__init__(body, nn.Linear(12, classes))


NAMES = ["backbone.body.1.weight", "backbone.body.1.bias", "backbone.head.weight", "backbone.head.bias"]


def gradients(w: dict[str, torch.Tensor], images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    w = {name: tensor.clone().requires_grad_() for name, tensor in w.items()}
    hidden = torch.tanh(images.flatten(1) @ w[NAMES[0]].T + w[NAMES[1]])
    nn.functional.cross_entropy(hidden @ w[NAMES[2]].T + w[NAMES[3]], labels).backward()
    return {name: tensor.grad for name, tensor in w.items()}


def exchanged(w: np.ndarray, mask: np.ndarray, gradient: np.ndarray, share: float) -> np.ndarray:
    w, kept, gradient = w.ravel(), set(np.flatnonzero(mask)), gradient.ravel()
    count = round(share * len(kept))
    kept -= set(sorted(kept, key=lambda i: abs(w[i]))[:count])
    kept |= set(sorted(set(range(w.size)) - kept, key=lambda i: -abs(gradient[i]))[:count])
    return np.isin(np.arange(w.size), [*kept]).reshape(mask.shape)


@pytest.mark.seconds
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_rounds_equal_the_formulas(participation):
    """Two gradient steps of 0.5 a round at each of four clients of different sizes."""
    rounds = 4
    made = client(FedSpa, backbone=TwoLayers, optimizer=sgd(0.5), scheduler=None, density=0.4, rounds=3)
    federation = run(made, unequal(), rounds=rounds, local_epochs=2, participation=participation)
    with federation.draws.default_generators("weights"):
        fresh = federation.prototype.build(federation.clients[0].spec)
    w = {name: fresh.learner.get_parameter(name).detach().double() for name in NAMES}
    m = {k: {name: mask.clone() for name, mask in fresh.masks.items()} for k in range(4)}
    data = {}
    for k in range(4):
        [(images, labels)] = list(federation.clients[k].training_data())
        data[k] = images.double(), labels

    for t, participants in enumerate(chosen(federation, rounds)):
        updates = []
        for k in participants:
            sent = {name: w[name] * m[k].get(name, 1) for name in NAMES}
            local = dict(sent)
            for _ in range(2):
                gradient = gradients(local, *data[k])
                local = {name: local[name] - 0.5 * gradient[name] * m[k].get(name, 1) for name in NAMES}
            updates.append({name: sent[name] - local[name] for name in NAMES})
            dense = gradients(local, *data[k])
            share = 0.25 * (1 + math.cos(math.pi * min(t, 3) / 3))
            for name, mask in m[k].items():
                new = exchanged(local[name].numpy(), mask.numpy(), dense[name].numpy(), share)
                assert (new.sum(), t < 3) == (mask.sum(), not np.array_equal(new, mask))
                m[k][name] = torch.from_numpy(new)
        w = {name: w[name] - sum(u[name] for u in updates) / len(updates) for name in NAMES}

    server = federation.coordinator.server
    for name in NAMES:
        np.testing.assert_allclose(server.model[name], w[name], atol=2e-6)
    for k in range(4):
        reply = server.reply(k)
        for name in NAMES:
            np.testing.assert_allclose(reply[name], w[name] * m[k].get(name, 1), atol=2e-6)
        assert_equal(masks(federation, k), m[k])


@pytest.mark.parametrize("regrow", ["gradient", "random", "none"])
def test_with_density_1_it_is_fedavg(regrow):
    sparse = run(softmax_regression(FedSpa, density=1.0, regrow=regrow), equal(), rounds=4)
    averaged = run(softmax_regression(FedAvg), equal(), rounds=4)
    for k, state in weights(averaged).items():
        for name, tensor in state.items():
            torch.testing.assert_close(weights(sparse)[k][name], tensor, atol=1e-6, rtol=0)
            torch.testing.assert_close(
                sparse.coordinator.server.reply(k)[name], averaged.coordinator.server.reply(k)[name], atol=1e-6, rtol=0
            )
    assert all(mask.all() for mask in masks(sparse, 0).values())


@pytest.mark.seconds
def test_with_density_1_and_batch_norm_it_is_fedavg():
    sparse = run(client(FedSpa, density=1.0, regrow="none", norm_stats="averaged"), equal(), rounds=3)
    averaged = run(client(FedAvg, norm_stats="averaged"), equal(), rounds=3)
    for name, tensor in averaged.coordinator.server.reply(0).items():
        torch.testing.assert_close(sparse.coordinator.server.reply(0)[name], tensor, atol=1e-5, rtol=1e-5)
    assert sparse.coordinator.server.reply(0)["backbone.body.1.num_batches_tracked"].dtype == torch.int64


# ---------------------------------------------------------------------------------------------------------- the client


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("optimizer", "regrow", "options"),
    [
        (sgd(0.1, momentum=0.9, weight_decay=0.1), "gradient", {}),
        (sgd(0.1, momentum=0.9, weight_decay=0.1, nesterov=True), "random", {"gradient_clip_val": 0.5}),
        (sgd(0.1, momentum=0.9, dampening=0.5), "gradient", {"accumulate_grad_batches": 2}),
        (adamw, "random", {}),
        (adamw, "gradient", {"precision": "bf16-mixed"}),
    ],
    ids=["momentum", "nesterov, clipped", "accumulated", "AdamW", "mixed precision"],
)
def test_masked_weights_stay_zero_and_the_density_stays_exact(optimizer, regrow, options):
    made = client(Watched, optimizer=optimizer, density=0.4, rounds=6, regrow=regrow)
    federation = run(made, digits(2, batch_size=256), rounds=4, local_epochs=2, client_trainer=options)
    shapes = {CONV: torch.Size([4, 1, 3, 3]), HEAD: torch.Size([10, 16]), "biases and batch norm": torch.Size([22])}
    expected = erk_densities(shapes, 0.4, {"biases and batch norm"})
    active = {CONV: round(expected[CONV] * 36), HEAD: round(expected[HEAD] * 160)}
    assert abs(sum(active.values()) + 22 - 0.4 * 218) <= 1
    for member in federation.clients.values():
        assert len(member.notes) == 4
        previous = None
        for round_number, before, after, state, buffers, upload in member.notes:
            for name in (CONV, HEAD):
                assert before[name].sum() == after[name].sum() == active[name]
                assert not torch.equal(before[name], after[name]), round_number
                assert not state[name][~before[name]].any()
                assert state[name][before[name]].all()
                assert buffers[name]
                assert all(not buffer[~before[name]].any() for buffer in buffers[name])
                assert not upload[name][~before[name]].any()
                assert previous is None or torch.equal(previous[name], before[name])
            previous = after
    server = federation.coordinator.server
    for k in (0, 1):
        assert torch.equal(server.masks[k], pack_bits(masks(federation, k).values()))
        assert all(int(torch.count_nonzero(server.reply(k)[name])) == active[name] for name in active)
    assert not torch.equal(masks(federation, 0)[HEAD], masks(federation, 1)[HEAD])  # each to its own data


@pytest.mark.seconds
def test_the_share_of_exchanged_weights_falls_along_a_cosine_of_the_federation_s_rounds():
    """Random regrowth of many weights: about half of those that are dropped are not drawn again."""
    made = client(Watched, backbone=TwoLayers, density=0.5, rounds=4, regrow="random", prune_rate=0.8)
    federation = run(made, digits(4), rounds=6, participation=0.5)
    share = {t + 1: 0.4 * (1 + math.cos(math.pi * min(t, 4) / 4)) for t in range(6)}
    seen = set()
    for k, member in federation.clients.items():
        assert [note[0] for note in member.notes] == [t + 1 for t in range(6) if k in chosen(federation, 6)[t]]
        for round_number, before, after, *_ in member.notes:
            name = NAMES[0]
            count, active = round(share[round_number] * int(before[name].sum())), int(before[name].sum())
            gone = int((before[name] & ~after[name]).sum())
            assert gone <= count
            assert gone == pytest.approx(count * (768 - active) / (768 - active + count), abs=0.25 * count)
            seen.add(round_number)
    assert seen == set(range(1, 7))


def test_gradients_are_those_of_the_dense_network_and_leave_no_trace():
    federation = run(client(FedSpa, density=0.2), digits(2), rounds=1)
    member = federation.clients[0]
    member.data.train.shuffle = False
    images, labels = next(iter(member.training_data()))
    before = weights(federation)[0]
    member.backbone.body[-1].p = 0.0
    member.train()
    got = member._gradients([member.learner.get_parameter(name) for name in (CONV, HEAD)])
    assert_equal(weights(federation)[0], before)
    assert all(parameter.grad is None for parameter in member.parameters())

    copy = FedAvg(backbone=federation.prototype.make_backbone).build(member.spec)
    copy.learner.load_state_dict({name: before[name] for name in copy.learner.state_dict()})
    copy.backbone.body[-1].p = 0.0
    copy.objective((images, labels), 0).backward()
    for gradient, name in zip(got, (CONV, HEAD), strict=True):
        torch.testing.assert_close(gradient, copy.learner.get_parameter(name).grad)
        assert gradient[before[name] == 0].any()


@pytest.mark.seconds
def test_masks_that_never_change_are_sent_on_joining_only():
    federation = run(client(Watched, regrow="none", density=0.3), digits(3), rounds=3)
    first = masks(federation, 0)
    for k, member in federation.clients.items():
        assert_equal(masks(federation, k), first)
        assert all(MASKS not in note[-1] for note in member.notes)
        assert all(torch.equal(note[1][HEAD], first[HEAD]) for note in member.notes)
        assert MASKS in member.initial()
        assert MASKS not in member.upload()
    assert not federation.coordinator.refused


def test_masks_may_differ_from_the_start():
    federation = run(client(FedSpa, regrow="none", common_masks=False), digits(3), rounds=1)
    heads = [masks(federation, k)[HEAD] for k in range(3)]
    assert heads[0].sum() == heads[1].sum() == heads[2].sum()
    assert not torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[1], heads[2])
    with federation.draws.default_generators("weights"):
        again = federation.prototype.build(federation.clients[1].spec)
    assert torch.equal(again.masks[HEAD], heads[1])


def test_it_starts_from_the_weights_of_other_methods():
    tasks = spec(channels=1, image_size=8)
    torch.manual_seed(0)
    sparse = client(FedSpa).build(tasks)
    torch.manual_seed(0)
    dense = client(FedAvg).build(tasks)
    assert_equal(dict(sparse.learner.state_dict()), dict(dense.learner.state_dict()))


# ---------------------------------------------------------------------------------------------------------- the server


def test_the_server_subtracts_the_mean_of_updates_with_nothing_where_there_is_no_weight():
    rng = np.random.default_rng(0)
    w, bias = rng.normal(size=(5, 7)).astype(np.float32), rng.normal(size=5).astype(np.float32)
    m = rng.random((3, 5, 7)) < 0.4
    updates, biases = rng.normal(size=(3, 5, 7)).astype(np.float32) * m, rng.normal(size=(3, 5)).astype(np.float32)
    server = FedSpaServer(["w"], masks_change=True)
    packed = [torch.from_numpy(np.packbits(m[k])) for k in range(3)]
    server.start({
        k: ClientInfo(10 * k + 1, Payload({"w": torch.from_numpy(w), "b": torch.from_numpy(bias), MASKS: packed[k]}))
        for k in range(3)
    })  # fmt: skip
    for k in range(3):
        np.testing.assert_array_equal(server.reply(k)["w"], w * m[k])
        assert server.reply(k)["round_number"] == 1
        assert not server.reply(k)["w"][~torch.from_numpy(m[k])].signbit().any()  # as it would arrive: +0
    new = np.packbits(rng.random((5, 7)) < 0.4)
    server.aggregate(1, {
        k: Payload({"w": torch.from_numpy(updates[k]), "b": torch.from_numpy(biases[k]),
                    MASKS: torch.from_numpy(new) if k == 2 else packed[k]}, ["w"])
        for k in (0, 2)
    })  # fmt: skip
    expected = w - (updates[0] + updates[2]) / 2
    np.testing.assert_allclose(server.model["w"], expected, atol=1e-6)
    np.testing.assert_array_equal(server.model["w"].numpy()[~m[0] & ~m[2]], w[~m[0] & ~m[2]])
    np.testing.assert_allclose(server.reply(1)["b"], bias - (biases[0] + biases[2]) / 2, atol=1e-6)
    np.testing.assert_allclose(server.reply(1)["w"], expected * m[1], atol=1e-6)
    np.testing.assert_allclose(server.reply(2)["w"], expected * np.unpackbits(new, count=35).reshape(5, 7), atol=1e-6)
    assert server.reply(2)["round_number"] == 2


# ------------------------------------------------------------------------------------------------------------- traffic


@pytest.mark.parametrize("regrow", ["gradient", "none"])
def test_traffic_is_that_of_active_weights_and_of_masks(regrow):
    rounds = 3
    made = client(FedSpa, backbone=TwoLayers, density=0.5, regrow=regrow)
    federation = run(made, digits(2), rounds=rounds)
    active = sum(int(mask.sum()) for mask in masks(federation, 0).values())
    dense = 12 + 10
    assert active + dense == pytest.approx(0.5 * (64 * 12 + 12 * 10 + dense), abs=1)
    packed = (888 // 8) * (regrow != "none")
    # every payload says where its non-zero weights are; a round number goes down, new masks go up
    down = 4 * (active + dense) + 768 // 8 + 120 // 8 + 8
    up = 4 * (active + dense) + 768 // 8 + 120 // 8 + packed
    header = 900
    for client_up, client_down in federation.traffic.clients.values():
        assert rounds * up <= client_up <= rounds * (up + header)
        assert rounds * down <= client_down <= rounds * (down + header)
    assert federation.traffic.elements == 2 * rounds * (2 * (active + dense) + 1)  # masks are bytes only


def test_traffic_of_resnet9_is_half():
    member = client(FedSpa, backbone=ResNet9).build(spec())
    server = member.configure_server()
    joined = member.initial()
    server.start({0: ClientInfo(10, joined)})
    dense = Payload(member.shared_parameters()).nbytes
    reply = server.reply(0)
    assert reply.nbytes == len(reply.to_bytes())
    assert reply.nbytes / dense == pytest.approx(0.5 + 1 / 32, abs=0.002)
    assert joined[MASKS].numel() == -(-sum(mask.numel() for mask in member.masks.buffers()) // 8)
    assert joined[MASKS].numel() / dense == pytest.approx(1 / 32, rel=0.01)


# --------------------------------------------------------------------------------------------------------- federations


@pytest.mark.seconds
def test_heads_stay_at_home_and_dense_where_labels_differ():
    federation = run(client(FedSpa, density=0.3), digits(3, permute_labels=True), rounds=3)
    states = weights(federation)
    for k, member in federation.clients.items():
        assert list(member.masks) == [CONV]
        assert int(member.masks[CONV].sum()) == round(0.3 * (36 + 12) - 12)  # 12 in bias and batch norm
        assert not any("head" in name for name in [*member.upload(), *federation.coordinator.server.reply(k)])
        assert states[k][HEAD].all()
    assert not torch.equal(states[0][HEAD], states[1][HEAD])


@pytest.mark.parametrize(
    ("option", "value"), [("density", 0.0), ("density", 1.5), ("prune_rate", -0.1), ("prune_rate", 1.1)]
)
def test_errors(option, value):
    with pytest.raises(ConfigError, match=rf"model\.{option}={value}: give a share"):
        FedSpa(**{option: value})


def test_a_density_below_what_has_no_masks_is_refused():
    with pytest.raises(ConfigError, match=r"model\.density=0\.1: biases and .* 0\.1 of the shared"):
        run(client(FedSpa, density=0.1), digits(2), rounds=1)


def test_factorized_weights_are_refused():
    with pytest.raises(ConfigError, match=r"model\.factorization: FedSpa"):
        FedSpa(factorization=Factorization())


# ------------------------------------------------------------------------------------------------ learners of all kinds


class Words(L.LightningModule):
    """Has an embedding with sparse gradients, a frozen layer, weights without entries, and buffers without signs."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(9, 6, sparse=True), nn.Flatten(), nn.Linear(18, 6), nn.Linear(6, 6))
        self.body[3].requires_grad_(False)
        self.head = nn.Linear(6, 2)
        self.none = nn.Parameter(torch.zeros(0, 6))
        self.register_buffer("seen", torch.zeros((), dtype=torch.bool))
        self.register_buffer("batches", torch.zeros((), dtype=torch.uint8))

    def training_step(self, batch, batch_idx):
        self.seen.fill_(True)
        self.batches += 1
        return nn.functional.cross_entropy(self.head(self.body(batch[0])), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD([weight for weight in self.parameters() if weight.requires_grad], lr=0.1)


class Sentences(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randint(9, (12, 3)), torch.randint(2, (12,))), batch_size=4)


def test_frozen_and_empty_weights_sparse_gradients_and_tensors_without_signs():
    torch.manual_seed(0)
    learner = Words()
    frozen = learner.body[3].weight.clone()
    federation = run(FedSpa(learner=learner, density=0.7), PerClient([Sentences(), Sentences()]), seed=1)
    model = federation.coordinator.server.model
    assert "body.3.weight" not in model  # what never trains stays at home
    assert torch.equal(federation.clients[0].learner.body[3].weight, frozen)
    assert model["seen"]
    assert model["batches"] == 2 * 3
    masked = federation.clients[0].masks
    assert "body.3.weight" not in masked
    active = sum(int(mask.sum()) for _, mask in masked.items())
    total = sum(weight.numel() for weight in learner.parameters() if weight.requires_grad)
    assert active == pytest.approx(0.7 * total - (total - sum(mask.numel() for _, mask in masked.items())), abs=2)
