"""Federations of Flower whose nodes are in this process: the apps, the messages and the files, without the network."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, Context, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.task_identity import TaskIdentity

from foreign import Loaders, Regression, diabetes
from links.grids import DirectGrid, assert_same, states
from lit_pfl import Client, Federation, Payload
from lit_pfl.core import ClientSpec
from lit_pfl.data import Dirichlet, PerClient
from lit_pfl.errors import ConfigError, UploadError
from lit_pfl.links.flower import client_app, nodes, server_app
from lit_pfl.links.flower.messages import pack, unpack
from lit_pfl.links.flower.plan import Plan
from lit_pfl.links.flower.server import FlowerServer
from lit_pfl.links.flower.states import States
from lit_pfl.methods import Ditto, FactorizedFL, FedAvg, FedExP, FedSLR, PsiNet, Scaffold, SimFed
from lit_pfl.models import VGG9
from lit_pfl.randomness import Draws
from lit_pfl_callbacks.run_folder import read_rows
from tiny import assert_equal, digits, trainer
from tiny import client as tiny_client

METHODS = {
    "SimFed": lambda: tiny_client(SimFed),
    "FactorizedFL": lambda: tiny_client(FactorizedFL),
    "Scaffold": lambda: tiny_client(Scaffold, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)),
    "Ditto": lambda: tiny_client(Ditto),
    "FedSLR": lambda: tiny_client(FedSLR),
    "PsiNet": lambda: PsiNet(backbone=lambda channels, classes: VGG9(channels, classes, width=2, norm="batch")),
    "FedAvg": lambda: tiny_client(FedAvg),
    "FedExP": lambda: tiny_client(FedExP),
}
CONFIG = {"clients": 6, "rounds": 4, "participation": 0.5, "seed": 3, "threads": 1, "timeout": 1.0, "folder": "server"}
NODES = {10: [0, 1], 20: [2, 3], 30: [4, 5]}


@pytest.fixture(autouse=True)
def _in_a_run(monkeypatch):
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@cache
def data():
    module = digits(6, image_size=16, partition=Dirichlet(alpha=0.5))
    module.setup()
    return module


def spec(config=None):
    return ClientSpec(example=(torch.zeros(1, 1, 16, 16), torch.zeros(1, dtype=torch.int64)), num_classes=10)


def sites(context: Context):
    everybody = data()
    return {int(client): everybody.client(int(client)) for client in context.node_config["clients"].split(",")}


def grid(name="FedAvg", make=None, **config) -> DirectGrid:
    nodes = {node: {"clients": ",".join(map(str, clients)), "folder": f"node{node}"} for node, clients in NODES.items()}
    make = make or METHODS[name]
    return DirectGrid(client_app(lambda config: make(), sites), nodes, {**CONFIG, **config})


def server(grid: DirectGrid, name="FedAvg", **config) -> FlowerServer:
    return FlowerServer(grid, METHODS[name](), spec(), Plan.of({**grid.config, **config}))


def federation(method: Client, rounds=4, **options) -> Federation:
    federation = Federation(method, **{"participation": 0.5, "seed": 3, "threads": 1, **options})
    trainer(rounds).fit(federation, datamodule=data())
    return federation


@pytest.mark.parametrize("name", METHODS)
def test_the_same_run_as_in_one_process(name):
    here = grid(name)
    flower = server(here, name)
    flower.run()
    whole = federation(METHODS[name]())
    assert_same(Path(), flower.folder, whole)
    ledger = flower.coordinator.ledger
    assert sum(up for up, _ in ledger.clients.values()) == here.payload_bytes["train"][0]
    assert sum(down for _, down in ledger.clients.values()) == here.payload_bytes["train"][1]


@pytest.mark.parametrize(("name", "rounds"), [("FedSLR", 4), ("FedExP", 2)])
def test_scores_are_those_of_one_process(name, rounds):
    flower = server(grid(name, rounds=rounds), name, rounds=rounds)
    flower.run()
    whole = federation(METHODS[name](), rounds)
    rows = read_rows(Path("server/clients.csv"))
    expected = [row for row in whole.rows if row.split == "test"]
    assert len(rows) == len(expected) == (12 if name == "FedSLR" else 6)  # two models each
    assert len(whole.scores.trained) < 6
    for row, reference in zip(rows, expected, strict=True):
        assert (int(row["client"]), row["model"], int(row["n"])) == (reference.client, reference.model, reference.n)
        for name, value in reference.scores.items():
            assert float(row[name]) == value


def test_every_round_is_logged():
    flower = server(grid())
    flower.run()
    whole = federation(METHODS["FedAvg"](), rounds=1)
    rows = read_rows(Path("server/metrics.csv"))
    assert [int(row["round"]) for row in rows] == [1, 2, 3, 4]
    assert int(rows[0]["comm/up_bytes"]) == whole.traffic.up
    assert float(rows[0]["train/loss"]) == float(whole.trainer.callback_metrics["train/loss"])


@pytest.mark.parametrize("name", ["Ditto", "Scaffold"])
@pytest.mark.parametrize("when", ["before its checkpoint", "after its checkpoint"])
def test_a_server_that_is_restarted_goes_on(name, when):
    """Killed once clients have trained round 3, with that round's checkpoint or only the one before."""
    here = grid(name)
    first = server(here, name)
    save, saved = first._save, []

    def stop() -> None:
        if first.coordinator.round == 3 and when == "before its checkpoint":
            raise KeyboardInterrupt
        save()
        saved.append(first.coordinator.round)
        if first.coordinator.round == 3:
            raise KeyboardInterrupt

    first._save = stop
    with pytest.raises(KeyboardInterrupt):
        first.run()
    assert saved[-1] == (2 if "before" in when else 3)
    second = server(here, name)
    second.run()
    assert_same(Path(), second.folder, federation(METHODS[name]()))
    assert [row["round"] for row in second.metrics] == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["Ditto", "Scaffold"])
def test_a_client_whose_answer_is_lost_goes_back(name):
    """It has trained, the server does not know: both go on as if it had not."""
    here = grid(name, participation=1.0)

    def lose(message, answer):
        return None if (message.metadata.group_id, message.metadata.dst_node_id) == ("2", 20) else answer

    here.change = lose
    with pytest.warns(UserWarning, match="Client 2: its node has not answered"):
        server(here, name).run()
    lost = states(Path(), Path("server"))

    here = grid(name, participation=1.0)
    here.nodes = {node: {**config, "folder": f"again/{node}"} for node, config in here.nodes.items()}
    here.down_in = {"2": {20}}
    with pytest.warns(UserWarning, match="Client 2: its node has not answered"):
        server(here, name, folder="other").run()
    assert_equal(lost, states(Path("again"), Path("other")))
    for folder in ("server", "other"):
        assert [int(row["uploads"]) for row in read_rows(Path(folder, "metrics.csv"))] == [6, 4, 6, 6]


def test_a_node_that_is_down_is_named_and_the_quorum_decides():
    here = grid(participation=1.0, quorum=0.6)
    flower = server(here)
    flower._begin()
    here.down = {30}
    with pytest.warns(UserWarning, match="Client 4: its node has not answered within 1 s"):
        flower._round()
    here.down = set()
    flower.run()
    assert [row["uploads"] for row in flower.metrics] == [4, 6, 6, 6]


def test_too_few_nodes_for_the_quorum():
    here = grid(participation=1.0)
    server(here, rounds=1).run()
    here.down = {20, 30}
    with pytest.raises(UploadError, match=r"2 of 6 uploads are usable.*Client 2: no node has it"):
        server(here).run()
    here.down = set()
    again = server(here)
    again.run()
    assert again.coordinator.round == 4


def test_a_node_that_comes_back_under_another_id():
    here = grid(participation=1.0)
    flower = server(here)
    move = flower._round

    def moved() -> None:
        if flower.coordinator.round == 2:
            here.nodes[31] = here.nodes.pop(30)
        move()

    flower._round = moved
    flower.run()
    assert [row["uploads"] for row in flower.metrics] == [6] * 4
    assert here.asked.count((31, "query")) == here.asked.count((30, "query")) == 1
    assert_same(Path(), flower.folder, federation(METHODS["FedAvg"](), participation=1.0))


def test_a_node_that_trains_otherwise_does_not_join():
    here = grid("FedAvg")
    said = r"Node \d0 cannot join: it trains by FedAvg for 1 epochs a round, and the server has Ditto for 1"
    with pytest.warns(UserWarning, match=said), pytest.raises(ConfigError, match="0 have joined within 0.1 s"):
        server(here, "Ditto", timeout=0.1).run()


def test_a_client_at_two_nodes_is_named():
    here = grid()
    here.nodes[40] = {**here.nodes[30], "folder": "node40"}
    with pytest.warns(UserWarning, match="Client 4 is at node 40, which is asked from now on, and at node 30, unless"):
        server(here).run()


def test_a_message_that_has_expired_was_not_answered_in_time():
    def expire(message, answer):
        late = message.metadata.group_id == "2" and message.metadata.dst_node_id == 20
        return Message(Error(ErrorCode.MESSAGE_UNAVAILABLE, "expired"), reply_to=message) if late else answer

    here = grid(participation=1.0)
    here.change = expire
    flower = server(here)
    with pytest.warns(UserWarning, match="Client 2: its node has not answered within"):
        flower.run()


def test_a_node_that_never_answers_is_not_waited_for_twice(monkeypatch):
    """Nor at all if it has come before all clients have joined."""
    here, waits = grid(timeout=60.0, rounds=5), []
    monkeypatch.setattr(nodes, "LOOK", 30.0)
    monkeypatch.setattr(nodes, "time", SimpleNamespace(sleep=waits.append, monotonic=lambda: sum(waits)))
    here.nodes[5], here.down = {}, {5, 6}
    flower = server(here)
    flower._begin()
    flower._round()
    assert not waits
    here.nodes[6] = {}
    flower._round()
    assert waits == [30.0, 30.0]
    [question] = [question for question, node in flower.nodes._asked.items() if node == 6]
    here.waiting[question] = SimpleNamespace(
        metadata=SimpleNamespace(reply_to_message_id=question),
        error=Error(ErrorCode.MESSAGE_UNAVAILABLE, "expired"),
        has_content=lambda: False,
    )
    flower.run()
    assert waits == [30.0, 30.0]
    assert here.asked.count((5, "query")) == 1
    assert here.asked.count((6, "query")) == 2  # once more in the next round


def test_clients_that_do_not_join_are_counted():
    here = grid()
    del here.nodes[20]
    with pytest.raises(ConfigError, match=r"clients=6: 4 have joined within 0.1 s \(0, 1, 4, 5\)"):
        server(here, timeout=0.1).run()
    assert not Path("server/checkpoint.ckpt").exists()


def test_an_existing_project():
    """Its own module, its own data modules, one at each node: the same as all of them in one process."""
    sites = [Loaders(samples) for samples in diabetes()[:3]]

    def own(context):
        client = context.node_config["client"]
        module = PerClient([sites[client]])
        module.setup()
        return {client: module.client(0)}

    def make(config):
        return Ditto(learner=Regression(), head=r"^net\.3\.")

    config = {**CONFIG, "clients": len(sites), "participation": 1.0}
    nodes = {client: {"client": client, "folder": f"nodes/{client}"} for client in range(len(sites))}
    here = DirectGrid(client_app(make, own, client_options={"gradient_clip_val": 1.0}), nodes, config)
    server_app(make)(here, Context(1, 1, {}, RecordDict(), config))
    with Draws(3).default_generators("weights"):
        method = make(config)
    whole = Federation(method, seed=3, threads=1, client_trainer={"gradient_clip_val": 1.0})
    trainer(4).fit(whole, datamodule=PerClient(sites))
    assert_same(Path("nodes"), Path("server"), whole)
    rows = read_rows(Path("server/clients.csv"))
    assert len(rows) == len(whole.rows) == 3
    for row, reference in zip(rows, whole.rows, strict=True):
        assert {name: float(row[name]) for name in reference.scores} == reference.scores


def test_a_run_s_name_does_not_lead_out_of_the_folder():
    for name in ("..", "a/b", ""):
        with pytest.raises(ConfigError, match="must be letters and digits"):
            States(Path("here"), name, 0)


def test_another_run_is_refused():
    here = grid()
    server(here, rounds=1).run()
    for option, value in (("participation", 1.0), ("seed", 4), ("local-epochs", 2)):
        with pytest.raises(ConfigError, match=f"run-config {option}={value}: the run in server has"):
            server(here, **{option: value}).run()
    with pytest.raises(ConfigError, match="run-config method=Ditto: the run in server has FedAvg"):
        server(here, "Ditto").run()
    server(here, rounds=2).run()
    assert len(read_rows(Path("server/metrics.csv"))) == 2


def test_a_client_that_has_lost_its_state_says_so():
    here = grid(participation=1.0)
    server(here, rounds=1).run()
    for path in Path("node20").rglob("*.ckpt"):
        path.unlink()
    flower = server(here, rounds=2)
    with pytest.warns(UserWarning, match=r"Client 2: .*its state after round 1 is not in node20"):
        flower.run()
    assert flower.metrics[-1]["uploads"] == 4


def test_a_client_that_a_callback_has_ended_is_named_and_the_others_of_its_node_train_on():
    class EndsEarly(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.should_stop = pl_module.spec.client_id == 1

    here = grid(participation=1.0)
    here.app = client_app(lambda config: METHODS["FedAvg"](), sites, client_options={"callbacks": [EndsEarly()]})
    flower = server(here, rounds=4)
    with pytest.warns(UserWarning, match="Client 1: a callback has ended its training"):
        flower.run()
    assert [row["uploads"] for row in flower.metrics] == [6, 5, 5, 5]
    assert {row["client"] for row in read_rows(flower.folder / "clients.csv")} == {*"012345"}


def test_a_scoring_that_nobody_answers_leaves_the_table():
    here = grid(participation=1.0)
    server(here, rounds=1).run()
    table = Path("server/clients.csv").read_text()
    here.change = lambda message, answer: None if message.metadata.message_type == "evaluate" else answer
    with pytest.warns(UserWarning, match="No node has answered the scoring"):
        server(here, rounds=2).run()
    assert Path("server/clients.csv").read_text() == table


def test_training_that_runs_away_is_refused_by_name():
    class RunsAway(FedAvg):
        def objective(self, batch, batch_idx):
            loss = super().objective(batch, batch_idx)
            return loss * float("nan") if self.spec.client_id == 3 and self.completed_rounds == 1 else loss

    def make():
        return tiny_client(RunsAway)

    here = grid(make=make, participation=1.0)
    flower = FlowerServer(here, make(), spec(), Plan.of(here.config))
    with pytest.warns(UserWarning, match="Client 3: tensor .* holds NaN"):
        flower.run()
    assert [row["uploads"] for row in flower.metrics] == [6, 5, 6, 6]
    with pytest.warns(UserWarning, match="Client 3: tensor .* holds NaN"):
        assert_same(Path(), flower.folder, federation(make(), participation=1.0))


def inflated(array):
    """Return an array that claims to be larger than it is."""
    return Array(array.dtype, array.shape, array.stype, array.data.replace(b"'shape': (", b"'shape': (9"))


def spoil(change):
    def spoiled(message, answer):
        if message.metadata.group_id == "1" and message.metadata.dst_node_id == 20:
            change(answer.content)
        return answer

    return spoiled


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c["payloads"].__setitem__("2", Array(np.zeros(9, dtype=np.uint8))), "header is not as"),
        (lambda c: c["payloads"].__setitem__("2", Array(np.array([128, 4, 46], np.uint8))), "ends within"),
        (lambda c: c["payloads"].__setitem__("2", Array(np.zeros(9, dtype=np.float32))), "an array of float32"),
        (lambda c: c["payloads"].__setitem__("2", inflated(c["payloads"]["2"])), "an array of uint8"),
        (lambda c: c["payloads"].__setitem__("2", Array("uint8", (9,), "numpy.ndarray", b"")), "cannot be decoded"),
        (lambda c: c["payloads"].pop("2"), "cannot be decoded"),
        (lambda c: c["layout"].__setitem__("2", "nonsense"), "cannot be decoded"),
        (lambda c: c["layout"].__setitem__("2", "[" * 100_000), "cannot be decoded"),
        (lambda c: c["layout"].__setitem__("2", c["layout"]["2"].replace("]", ",[]]")), "no lists of names"),
        (lambda c: c["layout"].__setitem__("2", '{"names": ["a"], "sparse": []}'), "cannot be decoded"),
        (lambda c: c.pop("payloads"), "cannot be decoded"),
        (lambda c: c.pop("losses"), "is not whole"),
        (lambda c: c["losses"].__setitem__("2", [1.0]), "is not whole"),
        (lambda c: c.pop("troubles"), "is not whole"),
        (lambda c: c.update(pack({2: Payload({"a": torch.ones(1)})})), "lacks tensor"),
    ],
)
def test_an_answer_that_is_not_right(change, says):
    here = grid(participation=1.0)
    here.change = spoil(change)
    flower = server(here, rounds=1)
    with pytest.warns(UserWarning, match=f"Round 1 continues without one upload. Client 2: .*{says}"):
        flower.run()
    assert flower.metrics[-1]["uploads"] < 6


def test_what_was_refused_is_in_a_table_and_its_node_is_told():
    here = grid(participation=1.0)
    here.change = spoil(lambda content: content.update(pack({2: Payload({"a": torch.ones(1)})})))
    flower = server(here, rounds=2)
    with pytest.warns(UserWarning, match="has refused an upload of this node") as told:
        flower.run()
    said = [str(warning.message) for warning in told]
    reasons = [words for words in said if words.startswith("Round 1 continues without")]
    assert len(reasons) == 2
    for reason in reasons:
        assert f"The server has refused an upload of this node. {reason.partition('upload. ')[2]}" in said
    row, other = read_rows(flower.folder / "refused.csv")  # nothing has come of client 3, who is told so too
    assert [(row["round"], row["client"]), (other["round"], other["client"])] == [("1", "2"), ("1", "3")]
    assert row["tensor"] in row["reason"]
    assert row["reason"].startswith("Client 2: the upload lacks tensor")


def test_what_was_refused_in_the_round_that_ends_the_run_is_in_the_table():
    here = grid(participation=1.0)
    here.change = spoil(lambda content: content.update(pack({k: Payload({"a": torch.ones(1)}) for k in range(4)})))
    flower = server(here, rounds=1, quorum=1.0)
    with pytest.warns(UserWarning, match="continues without"), pytest.raises(UploadError, match="than the quorum"):
        flower.run()
    assert read_rows(flower.folder / "refused.csv")


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.update({"2": MetricRecord({"n": 1})}),
        lambda c: c.update({"2/personalized": MetricRecord({"acc": 1.0})}),
        lambda c: c.update({"2/personalized": MetricRecord({"n": float("inf")})}),
        lambda c: c.update({"2/personalized": MetricRecord({"n": 3, "acc": [1.0]})}),
        lambda c: c.update({"0/personalized": MetricRecord({"n": 3, "acc": 1.0})}),
        lambda c: c.pop("higher_is_better"),
    ],
)
def test_scores_that_are_not_whole_are_left_out_by_node(change):
    def spoiled(message, answer):
        if message.metadata.message_type == "evaluate" and message.metadata.dst_node_id == 20:
            change(answer.content)
        return answer

    here = grid(participation=1.0)
    here.change = spoiled
    flower = server(here, rounds=1)
    with pytest.warns(UserWarning, match="Node 20: its scores are not whole"):
        flower.run()
    assert {row["client"] for row in read_rows(flower.folder / "clients.csv")} == {"0", "1", "4", "5"}


@pytest.mark.parametrize("number", [0, -3, 1.5, float("inf"), 2**60])
def test_a_node_with_no_number_of_samples_does_not_join(number):
    def spoiled(message, answer):
        if message.metadata.message_type == "query" and message.metadata.dst_node_id == 20:
            answer.content["samples"]["2"] = number
        return answer

    here = grid(participation=1.0, timeout=0.1)
    here.change = spoiled
    flower = server(here, rounds=1)
    with (
        pytest.warns(UserWarning, match="Node 20 cannot join: Client 2"),
        pytest.raises(ConfigError, match="have joined within"),
    ):
        flower.run()


def test_a_node_answers_for_its_own_clients_only():
    here = grid(participation=1.0)
    here.change = spoil(lambda content: content.update(pack({0: Payload({"a": torch.ones(1)})})))
    flower = server(here, rounds=1)
    with pytest.warns(UserWarning, match="Client 2"):
        flower.run()
    assert flower.metrics[0]["uploads"] == 4  # of its own there is nothing left; client 0 is as it was


def node_20(here: DirectGrid, again: dict | None = None) -> dict[tuple[str, str], RecordDict]:
    """Note what node 20 answers, by kind and round of the message; let it send something else ``again`` for some."""
    honest: dict[tuple[str, str], RecordDict] = {}

    def change(message, answer):
        if message.metadata.dst_node_id != 20:
            return answer
        which = message.metadata.message_type, message.metadata.group_id
        honest[which] = answer.content
        return Message(again[which], reply_to=message) if which in (again or {}) else answer

    here.change = change
    return honest


def test_an_old_round_that_a_node_sends_again_is_refused():
    here, again = grid(participation=1.0), {}
    honest = node_20(here, again)
    flower = server(here)
    flower._begin()
    flower._round()
    again["train", "3"] = honest["train", "1"]
    with pytest.warns(UserWarning, match=r"Client 2: its node's answer is of round 1, not of round 3\."):
        flower.run()
    rows = [(row["round"], row["client"], row["reason"]) for row in read_rows(Path("server/refused.csv"))]
    assert rows == [("3", str(c), f"Client {c}: its node's answer is of round 1, not of round 3.") for c in (2, 3)]
    replayed = states(Path(), Path("server"))

    # the same as if the node had been silent
    here = grid(participation=1.0)
    here.nodes = {node: {**config, "folder": f"again/{node}"} for node, config in here.nodes.items()}
    here.down_in = {"3": {20}}
    with pytest.warns(UserWarning, match="Client 2: its node has not answered"):
        server(here, folder="other").run()
    assert_equal(replayed, states(Path("again"), Path("other")))


def test_what_belongs_to_another_run_is_refused():
    here = grid(participation=1.0)
    others = node_20(here)
    server(here, folder="earlier", rounds=2).run()  # of the same method and round, so that all tensors would fit
    again = {("train", "2"): others["train", "2"], ("evaluate", ""): others["evaluate", ""]}
    node_20(here, again)
    flower = server(here, rounds=2)
    with pytest.warns(UserWarning, match="of another run") as said:
        flower.run()
    lines = "\n".join(str(warning.message) for warning in said)
    assert "Round 2 continues without one upload. Client 2: its node's answer is of another run." in lines
    assert "Node 20: its scores are not whole (ValueError('they are of another run'))" in lines
    assert [row["uploads"] for row in flower.metrics] == [6, 4]
    assert [row["client"] for row in read_rows(flower.folder / "refused.csv")] == ["2", "3"]
    assert {row["client"] for row in read_rows(flower.folder / "clients.csv")} == {"0", "1", "4", "5"}


def test_payloads_arrive_as_they_were():
    names = {
        "z": torch.randn(3),
        "a": torch.arange(4),
        "b": torch.zeros(2, 2),
        "c": torch.zeros(()),
        "e": torch.ones(0),
    }
    names["h"] = torch.randn(5).bfloat16()
    names["s"] = torch.zeros(100).index_fill(0, torch.tensor([7]), 2.0)
    for payload in (Payload(names, ["s", "z"]), Payload({})):
        records = RecordDict({**pack({3: payload})})
        arrived = unpack(records, 3)
        assert list(arrived) == list(payload)
        assert arrived.sparse == payload.sparse
        assert (arrived.nbytes, arrived.elements) == (payload.nbytes, payload.elements)
        assert_equal(dict(arrived), dict(payload))
        assert records["payloads"]["3"].numpy().nbytes == payload.nbytes


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"rounds": 3}, "run-config clients is not given"),
        ({"clients": 0, "rounds": 3}, "run-config clients=0: must be 1 or more"),
        ({"clients": 2, "rounds": "3"}, "run-config rounds='3': give a value of type int"),
        ({"clients": 2, "rounds": 3, "participation": 3}, "run-config participation=3 is more than the 2 clients"),
        ({"clients": 2, "rounds": 3, "quorum": 1.5}, "run-config quorum=1.5"),
        ({"clients": 2, "rounds": 3, "timeout": 0}, "run-config timeout=0"),
        ({"clients": 2, "rounds": 3, "local-epochs": -1}, "run-config local-epochs=-1"),
        (
            {"clients": 2, "rounds": 3, "deadline.seconds": 5},
            "run-config deadline: only a Federation has simulated time",
        ),
        ({"clients": 2, "rounds": 3, "asynchronous": "FedBuff"}, "run-config asynchronous: only a Federation has"),
        ({"clients": 2, "rounds": 3, "privacy.clip": 1.0}, "run-config privacy: only a Federation protects uploads"),
    ],
)
def test_options_that_are_not_right(config, says):
    with pytest.raises(ConfigError, match=says):
        Plan.of(config)


def test_a_deadline_is_refused_before_round_1():
    here = grid()
    with pytest.raises(
        ConfigError, match="run-config deadline: .* a round waits .* run-config timeout seconds at most"
    ):
        server_app(METHODS["FedAvg"])(here, Context(1, 1, {}, RecordDict(), {**CONFIG, "deadline": 5}))
    assert not here.asked


def test_options_of_a_project_are_its_own():
    assert Plan.of({"clients": 2, "rounds": 3, "method": "Ditto", "local-epochs": 5}).local_epochs == 5
