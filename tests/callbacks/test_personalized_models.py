"""Models as files when a fit ends."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from safetensors.torch import load_file

from callbacks.plain import Group, Line, Score, batches, trainer
from lit_pfl import Federation
from lit_pfl.methods import APFL
from lit_pfl_callbacks import PersonalizedModels, RunLogger
from tiny import GroupNet, client, digits
from tiny import trainer as fitting


def test_any_module_is_one_model(tmp_path):
    module = Line()
    trainer(tmp_path, 1, [PersonalizedModels()]).fit(module, batches())
    [path] = (tmp_path / "run" / "models").iterdir()
    assert path.name == "model.safetensors"
    assert torch.equal(load_file(path)["net.weight"], module.net.weight)


def test_some_clients_of_many(tmp_path):
    group = Group()
    trainer(tmp_path, 1, [PersonalizedModels(most=2)]).fit(group, batches())
    assert {path.name for path in (tmp_path / "run" / "models").iterdir()} == {
        "client_0.safetensors", "client_2.safetensors",
    }  # fmt: skip
    trainer(tmp_path / "one", 1, [PersonalizedModels([1])]).fit(group, batches())
    [path] = (tmp_path / "one" / "run" / "models").iterdir()
    assert torch.equal(load_file(path)["weight"], group.members[1].weight)


def test_loggers_are_told_the_scores_of_these_models_and_no_other_ones(tmp_path):
    told = {}

    class Models(PersonalizedModels):
        def __init__(self):
            super().__init__()
            self._dashboard = SimpleNamespace(files=lambda trainer, name, paths, about: told.update(about))

    group = Group()
    group.rows = [
        Score(client, 1, "test", f"{model}:before", 8, {"acc": acc})
        for client in range(3)
        for model, acc in (("personalized", 0.9), ("other", 0.4))
    ]
    trainer(tmp_path, 1, [Models()]).fit(group, batches())
    assert told == {f"client_{client}": {"acc": 0.9} for client in range(3)}


def test_of_a_federation_those_that_are_scored(tmp_path):
    federation = Federation(client(APFL, alpha=0.7, backbone=GroupNet), seed=1, threads=1)
    logger = RunLogger(str(tmp_path), name="", version="run")
    fitting(1, callbacks=[PersonalizedModels()], logger=logger).fit(federation, datamodule=digits(2))
    member = federation.clients[1]
    weight = 0.7 * member.personal.backbone.head.weight + 0.3 * member.learner.backbone.head.weight
    found = load_file(tmp_path / "run" / "models" / "client_1.safetensors")
    torch.testing.assert_close(found["head.weight"], weight)


def test_a_client_that_there_is_not_is_refused_before_training(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"clients=\[7\]\): there is no client 7; there are 0, 1, 2\."):
        trainer(tmp_path, 1, [PersonalizedModels([7])]).fit(Group(), batches())


def test_sparse_buffers_are_written_dense(tmp_path):
    module = Line()
    module.register_buffer("graph", torch.eye(3).to_sparse())
    trainer(tmp_path, 1, [PersonalizedModels()]).fit(module, batches())
    assert torch.equal(load_file(tmp_path / "run" / "models" / "model.safetensors")["graph"], torch.eye(3))
