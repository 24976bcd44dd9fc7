"""Many clients in one step come to what they would have come to one after another."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from lit_pfl import Federation
from lit_pfl import methods as M
from lit_pfl.core.deadline import Deadline, Speeds
from lit_pfl.data import ClassShards, Dirichlet
from lit_pfl.engines import Local, Stacked
from lit_pfl.engines.stack import Epoch, Stack, train_together
from lit_pfl.errors import ConfigError
from lit_pfl_callbacks.tensors import copied, tensors_of
from tiny import GroupNet, Learner, MixedNet, Parts, assert_equal, client, digits, run, spec, trainer, weights


def both(method, rounds=3, data=None, size=32, **options):
    """Return a federation that was trained one client after another, and one that was trained stacked."""
    make = {"backbone": MixedNet, **options.pop("model", {})}
    return [
        run(client(method, **make), (data or digits)(), rounds=rounds, engine=engine, **options)
        for engine in (Local(), Stacked(size))
    ]


def assert_close(one, other):
    for k, state in weights(one).items():
        for name, tensor in weights(other)[k].items():
            torch.testing.assert_close(tensor, state[name], rtol=1e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert one.traffic.state_dict() == other.traffic.state_dict()
    for a, b in zip(one.rows, other.rows, strict=True):
        assert (a.client, a.round, a.model, a.n) == (b.client, b.round, b.model, b.n)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "method",
    [
        M.FedAvg,
        M.StandAlone,
        M.FedPer,
        M.LGFedAvg,
        M.PFedPara,
        M.AgnosticFL,
        M.ClusteredFL,
        M.FedFOMO,
        M.SimFed,
        M.FactorizedFL,
    ],
)
def test_clients_in_a_stack_learn_what_they_would_by_themselves(method):
    one, stacked = both(method)
    assert_close(one, stacked)
    for k in one.clients:
        a, b = (f.clients[k].trainer for f in (one, stacked))
        assert (a.global_step, a.current_epoch) == (b.global_step, b.current_epoch)
    losses = [float(f.trainer.callback_metrics["train/loss"]) for f in (one, stacked)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_an_epoch_that_a_deadline_leaves_empty_is_none_for_schedules():
    one, stacked = both(
        M.FedAvg, 2, lambda: digits(3, train_fraction=0.2, test_fraction=0.6), local_epochs=2,
        model={"scheduler": step_schedule}, deadline=Deadline(3.5, late="partial", speeds=Speeds(spread=0.9)),
    )  # fmt: skip
    assert_close(one, stacked)
    epochs = [
        [member.trainer.lr_scheduler_configs[0].scheduler.last_epoch for member in federation.clients.values()
         if member._trainer is not None]
        for federation in (one, stacked)
    ]  # fmt: skip
    assert epochs[0] == epochs[1] != []


def test_what_stays_at_home_does_in_a_stack():
    assert_close(*both(M.FedAvg, model={"local": "norm", "norm_stats": "averaged"}))


def own_state(module):
    return copied(module.state_dict())


@pytest.mark.seconds
@pytest.mark.few(1)
@pytest.mark.parametrize("channels_last", [None, True])
@pytest.mark.parametrize("method", [M.FedAvg, M.SimFed])
def test_clients_that_sleep_come_to_the_same_bits(method, channels_last, tmp_path):
    """And a checkpoint with states in files resumes with all in memory."""

    def fit(engine, rounds, path=None):
        make = {"backbone": MixedNet, "channels_last": channels_last}
        federation = Federation(client(method, **make), seed=3, threads=1, participation=3, engine=engine)
        fitting = trainer(rounds)
        fitting.fit(federation, datamodule=digits(6), ckpt_path=path, weights_only=False)
        return federation, fitting

    whole, _ = fit(Stacked(2), 4)
    half, fitting = fit(Stacked(32, awake=2), 2)
    assert len(half.clients) == 2
    fitting.save_checkpoint(tmp_path / "last.ckpt")
    for engine in (Stacked(2), Stacked(2, awake=3)):
        resumed, _ = fit(engine, 4, tmp_path / "last.ckpt")
        assert_equal(whole.ask(own_state), resumed.ask(own_state))
        assert whole.rows == resumed.rows


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def uneven():
    return digits(6, partition=Dirichlet(0.5), batch_size=32)


@pytest.mark.seconds
@pytest.mark.parametrize("optimizer", [adam, lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)])
def test_clients_may_have_any_number_of_batches_and_take_part_at_times(optimizer):
    one, stacked = both(
        M.FedAvg,
        4,
        uneven,
        model={"optimizer": optimizer, "backbone": GroupNet},
        participation=0.5,
        local_epochs=2,
        size=4,
    )
    assert len({len(one.data.client(k).train) for k in one.clients}) > 3
    assert_close(one, stacked)


@pytest.mark.seconds
def test_a_part_of_the_network_may_be_frozen_for_an_epoch():
    assert_close(*both(M.FedRep, local_epochs=3))


@pytest.mark.seconds
def test_clients_whose_networks_differ_are_in_stacks_of_their_own():
    def data():
        return digits(4, partition=Dirichlet(0.03), batch_size=32)

    one, stacked = both(M.PsiNet, data=data, model={"backbone": GroupedNet, "optimizer": adam, "groups": 10})
    shapes = {tuple(tuple(t.shape) for t in state.values()) for state in weights(one).values()}
    assert len(shapes) > 1
    assert_close(one, stacked)


@pytest.mark.seconds
def test_networks_of_the_same_shapes_that_compute_other_things_are_in_stacks_of_their_own():
    def data():
        return digits(4, partition=ClassShards(5), batch_size=32)

    one, stacked = both(M.PsiNet, data=data, model={"backbone": GroupedNet, "optimizer": adam, "groups": 10})
    assert len({tuple(tuple(t.shape) for t in state.values()) for state in weights(one).values()}) == 1
    assert len({tuple(c.own_groups()) for c in one.clients.values()}) > 1
    assert_close(one, stacked)


@pytest.mark.parametrize(
    ("change", "stacks"),
    [
        (lambda net: None, 1),
        (lambda net: net.body[1].eval(), 2),
        (lambda net: setattr(net.body[0], "stride", (1, 1)), 2),
        (lambda net: setattr(net.body[1], "momentum", 0.5), 2),
        (lambda net: setattr(net, "scale", torch.ones(1)), 2),
        (lambda net: setattr(net, "table", np.arange(2000)), 2),
        (lambda net: net.table.__setitem__(1000, -1), 2),
        (lambda net: net.head.weight.requires_grad_(False), 2),
    ],
)
def test_only_what_is_of_one_kind_is_stacked(change, stacks):
    clients = [client(M.FedAvg, backbone=MixedNet).build(spec(k, 1, 8)) for k in range(3)]
    for one in clients:
        one.backbone.table = np.zeros(2000)
    change(clients[1].backbone)
    epochs = [Epoch(one, adam(one.learner.parameters()), []) for one in clients]
    assert len({epoch.kind() for epoch in epochs}) == stacks


def test_optimizers_with_rates_that_differ_in_a_late_digit_are_in_stacks_of_their_own():
    learner = client(M.FedAvg, backbone=MixedNet).build(spec(0, 1, 8))
    rates = (torch.tensor(0.1), torch.tensor(0.10000001), torch.tensor(0.1))
    epochs = [Epoch(learner, torch.optim.SGD(learner.learner.parameters(), lr=rate), []) for rate in rates]
    assert len({epoch.kind() for epoch in epochs}) == 2


class GroupedNet(Parts):
    def __init__(self, channels: int, classes: int) -> None:
        body = nn.Sequential(
            nn.Conv2d(channels, 5, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(20, 10),
            nn.ReLU(),
        )  # fmt: skip
        super().__init__(body, nn.Linear(10, classes))


@pytest.mark.parametrize("optimizer", [adam, lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)])
@pytest.mark.parametrize("method", [M.FedAvg, M.SimFed, M.PFedPara])
def test_in_double_precision_nothing_differs(method, optimizer):
    """Training makes much of a little, so single precision shows no more than that the numbers are about the same."""
    trained = []
    for stacked in (False, True):
        torch.manual_seed(0)
        made = client(method, backbone=MixedNet, optimizer=optimizer, scheduler=None)
        epochs = []
        for k, sizes in enumerate([(8, 8, 8), (8, 8, 5), (8, 8, 5), (8, 3), ()]):
            one = made.build(spec(k, 1, 8)).double()
            batches = [(torch.randn(n, 1, 8, 8).double(), torch.randint(10, (n,))) for n in sizes]
            epochs.append(Epoch(one, optimizer(one.learner.parameters()), batches))
        for _ in range(2):
            if stacked:
                train_together(epochs[::-1])
                continue
            for epoch in epochs:
                for i, batch in enumerate(epoch.batches):
                    epoch.optimizer.zero_grad()
                    epoch.client.training_step(batch, i).backward()
                    epoch.optimizer.step()
        trained.append([{**tensors_of(epoch.client), "loss": epoch.client.release_round_state()} for epoch in epochs])
    for one, other in zip(*trained, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=1e-7, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_matched_networks_of_other_widths_are_stacked_anew():
    one, stacked = both(M.FedMA, 4, model={"backbone": GroupedNet})
    assert_close(one, stacked)


def test_a_stack_is_what_trains(monkeypatch):
    sizes = []
    of = Stack.of
    monkeypatch.setattr(Stack, "of", lambda epochs: sizes.append(len(epochs)) or of(epochs))
    run(client(M.FedAvg, backbone=MixedNet), digits(5), rounds=2, engine=Stacked(size=3))
    assert sizes == [3, 2, 3, 2]


@pytest.mark.parametrize("method", [M.Ditto, M.APFL, M.FedProx, M.FedDyn, M.Scaffold, M.PerFedAvg, M.FedSLR])
def test_methods_with_more_than_a_learners_loss_are_refused(method):
    with pytest.raises(
        ConfigError, match=rf"^federation\.engine=Stacked: {method.__name__} minimizes more than its"
    ) as e:
        run(client(method, backbone=MixedNet, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)), engine=Stacked())
    assert str(e.value).endswith("use federation.engine=Local.")
    assert "\n" not in str(e.value)


class Mine(Learner):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 10))


def random_layers(channels, classes):
    return Parts(nn.Sequential(nn.Flatten(), nn.Dropout(0.5)), nn.Linear(64, classes))


class Outside(MixedNet):
    """Its ``forward`` does to something else than PyTorch's tensors what Python could do for all clients only once."""

    def __init__(self, what: str, *sizes: int) -> None:
        super().__init__(*sizes)
        self.what, self.scale = what, 1.0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, images):
        logits = super().forward(images)
        if not self.training:
            return logits
        if self.what == "buffer":
            self.count = self.count + 1
        elif self.what == "attribute":
            self.scale *= 0.9
        elif self.what == "kept":
            self.last = logits
        return logits * {"numpy": np.random.rand, "python": random.random}.get(self.what, lambda: 1.0)()


def step_schedule(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


OWN_WAY = "trainer.precision or federation.client_trainer is about single steps"


class Hears(M.FedAvg):
    def on_train_batch_start(self, *args):
        pass


class StepSchedule(M.FedAvg):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.learner.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": step_schedule(optimizer), "interval": "step"}]


@pytest.mark.parametrize(
    ("method", "model", "options", "reason"),
    [
        (M.FedAvg, {"learner": Mine()}, {}, "a step of Mine may do"),
        (M.FedAvg, {"backbone": random_layers}, {}, r"this network cannot be trained for many .*random"),
        *(
            (M.FedAvg, {"backbone": partial(Outside, what)}, {}, rf"this network cannot be trained for many .*{reason}")
            for what, reason in (
                ("buffer", r"backbone\.count is assigned in a step instead of changed in place"),
                ("attribute", r"changes 'scale' of backbone"),
                ("kept", r"changes 'last' of backbone"),
                ("numpy", "draws random numbers"),
                ("python", "draws random numbers"),
            )
        ),
        (M.FedAvg, {"optimizer": lambda p: torch.optim.LBFGS(p)}, {}, "LBFGS may not treat every number on its own"),
        (M.FedAvg, {}, {"client_trainer": {"gradient_clip_val": 1.0}}, OWN_WAY),
        (Hears, {}, {}, "Hears.on_train_batch_start is about single steps"),
        (StepSchedule, {}, {}, "the learning rate changes from step to step"),
        (M.FedSpa, {}, {}, "FedSpa has hooks in every step"),
    ],
)
def test_what_is_about_single_clients_is_refused(method, model, options, reason):
    with pytest.raises(ConfigError, match=rf"^federation\.engine=Stacked: {reason}") as error:
        run(client(method, **{"backbone": MixedNet, **model}), engine=Stacked(), **options)
    assert str(error.value).endswith("use federation.engine=Local.")
    assert "\n" not in str(error.value)


@pytest.mark.seconds
@pytest.mark.parametrize("engines", [(Stacked, Stacked), (Local, Stacked), (Stacked, Local)])
def test_a_run_resumes_in_either_engine(tmp_path, engines):
    def federation(engine):
        return Federation(client(M.SimFed, backbone=MixedNet), seed=3, threads=1, engine=engine())

    def fit(made, rounds, **options):
        fitting = trainer(rounds, enable_checkpointing=False)
        fitting.fit(made, datamodule=digits(), **options)
        return fitting, made

    _, whole = fit(federation(engines[0]), 4)
    half, _ = fit(federation(engines[0]), 2)
    half.save_checkpoint(tmp_path / "half.ckpt", weights_only=False)
    _, resumed = fit(federation(engines[1]), 4, ckpt_path=tmp_path / "half.ckpt", weights_only=False)
    if engines[0] == engines[1]:
        for k, state in weights(whole).items():
            for name, tensor in weights(resumed)[k].items():
                assert torch.equal(tensor, state[name]), name
    assert_close(whole, resumed)


@pytest.mark.seconds
def test_a_client_that_runs_away_costs_the_others_nothing():
    class Spoilt(M.FedAvg):
        def end_round(self):
            if self.spec.client_id == 1 and self.completed_rounds == 1:
                self.learner.backbone.head.weight.data.fill_(float("nan"))

    with pytest.warns(UserWarning, match="Client 1: .* NaN or infinity"):
        one = run(client(Spoilt, backbone=MixedNet), rounds=3)
    with pytest.warns(UserWarning, match="Client 1: .* NaN or infinity"):
        stacked = run(client(Spoilt, backbone=MixedNet), rounds=3, engine=Stacked())
    assert_close(one, stacked)
