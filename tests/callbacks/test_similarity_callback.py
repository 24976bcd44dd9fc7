"""How alike clients are, measured."""

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from callbacks.plain import Group, Line, batches, rows
from callbacks.plain import trainer as plain_trainer
from lit_pfl import Federation
from lit_pfl.core.asynchronous import FedBuff
from lit_pfl.core.deadline import Speeds
from lit_pfl.methods import ClusteredFL, FactorizedFL, FedAvg, FedFOMO, SimFed
from lit_pfl_callbacks import RunLogger, Similarity
from lit_pfl_callbacks.similarity import cosine_matrix
from tiny import client, digits, trainer


def fit(tmp_path, rounds, similarity, method=FactorizedFL, callbacks=(), clients=3, **options) -> Federation:
    federation = Federation(client(method), seed=1, threads=1, **options)
    logger = RunLogger(str(tmp_path), name="", version="run")
    trainer(rounds, callbacks=[similarity, *callbacks], logger=logger).fit(federation, datamodule=digits(clients))
    return federation


def found(folder, name="similarity.csv"):
    """Return what is in a file, by all but the last column."""
    return {tuple(line.values())[:-1]: float([*line.values()][-1]) for line in rows(folder / "run" / name)}


def cosine(a, b):
    a, b = (np.concatenate([part.numpy().ravel() for part in parts]).astype(np.float64) for parts in (a, b))
    return a @ b / np.sqrt((a @ a) * (b @ b))


@pytest.mark.seconds
def test_every_pair_of_every_group_has_a_row_a_round(tmp_path):
    federation = fit(tmp_path, 3, Similarity(every_n_rounds=2, updates=False))
    lines = found(tmp_path)
    assert {key[:2] for key in lines} == {("1", "u"), ("1", "v"), ("2", "u"), ("2", "v")}
    assert len(lines) == len(rows(tmp_path / "run" / "similarity.csv")) == 2 * 2 * 3
    again = fit(tmp_path / "again", 2, Similarity(every_n_rounds=2, updates=False))
    assert federation.clients.keys() == again.clients.keys()
    states = {k: c.learner.state_dict() for k, c in again.clients.items()}
    expected = cosine(*([states[k]["backbone.body.0.v"]] for k in (0, 2)))
    assert lines["2", "v", "0", "2"] == pytest.approx(expected, abs=2e-6)


def test_long_vectors_in_parts_lose_no_digits():
    generator = np.random.default_rng(0)
    vectors = [[generator.normal(1, 1, size=shape) for shape in ((300, 400), (7,), (2, 3, 5))] for _ in range(3)]
    matrix = cosine_matrix([[torch.from_numpy(part).float() for part in parts] for parts in vectors])
    for i in range(3):
        for j in range(3):
            a, b = (np.concatenate([part.ravel() for part in vectors[k]]) for k in (i, j))
            assert float(matrix[i, j]) == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), abs=1e-6)
    assert cosine_matrix([[torch.zeros(2)], [torch.ones(2)]]).isnan().tolist() == [[True, True], [True, False]]


def test_dense_clients_are_compared_by_all_parameters(tmp_path):
    federation = fit(tmp_path, 1, Similarity(updates=False), FedAvg)
    states = [federation.clients[k].state_dict() for k in (1, 2)]
    names = [name for name in states[0] if "running" not in name and "num_batches" not in name]
    expected = cosine(*([state[name] for name in names] for state in states))
    assert found(tmp_path)["1", "parameters", "1", "2"] == pytest.approx(expected, abs=2e-6)


def test_updates_are_uploads_less_replies(tmp_path):
    federation = Federation(client(FedAvg), seed=1, threads=1, participation=2)
    sent = {}

    def keep(x):
        sent[x.round, x.client, x.direction] = {name: tensor.clone() for name, tensor in x.tensors.items()}

    class Watch(Similarity):
        def on_fit_start(self, trainer, pl_module):
            super().on_fit_start(trainer, pl_module)
            pl_module.traffic.watchers.append(keep)

    logger = RunLogger(str(tmp_path), name="", version="run")
    trainer(2, callbacks=[Watch(every_n_rounds=2)], logger=logger).fit(federation, datamodule=digits(3))
    a, b = federation.participants(1)
    updates = [[sent[2, k, "up"][n] - sent[2, k, "down"][n] for n in sent[2, k, "up"]] for k in (a, b)]
    lines = found(tmp_path)
    assert lines["2", "update", str(a), str(b)] == pytest.approx(cosine(*updates), abs=2e-6)
    assert len([key for key in lines if key[:2] == ("2", "update")]) == 1
    assert len([key for key in lines if key[:2] == ("2", "parameters")]) == 3


@pytest.mark.seconds
def test_an_upload_of_a_later_round_is_compared_with_what_it_began_with(tmp_path):
    asynchronous = FedBuff(buffer=3, speeds=Speeds(variation=0.5))
    fit(tmp_path, 6, Similarity(every_n_rounds=1), FedAvg, clients=6, participation=4, asynchronous=asynchronous)
    rounds = {key[0] for key in found(tmp_path) if key[1] == "update"}
    assert {"3", "4", "5", "6"} <= rounds


def test_embeddings_are_those_that_are_uploaded(tmp_path):
    federation = fit(tmp_path, 1, Similarity(), SimFed)
    server = federation.coordinator.server
    vectors = [[server.latest[k]["embedding"]] for k in (0, 1)]
    assert found(tmp_path)["1", "embedding", "0", "1"] == pytest.approx(cosine(*vectors), abs=2e-6)


def test_how_often_clients_are_matched(tmp_path):
    """Client 0 is given something of 1 in every round, client 1 of 2 in the first only."""
    plain_trainer(tmp_path, 4, [Similarity({"all": ""}, every_n_rounds=2)]).fit(Group(), batches())
    lines = found(tmp_path, "matching.csv")
    assert {key[0] for key in lines} == {"1", "2", "4"}
    assert {key[1:]: value for key, value in lines.items() if key[0] == "4"} == {
        ("0", "1"): 1.0, ("1", "2"): 0.25, ("0", "2"): 0.0, ("1", "0"): 0.0, ("2", "0"): 0.0, ("2", "1"): 0.0,
    }  # fmt: skip


@pytest.mark.parametrize("method", [SimFed, ClusteredFL, FedFOMO])
def test_methods_tell_who_is_mixed_with_whom(tmp_path, method):
    federation = fit(tmp_path, 2, Similarity(every_n_rounds=1), method)
    ids, weights = federation.mixing()
    assert sorted(ids) == [0, 1, 2]
    torch.testing.assert_close(weights.sum(1), torch.ones(3, dtype=weights.dtype))
    assert len(found(tmp_path, "matching.csv")) == 2 * 6
    for i, one in enumerate(ids):
        for j, other in enumerate(ids):
            given = weights[i, j] > 0
            assert i == j or given or found(tmp_path, "matching.csv")["2", str(one), str(other)] < 1


def test_of_many_clients_some_are_compared(tmp_path):
    fit(tmp_path, 1, Similarity(most=3), FedAvg, clients=7)
    pairs = {key[2:] for key in found(tmp_path) if key[1] == "update"}
    assert pairs == {("0", "3"), ("0", "6"), ("3", "6")}


def test_a_resumed_run_counts_on_and_has_every_row_once(tmp_path):
    def fit_group(folder, epochs, path=None):
        torch.manual_seed(0)
        similarity = Similarity({"all": ""}, every_n_rounds=2)
        plain_trainer(tmp_path / folder, epochs, [similarity]).fit(Group(), batches(), ckpt_path=path)
        return [rows(tmp_path / folder / "run" / name) for name in ("similarity.csv", "matching.csv")]

    whole = fit_group("whole", 4)
    fit_group("parts", 3)
    assert fit_group("parts", 4, tmp_path / "parts" / "run" / "last.ckpt") == whole


def test_groups_that_find_nothing_are_refused_and_modules_without_clients_are_told_of(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"'w': 'weihgt'.*'w'.*backbone"):
        fit(tmp_path, 1, Similarity({"w": "weihgt"}))
    with pytest.warns(match="Similarity: waits for several clients .* Line has no `client_ids`"):
        plain_trainer(tmp_path, 1, [Similarity()]).fit(Line(), batches())
    with pytest.raises(MisconfigurationException, match="most=1"):
        Similarity(most=1)
    for option in ("groups", "uploads"):
        with pytest.raises(MisconfigurationException, match=rf"Similarity\({option}=...\): '\*' is not a regular"):
            Similarity(**{option: {"all": "*"}})
