"""Non-zero entries and ranks of weights."""

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from callbacks.plain import Group, Line, batches, rows
from callbacks.plain import trainer as plain_trainer
from lit_pfl import Federation
from lit_pfl.methods import FedAvg, FedSLR, SimFed
from lit_pfl.nn import factorized_layers
from lit_pfl.nn.factorization import Factorization
from lit_pfl_callbacks import RunLogger, SparsityMonitor
from lit_pfl_callbacks.sparsity import measured, rank_of
from tiny import client, digits, trainer


def fit(folder, method, rounds=2, monitor=None, clients=3, **options):
    monitor = monitor or SparsityMonitor(every_n_rounds=1, per_client=True)
    federation = Federation(method, seed=1, threads=1, **options)
    logger = RunLogger(str(folder), name="", version="run")
    trainer(rounds, callbacks=[monitor], logger=logger).fit(federation, datamodule=digits(clients))
    return federation, monitor, rows(folder / "run" / "sparsity.csv")


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (40, 40), (1, 7)])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_ranks_are_those_of_numpy(shape, rank):
    rng = np.random.default_rng(0)
    matrix = (rng.normal(size=(shape[0], rank)) @ rng.normal(size=(rank, shape[1]))).astype(np.float32)
    expected = np.linalg.matrix_rank(matrix)
    assert rank_of(torch.from_numpy(matrix)) == expected == min(rank, *shape)
    assert rank_of(torch.from_numpy(matrix).double()) == np.linalg.matrix_rank(matrix.astype(np.float64))
    u, v = torch.from_numpy(rng.normal(size=(shape[0], 4))), torch.from_numpy(rng.normal(size=(shape[1], 4)))
    u[:, rank:] = 0
    assert rank_of(u.float(), v.float()) == np.linalg.matrix_rank((u @ v.T).numpy())


@pytest.mark.parametrize("columns", [1, 2])
def test_what_is_not_finite_has_rank_zero(columns):
    bad = torch.ones(3, columns)
    bad[0, 0] = torch.nan
    assert rank_of(bad) == rank_of(bad, torch.ones(4, columns)) == rank_of(torch.ones(4, columns), bad) == 0


def test_ranks_of_what_is_empty_or_not_finite():
    assert rank_of(torch.zeros(0, 3)) == rank_of(torch.full((2, 2), torch.nan)) == rank_of(torch.zeros(3, 3)) == 0
    assert rank_of(torch.ones(3, 1), torch.zeros(4, 1)) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_ranks_of_half_precision(dtype):
    """In a wide matrix its rounding is as large as what it holds."""
    matrix = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert rank_of(matrix) == 256
    assert rank_of(matrix[:, :2], matrix[:, 2:4]) == 2
    assert rank_of(torch.tensor([[1, 2], [2, 4]], dtype=torch.int8)) == 1  # as quantized networks have them


def test_any_module_under_a_plain_trainer(tmp_path):
    class Sparse(Line):
        """Its weight has one row of zeros, and stays so."""

        def __init__(self):
            super().__init__()
            self.other = nn.Conv2d(2, 4, 3)

        def on_train_batch_end(self, *_):
            with torch.no_grad():
                self.net.weight[1] = 0
                self.other.weight.copy_(torch.ones(4, 2, 3, 3))

    monitor = SparsityMonitor(every_n_rounds=2)
    plain_trainer(tmp_path, 4, [monitor]).fit(Sparse(), batches())
    assert [list(line.values()) for line in rows(tmp_path / "run" / "sparsity.csv")] == [
        [round, "", *line] for round in "124" for line in (["net", "3", "6", "1"], ["other", "72", "72", "1"])
    ]
    assert monitor.latest["net"].parameters == 3
    assert monitor.latest["other"].parameters == 4 + 18  # of rank 1


def test_factorized_layers_count_mu_as_it_is_used(tmp_path):
    method = client(SimFed, tau=-1.0, factorization=Factorization(form="FFxIO", rank=2, threshold=0.02))
    federation, monitor, lines = fit(tmp_path, method)
    for number, member in federation.clients.items():
        for layer, module in factorized_layers(member.learner):
            [line] = [x for x in lines if (x["round"], x["client"], x["layer"]) == ("2", str(number), layer)]
            mu = module.mu.detach().numpy()
            assert int(line["elements"]) == mu.size
            assert int(line["rank"]) == 2
            assert int(line["nonzeros"]) == (np.abs(mu) >= 0.02).sum() < mu.size
    layer, module = next(iter(factorized_layers(federation.clients[0].learner)))
    kept = [int(x["nonzeros"]) for x in lines if (x["round"], x["layer"]) == ("2", layer)]
    assert monitor.latest[layer].parameters == pytest.approx(np.mean(kept) + module.u.numel() + module.v.numel())


def test_without_a_mask_factors_are_all(tmp_path):
    method = client(SimFed, factorization=Factorization(mask=False, rank=1))
    federation, _, lines = fit(tmp_path, method, rounds=1)
    layer, module = next(iter(factorized_layers(federation.clients[0].learner)))
    line = next(x for x in lines if x["layer"] == layer)
    assert int(line["elements"]) == module.u.numel() + module.v.numel()
    assert int(line["rank"]) == 1


@pytest.mark.seconds
def test_fedslr_counts_p_and_the_rank_of_w(tmp_path):
    federation, _, lines = fit(tmp_path, client(FedSLR, lam=0.02, mu=0.05), local_epochs=2)
    member = federation.clients[1]
    w = member.learner.backbone.body[0].weight.detach()
    p = member.personal.backbone.body[0].weight.detach()
    [line] = [x for x in lines if (x["round"], x["client"], x["layer"]) == ("2", "1", "backbone.body.0")]
    assert int(line["nonzeros"]) == np.count_nonzero(p.numpy())
    matrix = w.permute(0, 2, 1, 3).reshape(4 * 3, 1 * 3).numpy()  # outputs x height, inputs x width
    assert int(line["rank"]) == np.linalg.matrix_rank(matrix)


def test_the_mean_over_clients_and_over_those_that_have_a_layer(tmp_path):
    monitor = SparsityMonitor(every_n_rounds=1)
    group = Group()
    with torch.no_grad():
        group.clients[1].weight.zero_().requires_grad_(False)
    group.clients[2] = nn.Sequential(nn.Linear(2, 2))
    plain_trainer(tmp_path, 1, [monitor]).fit(group, batches())
    lines = {line["layer"]: line for line in rows(tmp_path / "run" / "sparsity.csv")}
    assert lines.keys() == {"weight", "0"}
    assert (lines["weight"]["client"], lines["weight"]["nonzeros"], lines["weight"]["rank"]) == ("mean", "3", "1")
    assert lines["0"]["nonzeros"] == "4"


def test_of_many_clients_some_are_measured(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("lit_pfl_callbacks.sparsity.measured", lambda module: seen.append(module) or measured(module))
    federation, _, lines = fit(tmp_path, client(FedAvg), 1, SparsityMonitor(most=3), clients=7)
    assert [k for k, member in federation.clients.items() if any(member is s for s in seen)] == [0, 3, 6]
    assert {line["client"] for line in lines} == {"mean"}


@pytest.mark.parametrize("options", [{"every_n_rounds": 0}, {"most": 0}])
def test_numbers_below_one_are_refused(options):
    with pytest.raises(MisconfigurationException, match="give 1 or more"):
        SparsityMonitor(**options)
