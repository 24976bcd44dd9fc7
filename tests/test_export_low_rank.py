"""Models of low rank, and sparse ones beside them, by themselves."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from lit_pfl.errors import ConfigError
from lit_pfl.export import load_mixed, load_model, low_rank_weights, save_mixed, save_model, save_program, to_factors
from lit_pfl.learners import Mixture
from lit_pfl.methods import FedSLR
from lit_pfl.methods.factorized.fedslr import MIXED
from lit_pfl.models import ResNet18
from lit_pfl.ops.low_rank import as_matrix, as_weight
from test_export import data_bytes
from tiny import GroupNet, client, digits, run

EXAMPLE = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def shrunk(network, rank):
    """Bring all convolutions and linear layers to a rank."""
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            u, s, vt = torch.linalg.svd(as_matrix(layer.weight.detach()).double(), full_matrices=False)
            matrix = (u[:, :rank] * s[:rank]) @ vt[:rank]
            layer.weight.data = as_weight(matrix, layer.weight.shape).float()
    return network.eval()


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(6, 8, 3, padding=1),
        nn.Conv2d(6, 8, (5, 3), stride=(2, 1), padding=(2, 0), dilation=(1, 2), bias=False),
        nn.Conv2d(6, 8, 1, stride=2),
        nn.Linear(32, 9),
        nn.Linear(32, 9, bias=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_two_layers_compute_what_one_does(layer, rank):
    layer.reset_parameters()
    layer = shrunk(layer, rank)
    halves = to_factors(layer)
    assert [type(half) for half in halves] == [type(layer)] * 2
    x = EXAMPLE.reshape(3, 6, 16, 32)
    torch.testing.assert_close(halves(x), layer(x), atol=1e-5, rtol=1e-5)
    elements = sum(p.numel() for p in halves.parameters()) - (layer.bias is not None) * len(layer.weight)
    assert elements == max(rank, 1) * sum(as_matrix(layer.weight).shape)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(6, 8, 3, padding="same"),
        nn.Conv2d(6, 8, 3, groups=2),
        nn.Conv2d(6, 8, 3, padding=1, padding_mode="circular"),
        nn.ConvTranspose2d(6, 8, 3),
        nn.Linear(0, 5),
    ],
    ids=str,
)
def test_what_cannot_be_divided_stays(layer):
    if isinstance(layer, nn.Conv2d):
        layer = shrunk(layer, 1)
    assert type(to_factors(layer)) is type(layer)


class InTwoPlaces(nn.Module):
    """One layer twice, and two layers of one weight."""

    def __init__(self):
        super().__init__()
        self.a, self.c, self.d = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.b, self.d.weight = self.a, self.c.weight

    def forward(self, x):
        return self.d(self.c(self.b(self.a(x).relu()).relu()).relu())


def test_weights_in_two_places(tmp_path):
    common, personal, loaded, x = shrunk(InTwoPlaces(), 2), InTwoPlaces(), InTwoPlaces(), torch.randn(3, 16)
    factors = to_factors(common)
    torch.testing.assert_close(factors(x), common(x), atol=1e-5, rtol=1e-5)
    assert factors.a is factors.b
    save_mixed(common, personal, tmp_path / "mixed")
    load_mixed(tmp_path / "mixed", loaded)
    for name, weight in loaded.named_parameters(remove_duplicate=False):
        both = common.get_parameter(name) + personal.get_parameter(name)
        torch.testing.assert_close(weight, both, atol=1e-5, rtol=1e-5)


def test_a_transformer_s_layer_finds_its_weights():
    layer, x = nn.TransformerEncoderLayer(16, 2, 64, batch_first=True), torch.randn(2, 3, 16)
    with torch.no_grad():
        torch.testing.assert_close(to_factors(shrunk(layer, 1))(x), layer(x))


def test_full_rank_stays():
    network = ResNet18(3, 10, width=4, norm="group", bias=False).eval()
    assert not low_rank_weights(network)
    assert str(to_factors(network)) == str(network)


@pytest.mark.parametrize("rank", [1, 4])
def test_a_network_by_its_factors(rank):
    network = shrunk(ResNet18(3, 10, width=8, norm="group", bias=False), rank)
    state = torch.get_rng_state()
    factored = to_factors(network)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(factored(EXAMPLE), network(EXAMPLE), atol=1e-4, rtol=1e-4)
    expected = sum(
        min(p.numel(), rank * sum(as_matrix(p).shape)) if p.dim() > 1 else p.numel() for p in network.parameters()
    )
    assert sum(p.numel() for p in factored.parameters()) == expected
    payload = save_model(factored, "gkr.safetensors")
    assert payload.elements == expected
    plain = safetensors.torch.load_file("gkr.safetensors")
    assert plain.keys() == factored.state_dict().keys()
    other = to_factors(shrunk(ResNet18(3, 10, width=8, norm="group", bias=False), rank))
    assert torch.equal(load_model("gkr.safetensors", other)(EXAMPLE), factored(EXAMPLE))


SCRIPT = """
import sys
sys.modules["lit_pfl"] = sys.modules["lit_pfl_callbacks"] = None
import torch
network = torch.export.load("model.pt2").module()
images = torch.load("images.pt")
torch.save(network(images), "logits.pt")
"""


@pytest.mark.slow
def test_a_program_runs_without_this_library():
    network = to_factors(shrunk(GroupNet(3, 10), 2))
    save_program(network, "model.pt2", torch.zeros(2, 3, 32, 32))
    torch.save(EXAMPLE, "images.pt")
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
    torch.testing.assert_close(torch.load("logits.pt"), network.eval()(EXAMPLE))


@pytest.mark.seconds
def test_a_mixture_of_networks_is_a_program_for_batches_of_any_size(tmp_path):
    mixture = Mixture(GroupNet(3, 10), GroupNet(3, 10), torch.tensor(0.3))
    save_program(mixture, tmp_path / "model.pt2", torch.zeros(2, 3, 32, 32))
    program = torch.export.load(tmp_path / "model.pt2").module()
    for images in (EXAMPLE, EXAMPLE[:1]):
        torch.testing.assert_close(program(images), mixture(images))


@pytest.mark.seconds
@pytest.mark.parametrize("permute_labels", [False, True])
def test_the_models_of_a_federation(permute_labels):
    method = client(FedSLR, lam=0.08, mu=0.02, backbone=GroupNet)
    federation = run(method, digits(2, permute_labels=permute_labels), rounds=2, local_epochs=3)
    member = federation.clients[1]
    images, _ = next(iter(federation.data.client(1).test))
    member.eval()
    common = to_factors(member.backbone)
    torch.testing.assert_close(common(images), member.backbone(images), atol=1e-5, rtol=1e-5)

    payload = save_mixed(member.backbone, member.personal.backbone, "mixed.safetensors")
    assert payload.low_rank
    nonzero = sum(int((p != 0).sum()) for p in member.personal.parameters())
    assert payload.elements == member.common_parameters + nonzero
    assert nonzero < sum(p.numel() for p in member.personal.parameters())
    loaded = load_mixed("mixed.safetensors", GroupNet(1, 10)).eval()
    with member.as_evaluated(MIXED) as mixed:
        torch.testing.assert_close(loaded(images), mixed(images), atol=1e-5, rtol=1e-5)
    assert Path("mixed.safetensors").stat().st_size == payload.nbytes
    assert data_bytes("mixed.safetensors") < 4 * (payload.elements + nonzero) + 200


def test_mistakes():
    network = GroupNet(1, 10)
    save_mixed(network, network, "mixed")
    with pytest.raises(ConfigError, match="mixed does not fit this ResNet18: "):
        load_mixed("mixed", ResNet18(width=4))
    save_model(network, "model")
    with pytest.raises(ConfigError, match="model does not fit this GroupNet"):
        load_mixed("model", network)
    Path("garbage").write_bytes(b"garbage garbage")
    with pytest.raises(ConfigError, match="garbage is not a file of save_mixed"):
        load_mixed("garbage", network)
    values = {name: p.detach().clone() for name, p in network.named_parameters()}
    doubled = load_mixed("mixed", network)
    for name, p in doubled.named_parameters():
        np.testing.assert_array_equal(p.detach(), 2 * values[name])
