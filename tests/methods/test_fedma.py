"""FedMA: layers of permuted copies, of clients that miss rounds, and of whole federations on digits."""

from functools import partial
from itertools import permutations

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lit_pfl import Federation, Payload
from lit_pfl.core.server import ClientInfo
from lit_pfl.data import BalancedDirichlet, ClassShards
from lit_pfl.errors import ConfigError
from lit_pfl.lightning_internals import LastCheckpoint
from lit_pfl.methods import FedMA
from lit_pfl.models import CNN, MLP, VGG9, Backbone, ResNet9
from lit_pfl.nn.factorization import Factorization
from lit_pfl.ops import Matching, nearest_units, unit_matrix
from tiny import Parts, assert_equal, digits, momentum_sgd, run, spec, step_schedule, trainer, weights

DEPTH = 4


class Small(Backbone):
    """Every kind of layer once: convolution to convolution, through a flatten with 2 x 2 positions, to linear."""

    def __init__(self, channels: int = 1, classes: int = 10) -> None:
        body = nn.Sequential(
            nn.Conv2d(channels, 6, 3), nn.ReLU(), nn.Sequential(nn.Conv2d(6, 8, 3, bias=False), nn.ReLU()),
            nn.MaxPool2d(2), nn.Dropout2d(0.05), nn.Flatten(), nn.Linear(32, 12), nn.ReLU(),
        )  # fmt: skip
        super().__init__(body, nn.Linear(12, classes))


class SmallMLP(Backbone):
    def __init__(self, channels: int = 1, classes: int = 10) -> None:
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(64 * channels, 3), nn.Tanh()), nn.Linear(3, classes))


def fedma(**options):
    return FedMA(**{"backbone": Small, "optimizer": momentum_sgd, **options})


def members(num_clients=3, seed=0, **options):
    """Clients with data, not yet in any federation, and their server."""
    data = digits(num_clients)
    data.setup()
    clients = {}
    for k in range(num_clients):
        torch.manual_seed(seed)
        clients[k] = fedma(**options).build(spec(client=k, channels=1, image_size=8))
        clients[k].data = data.client(k)
        clients[k].eval()
    server = clients[0].configure_server()
    server.start({k: ClientInfo(10, c.initial()) for k, c in clients.items()})
    return clients, server


def sub_round(clients, server, take_part=None, train=lambda client: None):
    """Let some clients load, train and upload as a federation does; the uploads must be as the server says."""
    uploads = {}
    for k in take_part if take_part is not None else clients:
        clients[k].download(server.reply(k))
        clients[k].begin_round()
        train(clients[k])
        clients[k].end_round()
        uploads[k] = clients[k].upload()
        assert {n: (t.shape, t.dtype) for n, t in uploads[k].items()} == dict(server.layout(k))
    server.aggregate(1 + server.step, uploads)
    return uploads


def shake(client):
    """Stand in for training."""
    with torch.no_grad():
        for parameter in client.backbone.parameters():
            if parameter.requires_grad:
                parameter += 0.3 * torch.randn_like(parameter)


def enlarge(clients, factor=15.0):
    """Make units so large that their differences, and not the prior, decide."""
    with torch.no_grad():
        for client in clients.values():
            for parameter in client.backbone.parameters():
                parameter *= factor


def logits(client, scale=1.0):
    images = scale * torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return client.eval()(images)


# ------------------------------------------------------------------------------------------------- function preserved


@pytest.mark.parametrize("num_clients", [2, 3])
@pytest.mark.parametrize("popularity", ["paper", "released"])
def test_permuted_copies_of_a_network_are_that_network(num_clients, popularity):
    clients, server = members(num_clients, matching=Matching(popularity=popularity))
    enlarge(clients)
    for k in range(1, num_clients):
        conv1, conv2, linear, head = (layer for _, layer in clients[k].layers)
        first, second, third, last = (layer for _, layer in clients[0].layers)
        p, q, r = torch.randperm(6), torch.randperm(8), torch.randperm(12)
        with torch.no_grad():
            conv1.weight.copy_(first.weight[p])
            conv1.bias.copy_(first.bias[p])
            conv2.weight.copy_(second.weight[q][:, p])
            linear.weight.copy_(third.weight.view(12, 8, 4)[r][:, q].flatten(1))
            linear.bias.copy_(third.bias[r])
            head.weight.copy_(last.weight[:, r])
            head.bias.copy_(last.bias)
    expected = logits(clients[0])
    for k in range(1, num_clients):
        torch.testing.assert_close(logits(clients[k]), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    for _ in range(DEPTH):
        sub_round(clients, server)
    for k, client in clients.items():
        client.download(server.reply(k))
        torch.testing.assert_close(logits(client), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
        assert [len(layer.weight) for _, layer in client.layers] == [6, 8, 12, 10]
    client.begin_round()  # cut out
    torch.testing.assert_close(logits(client), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    torch.testing.assert_close(client.layers[0][1].weight[torch.argsort(p)], first.weight)  # in its own order again


def test_a_client_alone_computes_the_same_in_every_sub_round():
    clients, server = members(1)
    before = logits(clients[0])
    for _ in range(2 * DEPTH + 1):
        sub_round(clients, server)
        assert torch.equal(logits(clients[0]), before)


def test_zero_padding_keeps_the_function_whatever_other_units_are_there():
    """Global layers with the client's own units in other places, among units of others."""
    client = members(1)[0][0]
    before = logits(client)
    for step, (name, layer) in enumerate(client.layers[:-1], 1):
        own, width = len(layer.weight), len(layer.weight) + 5
        assignment = torch.randperm(width)[:own]
        weight = torch.randn(width, *layer.weight.shape[1:])
        weight[assignment] = layer.weight.detach()
        reply = {f"{name}.weight": weight, f"{name}.assignment": assignment.int()}
        if layer.bias is not None:
            reply[f"{name}.bias"] = torch.randn(width)
            reply[f"{name}.bias"][assignment] = layer.bias.detach()
        client.download({"step": torch.tensor(step), **reply})
        assert torch.equal(layer.weight, weight)
        torch.testing.assert_close(logits(client), before)
    client.cut()
    assert torch.equal(logits(client), before)
    assert all(torch.equal(own, torch.arange(len(own))) for _, own in client.assignments.items())


def test_layers_grow_where_clients_have_different_features():
    clients, server = members(2)
    with torch.no_grad():
        for k, client in clients.items():
            client.layers[0][1].bias.zero_()
            client.layers[0][1].weight.zero_()
            # the k-th half of the 9 positions: nothing that the other one sees
            client.layers[0][1].weight.view(6, 9)[:4, 4 * k : 4 * k + 4] = 10 * torch.eye(4)
            client.layers[0][1].weight.view(6, 9)[4:, 8] = torch.tensor([20.0, -20.0])  # in common
    sub_round(clients, server)
    assert len(server.model["backbone.body.0.weight"]) == 4 + 4 + 2
    for k, client in clients.items():
        own = client.layers[0][1].weight.detach().clone()
        client.download(server.reply(k))
        assert client.layers[0][1].weight.shape == (10, 1, 3, 3)
        assert client.layers[0][1].out_channels == client.layers[1][1].in_channels == 10
        assert torch.equal(client.layers[0][1].weight[client.assignments["backbone.body.0"].long()], own)
        assert client.layers[1][1].weight.shape == (8, 10, 3, 3)
    sub_round(clients, server)
    assert server.model["backbone.body.2.0.weight"].shape[1] == 10


# ------------------------------------------------------------------------------------------------ a round by the rules


def test_the_last_layer_is_the_mean_by_class():
    clients, server = members(3)
    counts = torch.tensor([[5, 0, 1, 0] + [1] * 6, [5, 2, 3, 0] + [1] * 6, [0, 8, 0, 0] + [2] * 6])
    for _ in range(DEPTH - 1):
        sub_round(clients, server)
    uploads = {}
    for k, client in clients.items():
        client.download(server.reply(k))
        client.begin_round()
        uploads[k] = client.upload()
        labels = torch.cat([labels for _, labels in client.data.train])
        assert uploads[k]["class_counts"].tolist() == np.bincount(labels.numpy(), minlength=10).tolist()
        uploads[k] = Payload({**uploads[k], "class_counts": counts[k].int()}).clone()
    server.aggregate(DEPTH, uploads)
    weight = np.stack([upload["backbone.head.weight"].numpy() for upload in uploads.values()])
    bias = np.stack([upload["backbone.head.bias"].numpy() for upload in uploads.values()])
    for c in range(10):
        n = counts[:, c].numpy()
        p = n / n.sum() if n.sum() else np.full(3, 1 / 3)  # a class that nobody has
        reply = server.reply(1)
        np.testing.assert_allclose(reply["backbone.head.weight"][c], p @ weight[:, c], atol=1e-6)
        np.testing.assert_allclose(reply["backbone.head.bias"][c], p @ bias[:, c], atol=1e-6)


def by_the_rules(starts, data, rounds, epochs, lr=0.1, momentum=0.9, gamma=7.0):
    """FedMA for two clients with one hidden layer of 3 units, from the papers; full batches.

    Returns both clients' (W, b, V, c) after their training in the last round.
    """
    batches = [next(iter(d)) for d in data]
    counts = np.stack([np.bincount(labels, minlength=10) for _, labels in batches])
    nets = [[t.clone() for t in start] for start in starts]
    own_layer = [None, None]
    for round in range(rounds):
        trained = [0, 1, 2, 3] if round % 2 == 0 else [2, 3]
        if round % 2 == 0 and round:  # cut out
            for net, columns in zip(nets, own_layer, strict=True):
                net[0], net[1], net[2] = net[0][columns], net[1][columns], net[2][:, columns]
        for net, (images, labels) in zip(nets, batches, strict=True):
            velocity = [torch.zeros_like(t) for t in net]
            for _ in range(epochs):
                net[:] = [t.detach().requires_grad_(i in trained) for i, t in enumerate(net)]
                W, b, V, c = net
                F.cross_entropy(torch.tanh(images.flatten(1) @ W.T + b) @ V.T + c, labels).backward()
                for i in trained:
                    velocity[i] = momentum * velocity[i] + net[i].grad
                    net[i] = net[i].detach() - lr * velocity[i]
            net[:] = [t.detach() for t in net]
        if round == rounds - 1:
            break
        if round % 2 == 0:  # match: the first client's units are the first three global ones
            units = [np.c_[net[0].numpy(), net[1].numpy()].astype(float) for net in nets]

            def total(columns, units=units):
                score = 0.0
                for w, i in zip(units[1], columns, strict=True):
                    if i < 3:
                        s = units[0][i]
                        score += ((w + s) ** 2).sum() / 3 - (s**2).sum() / 2 + 2 * np.log(1 / (2 - 1))
                    else:
                        score += (w**2).sum() / 2 - 2 * np.log(i - 2) + 2 * np.log(gamma / 2)
                return score

            best = max(permutations(range(6), 3), key=total)
            new = [i for i in best if i >= 3]
            second = torch.tensor([i if i < 3 else 3 + new.index(i) for i in best])
            own_layer = [torch.arange(3), second]
            width = 3 + len(new)
            merged, have = torch.zeros(width, 65), torch.zeros(width, 1)
            for columns, u in zip(own_layer, units, strict=True):
                merged[columns] += torch.from_numpy(u).float()
                have[columns] += 1
            merged = merged / have
            for net, columns in zip(nets, own_layer, strict=True):
                wide = torch.zeros(10, width)
                wide[:, columns] = net[2]
                net[0], net[1], net[2] = merged[:, :64].clone(), merged[:, 64].clone(), wide
        else:
            p = torch.from_numpy(counts / counts.sum(0)).float()
            V, c = sum(p[j][:, None] * nets[j][2] for j in (0, 1)), sum(p[j] * nets[j][3] for j in (0, 1))
            for net in nets:
                net[2], net[3] = V.clone(), c.clone()
    return nets


@pytest.mark.parametrize("gamma", [0.1, 7.0])
@pytest.mark.parametrize("client_trainer", [{}, {"gradient_clip_val": 1e9}], ids=["lean", "clipped"])
def test_five_rounds_equal_the_rules_by_a_plain_loop(gamma, client_trainer):
    """Two whole communication rounds and the start of a third, with momentum that each sub-round starts at zero."""
    data = digits(2, batch_size=2000)
    method = fedma(backbone=SmallMLP, matching=Matching(gamma=gamma, sweeps=0))
    started = {}

    class Started(L.Callback):
        def on_train_start(self, trainer, federation):
            started.update(
                {k: [t.detach().clone() for t in c.backbone.parameters()] for k, c in federation.clients.items()}
            )

    federation = Federation(method, seed=3, threads=1, local_epochs=3, client_trainer=client_trainer)
    trainer(5, callbacks=[Started()]).fit(federation, datamodule=data)
    assert not torch.equal(started[0][0], started[1][0])
    expected = by_the_rules(list(started.values()), [data.client(k).train for k in (0, 1)], 5, 3, gamma=gamma)
    widths = len(federation.coordinator.server.model["backbone.body.1.weight"])
    assert (widths > 3) == (gamma > 1)  # grown in one of the two cases
    for k in (0, 1):
        for ours, theirs in zip(federation.clients[k].backbone.parameters(), expected[k], strict=True):
            torch.testing.assert_close(ours.detach(), theirs, atol=2e-5, rtol=1e-4)


def test_layers_that_are_done_do_not_train_and_schedules_go_on():
    federation = run(fedma(scheduler=step_schedule), digits(3), rounds=3, local_epochs=2)
    server, optimizer = federation.coordinator.server, federation.clients[0].make_optimizer
    assert optimizer is momentum_sgd
    for client in federation.clients.values():
        for name, layer in client.layers[:2]:  # after the third sub-round's training
            for leaf, tensor in layer.named_parameters():
                assert torch.equal(tensor, server.model[f"{name}.{leaf}"])
                assert not tensor.requires_grad
        assert all(t.requires_grad for _, layer in client.layers[2:] for t in layer.parameters())
    [group] = federation.engine._restored[0]["optimizer_states"][0]["param_groups"]
    assert group["lr"] == pytest.approx(0.1 * 0.5**3)  # halved every second of 6 epochs
    assert len(federation.engine._restored[0]["optimizer_states"][0]["state"]) == 4  # momentum of what trains


# ------------------------------------------------------------------------------------------------------------- traffic


class Sizes(L.Callback):
    def __init__(self):
        self.up, self.down, self.elements = [], [], []

    def on_train_epoch_end(self, trainer, federation):
        self.up.append(federation.traffic.up)
        self.down.append(federation.traffic.down)
        self.elements.append(federation.traffic.elements)


@pytest.mark.seconds
@pytest.mark.parametrize("permute_labels", [False, True])
def test_a_sub_round_costs_its_layer_and_no_more(permute_labels):
    sizes = Sizes()
    federation = Federation(fedma(matching=Matching(gamma=1e-9)), seed=3, threads=1)  # no layer grows
    trainer(DEPTH + 2, callbacks=[sizes]).fit(federation, datamodule=digits(3, permute_labels=permute_labels))
    f32, i32, step = torch.float32, torch.int32, {"step": torch.tensor(0)}
    own = [
        {"backbone.body.0.weight": (6, 1, 3, 3), "backbone.body.0.bias": (6,)},
        {"backbone.body.2.0.weight": (8, 6, 3, 3)},
        {"backbone.body.6.weight": (12, 32), "backbone.body.6.bias": (12,)},
        {"backbone.head.weight": (10, 12), "backbone.head.bias": (10,)},
    ]
    layers = [{name: torch.zeros(shape, dtype=f32) for name, shape in layer.items()} for layer in own]
    assigned = [
        {f"{name}.assignment": torch.zeros(n, dtype=i32)}
        for name, n in {"backbone.body.0": 6, "backbone.body.2.0": 8, "backbone.body.6": 12}.items()
    ]
    counts = {"class_counts": torch.zeros(10, dtype=i32)}
    if permute_labels:
        layers[3], counts = {}, {}
    up = [Payload({**step, **layer}) for layer in layers[:3]] + [Payload({**step, **layers[3], **counts})]
    down = [Payload({**step, **layer, **a}) for layer, a in zip(layers, [*assigned, {}], strict=True)]
    assert sizes.up == [3 * len(payload.to_bytes()) for payload in [*up, up[0], up[1]]]
    assert sizes.down == [3 * len(payload.to_bytes()) for payload in [Payload(step), *down, down[0]]]
    beyond = 2 + sum(a.numel() for tensors in assigned for a in tensors.values())
    first = sum(t.numel() for layer in layers[:1] for t in layer.values())
    assert sizes.elements[0] == 3 * (first + 2)
    total = 2 * sum(t.numel() for layer in layers for t in layer.values()) + beyond + 10 * (not permute_labels)
    assert sizes.elements[DEPTH] - sizes.elements[0] == 3 * (total - first + first + 2 * (DEPTH - 1))


class Widths(L.Callback):
    """The units of every global layer, and the elements sent until then, round by round."""

    def __init__(self):
        self.units, self.elements = [], []

    def on_train_epoch_end(self, trainer, federation):
        layer = list(federation.coordinator.server.model.values())[-1]
        self.units.append(len(layer))
        self.elements.append(federation.traffic.elements)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_clients", "partition"), [(16, BalancedDirichlet(0.5)), (10, ClassShards(3, deal="mixed"))]
)
def test_a_communication_round_of_vgg_9_costs_what_its_layers_grow_to(num_clients, partition):
    """Psi-Net's comparison: up goes every client's own layer, with the inputs that there are by then; down the global
    one, and which of its units are the client's."""
    widths, size = Widths(), 2
    federation = Federation(FedMA(backbone=partial(VGG9, width=size), matching=Matching(gamma=50.0)), seed=3, threads=1)
    data = digits(num_clients, partition=partition, train_fraction=0.2)
    trainer(10, callbacks=[widths], check_val_every_n_epoch=99).fit(federation, datamodule=data)
    own = [size * factor for factor in (1, 2, 4, 4, 8, 8, 16, 16)] + [10]
    kernel = [9] * 6 + [1, 1, 1]  # of 8 x 8 pixels one is left where the fully connected layers begin
    inputs, units, assigned = [1, *widths.units[:8]], widths.units[:9], [*own[:8], 0]
    step, counts = 1, 10
    up = [n * i * k + n + step for n, i, k in zip(own, inputs, kernel, strict=True)]
    down = [n * i * k + n + a + step for n, i, k, a in zip(units, inputs, kernel, assigned, strict=True)]
    assert all(grown >= before for grown, before in zip(units, own, strict=True))
    assert units != own
    first = own[0] * inputs[0] * 9 + own[0] + step  # of the second communication round
    total = step + sum(up) + counts + sum(down) + first
    assert widths.elements[-1] == num_clients * total


# -------------------------------------------------------------------------------------------- who takes part, and when


def check_against_server(client, server):
    """All layers of this communication round are the server's, and the network runs."""
    done = (server.step - 1) % DEPTH + 1
    for name, layer in client.layers[:done]:
        for leaf, tensor in layer.named_parameters():
            assert torch.equal(tensor, server.model[f"{name}.{leaf}"]), name
    assert int(client.step) == server.step
    assert logits(client).isfinite().all()


def test_clients_come_and_go_for_rounds_and_always_catch_up():
    clients, server = members(5)
    draw = np.random.default_rng(1)
    for _ in range(5 * DEPTH):
        present = sorted(draw.choice(5, draw.integers(1, 4), replace=False).tolist())
        sub_round(clients, server, present, shake)
        for k in clients:
            state = {name: tensor.clone() for name, tensor in clients[k].state_dict().items()}
            clients[k].download(server.reply(k))  # only to look at, as an evaluation does
            check_against_server(clients[k], server)
            clients[k].load_state_dict(state)
            assert_equal(dict(clients[k].state_dict()), state)
    assert server.step == 5 * DEPTH


def test_a_client_that_missed_layers_matches_itself_to_them():
    clients, server = members(3)
    before = logits(clients[2])
    own = clients[2].layers[0][1]
    first = unit_matrix(own.weight, own.bias).detach().clone()
    for _ in range(2):
        sub_round(clients, server, [0, 1], shake)
    assert "backbone.body.0.assignment" not in server.reply(2)
    assert {"backbone.body.0.weight", "backbone.body.2.0.weight"} < set(server.reply(2))
    assert set(server.reply(0)) == {"step", "backbone.body.2.0.weight", "backbone.body.2.0.assignment"}
    clients[2].download(server.reply(2))
    check_against_server(clients[2], server)
    model = unit_matrix(server.model["backbone.body.0.weight"], server.model["backbone.body.0.bias"])
    assert clients[2].assignments["backbone.body.0"].tolist() == nearest_units(first, model).tolist()
    assert not torch.equal(logits(clients[2]), before)


def test_a_client_that_missed_the_end_of_a_communication_round_takes_its_own_size_into_the_next():
    clients, server = members(3)
    sub_round(clients, server, train=shake)
    for _ in range(DEPTH):  # the third client has the first layer only, when the others are done with that of the next
        sub_round(clients, server, [0, 1], shake)
    clients[2].download(server.reply(2))
    check_against_server(clients[2], server)
    clients[2].begin_round()
    for (_, layer), (_, other) in zip(clients[2].layers, clients[0].layers, strict=True):
        assert len(layer.weight) in (len(other.weight), len(server.model["backbone.body.0.weight"]))
    sub_round(clients, server, train=shake)


def test_with_nobody_left_the_sub_round_is_tried_again():
    clients, server = members(2)
    sub_round(clients, server)
    for client in clients.values():
        for _ in range(2):  # nothing was usable: the same reply comes twice
            client.download(server.reply(client.spec.client_id))
            client.begin_round()
            state = {name: tensor.clone() for name, tensor in client.state_dict().items()}
        client.download(server.reply(client.spec.client_id))
        assert_equal(dict(client.state_dict()), state)
        assert {n: (t.shape, t.dtype) for n, t in client.upload().items()} == server.layout(0)


@pytest.mark.seconds
@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{}, {"participation": 0.5}, {"participation": 1, "evaluate": "after"}])
def test_it_runs_with_whoever_takes_part(options):
    federation = run(fedma(), digits(4), rounds=2 * DEPTH + 1, **options)
    assert federation.coordinator.server.step == 2 * DEPTH + 1
    assert all(row.n and 0 <= row.scores["acc"] <= 1 for row in federation.rows)


class Poison(L.Callback):
    """Spoils one client's weights in the second round."""

    def on_train_batch_start(self, trainer, federation, batch, batch_idx):
        if trainer.current_epoch == 1 and batch == [1]:
            with torch.no_grad():
                for parameter in federation.clients[1].backbone.parameters():
                    parameter.fill_(torch.nan)


@pytest.mark.seconds
@pytest.mark.filterwarnings("ignore:Round . continues without one upload")
def test_a_client_that_is_refused_heals_in_the_next_communication_round():
    federation = Federation(fedma(), seed=3, threads=1)
    trainer(2 * DEPTH, callbacks=[Poison()]).fit(federation, datamodule=digits(3))
    assert not federation.coordinator.refused
    for client in federation.clients.values():
        assert all(tensor.isfinite().all() for tensor in client.state_dict().values())


# -------------------------------------------------------------------------------------------------- whole federations


@pytest.mark.slow
def test_a_resumed_run_is_the_run_that_never_stopped(tmp_path):
    """Stopped after the first sub-round, at the end of a communication round, and within the next."""

    def fit(name, rounds, path=None):
        checkpoint = LastCheckpoint(tmp_path / name)
        federation = Federation(fedma(scheduler=step_schedule), seed=3, threads=1, local_epochs=2, participation=0.75)
        fitting = trainer(rounds, enable_checkpointing=True, callbacks=[checkpoint])
        fitting.fit(federation, datamodule=digits(4, train_fraction=0.3), ckpt_path=path)
        return federation

    whole = fit("whole", DEPTH + 3)
    for stop in (1, DEPTH, DEPTH + 2):
        fit(f"first {stop}", stop)
        torch.load(tmp_path / f"first {stop}" / "last.ckpt", weights_only=True)
        resumed = fit(f"then {stop}", DEPTH + 3, tmp_path / f"first {stop}" / "last.ckpt")
        assert_equal(weights(whole), weights(resumed))
        assert_equal(whole.coordinator.state_dict(), resumed.coordinator.state_dict())
        assert whole.rows == resumed.rows


def test_heads_are_kept_local_where_labels_differ():
    federation = run(fedma(), digits(3, permute_labels=True), rounds=2 * DEPTH)
    server = federation.coordinator.server
    assert {name.rpartition(".")[0] for name in server.model} == {name for name, _ in federation.clients[0].layers[:-1]}
    heads = [client.backbone.head.weight for client in federation.clients.values()]
    assert heads[0].shape == heads[1].shape == (10, len(server.model["backbone.body.6.weight"]))
    assert not torch.equal(heads[0], heads[1])
    for client in federation.clients.values():
        check = dict(client.layers)["backbone.body.6"].weight
        assert torch.equal(check, server.model["backbone.body.6.weight"])


def test_after_a_communication_round_all_clients_have_the_global_network():
    federation = run(fedma(), digits(3), rounds=DEPTH, evaluate="after")
    outputs = []
    for k, client in federation.clients.items():
        client.download(federation.coordinator.server.reply(k))
        outputs.append(logits(client))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.seconds
def test_three_clients_learn_digits_in_two_communication_rounds():
    federation = run(fedma(), digits(3), rounds=2 * DEPTH, local_epochs=3, evaluate="after")
    assert np.mean([row.scores["acc"] for row in federation.rows]) > 0.6


@pytest.mark.seconds
def test_one_client_learns_too():
    federation = run(fedma(), digits(1), rounds=2 * DEPTH, local_epochs=2, evaluate="after")
    assert federation.rows[0].scores["acc"] > 0.8


# ------------------------------------------------------------------------------------------------------- what it takes


def test_clients_draw_initial_weights_of_their_own_from_the_seed():
    first, again = members(3)[0], members(3)[0]
    for k in first:
        assert torch.equal(first[k].backbone.body[0].weight, again[k].backbone.body[0].weight)
        for other in range(k):
            assert not torch.equal(first[k].backbone.body[0].weight, first[other].backbone.body[0].weight)
    assert not torch.equal(first[0].backbone.head.weight, members(3, seed=1)[0][0].backbone.head.weight)


class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        return x + self.layer(x)


def backbone_of(*body, head=None):
    return lambda channels, classes: Parts(nn.Sequential(*body), head or nn.Linear(16, classes))


@pytest.mark.parametrize(
    ("backbone", "complaint"),
    [
        (lambda c, k: ResNet9(c, k, width=2), r"backbone\.body\S* is a "),
        (backbone_of(nn.Conv2d(1, 16, 8), nn.BatchNorm2d(16), nn.Flatten()), "backbone.body.1 is a BatchNorm2d"),
        (backbone_of(nn.Flatten(), nn.Linear(64, 16), Skip()), "backbone.body.2 is a Skip"),
        (
            backbone_of(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 6, groups=2), nn.Flatten(), nn.Linear(4, 16)),
            "body.1 is a Conv2d with groups",
        ),
        (
            backbone_of(nn.Flatten(), head=nn.Sequential(nn.Linear(64, 16), nn.Linear(16, 10))),
            "head of a single linear layer",
        ),
        (backbone_of(nn.Flatten(), nn.Linear(64, 10), head=nn.Identity()), "head of a single linear layer"),
    ],
)
def test_backbones_that_are_no_chain_are_named(backbone, complaint):
    size = 16 if "S*" in complaint else 8
    with pytest.raises(ConfigError, match=complaint):
        fedma(backbone=backbone).build(spec(channels=1, image_size=size))


def test_a_factorization_is_refused():
    with pytest.raises(ConfigError, match=r"model\.factorization"):
        fedma(factorization=Factorization())


@pytest.mark.seconds
@pytest.mark.parametrize(("backbone", "size", "depth"), [(CNN, 16, 4), (MLP, 8, 3), (lambda c, k: VGG9(c, k, 2), 8, 9)])
def test_the_networks_of_the_field_do(backbone, size, depth):
    federation = run(fedma(backbone=backbone), digits(2, image_size=size, batch_size=800), rounds=depth + 2)
    assert len(federation.clients[0].layers) == depth
    assert federation.coordinator.server.step == depth + 2


def test_the_default_is_the_papers():
    method = FedMA()
    client = method.build(spec())
    assert sum(parameter.numel() for parameter in client.backbone.parameters()) == 3_491_530
    [group] = client.configure_optimizers().param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.01, 0.9, 1e-4)
    assert client.matching == Matching(7.0, 1.0, 1.0, 5)
