"""Personalized networks by themselves."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn
from torchvision.models import SwinTransformer

from lit_pfl import Payload
from lit_pfl.errors import ConfigError
from lit_pfl.export import load_model, save_model, to_dense
from lit_pfl.learners.scoring import score
from lit_pfl.methods import SimFed
from lit_pfl.models import CNN, ResNet9, ResNet18, TorchvisionModel
from lit_pfl.nn import FactorizedConv2d, FactorizedLinear, HadamardConv2d, factorize, factorized_layers, hadamard
from lit_pfl.nn.factorization import Factorization
from tiny import TinyNet, assert_equal, client, digits, run, spec

WAYS = {
    "dense": lambda network: network,
    "IFxOF": lambda network: factorize(network, "IFxOF", rank=2),
    "FFxIO": lambda network: factorize(network, "FFxIO", threshold=0.02),
    "rawview": lambda network: factorize(network, "FFxIO", pi="rawview", threshold=0.02),
    "without mask": lambda network: factorize(network, mask=False),
    "FedPara": lambda network: hadamard(network),
    "pFedPara": lambda network: hadamard(network, personal=True),
}
NETWORKS = {
    "ResNet9": lambda: ResNet9(3, 7, width=4, fc_layers=2, fc_norm=True),
    "ResNet18": lambda: ResNet18(3, 7, width=4, norm="group", bias=False),
    "mobilenet": lambda: TorchvisionModel(3, 7, "mobilenet_v3_small"),
    "swin": lambda: SwinTransformer([4, 4], 12, [2, 2], [2, 3], [4, 4], num_classes=7),  # reads its layers' weights
}


def made(network="ResNet9", way="FFxIO", seed=1):
    torch.manual_seed(seed)
    return WAYS[way](NETWORKS[network]())


def trained(network="ResNet9", way="FFxIO"):
    """A network with nothing at its initial value any more."""
    model = made(network, way)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor += 0.05 * torch.rand(tensor.shape)
            elif tensor.ndim == 0:  # a number of batches
                tensor += 3
        for _, layer in factorized_layers(model):
            if layer.mu is not None:
                nn.init.normal_(layer.mu, std=0.02)
    return model


@torch.no_grad()
def logits(model):
    training = model.training
    generator = torch.Generator().manual_seed(0)
    out = model.eval()(torch.randn(2, 3, 64, 64, generator=generator))
    model.train(training)
    return out


def data_bytes(path):
    """Length of a safetensors file beyond its header."""
    data = Path(path).read_bytes()
    return len(data) - 8 - int.from_bytes(data[:8], "little")


@pytest.mark.few(10)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("network", NETWORKS)
def test_the_same_logits_after_saving_and_loading(network, way):
    model = trained(network, way)
    payload = save_model(model, "here/model.safetensors")
    assert Path("here/model.safetensors").stat().st_size == payload.nbytes
    assert [path.name for path in Path("here").iterdir()] == ["model.safetensors"]  # no unfinished file is left
    other = made(network, way, seed=2)
    assert not torch.equal(logits(other), logits(model))
    assert load_model("here/model.safetensors", other) is other
    assert torch.equal(logits(other), logits(model))


@pytest.mark.few(10)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("network", NETWORKS)
def test_the_dense_copy_computes_the_same_and_needs_nothing_of_this_library(network, way):
    model = trained(network, way)
    expected = logits(model)
    random_state, before = torch.get_rng_state(), {name: t.clone() for name, t in model.state_dict().items()}
    dense = to_dense(model)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert_equal(dict(model.state_dict()), before)
    torch.testing.assert_close(logits(dense), expected, atol=1e-5, rtol=1e-5)
    assert not [m for m in dense.modules() if type(m).__module__.startswith("lit_pfl.nn")]
    assert all(m.training for m in dense.modules())
    pointers = {t.data_ptr() for t in model.state_dict().values() if t.numel()}
    assert not pointers & {t.data_ptr() for t in dense.state_dict().values() if t.numel()}

    save_model(dense, "plain.safetensors")
    plain = made(network, "dense", seed=2)
    plain.load_state_dict(safetensors.torch.load_file("plain.safetensors"))
    assert torch.equal(logits(plain), logits(dense))
    assert data_bytes("plain.safetensors") == sum(t.nbytes for t in plain.state_dict().values())


def test_a_plain_resnet9_from_the_file_of_a_factorized_one():
    model = factorize(ResNet9(3, 10, width=8), "IFxOF")
    save_model(to_dense(model), "plain.safetensors")
    plain = ResNet9(3, 10, width=8)
    plain.load_state_dict(safetensors.torch.load_file("plain.safetensors"), strict=True)
    assert torch.equal(logits(plain), logits(model))
    for path, layer in factorized_layers(model):
        assert torch.equal(plain.get_submodule(path).weight, layer.weight)


def test_the_dense_weight_is_that_of_evaluation():
    layer = factorize(nn.Conv2d(4, 9, 3), "FFxIO", threshold=0.5)
    nn.init.normal_(layer.mu)
    assert layer.training
    dense = to_dense(layer)
    assert type(dense) is nn.Conv2d
    assert dense.training
    kept = torch.where(layer.mu.abs() < 0.5, 0.0, layer.mu)
    product = (layer.u @ layer.v.T).view(3, 3, 4, 9).permute(3, 2, 0, 1)
    torch.testing.assert_close(dense.weight, product + kept)
    assert layer.training
    assert (layer.mu != kept).any()


@pytest.mark.parametrize(
    "layer",
    [
        FactorizedConv2d(6, 4, (5, 3), stride=(2, 1), padding=(2, 1), dilation=(1, 2), groups=2, bias=False),
        FactorizedConv2d(3, 4, 3, padding="same", form="FFxIO", rank=3),
        HadamardConv2d(6, 4, (3, 1), stride=2, padding=1, groups=2, rank=2),
        FactorizedLinear(64, 5, bias=False, rank=2),
    ],
    ids=str,
)
def test_a_layer_by_itself(layer):
    x = torch.randn(2, layer.in_features) if isinstance(layer, FactorizedLinear) else None
    x = x if x is not None else torch.randn(2, layer.weight_shape[1] * layer.groups, 16, 16)
    dense = to_dense(layer)
    assert type(dense) in (nn.Conv2d, nn.Linear)
    torch.testing.assert_close(dense(x), layer(x))
    assert (dense.bias is None) == (layer.bias is None)
    dense(x).sum().backward()
    assert dense.weight.grad is not None
    save_model(layer, "layer")
    assert load_model("layer", layer) is layer


def test_the_dense_copy_keeps_types_modes_lay_outs_and_layers_used_twice():
    twice = FactorizedLinear(4, 4)
    network = nn.Sequential(twice, nn.Sequential(twice), nn.ModuleList([twice, FactorizedLinear(4, 4)])).double()
    network[2].eval()
    dense = to_dense(network)
    assert dense[0] is dense[1][0] is dense[2][0]
    assert dense[2][1] is not dense[0]
    assert dense[0].weight.dtype == torch.float64
    assert (dense[1].training, dense[2][1].training) == (True, False)
    model = made("ResNet9", "IFxOF").to(memory_format=torch.channels_last)
    assert torch.equal(logits(to_dense(model)), logits(model))


@pytest.mark.parametrize("density", [0.1, 0.5, 1.0])
def test_the_size_on_disk_is_what_the_sparsity_says(density):
    model = factorize(ResNet9(3, 10, width=8), "FFxIO", threshold=0.5)
    kept = total = 0
    with torch.no_grad():
        for _, layer in factorized_layers(model):
            nn.init.uniform_(layer.mu, -0.49, 0.49)  # all of it below the threshold, but for a share
            chosen = torch.randperm(layer.mu.numel())[: round(density * layer.mu.numel())]
            layer.mu.view(-1)[chosen] = 0.5 * torch.randint(0, 2, chosen.shape).mul(2).sub(1)
            kept, total = kept + len(chosen), total + layer.mu.numel()
    payload = save_model(model, "model")
    others = sum(t.nbytes for name, t in model.state_dict().items() if not name.endswith(".mu"))
    bits = sum((layer.mu.numel() + 7) // 8 for _, layer in factorized_layers(model)) if density < 1 else 0
    assert data_bytes("model") == others + bits + 4 * kept
    assert Path("model").stat().st_size == payload.nbytes
    assert payload.elements == sum(t.numel() for t in model.state_dict().values()) - total + kept
    stored = safetensors.torch.load_file("model")
    name = "body.6.0.mu#values" if density < 1 else "body.6.0.mu"
    assert stored[name].numel() == round(density * 64 * 8 * 2 * 9)
    header = json.loads(Path("model").read_bytes()[8 : 8 + int.from_bytes(Path("model").read_bytes()[:8], "little")])
    assert ("__metadata__" in header) == (density < 1)


def test_what_is_written_is_what_the_client_would_send():
    """Section 4 of Factorized-FL counts a model as |u| + |v| + the entries of mu from the threshold up."""
    model = factorize(ResNet9(3, 10, width=4), "FFxIO", threshold=0.01)
    for _, layer in factorized_layers(model.body):
        nn.init.normal_(layer.mu, std=0.02)
    save_model(model, "model")
    arrived = Payload.from_bytes(Path("model").read_bytes())
    layers = dict(factorized_layers(model.body))
    counted = sum(m.u.numel() + m.v.numel() + int((m.mu.abs() >= 0.01).sum()) for m in layers.values())
    own = {f"body.{path}.{factor}" for path in layers for factor in ("u", "v", "mu")}
    names = [name for name in arrived if name in own]
    assert sum(int((arrived[n] != 0).sum()) if n.endswith("mu") else arrived[n].numel() for n in names) == counted


def test_layers_that_take_their_shape_from_their_input():
    model = CNN(1, 5)
    with pytest.raises(ConfigError, match=r"Cannot save 'body\.7\.weight': it has no shape yet"):
        save_model(model, "model")
    x = torch.randn(2, 1, 20, 20)
    model(x)
    save_model(model, "model")
    assert torch.equal(load_model("model", CNN(1, 5))(x), model(x))


def test_mistakes_name_the_tensor_and_change_nothing():
    model = trained("ResNet9", "FFxIO")
    save_model(model, "model")
    cases = {
        "ResNet9: it has no 'body.0.0.weight'": made("ResNet9", "dense"),
        "it holds 'body.10.bias', which the network does not have": ResNet9(3, 7, width=4),
        r"its 'body.0.0.u' has shape \(9, 1\), the network's \(9, 2\)": factorize(
            ResNet9(3, 7, 4, 2, True), "FFxIO", rank=2
        ),
        r"its 'head.v' has shape \(7, 1\), the network's \(8, 1\)": factorize(ResNet9(3, 8, 4, 2, True), "FFxIO"),
    }
    save_model(trained("ResNet9", "dense"), "dense")
    for message, other in cases.items():
        before = {name: t.clone() for name, t in other.state_dict().items()}
        with pytest.raises(ConfigError, match=message):
            load_model("dense" if "holds" in message else "model", other)
        assert_equal(dict(other.state_dict()), before)
    with pytest.raises(FileNotFoundError, match="no such"):
        load_model("no such", model)
    for garbage in (b"\x80\x04pickle", Path("model").read_bytes()[:-1], b"x"):
        Path("garbage").write_bytes(garbage)
        with pytest.raises(ConfigError, match="garbage is not a file of save_model"):
            load_model("garbage", model)


def test_an_entry_that_is_no_tensor():
    class Odd(nn.Linear):
        def get_extra_state(self):
            return {"a": 1}

        def set_extra_state(self, state):
            pass

    with pytest.raises(ConfigError, match="Cannot save '_extra_state': it is not a tensor but dict"):
        save_model(Odd(2, 2), "model")


@pytest.mark.parametrize("step", ["os.fsync", "pathlib.Path.replace"])
def test_a_write_that_fails_leaves_the_former_file_whole(monkeypatch, step):
    save_model(trained(), "model")
    before = Path("model").read_bytes()

    def fails(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(step, fails)
    with pytest.raises(OSError, match="No space left"):
        save_model(trained("ResNet18"), "model")
    assert Path("model").read_bytes() == before
    assert [path.name for path in Path().iterdir()] == ["model"]


@pytest.mark.seconds
@pytest.mark.parametrize("threshold", [0.0, 0.02])
def test_the_whole_life(threshold):
    """Two rounds of a federation; one client's model goes to a file, and scores the same wherever it is loaded."""
    factorization = Factorization(form="FFxIO", l1=1e-3, threshold=threshold)
    method = client(SimFed, tau=-1.0, alpha=1.0, factorization=factorization)
    federation = run(method, digits(), rounds=2, local_epochs=4)
    member, batches = federation.clients[2], federation.data.client(2).test
    [scored] = [row for row in federation.rows if row.client == 2]
    save_model(member.backbone, "client 2.safetensors")

    fresh = method.build(spec(2, channels=1, image_size=8))
    assert score(fresh.learner, batches, "test").values["acc"] != scored.scores["acc"]
    load_model("client 2.safetensors", fresh.backbone)
    assert scored.scores.keys() == {"acc", "loss"}
    assert score(fresh.learner, batches, "test").values == scored.scores
    mu = torch.cat([layer.mu.flatten() for _, layer in factorized_layers(fresh.backbone)])
    assert mu[mu != 0].abs().min() >= threshold
    assert threshold == 0.0 or (mu == 0).float().mean() > 0.05

    save_model(to_dense(member.backbone), "plain.safetensors")
    plain = TinyNet(1, 10).eval()
    plain.load_state_dict(safetensors.torch.load_file("plain.safetensors"))
    right = sum(int((plain(images).argmax(1) == labels).sum()) for images, labels in batches)
    assert right / scored.n == pytest.approx(scored.scores["acc"], abs=1e-9)
    assert scored.scores["acc"] > 0.3
