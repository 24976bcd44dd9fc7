"""Psi-Net: what clients without some classes have, send and get, and how groups are averaged."""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lit_pfl import Federation
from lit_pfl.core.averaging import mean_of_rows, weighted_mean
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo, Server, Weighting
from lit_pfl.data import IID, ClassShards
from lit_pfl.errors import ConfigError
from lit_pfl.lightning_internals import LastCheckpoint
from lit_pfl.methods import FedAvg, PsiNet
from lit_pfl.methods.factorized.psi_net import PsiNetServer
from lit_pfl.models import Backbone, psi
from lit_pfl.nn import GroupedNorm
from tiny import Backwards, TinyNet, assert_equal, client, digits, run, spec, trainer, weights


class Net(Backbone):
    """Two convolutions, one to share and one to divide, and two linear layers."""

    def __init__(self, channels: int = 1, classes: int = 10) -> None:
        body = nn.Sequential(
            nn.Conv2d(channels, 10, 3), nn.BatchNorm2d(10), nn.ReLU(),
            nn.Conv2d(10, 20, 3), nn.BatchNorm2d(20), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(20, 20), nn.ReLU(),
        )  # fmt: skip
        super().__init__(body, nn.Linear(20, classes))


def method(**options: Any) -> PsiNet:
    made = client(PsiNet, **{"backbone": Net, "depth": 1, **options})
    assert isinstance(made, PsiNet)
    return made


def few_classes(num_clients: int = 5, kind: type = digits, **options: Any):
    return kind(num_clients=num_clients, **{"image_size": 8, "batch_size": 64, "partition": ClassShards(2), **options})


def classes_of(federation: Federation) -> dict[int, list[int]]:
    return {k: np.flatnonzero(row).tolist() for k, row in enumerate(federation.data.class_counts("train"))}


@pytest.fixture
def federation() -> Federation:
    return run(method(), few_classes())


# One group


class PlainAveraging(FedAvg):
    """FedAvg of the networks that Psi-Net's clients have."""

    options: ClassVar[dict[str, Any]] = {}

    def configure_learner(self) -> None:
        super().configure_learner()
        self.learner.backbone = psi(self.learner.backbone, **{"groups": 10, "depth": 1, **self.options})


class DensePlainAveraging(PlainAveraging):
    options: ClassVar[dict[str, Any]] = {"structure": "dense"}


@pytest.mark.seconds
@pytest.mark.parametrize(("options", "same"), [({"groups": 1}, FedAvg), ({"structure": "dense"}, DensePlainAveraging)])
def test_without_groups_it_is_fedavg_bit_for_bit(options, same):
    ours = run(method(weighting="samples", **options), few_classes(), participation=3)
    assert len(set(ours.coordinator.server.num_samples.values())) > 1
    theirs = run(client(same, backbone=Net, norm_stats="averaged"), few_classes(), participation=3)
    assert_equal(weights(ours), weights(theirs))
    assert ours.traffic.state_dict() == theirs.traffic.state_dict()
    assert ours.rows == theirs.rows


@pytest.mark.seconds
def test_where_everybody_has_every_class_it_is_fedavg_of_the_same_network():
    ours = run(method(weighting="samples"), digits(3))
    theirs = run(client(PlainAveraging, backbone=Net, norm_stats="averaged"), digits(3))
    assert_equal(weights(ours), weights(theirs))


# What a client has


@pytest.mark.seconds
def test_clients_have_the_groups_of_their_classes(federation):
    for k, classes in classes_of(federation).items():
        network = federation.clients[k].backbone
        assert len(classes) == 2
        norms = [m for m in network.modules() if isinstance(m, GroupedNorm)]
        assert [norm.kept for norm in norms] == [classes]
        shapes = {name: tuple(p.shape) for name, p in network.named_parameters()}
        assert shapes["body.0.weight"] == (10, 1, 3, 3)
        assert shapes["body.3.weight"] == (4, 1, 3, 3)
        assert shapes["body.8.weight"] == (4, 2)
        assert shapes["head.weight"] == (2, 2)
        logits = network(torch.randn(3, 1, 8, 8))
        assert logits.isfinite().sum(0).tolist() == [3 * (c in classes) for c in range(10)]


@pytest.mark.seconds
def test_a_trimmed_client_is_the_whole_network_as_far_as_it_goes(federation):
    whole = method().build(spec(channels=1, image_size=8))
    whole.load_global(federation.coordinator.server.global_model())
    for k, classes in classes_of(federation).items():
        own = federation.clients[k]
        own.download(federation.coordinator.server.reply(k))
        images = torch.randn(4, 1, 8, 8)
        logits = [network.eval()(images)[:, classes] for network in (own.backbone, whole.backbone)]
        torch.testing.assert_close(*logits)


@pytest.mark.seconds
def test_only_what_a_client_has_travels(federation):
    whole = {name: p.numel() for name, p in psi(Net(), 10, 1).state_dict().items()}
    grouped = {"body.3.", "body.4.", "body.8.", "head."}
    of_groups = sum(n for name, n in whole.items() if name.startswith(tuple(grouped)))
    expected = sum(whole.values()) - of_groups + 2 * of_groups // 10
    for k, module in federation.clients.items():
        assert module.upload().elements == federation.coordinator.server.reply(k).elements == expected
    assert federation.traffic.elements == expected * 5 * 2 * 2


@pytest.mark.seconds
def test_untrimmed_clients_have_and_send_everything():
    federation = run(method(trim=False), few_classes())
    expected = sum(tensor.numel() for tensor in psi(Net(), 10, 1).state_dict().values())
    assert federation.traffic.elements == expected * 5 * 2 * 2
    assert federation.clients[0].backbone(torch.randn(1, 1, 8, 8)).isfinite().all()


@pytest.mark.seconds
def test_classes_count_under_the_clients_own_labels():
    federation = run(method(), few_classes(permute_labels=True), rounds=1)
    for module in federation.clients.values():
        labels = {int(label) for _, batch in module.data.train for label in batch}
        assert set(module.own_groups()) == labels
        assert len(labels) == 2


# Averaging


def reference(parts: list[tuple[np.ndarray, list[int], int]], before: np.ndarray) -> np.ndarray:
    after = before.copy()
    for row in range(len(before)):
        owners = [(tensor[rows.index(row)], n) for tensor, rows, n in parts if row in rows]
        if owners:
            after[row] = sum(value * n for value, n in owners) / sum(n for _, n in owners)
    return after


def test_rows_are_averaged_over_those_who_have_them():
    rng = np.random.default_rng(0)
    before = rng.normal(size=(6, 3))
    parts = [(rng.normal(size=(len(rows), 3)), rows, n) for rows, n in (([0, 1], 5), ([1, 4, 5], 2), ([5], 9))]
    found = mean_of_rows([(torch.tensor(t), torch.tensor(rows), n) for t, rows, n in parts], torch.tensor(before))
    np.testing.assert_allclose(found.numpy(), reference(parts, before))
    np.testing.assert_array_equal(found[[2, 3]].numpy(), before[[2, 3]])


def test_rows_that_everybody_has_are_averaged_as_anything_else():
    sizes, tensors = [3, 8, 5], torch.randn(3, 7, 2)
    rows = torch.arange(7)
    found = mean_of_rows([(t, rows, n) for t, n in zip(tensors, sizes, strict=True)], torch.zeros(7, 2))
    shares = (torch.tensor(sizes, dtype=torch.float64) / sum(sizes)).tolist()
    assert torch.equal(found, weighted_mean([Payload({"t": t}) for t in tensors], shares)["t"])


OWN = {0: [0, 2], 1: [2], 2: [0], 4: [1, 2]}
ROWS = {"grouped": [0, 0, 1, 1, 2, 2], "head": [2, 0, 1, 0]}


def joined(
    trim: bool, weighting: Weighting = "uniform"
) -> tuple[PsiNetServer, dict[str, np.ndarray], dict[int, Payload]]:
    """A server of four clients, what they started from, and an upload of each."""
    rng = np.random.default_rng(1)
    initial = {"shared": rng.normal(size=(3,)), "grouped": rng.normal(size=(6, 2)), "head": rng.normal(size=(4,))}
    server = PsiNetServer({name: torch.tensor(rows) for name, rows in ROWS.items()}, trim, weighting)

    def payload(k: int, noise: float, **more: Tensor) -> Payload:
        tensors = {
            n: torch.tensor((t + noise * rng.normal(size=t.shape))[rows_of(k, n, trim)]) for n, t in initial.items()
        }
        return Payload({**tensors, **more})

    infos = {k: ClientInfo(10 + k, payload(k, 0, groups=torch.tensor(own))) for k, own in OWN.items()}
    server.start(infos)
    return server, initial, {k: payload(k, 1) for k in OWN}


def rows_of(k: int, name: str, trim: bool = True) -> list[int]:
    rows = ROWS.get(name, range(3))
    return [i for i, group in enumerate(rows) if name == "shared" or not trim or group in OWN[k]]


def test_the_model_is_put_together_from_all_clients():
    server, initial, _ = joined(trim=True)
    for name, tensor in initial.items():
        np.testing.assert_array_equal(server.model[name].numpy(), tensor)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("trim", [True, False])
@pytest.mark.parametrize("present", [[0, 1, 2, 4], [0, 1], [1, 2], [2]])
def test_a_group_is_averaged_over_its_owners_and_keeps_its_value_without_any(trim, present, weighting):
    """Eq. 7 and 8: plain means over clients; or weighted by their 10, 11, 12 and 14 samples."""
    server, initial, uploads = joined(trim, weighting)
    server.aggregate(1, {k: uploads[k] for k in present})
    for name, before in initial.items():
        parts = []
        for k in present:
            rows = rows_of(k, name)
            tensor = uploads[k][name].numpy()
            parts.append((tensor if trim else tensor[rows], rows, 10 + k if weighting == "samples" else 1))
        np.testing.assert_allclose(server.model[name].numpy(), reference(parts, before))
    if 4 not in present:
        np.testing.assert_array_equal(server.model["grouped"][2:4].numpy(), initial["grouped"][2:4])


@pytest.mark.seconds
def test_the_papers_plain_mean_is_the_default():
    """Eq. 7 and 8 have no numbers of samples; of a network that is not divided either."""
    for options, kind in (({}, PsiNetServer), ({"structure": "dense"}, Server)):
        federation = run(method(**options), few_classes(), rounds=1)
        server = federation.coordinator.server
        assert type(server) is kind
        assert len(set(server.num_samples.values())) > 1
        uploads = {k: own.upload() for k, own in federation.clients.items()}
        server.aggregate(2, uploads)
        name = "backbone.body.0.weight"
        mean = torch.stack([upload[name] for upload in uploads.values()]).mean(0)
        torch.testing.assert_close(server.model[name], mean)


def test_replies_are_the_rows_of_the_client():
    server, _, uploads = joined(trim=True)
    server.aggregate(1, uploads)
    for k in OWN:
        reply = server.reply(k)
        assert {name: (t.shape, t.dtype) for name, t in reply.items()} == server.layout(k)
        for name, tensor in reply.items():
            assert torch.equal(tensor, server.model[name][rows_of(k, name)])


def test_a_group_that_nobody_has_is_not_in_the_model_of_all():
    server, _, _ = joined(trim=True)
    server.own = {k: [g for g in own if g != 1] for k, own in server.own.items()}
    model = server.global_model()
    assert model["groups"].tolist() == [0, 2]
    assert torch.equal(model["head"], server.model["head"][[0, 1, 3]])


# Runs


@pytest.mark.seconds
def test_clients_differently_trimmed_resume_bit_for_bit(tmp_path):
    def fit(folder: Path, rounds: int, resume: bool = False) -> Federation:
        federation = Federation(method(), seed=3, threads=1, local_epochs=2, participation=2)
        checkpoint = LastCheckpoint()
        checkpoint.dirpath = str(folder)
        options: dict[str, Any] = {"callbacks": [checkpoint], "enable_checkpointing": True}
        fitting = trainer(rounds, default_root_dir=str(folder), **options)
        fitting.fit(federation, datamodule=few_classes(), ckpt_path=folder / "last.ckpt" if resume else None)
        return federation

    whole = fit(tmp_path / "whole", 4)
    fit(tmp_path / "parts", 2)
    resumed = fit(tmp_path / "parts", 4, resume=True)
    assert_equal(weights(resumed), weights(whole))
    assert_equal(dict(resumed.coordinator.server.model), dict(whole.coordinator.server.model))
    assert resumed.traffic.state_dict() == whole.traffic.state_dict()


@pytest.mark.seconds
def test_the_order_of_clients_differently_trimmed_does_not_matter():
    forwards, backwards = (run(method(), few_classes(kind=kind), participation=3) for kind in (digits, Backwards))
    assert_equal(weights(backwards), weights(forwards))


@pytest.mark.seconds
def test_an_upload_of_more_than_a_clients_own_groups_is_refused():
    federation = run(method(), few_classes(), rounds=1)
    whole = federation.coordinator.server.model
    with pytest.warns(UserWarning, match=r"Client 1: tensor 'backbone.body.3.weight' .* must be .*\(4, 1, 3, 3\)"):
        federation.coordinator.collect({**{k: c.upload() for k, c in federation.clients.items()}, 1: whole})


@pytest.mark.seconds
def test_running_statistics_of_shared_layers_are_averaged(federation):
    replies = [federation.coordinator.server.reply(k) for k in federation.clients]
    name = "backbone.body.1.running_mean"
    assert all(torch.equal(reply[name], replies[0][name]) for reply in replies)
    assert not [n for n in replies[0] if "running" in n and not n.startswith("backbone.body.1.")]
    own = [module.learner.state_dict()[name] for module in federation.clients.values()]
    assert not torch.equal(own[0], own[1])


@pytest.mark.seconds
def test_clients_learn_their_classes():
    federation = run(method(scheduler=None), few_classes(batch_size=16), rounds=4)
    assert np.mean([row.scores["acc"] for row in federation.rows]) > 0.65  # of two classes
    assert sum(row.n for row in federation.rows) == 180


# Options


@pytest.mark.seconds
def test_classes_are_mapped_as_given():
    mapping = [1, 0, 1, 0, 1, 0, 1, 0, 1, 0]
    federation = run(method(groups=2, mapping=mapping), few_classes(10, partition=ClassShards(1)), rounds=1)
    owned = {k: module.own_groups() for k, module in federation.clients.items()}
    assert owned == {k: [mapping[c] for c in classes] for k, classes in classes_of(federation).items()}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"groups": 11}, r"model.groups=11.*10 classes"),
        ({"groups": 2, "mapping": [0, 1]}, r"model.mapping=.*10 classes"),
        ({"depth": 5}, r"model.depth=5.*share 0 to 3"),
    ],
)
def test_options_that_do_not_fit_the_data(options, words):
    with pytest.raises(ConfigError, match=words):
        run(method(**options), digits(2, partition=IID()))


def test_it_has_no_factors():
    with pytest.raises(ConfigError, match=r"model.factorization"):
        client(PsiNet, factorization=object())


@pytest.mark.seconds
def test_one_class_in_a_batch_of_one():
    data = few_classes(10, partition=ClassShards(1), batch_size=1, train_fraction=0.05)
    assert run(method(backbone=TinyNet), data, rounds=1).rows
