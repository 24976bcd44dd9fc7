"""A module of one's own and the built-in one, a site's own Trainer and a federation's: the same to the last bit."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

import lit_pfl.methods
from foreign import Loaders, Regression, diabetes
from lit_pfl import Client
from lit_pfl.data import PerClient
from lit_pfl.lightning_internals import LateLoader
from lit_pfl.links import LocalHub
from lit_pfl.methods import APFL, Ditto, FedIT, FedRep, Scaffold
from lit_pfl_callbacks import FederatedLoop
from tiny import Parts, always_first, assert_equal, client, digits, run, step_schedule, trainer, weights

METHODS = {name: getattr(lit_pfl.methods, name) for name in lit_pfl.methods.__all__}


class Chain(Parts):
    """A plain chain of layers, which every method can do with."""

    def __init__(self, channels: int, classes: int) -> None:
        body = nn.Sequential(
            nn.Conv2d(channels, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.1), nn.Linear(36, 8)
        )
        super().__init__(body, nn.Linear(8, classes))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, weight_decay=1e-3)


class OwnClassifier(L.LightningModule):
    """Somebody's classifier."""

    def configure_model(self) -> None:
        self.backbone = Chain(1, 10)
        # The built-in one does so too: what a method draws from here on, as its masks, is to be the same.
        torch.manual_seed(torch.initial_seed() + 1)

    def forward(self, images):
        return self.backbone(images)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        logits = self(images)
        self.log("val_acc", (logits.argmax(1) == labels).double().mean())

    def configure_optimizers(self):
        optimizer = sgd(self.parameters())
        return [optimizer], [step_schedule(optimizer)]


#: those that this network has nothing for: batch norm, adapters
NOT_HERE = {"FedBN", *(name for name, kind in METHODS.items() if issubclass(kind, FedIT))}


@pytest.mark.parametrize("method", always_first(name for name in METHODS if name not in NOT_HERE))
def test_one_s_own_classifier_is_trained_like_the_built_in_one(method):
    kind = METHODS[method]
    data = {"permute_labels": not kind.needs_common_labels, "train_fraction": 0.1, "batch_size": 16}
    built_in = run(client(kind, backbone=Chain, optimizer=sgd), digits(3, **data), local_epochs=2, participation=2)
    own = kind(learner=OwnClassifier(), head=r"^backbone\.head", encoder="backbone.body")
    other = run(own, digits(3, **data), local_epochs=2, participation=2)
    assert_equal(weights(other), weights(built_in))
    assert other.traffic.state_dict() == built_in.traffic.state_dict()
    assert [row.scores["acc"] for row in other.rows] == pytest.approx([row.scores["acc"] for row in built_in.rows])


SITES, ROUNDS, EPOCHS = 4, 3, 2
CLIPPING = 0.5


class Counts(L.Callback):
    """Somebody's own callback."""

    batches = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1


def loaders() -> list[Loaders]:
    return [Loaders(diabetes()[site]) for site in range(SITES)]


def sites_under_their_own_trainers(methods: list[Client], folder: Any) -> None:
    hub, counters = LocalHub(seed=3), [Counts() for _ in methods]
    for site, (module, data) in enumerate(zip(methods, loaders(), strict=True)):
        fitting = trainer(
            ROUNDS * EPOCHS,
            logger=L.pytorch.loggers.CSVLogger(folder / str(site)),
            gradient_clip_val=CLIPPING,
            callbacks=[counters[site], FederatedLoop(hub.link, every_n_epochs=EPOCHS)],
            log_every_n_steps=1,
        )
        # A PyTorch loader draws a number when its iterator is made, which for the first epoch is before the join.
        own = LateLoader(data.train_dataloader()), data.val_dataloader()
        hub.add(site, lambda fitting=fitting, module=module, own=own: fitting.fit(module, *own))
    hub.run()
    assert [counter.batches for counter in counters] == [ROUNDS * EPOCHS * 10] * SITES


@pytest.mark.seconds
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("method", "optimizer"),
    [(Scaffold, "SGD"), (Ditto, "AdamW"), (APFL, "AdamW"), (FedRep, "AdamW")],
    ids=["Scaffold", "Ditto", "APFL", "FedRep"],
)
def test_sites_under_their_own_trainers_do_as_a_federation_does(method, optimizer, tmp_path):
    def made() -> Client:
        torch.manual_seed(0)
        return method(learner=Regression(optimizer), head=r"^net\.3\.")

    apart = [made() for _ in range(SITES)]
    sites_under_their_own_trainers(apart, tmp_path)

    options = {"callbacks": [Counts()], "gradient_clip_val": CLIPPING}
    federation = run(made(), PerClient(loaders()), rounds=ROUNDS, local_epochs=EPOCHS, client_trainer=options)
    for k, one in federation.clients.items():
        one.download(federation.coordinator.server.reply(k))  # a site loads the last reply too, before its fit ends
        assert_equal(apart[k].state_dict(), one.state_dict())
    first = made().learner.state_dict()
    assert not any(torch.equal(first[name], t) for name, t in apart[1].learner.state_dict().items() if "weight" in name)
