"""Fits in one process, as the server counts them."""

import copy

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from callbacks.plain import Line, batches
from lit_pfl import Payload, Server
from lit_pfl.core.ledger import Ledger
from lit_pfl.errors import ConfigError
from lit_pfl.links import LocalHub
from lit_pfl.methods import IFCA, FedAvg, PFedHN, Scaffold
from lit_pfl.randomness import Draws
from lit_pfl_callbacks import FederatedLoop, JoinInfo
from tiny import assert_equal, trainer


def test_what_clients_mark_as_sparse_on_joining_is_sent_back_as_sparse():
    hub, shared = LocalHub(), Payload({"mu": torch.zeros(1000)}, sparse=["mu"])

    def fit() -> None:
        hub.link.join(JoinInfo(1, shared))
        hub.link.exchange(shared)

    hub.add(0, fit)
    ledger = hub.run(Server()).ledger
    assert ledger.clients == {0: [shared.nbytes, 2 * shared.nbytes]}  # the first reply, and the last
    assert ledger.total < 1000


def test_what_a_ledger_hands_out_does_not_change():
    ledger = Ledger()
    ledger.sent_up(0, Payload({"w": torch.ones(2)}))
    state = ledger.state_dict()
    ledger.sent_up(0, Payload({"w": torch.ones(2)}))
    assert state["clients"][0] == [ledger.clients[0][0] / 2, 0]


def test_without_a_server_modules_as_they_are_are_averaged():
    def models(*server):
        hub, modules = LocalHub(), [Line(), Line()]
        for site, module in enumerate(modules):
            module.net.weight.data += site
            hub.add(site, lambda m=module: trainer(1, callbacks=[FederatedLoop(hub.link)]).fit(m, batches()))
        assert hub.run(*server).round == 1
        return [module.net.weight for module in modules]

    default, given = models(), models(Server())
    assert torch.equal(default[0], default[1])
    assert torch.equal(default[0], given[0])


def test_trainers_show_what_they_show_by_default(capsys):
    hub = LocalHub()
    for site in range(2):
        one = L.Trainer(max_epochs=2, accelerator="cpu", logger=False, callbacks=[FederatedLoop(hub.link)])
        hub.add(site, lambda one=one: one.fit(Line(), batches(), batches()))
    assert hub.run().round == 2


def test_sites_write_to_their_loggers_in_any_task_of_slurm(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    hub = LocalHub()
    for site in range(2):
        logger = CSVLogger(tmp_path, name=str(site), version="")
        one = trainer(1, logger=logger, log_every_n_steps=1, callbacks=[FederatedLoop(hub.link)])
        hub.add(site, lambda one=one: one.fit(Line(), batches(), batches()))
    hub.run()
    assert all((tmp_path / str(site) / "metrics.csv").exists() for site in range(2))


@pytest.mark.parametrize("method", [Scaffold, IFCA, PFedHN])
def test_without_a_server_the_first_module_under_a_method_makes_it(method):
    """With draws of the server's own, so that sites draw as with one that was made before."""

    def fitted(*server):
        hub, modules = LocalHub(seed=4), []
        for site in range(2):
            torch.manual_seed(site)
            modules.append(method(learner=Line()))
            hub.add(site, lambda m=modules[site]: trainer(2, callbacks=[FederatedLoop(hub.link)]).fit(m, batches()))
        return hub.run(*server).server, modules

    torch.manual_seed(0)
    first = method(learner=Line())
    with Draws(4).default_generators("server"):
        expected, modules = fitted(first.configure_server())
    server, others = fitted()
    assert type(server) is type(expected)
    for one, other in zip(modules, others, strict=True):
        assert_equal(one.state_dict(), other.state_dict())


@pytest.mark.parametrize(("first", "second"), [("by FedAvg", "by Scaffold"), ("without a method", "by FedAvg")])
def test_without_a_server_all_modules_are_under_the_same_method(first, second):
    hub, makes = LocalHub(), {"by FedAvg": FedAvg, "by Scaffold": Scaffold, "without a method": lambda learner: learner}
    for site, how in enumerate((first, second)):
        module = makes[how](learner=Line())
        hub.add(site, lambda m=module: trainer(1, callbacks=[FederatedLoop(hub.link)]).fit(m, batches()))
    with pytest.raises(ConfigError, match=f"Client 1 trains {second}, but client 0 {first}. Use the same method at"):
        hub.run()


def run(folder, rounds, paths=(None, None), state=None):
    """Run sites that keep a checkpoint of every round; return the server's states, and the coordinator."""
    hub, states = LocalHub(), {}

    def fit(site, last):
        keeps = ModelCheckpoint(folder / str(site), filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
        fitting = trainer(last, callbacks=[FederatedLoop(hub.link), keeps], enable_checkpointing=True)
        fitting.fit(Line(), batches(), ckpt_path=paths[site], weights_only=True)

    for site, last in enumerate(rounds):
        hub.add(site, lambda site=site, last=last: fit(site, last))
    after = lambda coordinator: states.update({coordinator.round: copy.deepcopy(coordinator.state_dict())})  # noqa: E731
    return states, hub.run(state=state, after_round=after)


@pytest.mark.parametrize(
    ("epochs", "round", "message"),
    [
        ((2, 1), 3, r"Client 1: its checkpoint is of round 2, .* after round 3: 1 round behind\."),
        ((3, 1), 3, r"Client 0: its checkpoint is of round 4, .* after round 3: 1 round ahead\."),
        ((2, None), 3, r"Client 1: it begins without a checkpoint, .* after round 3: 3 rounds behind\."),
        ((2, 2), 3, None),
    ],
)
def test_sites_resume_from_the_round_of_the_server_s_state(tmp_path, epochs, round, message):
    states, _ = run(tmp_path, (4, 4))
    paths = [None if e is None else tmp_path / str(site) / f"epoch={e}.ckpt" for site, e in enumerate(epochs)]
    if message is None:
        assert run(tmp_path, (6, 6), paths, states[round])[1].round == 6
        return
    with pytest.raises(ConfigError, match=message) as error:
        run(tmp_path, (6, 6), paths, states[round])
    assert "\n" not in str(error.value)


def test_sites_that_come_late_or_had_left_go_on_from_rounds_of_their_own(tmp_path):
    states, _ = run(tmp_path, (4, 2))  # site 1 leaves after two rounds
    first, left = tmp_path / "0/epoch=3.ckpt", tmp_path / "1/epoch=1.ckpt"
    states, coordinator = run(tmp_path, (6, 3, 2), (first, left, None), states[4])
    assert coordinator.round == 6
    assert sorted(states) == [5, 6]
    paths = [tmp_path / f"{site}/epoch={epoch}.ckpt" for site, epoch in enumerate((5, 2, 1))]
    assert run(tmp_path, (7, 4, 3), paths, states[6])[1].round == 7
    old = {name: value for name, value in states[6].items() if name != "last_rounds"}
    assert run(tmp_path, (7, 4, 2), [paths[0], left, None], old)[1].round == 8  # a state that does not tell
