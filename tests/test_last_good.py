"""A client whose training runs away is refused, and begins again from where it was."""

import pytest
import torch
from torch import nn

from lit_pfl.core.payload import Payload, all_finite
from lit_pfl.engines.last_good import LastGoodState
from lit_pfl.methods import FactorizedFL, FedAvg, FedPer, FedSpa, PFedPara, Scaffold, SimFed, StandAlone
from tiny import assert_equal, client, digits, run, weights


def spoilt(method, own=None, **options):
    """Return a client of a method of which number 2 has a loss of NaN in round 2, or ``own`` runs off to infinity."""

    class Spoilt(method):
        def bad(self):
            return self.spec.client_id == 2 and self.current_epoch == 1

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if self.bad() and own is None and batch_idx == 0 else loss

        def upload(self):
            if own is not None and self.bad():
                self.learner.get_parameter(own).data.fill_(float("inf"))
            return super().upload()

    return client(Spoilt, **options)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


METHODS = [FedAvg, FedSpa, SimFed, FactorizedFL, PFedPara, StandAlone]


@pytest.mark.seconds
@pytest.mark.parametrize("method", METHODS)
def test_a_bad_batch_costs_a_round_and_no_more(method):
    with pytest.warns(UserWarning, match=r"Client 2: .* NaN or infinity\. The client begins its next round from where"):
        federation = run(spoilt(method), rounds=4)
    assert not federation.coordinator.refused
    assert all(tensor.isfinite().all() for state in weights(federation).values() for tensor in state.values())
    [state] = federation.engine._restored[2]["optimizer_states"]
    assert all(s["momentum_buffer"].isfinite().all() for s in state["state"].values())
    assert federation.clients[2].trainer.current_epoch == 4
    assert all(row.scores["loss"] == row.scores["loss"] for row in federation.rows)


@pytest.mark.seconds
@pytest.mark.parametrize("optimizer", [None, adam])
def test_the_state_is_the_one_that_the_round_began_with(optimizer):
    """After the round the client is, bit for bit and optimizer included, what it was after the round before."""
    options = {} if optimizer is None else {"optimizer": optimizer}
    one = run(spoilt(StandAlone, **options), rounds=1)
    with pytest.warns(UserWarning, match="Client 2"):
        two = run(spoilt(StandAlone, **options), rounds=2)
    assert_equal(weights(two)[2], weights(one)[2])
    a, b = (f.engine._restored[2]["optimizer_states"][0]["state"] for f in (one, two))
    assert_equal(a, b)
    assert not torch.equal(weights(two)[1]["backbone.head.weight"], weights(one)[1]["backbone.head.weight"])


@pytest.mark.seconds
def test_an_optimizer_s_state_is_looked_at_where_all_weights_are_finite():
    class Spoilt(FedAvg):
        def upload(self):
            if self.spec.client_id == 2 and self.current_epoch == 1:
                for state in self.trainer.optimizers[0].state.values():
                    state["momentum_buffer"].fill_(torch.inf)
            return super().upload()

    with pytest.warns(UserWarning, match=r"Client 2: its optimizer's state holds NaN or infinity\. The client begins"):
        federation = run(client(Spoilt), rounds=3)
    assert all(tensor.isfinite().all() for state in weights(federation).values() for tensor in state.values())


@pytest.mark.seconds
def test_what_a_reply_overwrites_is_the_replys_again():
    with pytest.warns(UserWarning, match="Client 2"):
        federation = run(spoilt(FedPer, own="backbone.body.0.weight"), rounds=2)
    now, first = weights(federation)[2], weights(run(client(FedPer), rounds=1))
    common = run(client(FedPer), rounds=1).coordinator.server.model
    for name, tensor in now.items():
        inner = name.removeprefix("learner.")
        assert torch.equal(tensor, common[inner] if inner in common else first[2][name]), name


@pytest.mark.seconds
def test_what_never_travels_is_looked_at_too():
    with pytest.warns(
        UserWarning, match=r"Client 2: its own tensor 'learner\.backbone\.head\.weight' holds NaN or infinity"
    ):
        federation = run(spoilt(FedPer, own="backbone.head.weight"), digits(permute_labels=True), rounds=2)
    assert len(federation.coordinator.refused) == 1
    assert weights(federation)[2]["backbone.head.weight"].isfinite().all()


@pytest.mark.seconds
def test_the_loss_of_a_refused_round_does_not_count():
    with pytest.warns(UserWarning, match="Client 2"):
        federation = run(spoilt(FedAvg), rounds=2)
    assert torch.isfinite(federation.trainer.callback_metrics["train/loss"])


@pytest.mark.seconds
def test_control_variates_go_back_too():
    plain = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1), "scheduler": None}
    one = run(spoilt(Scaffold, **plain), rounds=1)
    with pytest.warns(UserWarning, match="Client 2"):
        two = run(spoilt(Scaffold, **plain), rounds=2)
    names = [name for name in weights(one)[2] if name.startswith("control.")]
    assert names
    for name in names:
        assert torch.equal(weights(one)[2][name], weights(two)[2][name])


def test_what_was_not_finite_before_is_no_trouble():
    module = torch.nn.Linear(2, 2)
    module.register_buffer("smallest", torch.tensor(float("inf")))
    state = LastGoodState(module, [], {})
    assert state.trouble(0, Payload({})) is None
    module.weight.data.fill_(3e38)  # finite, though their sum is not
    assert state.trouble(0, Payload({})) is None
    module.weight.data[0, 0] = float("nan")
    assert "'weight'" in str(state.trouble(0, Payload({})))
    state.restore()
    assert state.trouble(0, Payload({})) is None


def test_sparse_tensors_are_held_and_looked_at_too():
    module = torch.nn.Linear(2, 2)
    module.register_buffer("graph", torch.eye(2).to_sparse())
    state, sent = LastGoodState(module, [], {}), Payload({"graph": module.graph})
    assert state.trouble(0, sent) is None
    module.bias.data.fill_(float("nan"))
    assert "'bias'" in str(state.trouble(0, sent))
    state.restore()
    module.graph.mul_(float("inf"))
    assert not all_finite(state._stays(Payload({})))
    state.restore()
    assert torch.equal(module.graph.to_dense(), torch.eye(2))


def test_what_is_no_tensor_goes_back_too():
    class Counting(torch.nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.seen = [0]

        def get_extra_state(self):
            return self.seen

        def set_extra_state(self, state):
            self.seen = state

    module = Counting()
    state = LastGoodState(module, [], {"weight": torch.ones(2, 2)})
    module.seen.append(float("nan"))
    module.weight.data.fill_(float("nan"))
    state.restore()
    assert module.seen == [0]
    assert torch.equal(module.weight, torch.ones(2, 2))


def test_what_a_reply_leaves_is_copied_whatever_the_reply_holds():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.BatchNorm1d(2))
    names = list(module.state_dict())
    for left in names:
        before = module.state_dict()[left].clone()
        state = LastGoodState(module, [], {name: value for name, value in module.state_dict().items() if name != left})
        module.state_dict()[left].fill_(7)
        state.restore()
        assert torch.equal(module.state_dict()[left], before)


def test_states_that_modules_make_themselves_are_copied():
    class Hidden(torch.nn.Linear):
        memory = torch.zeros(1)

        def _save_to_state_dict(self, destination, prefix, keep_vars):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "memory"] = self.memory

        def _load_from_state_dict(self, state_dict, prefix, *args):
            self.memory = state_dict.pop(prefix + "memory")
            super()._load_from_state_dict(state_dict, prefix, *args)

    module = Hidden(2, 2)
    state = LastGoodState(module, [], {"weight": torch.ones(2, 2), "bias": torch.ones(2)})
    module.memory += 1
    state.restore()
    assert module.memory == 0


def test_what_has_two_names_is_as_in_the_reply_again():
    module = nn.Module()
    module.net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module.head = module.net[1]
    reply = {name: torch.full_like(weight, 3.0) for name, weight in module.named_parameters()}
    good = LastGoodState(module, [], reply)
    module.net.requires_grad_(False).apply(lambda part: [weight.fill_(torch.nan) for weight in part.parameters()])
    good.restore()
    assert all(weight.eq(3).all() for weight in module.parameters())
