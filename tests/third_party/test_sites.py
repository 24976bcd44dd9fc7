"""The same modules in projects that somebody has: a stock Trainer with what is usual in it, and FederatedLoop."""

from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from modules import CLIENTS, MODULES

from lit_pfl.links import LocalHub
from lit_pfl.methods import Ditto, FedAvg
from lit_pfl.testing import assert_equal
from lit_pfl_callbacks import FederatedLoop

#: what somebody watches in each module
WATCHED = {
    "ClassificationTask": "val_loss",
    "MoCoTask": "train_loss",
    "TemporalFusionTransformer": "val_loss",
    "BertForSequenceClassification with LoRA": "val_loss",
}
QUICK = "BertForSequenceClassification with LoRA"
EPOCHS = 2


def fit(name, method, folder, hub, client, states):
    """Train one site as its own project does, but for the method around its module and the callback."""
    module, watched = MODULES[name], WATCHED[name]
    torch.manual_seed(0)
    learner = module.make()
    callbacks = [
        ModelCheckpoint(folder / str(client), monitor=watched, save_on_train_epoch_end=True),
        EarlyStopping(watched, patience=10, check_on_train_epoch_end=True),
        LearningRateMonitor("step"),
        FederatedLoop(hub.link),
    ]
    trainer = L.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", callbacks=callbacks, logger=CSVLogger(folder, version=str(client)),
        log_every_n_steps=1, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(learner if method is None else method(learner=learner, **module.parts), datamodule=module.data(client))
    assert trainer.current_epoch == EPOCHS
    assert watched in trainer.callback_metrics
    assert callbacks[0].best_model_path
    states[client] = {name: value.clone() for name, value in learner.state_dict().items()}


@pytest.mark.parametrize("method", [None, FedAvg, Ditto], ids=["plain", "FedAvg", "Ditto"])
@pytest.mark.parametrize("name", [QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in WATCHED if n != QUICK)])
def test_a_project_with_its_own_trainer_becomes_a_site(name, method, tmp_path):
    module = MODULES[name]
    pytest.importorskip(module.library)
    hub, states = LocalHub(seed=1), {}
    for client in range(CLIENTS):
        hub.add(client, partial(fit, name, method, tmp_path, hub, client, states))
    with torch.random.fork_rng(devices=[]):
        server = None if method is None else module.method(method).configure_server()
    hub.run(*([] if server is None else [server]))
    weights = [name for name, weight in module.make().named_parameters() if weight.requires_grad]
    if method is not Ditto:  # whose own models differ
        # the last reply makes all clients equal again
        shared = [{name: state[name] for name in weights} for state in states.values()]
        assert_equal(shared[1], shared[0], "after the last round, the weights")
    first = next(iter(states.values()))
    assert all(torch.isfinite(first[name]).all() for name in weights)
