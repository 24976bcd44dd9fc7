"""Clients on a map."""

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from callbacks.plain import Group, Line, batches, rows
from callbacks.plain import trainer as plain_trainer
from lit_pfl import Federation
from lit_pfl.methods import FedAvg, SimFed
from lit_pfl_callbacks import EmbeddingMap, RunLogger
from lit_pfl_callbacks.embedding_map import principal_plane, turned
from tiny import client, digits, trainer


@pytest.mark.parametrize("shape", [(20, 5), (5, 20), (7, 7)])
def test_the_plane_is_that_of_principal_components(shape):
    vectors = np.random.default_rng(0).normal(size=shape) * np.linspace(1, 4, shape[1])
    points = principal_plane(torch.from_numpy(vectors)).numpy()
    u, s, _ = np.linalg.svd(vectors - vectors.mean(0))
    expected = u[:, :2] * s[:2]
    signs = np.sign((points * expected).sum(0))
    np.testing.assert_allclose(points, expected * signs, atol=1e-9)
    assert (points[np.abs(points).argmax(0), [0, 1]] > 0).all()


def test_planes_of_too_little():
    assert principal_plane(torch.zeros(3, 4)).tolist() == [[0.0, 0.0]] * 3
    assert principal_plane(torch.tensor([[1.0], [5.0]])).abs().tolist() == [[2.0, 0.0], [2.0, 0.0]]


def test_maps_are_turned_to_the_one_before():
    points = torch.randn(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    angle = torch.tensor(2.0)
    rotation = torch.tensor([[angle.cos(), -angle.sin()], [-angle.sin(), -angle.cos()]]).double()  # mirrored too
    torch.testing.assert_close(turned(points @ rotation, [1, 2, 4, 5], points[[1, 2, 4, 5]]), points)


def test_a_module_of_some_clients(tmp_path):
    """Embeddings (c, c^2 - 1, 1, round): clients 0, 1 and 2 are in a plane, whose distances the map keeps."""
    chart = EmbeddingMap(every_n_rounds=2)
    plain_trainer(tmp_path, 3, [chart]).fit(Group(), batches())
    lines = rows(tmp_path / "run" / "embeddings.csv")
    assert [(line["round"], line["client"]) for line in lines] == [(r, c) for r in "12" for c in "012"]
    places = np.array([[float(line["x"]), float(line["y"])] for line in lines[3:]])
    true = np.array([[c, c**2 - 1] for c in range(3)])
    for i in range(3):
        for j in range(3):
            assert np.linalg.norm(places[i] - places[j]) == pytest.approx(np.linalg.norm(true[i] - true[j]), abs=1e-4)
    assert lines[0] == {**lines[3], "round": "1"}  # nobody has moved


def test_simfeds_embeddings_also_of_those_who_were_absent(tmp_path):
    federation, chart = Federation(client(SimFed), seed=1, threads=1, participation=2), EmbeddingMap(every_n_rounds=1)
    logger = RunLogger(str(tmp_path), name="", version="run")
    trainer(4, callbacks=[chart], logger=logger).fit(federation, datamodule=digits(4))
    latest = federation.coordinator.server.latest
    assert chart.places.keys() == latest.keys()
    assert len(latest) > 2
    ids = sorted(latest)
    vectors = np.stack([latest[k]["embedding"].numpy() for k in ids])
    s = np.linalg.svd(vectors - vectors.mean(0))[1]
    assert np.square(np.array([chart.places[k] for k in ids])).sum() == pytest.approx(np.square(s[:2]).sum(), rel=1e-4)


def test_a_resumed_run_has_the_same_maps(tmp_path):
    def fit_group(folder, epochs, path=None):
        plain_trainer(tmp_path / folder, epochs, [EmbeddingMap(every_n_rounds=1)]).fit(
            Group(), batches(), ckpt_path=path
        )
        return rows(tmp_path / folder / "run" / "embeddings.csv")

    whole = fit_group("whole", 3)
    fit_group("parts", 2)
    assert fit_group("parts", 3, tmp_path / "parts" / "run" / "last.ckpt") == whole


def test_without_embeddings_there_is_no_map(tmp_path):
    chart, logger = EmbeddingMap(), RunLogger(str(tmp_path), name="", version="run")
    trainer(1, callbacks=[chart], logger=logger).fit(Federation(client(FedAvg), seed=1), datamodule=digits(2))
    plain_trainer(tmp_path, 1, [EmbeddingMap()]).fit(Line(), batches())
    assert not list(tmp_path.rglob("embeddings.csv"))
    with pytest.raises(MisconfigurationException, match="every_n_rounds=0"):
        EmbeddingMap(every_n_rounds=0)
    with pytest.raises(MisconfigurationException, match=r"EmbeddingMap\(tensor=...\): '\*' is not a regular"):
        EmbeddingMap("*")
