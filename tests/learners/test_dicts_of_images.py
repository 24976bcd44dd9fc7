"""The built-in classifier trains on dicts of bytes, as Hugging Face's data sets are, like on tuples of numbers."""

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from lit_pfl import Federation
from lit_pfl.cli.export import deployment
from lit_pfl.data import FromDataset, PerClient
from lit_pfl.engines import Stacked
from lit_pfl.errors import ConfigError
from lit_pfl.learners.classifier import images_in
from lit_pfl.methods import FedAvg, FedProto, FedRoD, StandAlone
from lit_pfl_callbacks import FeatureMap, RunLogger
from tiny import GroupNet, Site, TinyNet, assert_equal, run, trainer

PIXELS = torch.randint(0, 256, (48, 3, 12, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
CLASSES = torch.arange(48) % 4
NOTHING = {}


class Dicts(Dataset):
    def __init__(self, label: str = "label", named: bool = False):
        self.key, self.named = label, named

    def __len__(self):
        return len(PIXELS)

    def __getitem__(self, i):
        name = {"path": f"{i}.png"} if self.named else {}
        return {**name, "img": PIXELS[i], self.key: int(CLASSES[i])}


def fitted(method, dataset, labels, in_memory=True, made=NOTHING, **options):
    torch.manual_seed(1)
    data = FromDataset(dataset, labels=labels, num_clients=2, batch_size=8, in_memory=in_memory)
    return run(method(**{"backbone": TinyNet, **made}), data, seed=1, **options), data


def same_as_tuples(method, dicts, **options):
    federation, data = fitted(method, dicts, "label", **options)
    tuples, _ = fitted(method, TensorDataset(PIXELS / 255, CLASSES), CLASSES.tolist(), **options)
    for client, expected in tuples.clients.items():
        assert_equal(federation.clients[client].state_dict(), expected.state_dict())
    assert federation.trainer.callback_metrics["test/acc"] == tuples.trainer.callback_metrics["test/acc"]
    return federation, data


@pytest.mark.parametrize("method", [FedAvg, FedProto, FedRoD])
@pytest.mark.parametrize("named", [False, True])  # in memory; with names, read by a DataLoader
def test_the_same_bits(method, named):
    federation, data = same_as_tuples(method, Dicts(named=named), in_memory=not named)
    predicted = trainer().predict(federation, datamodule=data)
    assert predicted


def test_an_image_is_known_by_its_name():
    assert torch.equal(images_in({"mask": PIXELS[:2, :1], "image": PIXELS[:2]}), PIXELS[:2])
    assert images_in({"mask": PIXELS[:2, :1], "label": CLASSES[:2]}) is None


def test_in_a_stack():
    same_as_tuples(FedAvg, Dicts(), engine=Stacked(), made={"backbone": GroupNet, "channels_last": False})


@pytest.mark.seconds
def test_what_is_exported_takes_them_too(tmp_path):
    federation, data = fitted(FedAvg, Dicts(), "label")
    model = deployment(federation, data, 0)
    assert model.examples.dtype == torch.uint8
    model.save(tmp_path, onnx=False)
    program = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(program(PIXELS[:5]), federation.standalone(0)(PIXELS[:5] / 255))


def test_what_is_no_image_with_a_class_is_refused():
    with pytest.raises(ConfigError, match=r"this data has batches of \{img: uint8\[1, 3, 12, 12\], letter: int64\[1"):
        fitted(FedAvg, Dicts(label="letter"), "letter")
    three = TensorDataset(PIXELS / 255, torch.arange(48), CLASSES)
    with pytest.raises(ConfigError, match=r"batches of \(float32\[1, 3, 12, 12\], int64\[1\], int64\[1\]\); name the"):
        fitted(FedAvg, three, CLASSES.tolist())
    with pytest.raises(ConfigError, match=r"into which classes; give FromDataset labels, PerClient num_classes, or"):
        fitted(FedAvg, Dicts(), None)
    sites = PerClient([Site(TensorDataset(PIXELS / 255, CLASSES), 8) for _ in range(2)])
    with pytest.raises(ConfigError, match="into which classes"):
        trainer().fit(Federation(StandAlone(backbone=TinyNet)), datamodule=sites)


def test_callbacks_that_look_at_features(tmp_path):
    data = FromDataset(Dicts(), labels="label", num_clients=2, batch_size=8, train_fraction=0.5, val_fraction=0.3)
    federation = Federation(FedAvg(backbone=TinyNet), seed=1)
    logger = RunLogger(str(tmp_path), name="", version="run")
    trainer(1, callbacks=[FeatureMap()], logger=logger).fit(federation, datamodule=data)
    assert (tmp_path / "run" / "feature_map.csv").is_file()
