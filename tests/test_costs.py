"""What the papers' cost tables say, counted from real payloads."""

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
import yaml

from lit_pfl import Federation
from lit_pfl.core import Client
from lit_pfl.core.server import ClientInfo
from lit_pfl.data import ImageDataModule, ImageSet
from lit_pfl.methods import (
    APFL,
    FactorizedFL,
    FedAvg,
    FedFOMO,
    FedMA,
    FedRep,
    FedSLR,
    FedSpa,
    LGFedAvg,
    PsiNet,
    Scaffold,
)
from lit_pfl.models import VGG9, ResNet9, ResNet18, psi
from lit_pfl.nn import factorized_layers
from lit_pfl.nn.factorization import Factorization
from tiny import spec, trainer

ROOT = Path(__file__).parent.parent
# The tables' rounds: half of 99 for the label scenario (R = 50), 99 for the domain scenario (R = 100).
LABEL, DOMAIN = 49.5, 99
CLIENTS = 20


class Noise(ImageDataModule):
    """Colour images of 32 x 32 pixels without any meaning, a few for each client."""

    def load(self) -> ImageSet:
        n = 5 * self.num_clients
        images = torch.randint(256, (n, 3, 32, 32), dtype=torch.uint8)
        return ImageSet(images, torch.arange(n) % 10, 10, torch.zeros(3), torch.ones(3), channels=3)


class NoTest(Federation):
    """A federation whose models are of no interest."""

    def on_fit_end(self) -> None:
        self.engine.abort()


def elements_per_round(method: Client, rounds: int = 1) -> float:
    """Run some rounds among 20 clients; return the elements sent both ways in the last."""
    sent = [0]

    class Watch(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Federation) -> None:
            sent.append(pl_module.traffic.elements)

    fitting = trainer(rounds, check_val_every_n_epoch=9, callbacks=[Watch()])
    fitting.fit(NoTest(method, seed=1), datamodule=Noise(num_clients=CLIENTS))
    return sent[-1] - sent[-2]


def exchanged(method: Client, num_classes: int) -> tuple[Client, int, int]:
    """Return a client for colour images, and the elements that go down to it and up from it in its first round.

    No training is needed for that: what travels, and how dense it is, stands before.
    """
    member = method.build(spec(num_classes=num_classes, image_size=64 if num_classes == 200 else 32, local_epochs=3))
    server = member.configure_server()
    server.start({0: ClientInfo(500, member.initial())})
    reply = server.reply(0)
    member.download(reply)
    member._trainer = SimpleNamespace(optimizers=[])
    member.begin_round()
    member.end_round()
    return member, reply.elements, member.upload().elements


# FedSLR, Table 2: 1,000 rounds of 10 participants.
SLR_ROUNDS = 10 * 1000
#: number of classes, and the network's options
SLR_DATA = {
    "CIFAR-10": (10, {"bias": False}),
    "CIFAR-100": (100, {"bias": False}),
    "TinyImagenet": (200, {"stem": "large"}),
}


def slr(method: type[Client], data: str = "CIFAR-10", **options: object) -> tuple[Client, int, int]:
    classes, network = SLR_DATA[data]
    backbone = partial(ResNet18, norm="group", **network)
    return exchanged(method(backbone=backbone, **options), classes)


@pytest.mark.parametrize(
    ("method", "options", "cost", "parameters"),
    [
        (FedAvg, {}, 893.92, 11.17),
        (Scaffold, {}, 1787.83, 11.17),
        (APFL, {}, 893.92, 22.35),
    ],
)
def test_fedslr_s_table_prints_what_others_cost_with_the_network_of_cifar_10(method, options, cost, parameters):
    """For all three data sets."""
    member, down, up = slr(method, **options)
    assert round(gigabytes(down + up, SLR_ROUNDS), 2) == cost
    own = sum(p.numel() for learner in member.learners.values() for p in learner.parameters())
    assert round(own / 1e6, 2) == parameters


class Trained(FedSpa):
    """Has two images, and a training that moves every weight that its mask leaves."""

    def training_data(self):
        return [(torch.randn(2, 3, 32, 32), torch.tensor([0, 1]))]

    @torch.no_grad()
    def end_round(self) -> None:
        active = dict(self.masks.items())
        for name, tensor in self.shared_parameters().items():
            tensor.add_(active.get(name, 1))
        super().end_round()


@pytest.mark.slow
def test_fedspa_costs_what_the_table_prints():
    """Half of everything, normalisation layers included, both ways; masks and the round's number count for nothing."""
    row = yaml.safe_load((ROOT / "configs/paper/fedslr/rows/fedspa.yaml").read_text())["model"]["init_args"]
    member, down, up = slr(Trained, **row)
    assert member.regrow == "gradient"
    active, norms, round_number = sum(int(mask.sum()) for _, mask in member.masks.items()), 9_600, 1
    assert down == active + norms + round_number
    assert up == active + norms
    assert down == pytest.approx(11_173_952 / 2, abs=30)  # every layer rounds its share
    assert round(gigabytes(down + up, SLR_ROUNDS), 2) == 446.96
    assert round(down / 1e6, 2) == 5.59
    weights = sum(mask.numel() for _, mask in member.masks.items())
    upload = member.upload()  # where it is not zero, and the new mask: a bit for a weight each
    assert upload.nbytes == pytest.approx(4 * up + 2 * weights / 8, rel=0.01)
    assert upload.nbytes == len(upload.to_bytes())


@pytest.mark.parametrize(
    ("data", "head", "body"), [("CIFAR-10", 0.41, 893.51), ("CIFAR-100", 4.08, 889.84), ("TinyImagenet", 8.13, 885.78)]
)
def test_fedslr_s_table_divides_that_cost_by_each_network_s_own_head(data, head, body):
    """The share of the data set's own head, of the cost of CIFAR-10's network."""
    of_all = gigabytes(sum(slr(FedAvg)[1:]), SLR_ROUNDS)
    whole = sum(slr(FedAvg, data)[1:])
    assert round(of_all * sum(slr(LGFedAvg, data)[1:]) / whole, 2) == head
    # the table cuts 885.785 off
    assert of_all * sum(slr(FedRep, data, mode="joint")[1:]) / whole == pytest.approx(body, abs=6e-3)


def test_fedslr_begins_as_dense_as_fedavg_and_uploads_stay_so():
    member, down, up = slr(FedSLR)
    assert down == up == 11_173_952
    assert member.sizes("GKR") == {"parameters": 11_173_952}
    assert gigabytes(up, SLR_ROUNDS) == pytest.approx(446.96, abs=5e-3)


def gigabytes(elements: float, rounds: float) -> float:
    return elements * 4 * rounds / 1e9


@pytest.mark.seconds
def test_fedavg_costs_what_the_table_prints():
    elements = elements_per_round(
        FedAvg(backbone=ResNet9, norm_stats="averaged")
    )  # all of the state_dict, running statistics too
    assert elements == CLIENTS * 2 * 2_574_290
    assert round(gigabytes(elements, LABEL), 2) == 20.39
    assert round(gigabytes(elements, DOMAIN), 2) == 40.78


@pytest.mark.slow
def test_fedfomo_costs_what_the_table_prints():
    """Twelve transfers: one up, and eleven models down; the weights that clients send beside count for nothing."""
    elements = elements_per_round(FedFOMO(backbone=ResNet9, num_models=11, norm_stats="averaged"), rounds=2)
    assert elements == CLIENTS * (12 * 2_574_290 + 11)
    assert round(gigabytes(elements, LABEL), 2) == 122.33
    assert round(gigabytes(elements, DOMAIN), 2) == 244.66


@pytest.mark.slow
def test_factorized_fl_by_the_papers_definition_and_as_it_is_sent():
    """The paper prints 0.32 and 0.64, which its own definition, |U| + |V^(L-1)| up and |U| down, does not give."""
    method = FactorizedFL(backbone=ResNet9, share_head=False)
    elements = elements_per_round(method)
    norms = 2 * 1_472
    assert elements == CLIENTS * (2 * 88 + 65_536 + 2 * norms)
    by_definition = elements - CLIENTS * 2 * norms
    assert round(gigabytes(by_definition, LABEL), 3) == 0.26
    assert round(gigabytes(by_definition, DOMAIN), 3) == 0.52
    assert round(gigabytes(elements, LABEL), 3) == 0.284
    assert round(gigabytes(elements, DOMAIN), 3) == 0.567


# Factorized-FL, Fig. 8 (i): lambda and the size of the network in millions
SIZES = {1e-4: 2.731, 3e-4: 2.515, 5e-4: 2.283, 7e-4: 2.068, 1e-3: 1.784}


@pytest.mark.parametrize(("threshold", "millions"), SIZES.items())
def test_the_size_follows_the_threshold_as_in_the_paper(threshold, millions):
    """With entries of mu spread as they must have been there, a normal distribution of deviation 1.86e-3."""
    kind = Factorization(form="FFxIO", threshold=threshold)
    member = FactorizedFL(backbone=ResNet9, mixes="uvm", factorization=kind, share_head=False).build(spec())
    torch.manual_seed(0)
    for _, layer in factorized_layers(member):
        torch.nn.init.normal_(layer.mu, std=1.86e-3)
    sent = member.upload()
    norms = sum(tensor.numel() for name, tensor in sent.items() if name.endswith(("weight", "bias")))
    assert (sent.elements - norms) / 1e6 == pytest.approx(millions, rel=0.01)


DOCS = ROOT / "docs/psi_net.md"


def rows_of(section: str) -> list[list[str]]:
    """Return the cells of the last table of a section of Psi-Net's page."""
    text = DOCS.read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"][2:]


def test_psi_nets_page_has_the_parameters_of_its_networks():
    """Those of psi's documentation, which a test of its own counts."""
    documented = re.findall(r"^ *(\w+ +\d+(?:  +[\d,]+)+)$", psi.__doc__ or "", re.MULTILINE)
    assert rows_of("Parameters") == [line.split() for line in documented]


@pytest.mark.slow
def test_what_travels_of_vgg_9_in_psi_nets_comparison():
    """A node's elements in a round, down and up. Of FedMA nine rounds, of which the last reply comes with the next."""
    classes = (3, 4, 5, 10)

    def of_psi_net(own: int, **options: bool) -> int:
        member = PsiNet(**options).build(spec())
        member.own_groups = lambda: list(range(own))  # type: ignore[method-assign]
        server = member.configure_server()
        server.start({0: ClientInfo(500, member.initial())})
        return member.upload().elements + server.reply(0).elements

    def of_fedma() -> int:
        member = FedMA().build(spec())
        member._class_counts = lambda: torch.ones(10, dtype=torch.int32)  # type: ignore[method-assign]
        server = member.configure_server()
        server.start({0: ClientInfo(500, member.initial())})
        sent = 0
        for round in range(1, 10):
            upload = member.upload()
            server.aggregate(round, {0: upload})
            reply = server.reply(0)
            member.download(reply)
            sent += upload.elements + reply.elements
        return sent

    batch = partial(VGG9, norm="batch")
    plain, normed = (
        2 * FedAvg(backbone=network, norm_stats="averaged").build(spec()).upload().elements for network in (VGG9, batch)
    )
    expected = [
        [plain] * 4, [normed] * 4, [of_fedma()] * 4,
        [of_psi_net(c) for c in classes], [of_psi_net(c, trim=False) for c in classes],
    ]  # fmt: skip
    assert [[int(cell.replace(",", "")) for cell in row[2:]] for row in rows_of("What is sent")] == expected
