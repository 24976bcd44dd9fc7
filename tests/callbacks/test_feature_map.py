"""Maps of how samples are represented, in plain Lightning projects and in federations."""

import csv

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_pfl import Federation
from lit_pfl.methods import FedAvg, FedSLR
from lit_pfl_callbacks import FeatureMap, RunLogger
from lit_pfl_callbacks.features.map import represented, t_sne
from tiny import client, digits, trainer


class Classifier(L.LightningModule):
    """Somebody's: its head comes first among its layers and runs last, and what it returns is not the head's output."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)
        self.hidden, self.norm = nn.Linear(4, 5), nn.LayerNorm(5)

    def forward(self, x):
        return self.head(self.norm(self.hidden(x)).relu()).log_softmax(1)

    def training_step(self, batch, batch_idx):
        return nn.functional.nll_loss(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def samples(n: int = 40) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(n, 4, generator=generator), torch.arange(n) % 3)


def fit(tmp_path, callback: L.Callback | None, module: L.LightningModule | None = None, data=None) -> Classifier:
    torch.manual_seed(2)
    module = module or Classifier()
    fitting = trainer(
        2,
        callbacks=[callback] if callback else [],
        logger=RunLogger(str(tmp_path), name="", version="run") if tmp_path else False,
    )
    fitting.fit(module, DataLoader(data or samples(), batch_size=8, shuffle=True))
    return module


def rows(tmp_path) -> list[dict[str, str]]:
    return list(csv.DictReader((tmp_path / "run/feature_map.csv").open()))


def test_what_the_last_layer_sees():
    module, data = Classifier(), samples(20)
    features, labels, predicted = represented(module, DataLoader(data, batch_size=8), 12)
    x, y = data.tensors[0][:12], data.tensors[1][:12]
    torch.testing.assert_close(features, module.norm(module.hidden(x)).relu().detach())
    assert torch.equal(labels, y)
    assert torch.equal(predicted, module(x).argmax(1))
    assert module.training
    assert not module.head._forward_pre_hooks


def test_a_plain_project_gets_a_file(tmp_path):
    callback = FeatureMap(samples=30)
    fit(tmp_path, callback)
    found = rows(tmp_path)
    assert len(found) == len(callback.rows) == 30
    assert {row["client"] for row in found} == {""}
    assert {row["label"] for row in found} == set("012")
    assert torch.tensor([[float(row["x"]), float(row["y"])] for row in found]).std(0).min() > 0.1


def test_training_goes_on_as_if_nobody_had_looked(tmp_path):
    torch.manual_seed(5)
    alone, drawn = fit(None, None).state_dict(), torch.rand(1)
    watched = fit(None, FeatureMap()).state_dict()
    assert all(torch.equal(watched[name], tensor) for name, tensor in alone.items())
    assert torch.equal(torch.rand(1), drawn)


@pytest.mark.seconds
@pytest.mark.parametrize("method", [FedAvg, FedSLR])
def test_clients_of_a_federation_are_drawn_by_their_personalized_models(tmp_path, method):
    federation = Federation(client(method), seed=1, threads=1)
    logger = RunLogger(str(tmp_path), name="", version="run")
    trainer(2, callbacks=[FeatureMap(clients=[2, 0])], logger=logger).fit(federation, datamodule=digits(3))
    found = rows(tmp_path)
    assert {row["client"] for row in found} == {"0", "2"}
    own = federation.clients[2].data.val
    with torch.no_grad():
        expected = torch.cat([federation.standalone(2).eval()(x).argmax(1) for x, _ in own])
    assert [int(row["predicted"]) for row in found if row["client"] == "2"] == expected.tolist()


@pytest.mark.seconds
def test_four_clients_unless_it_is_said_which(tmp_path):
    federation, callback = Federation(client(FedAvg), seed=1, threads=1), FeatureMap()
    trainer(1, callbacks=[callback]).fit(federation, datamodule=digits(6))
    assert {row["client"] for row in callback.rows} == {0, 1, 2, 3}


def test_groups_that_are_apart_stay_apart():
    features = torch.cat([torch.randn(40, 6) + 30 * torch.eye(6)[i] for i in range(3)])
    groups = t_sne(features).reshape(3, 40, 2)
    middle = groups.mean(1)
    assert (torch.cdist(groups.flatten(0, 1), middle).argmin(1) == torch.arange(3).repeat_interleave(40)).all()
    assert torch.equal(t_sne(features), groups.flatten(0, 1))


@pytest.mark.parametrize(("n", "d"), [(4, 1), (4, 3), (5, 100), (50, 1)])
def test_few_samples_and_few_features(n, d):
    assert t_sne(torch.randn(n, d)).isfinite().all()


@pytest.mark.parametrize("value", [0.0, 7.0, 1e-30, 1e30])
def test_features_that_are_all_alike_or_of_odd_size(value):
    assert t_sne(torch.full((9, 3), value)).tolist() == [[0.0, 0.0]] * 9
    assert t_sne(value * torch.randn(9, 3)).isfinite().all()


def test_a_network_that_has_gone_astray_is_left_out(tmp_path):
    module = Classifier()
    with torch.no_grad():
        module.hidden.bias.fill_(float("nan"))
    with pytest.warns(match="leaves out Classifier: fewer than 4 samples, or features not finite"):
        fit(tmp_path, FeatureMap(), module)
    assert not (tmp_path / "run/feature_map.csv").exists()


def test_what_cannot_be_drawn_is_refused(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"FeatureMap\(samples=3\): give 4 or more"):
        FeatureMap(samples=3)
    with pytest.raises(MisconfigurationException, match="FeatureMap.clients: there is no client 9; there are 0 to 2"):
        trainer(1, callbacks=[FeatureMap(clients=[0, 9])]).fit(Federation(client(FedAvg)), datamodule=digits(3))
    with pytest.raises(MisconfigurationException, match="no client 0; Classifier has none"):
        fit(None, FeatureMap(clients=[0]))
    with pytest.raises(MisconfigurationException, match="batches of inputs and labels"):
        represented(Classifier(), [torch.zeros(3, 4)], 9)
    with pytest.raises(MisconfigurationException, match=r"\(B, classes\) logits"):
        represented(nn.Sequential(nn.Linear(4, 3), nn.Flatten(0)), DataLoader(samples(8), batch_size=8), 9)
