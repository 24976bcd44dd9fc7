"""What scoring and sleeping leave behind in a module: nothing."""

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import BinaryAUROC

from foreign import PROJECTS, Regression, Screening, diabetes
from lit_pfl import Federation
from lit_pfl.data import PerClient
from lit_pfl.errors import ConfigError
from lit_pfl.learners import unchanged
from lit_pfl.learners.scoring import score
from lit_pfl.links import LocalHub
from lit_pfl.methods import APFL, Ditto, FedAvg
from lit_pfl_callbacks import FederatedLoop
from tiny import assert_equal, trainer


@pytest.mark.parametrize("project", ["Regression", "Screening"])
def test_a_second_score_is_the_first(project):
    """Metrics keep sums in tensors that change in place, or lists that grow."""
    there = PROJECTS[project]
    learner, batches = there.make(), list(DataLoader(there.samples()[0], 8))
    first = score(learner, batches, "val").values
    assert score(learner, batches, "val").values == first
    assert score(learner, batches[:2], "val").values != first
    metrics = [part for part in learner.modules() if isinstance(part, Metric)]
    assert not any(metric.update_called for metric in metrics)


def test_scores_are_those_of_all_samples_at_once():
    learner = Regression()
    x, y = (torch.stack(part) for part in zip(*[diabetes()[0][i] for i in range(50)], strict=True))
    values = score(learner, DataLoader(torch.utils.data.TensorDataset(x, y), 8), "val").values
    with torch.no_grad():
        error = (learner.eval().net(x).squeeze(1) - y).square()
    assert values["mse"] == pytest.approx(float(error.mean()), rel=1e-5)
    assert values["r2"] == pytest.approx(float(1 - error.sum() / (y - y.mean()).square().sum()), rel=1e-4)


class LogsBoth(Regression):
    def validation_step(self, batch, batch_idx):
        self.val_r2(self.net(batch[0]).squeeze(1), batch[1])
        self.log_dict({"val_loss": 1.0, "loss": 3.0, "val_error": 5.0, "val/r2": self.val_r2, "r2": 0.5})


def test_names_that_differ_by_their_stage_alone_are_two_scores():
    scored = score(LogsBoth(), DataLoader(diabetes()[0], 8), "val")
    assert {name: value for name, value in scored.values.items() if name != "val/r2"} == {
        "val_loss": 1, "loss": 3, "error": 5, "r2": 0.5,
    }  # fmt: skip
    assert scored.higher_is_better == {"val/r2": True}


def test_plain_attributes_are_put_back_inside_too():
    module = nn.Linear(1, 1)
    module.hidden, module.seen, module.counts = torch.zeros(2), [1], {"steps": 0}
    module.wide, auroc = torch.zeros(1).expand(3), BinaryAUROC()
    module.auroc = auroc
    hidden = module.hidden
    with unchanged(module):
        module.hidden += 1
        module.seen.append(2)
        module.counts["steps"] = 5
        module.new = 1
        auroc.update(torch.rand(3), torch.ones(3, dtype=torch.int64))
    assert module.hidden is hidden
    assert (hidden.tolist(), module.seen, module.counts) == ([0, 0], [1], {"steps": 0})
    assert not hasattr(module, "new")
    assert not auroc.update_called
    assert not auroc.preds


class Frozen(OrderedDict):
    """Options that refuse to be changed, as those of networks of diffusers do."""

    def update(self, *_, **__):
        raise TypeError("frozen")


def test_a_dict_that_refuses_changes_is_left_alone():
    module = nn.Linear(1, 1)
    module.options = options = Frozen(width=1)
    module.order = {"a": 1, "b": 2}
    with unchanged(module):
        module.order["a"] = module.order.pop("a")
    assert module.options is options
    assert dict(options) == {"width": 1}
    assert [*module.order] == ["a", "b"]


class ScheduleFree(torch.optim.SGD):
    """Has one of two sets of weights in place, and notes which, as schedule-free optimizers do."""

    def train(self):
        self.swap(True)

    def eval(self):
        self.swap(False)

    def swap(self, training):
        for group in self.param_groups:
            if group.setdefault("training", True) != training:
                for weight in group["params"]:
                    weight.data.mul_(2 if training else 0.5)
            group["training"] = training


class Swaps(Screening):
    def configure_optimizers(self):
        return ScheduleFree(self.parameters(), lr=0.1)

    def on_train_epoch_start(self):
        self.optimizers().train()

    def on_validation_epoch_start(self):
        if self.trainer.optimizers:
            self.optimizers().eval()
            self.seen = self.optimizers().param_groups[0]["training"]


@pytest.mark.seconds
def test_an_optimizer_has_the_weights_in_place_that_it_says():
    def run(validated):
        torch.manual_seed(0)
        federation = Federation(FedAvg(learner=Swaps()), seed=0, threads=1)
        fitting = trainer(3, limit_val_batches=validated)
        fitting.fit(federation, datamodule=PROJECTS["Screening"].data())
        return federation.clients, fitting.callback_metrics

    (scored, scores), (unscored, _) = run(1.0), run(0)
    assert scores
    for own, other in zip(scored.values(), unscored.values(), strict=True):
        assert own.trainer.optimizers[0].param_groups[0]["training"]
        assert_equal(own.state_dict(), other.state_dict())


class TellsWhenAnEpochEnds(Screening):
    def __init__(self):
        super().__init__()
        self.told = []
        self.register_buffer("epochs", torch.zeros(()))

    def on_train_epoch_end(self):
        self.told.append("epoch ends")
        self.epochs += 1
        self.log("epochs", self.epochs)


class TellsWhenARoundEnds(FedAvg):
    def end_round(self):
        self.learner.told.append("round ends")

    def upload(self):
        self.learner.told.append("upload")
        return super().upload()


EXPECTED = ["upload", *["epoch ends", "epoch ends", "round ends", "upload"] * 2]


def test_a_module_s_epoch_is_over_before_its_round_is():
    there = PROJECTS["Screening"]
    federation = Federation(TellsWhenARoundEnds(learner=TellsWhenAnEpochEnds()), seed=0, threads=1, local_epochs=2)
    trainer(2).fit(federation, datamodule=there.data())
    for client in federation.clients.values():
        # A client joins twice: the federation asks it, then its own fit.
        assert client.learner.told[-len(EXPECTED) :] == EXPECTED
        assert client.learner.epochs == 4


def test_it_is_so_by_the_callback():
    batches = PROJECTS["Screening"].data().modules[0].train_dataloader()
    hub, module = LocalHub(), TellsWhenARoundEnds(learner=TellsWhenAnEpochEnds())
    fitting = trainer(4, callbacks=[FederatedLoop(hub.link, every_n_epochs=2)])
    hub.add(0, lambda: fitting.fit(module, batches))
    hub.run(module.configure_server())
    assert module.learner.told == EXPECTED
    assert fitting.callback_metrics["epochs"] == 4


@pytest.mark.seconds
@pytest.mark.parametrize("method", [Ditto, APFL])
def test_metrics_of_a_second_model_do_not_pile_up(method):
    """What it logs in training is not shown, but a Trainer would have started its metrics anew."""

    class Lists(Screening):
        def __init__(self):
            super().__init__()
            self.train_auroc = BinaryAUROC()

        def training_step(self, batch, batch_idx):
            logits = self(batch["features"])
            self.train_auroc.update(logits, batch["benign"])
            self.log("train_auroc", self.train_auroc, on_step=False, on_epoch=True)
            return nn.functional.binary_cross_entropy_with_logits(logits, batch["benign"].float())

    federation = Federation(method(learner=Lists()), seed=0, threads=1)
    data: PerClient = PROJECTS["Screening"].data()
    trainer(3).fit(federation, datamodule=data)
    for client in federation.clients.values():
        assert not client.personal.train_auroc.preds


def test_a_site_s_own_trainer_leaves_no_losses():
    hub, module = LocalHub(), FedAvg(learner=Regression())
    fitting = trainer(2, callbacks=[FederatedLoop(hub.link)])
    hub.add(0, lambda: fitting.fit(module, DataLoader(diabetes()[0], 64)))
    hub.run(module.configure_server())
    assert module.release_round_state() == (0.0, 0)


@pytest.mark.parametrize("value", [{"a": torch.ones(2)}, torch.ones(3)], ids=["dict", "vector"])
def test_a_metric_that_is_not_one_number_is_named(value):
    class Several(MeanMetric):
        def compute(self):
            return value

    class Logs(Regression):
        def validation_step(self, batch, batch_idx):
            self.val_mse.update(1.0)
            self.log("val_mse", self.val_mse)

    learner = Logs()
    learner.val_mse = Several()
    with pytest.raises(ConfigError, match=r"^self.log\('val_mse'\): its metric computes .*float32"):
        score(learner, DataLoader(diabetes()[0], 8), "val")


class Averages(Regression):
    """Adds its weights to an average whenever it is validated, as torch_uncertainty's SWA does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("taken", torch.zeros(()))
        self.register_buffer("unknown", torch.tensor(torch.nan))
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.register_buffer("graph", torch.eye(2).to_sparse())  # which cannot be compared
        self.average = None

    def on_validation_start(self):
        self.cache = torch.zeros(len(self.cache) + 1)
        self.unknown = self.unknown.clone()
        if self.collects:
            self.taken += 1
            self.average = nn.Linear(1, 1)


@pytest.mark.parametrize("collects", [True, False])
def test_what_is_collected_while_scored_is_warned_of(collects, recwarn):
    learner = Averages()
    learner.collects = collects
    score(learner, DataLoader(diabetes()[0], 8), "val")
    assert learner.taken == 0
    assert learner.average is None
    warned = [str(one.message) for one in recwarn if "collects while it is scored" in str(one.message)]
    assert len(warned) == collects
    assert not collects or "(average.bias, average.weight, taken)" in warned[0]
