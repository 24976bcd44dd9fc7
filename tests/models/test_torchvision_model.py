"""Torchvision's networks, cut in two."""

import csv
from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn

from lit_pfl.cli import main
from lit_pfl.errors import ConfigError
from lit_pfl.models import TorchvisionModel

TINY = ["--config", str(Path(__file__).parent.parent / "conf/tiny.yaml")]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("resnet18", 512), ("mobilenet_v3_small", 1024), ("shufflenet_v2_x0_5", 1024),
        ("densenet121", 1024), ("swin_t", 768),
    ],
)  # fmt: skip
def test_body_and_head_together_are_torchvision_s_network(name, features):
    torch.manual_seed(1)
    whole = torchvision.models.get_model(name, num_classes=7).eval()
    torch.manual_seed(1)
    model = TorchvisionModel(3, 7, name).eval()
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        embedding = model.body(x)
        assert torch.equal(model.head(embedding), whole(x))
    assert isinstance(model.head, nn.Linear)
    assert (embedding.shape, model.head.in_features, model.head.out_features) == ((2, features), features, 7)
    assert sum(t.numel() for t in model.state_dict().values()) == sum(t.numel() for t in whole.state_dict().values())


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "vgg11"])
def test_grey_images_get_a_first_convolution_of_their_own(name):
    model = TorchvisionModel(1, 7, name)
    assert model(torch.randn(2, 1, 64, 64)).shape == (2, 7)
    first = next(m for m in model.modules() if isinstance(m, nn.Conv2d))
    assert first.weight.shape[1] == first.in_channels == 1
    assert 0 < first.weight.std() < 1
    with pytest.raises(RuntimeError, match="channels"):
        model(torch.randn(2, 3, 64, 64))


@pytest.mark.seconds
def test_options_of_the_network():
    model = TorchvisionModel(name="vit_b_16", options={"image_size": 32})
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 10)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet81", None, r"model\.backbone\.name: torchvision has no 'resnet81'; choose one of resnet18, "),
        ("no such thing", None, r"torchvision has no 'no such thing'; choose one of alexnet, .*, vgg11"),
        ("squeezenet1_0", None, "squeezenet1_0 does not end in a fully connected layer"),
        ("googlenet", {"init_weights": False}, r"set model\.backbone\.options\.aux_logits=false"),
        ("resnet18", {"depth": 3}, r"model\.backbone\.options=\{'depth': 3\} do not suit resnet18: "),
        ("resnet18", {"num_classes": 3}, "do not suit resnet18"),
    ],
)
def test_mistakes(name, options, message):
    with pytest.raises(ConfigError, match=message):
        TorchvisionModel(3, 10, name, options)


@pytest.mark.slow
def test_from_the_command_line(capsys):
    model = ["--model", "FedAvg", "--model.backbone", "TorchvisionModel", "--model.backbone.name"]
    short = [
        "--trainer.max_epochs",
        "1",
        "--data.num_clients",
        "2",
        "--federation.client_trainer.limit_train_batches=1",
    ]
    main(["fit", *TINY, *model, "shufflenet_v2_x0_5", *short])
    with Path("runs/FedAvg-Digits/version_0/metrics.csv").open(newline="") as file:
        assert float(next(csv.DictReader(file))["test/acc"]) >= 0
    with pytest.raises(SystemExit):
        main(["fit", *TINY, *model, "shufflenet", *short])
    assert (
        "model.backbone.name: torchvision has no 'shufflenet'; choose one of shufflenet_v2" in capsys.readouterr().err
    )
