"""Bytes by round, client, direction and kind of tensor."""

from collections import Counter
from functools import partial

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from callbacks.plain import Echo, Group, Line, batches, rows
from callbacks.plain import trainer as plain_trainer
from lit_pfl import Federation, Payload
from lit_pfl.lightning_internals import LastCheckpoint
from lit_pfl.methods import FedAvg, FedFOMO, Scaffold, SimFed
from lit_pfl.nn.factorization import Factorization
from lit_pfl.ops.low_rank import LowRank
from lit_pfl_callbacks import CommunicationLedger, FederatedLoop, RunLogger
from tiny import Learner, TinyNet, client, digits, trainer


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def fit(folder, method, rounds=2, ledger=None, **options):
    ledger = ledger or CommunicationLedger()
    federation = Federation(method, seed=1, threads=1, **options)
    logger = RunLogger(str(folder), name="", version="run")
    trainer(rounds, callbacks=[ledger], logger=logger).fit(federation, datamodule=digits(4))
    return federation, ledger, rows(folder / "run" / "communication.csv")


def test_sizes_of_tensors_and_header_are_the_encoding():
    payload = Payload(
        {"a": torch.ones(7), "mu": torch.eye(64), "full": torch.ones(3, dtype=torch.float64)},
        sparse=["mu", "full"],
        low_rank={"w": LowRank(torch.ones(20, 1), torch.ones(1, 30), (20, 30))},
    )
    assert payload.sizes == {"a": 28, "mu": 64 * 64 // 8 + 64 * 4, "full": 24, "w": 4 * 50}
    data = payload.to_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    assert payload.nbytes == len(data) == header + sum(payload.sizes.values())
    assert Payload({}).sizes == {}


@pytest.mark.parametrize("method", [FedAvg, SimFed, FedFOMO, partial(Scaffold, optimizer=plain_sgd)])
def test_the_lines_of_a_round_add_up_to_what_the_federation_counts(tmp_path, method):
    federation, ledger, lines = fit(tmp_path, method(backbone=TinyNet), participation=3)
    metrics = rows(tmp_path / "run" / "metrics.csv")
    assert ledger.total == federation.traffic.total > 0
    for direction in ("up", "down"):
        for line in metrics:
            sizes = [int(x["bytes"]) for x in lines if (x["round"], x["direction"]) == (line["round"], direction)]
            assert sum(sizes) == int(float(line[f"comm/{direction}_bytes"]))
    assert {line["client"] for line in lines} == {"all"}
    known = {"body", "norm", "head", "u", "v", "mu", "header"}
    assert {line["group"] for line in lines} - known <= {"embedding", "criteria_input", "affinity", "control"}
    assert len(lines) == len({tuple(line[name] for name in ("round", "direction", "group")) for line in lines})


def test_groups_are_the_roles_of_tensors(tmp_path):
    factorized = Factorization(form="FFxIO", threshold=0.01)
    federation, _, lines = fit(tmp_path, client(SimFed, tau=-1.0, factorization=factorized), rounds=1)
    up = {line["group"]: int(line["bytes"]) for line in lines if line["direction"] == "up"}
    assert up.keys() == {"body", "u", "v", "mu", "norm", "head", "embedding", "header"}
    member = federation.clients[0]
    sizes, sent = Counter(), member.upload()
    for name, role in member.roles().items():
        sizes[role] += sent.sizes.get(name, 0)
    assert {group: 4 * sizes[group] for group in ("u", "v", "norm", "body")} == {
        group: up[group] for group in ("u", "v", "norm", "body")
    }
    assert up["embedding"] == 4 * sent["embedding"].nbytes


def test_a_line_for_every_client_and_groups_of_ones_own(tmp_path):
    ledger = CommunicationLedger({"head": "head", "rest": ""}, per_client=True)
    federation, _, lines = fit(tmp_path, client(FedAvg), ledger=ledger, participation=2)
    assert {line["group"] for line in lines} == {"head", "rest", "header"}
    for number, sizes in federation.traffic.clients.items():
        for direction, size in zip(("up", "down"), sizes, strict=True):
            own = [x for x in lines if (x["client"], x["direction"]) == (str(number), direction)]
            assert sum(int(x["bytes"]) for x in own) == size


def test_the_curve_holds_scores_against_bytes(tmp_path):
    _, ledger, _ = fit(tmp_path, client(FedAvg), rounds=3)
    metrics = rows(tmp_path / "run" / "metrics.csv")
    expected = [(int(float(m["comm/total_bytes"])), float(m["val/acc"])) for m in metrics]
    assert ledger.curve == expected


def test_the_curve_is_of_another_score_where_there_is_no_accuracy(tmp_path):
    """Also of one whose name is nearly that of the default."""

    class Scored(Learner):
        def validation_step(self, batch, batch_idx):
            self.log("mae", self.training_step(batch, batch_idx))

    learner = Scored(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    _, ledger, _ = fit(tmp_path, FedAvg(learner=learner), rounds=2)
    metrics = rows(tmp_path / "run" / "metrics.csv")
    assert ledger.curve == [(int(float(m["comm/total_bytes"])), float(m["val/mae"])) for m in metrics]
    resumed, shown = CommunicationLedger(), []
    resumed.load_state_dict(ledger.state_dict())
    resumed._dashboard.curve = lambda trainer, name, points: shown.append((name, *map(sorted, points)))
    resumed.on_train_end(trainer(1), learner)  # of a run that has not validated since
    assert shown == [("val/mae over bytes", ["bytes", "val/mae"], ["bytes", "val/mae"])]


@pytest.mark.parametrize("first", [True, False], ids=["before the loop", "after the loop"])
def test_a_site_of_a_plain_project(tmp_path, first):
    """Two epochs a round; a reply is of the round that it begins."""
    ledger, loop = CommunicationLedger(), FederatedLoop(Echo(), every_n_epochs=2)
    callbacks = [ledger, loop] if first else [loop, ledger]
    plain_trainer(tmp_path, 4, callbacks, limit_val_batches=1).fit(Line(), batches(), batches())
    size = str(4 * (3 * 2 + 2))
    assert [list(line.values()) for line in rows(tmp_path / "run" / "communication.csv")] == [
        ["1", "all", "up", "net", size],
        ["2", "all", "down", "net", size],
        ["2", "all", "up", "net", size],
        ["3", "all", "down", "net", size],
    ]
    assert ledger.total == 4 * int(size)
    assert len(ledger.curve) == 4
    assert loop.watchers == []  # nobody listens after a fit


def test_a_site_resumed_has_every_line_once(tmp_path):
    def callbacks():
        return [CommunicationLedger(), FederatedLoop(Echo(), every_n_epochs=2)]

    plain_trainer(tmp_path, 2, callbacks()).fit(Line(), batches())
    resumed = callbacks()
    plain_trainer(tmp_path, 4, resumed).fit(Line(), batches(), ckpt_path=tmp_path / "run" / "last.ckpt")
    lines = [line["round"] + line["direction"] for line in rows(tmp_path / "run" / "communication.csv")]
    assert lines == ["1up", "2down", "2up", "3down"]
    assert resumed[0].total == 4 * 32


def test_in_tensorboard_every_point_of_the_curve_is_once_also_after_a_resume(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for rounds in (2, 3):
        ledger = CommunicationLedger()
        logger = TensorBoardLogger(str(tmp_path), "", "run")
        fitting = trainer(
            rounds, callbacks=[ledger, LastCheckpoint(tmp_path)], enable_checkpointing=True, logger=logger
        )
        path = tmp_path / "last.ckpt" if rounds == 3 else None
        fitting.fit(Federation(client(FedAvg), seed=3, threads=1), datamodule=digits(2), ckpt_path=path)
        logger.finalize("success")
    shown = EventAccumulator(str(tmp_path / "run")).Reload().Scalars("val/acc over bytes")
    assert [(point.step, pytest.approx(point.value)) for point in shown] == ledger.curve


def test_a_module_of_some_clients_and_one_that_sends_nothing(tmp_path):
    ledger = CommunicationLedger(per_client=True)
    plain_trainer(tmp_path, 1, [ledger]).fit(Group(), batches())
    lines = rows(tmp_path / "run" / "communication.csv")
    assert {(x["client"], x["direction"], x["group"], x["bytes"]) for x in lines} == {
        (str(c), way, group, size)
        for c in range(3)
        for way in ("down", "up")
        for group, size in (("weight", "24"), ("bias", "8"), ("embedding", "16"))
        if (way, group) != ("down", "embedding")
    }
    plain_trainer(tmp_path / "nothing", 1, [CommunicationLedger()]).fit(Line(), batches())
    assert not (tmp_path / "nothing" / "run" / "communication.csv").exists()


def test_a_thousand_clients_need_no_more_lines(tmp_path):
    class Many(Group):
        def on_train_batch_end(self, *_):
            for number in range(1000):
                self.send(number, "up", {"w": torch.ones(3)})

    plain_trainer(tmp_path, 2, [CommunicationLedger()]).fit(Many(), batches())
    assert [line["bytes"] for line in rows(tmp_path / "run" / "communication.csv")] == ["12000", "12000"]


def test_a_pattern_that_is_none_is_refused():
    with pytest.raises(MisconfigurationException, match="groups=.* is not a regular expression"):
        CommunicationLedger({"u": "("})
