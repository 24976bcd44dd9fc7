"""Secure aggregation with Flower's SecAgg+: the server learns a plain mean, and no single upload."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Context, RecordDict
from flwr.common import bytes_to_ndarray
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.supercore.task_identity import TaskIdentity
from secure import client_app, server_app, task
from secure.options import MODULUS, Masking

from links.grids import DirectGrid
from lit_pfl import Federation
from lit_pfl.errors import ConfigError, UploadError
from lit_pfl.lightning_internals import read_whole
from lit_pfl.links.flower.plan import Plan
from tiny import trainer

CONFIG = {"clients": 4, "rounds": 3, "local-epochs": 0, "quorum": 0.75, "seed": 1, "threads": 1, "timeout": 5.0,
          "folder": "server", "clipping-range": 8.0, "largest-samples": 1000, "method": "FedAvg"}  # fmt: skip


@pytest.fixture(autouse=True)
def _in_a_run(monkeypatch):
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Run:
    """A run in this process; keeps what clients have trained, and what has left their nodes."""

    def __init__(self, monkeypatch, drops=(), lost=None, **config) -> None:
        self.config, self.drops = {**CONFIG, **config}, drops
        self.trained, self.sent, self.models = [], [], []
        fit, aggregate = client_app.MaskedClient.fit, server_app.MaskedMean.aggregate_fit

        def keep_upload(client, parameters, config):
            arrays, weight, metrics = fit(client, parameters, config)
            round = config["completed"] + 1
            if (round, client.id) in self.drops:
                raise RuntimeError("the power fails")
            self.trained.append((round, client.id, arrays, weight))
            return arrays, weight, metrics

        def keep_model(strategy, server_round, results, failures):
            aggregated = aggregate(strategy, server_round, results, failures)
            self.models.append([tensor.numpy() for tensor in strategy.model.values()])
            return aggregated

        monkeypatch.setattr(client_app.MaskedClient, "fit", keep_upload)
        monkeypatch.setattr(server_app.MaskedMean, "aggregate_fit", keep_model)
        nodes = {10 + client: {"clients": str(client), "folder": f"node{client}"} for client in range(4)}
        grid = DirectGrid(client_app.app, nodes, self.config)
        grid.change = self._keep
        self.grid, self.lost = grid, lost or (lambda node, stage, round: False)
        server_app.app(grid, Context(1, 0, {}, RecordDict(), self.config))

    def _keep(self, message, answer):
        stage = message.content.config_records.get(RECORD_KEY_CONFIGS, {}).get(Key.STAGE)
        if self.lost(message.metadata.dst_node_id, stage, message.metadata.group_id):
            return None
        if answer.has_content():
            self.sent.append(answer.content)
        return answer

    @property
    def masked(self):
        """All masked uploads, in the order in which they were trained."""
        records = [content.config_records.get(RECORD_KEY_CONFIGS, {}) for content in self.sent]
        return [list(map(bytes_to_ndarray, r[Key.MASKED_PARAMETERS])) for r in records if Key.MASKED_PARAMETERS in r]

    def means(self):
        """The weighted mean of every round's uploads, and the sum of their weights."""
        for round in range(1, self.config["rounds"] + 1):
            uploads = [(arrays, weight) for of, _, arrays, weight in self.trained if of == round]
            total = sum(weight for _, weight in uploads)
            mean = [sum(a[i] * weight for a, weight in uploads) / total for i in range(len(uploads[0][0]))]
            yield mean, total, len(uploads)


def distance(a, b) -> float:
    return max(float(np.abs(np.asarray(x) - np.asarray(y)).max()) for x, y in zip(a, b, strict=True))


def masking(config) -> Masking:
    return Masking.of(config, Plan.of(config))


def federation_in_one_process(name="FedAvg") -> Federation:
    whole = Federation(task.method({"method": name}), seed=1, threads=1)
    trainer(3).fit(whole, datamodule=task.digits(4))
    return whole


def test_the_model_is_the_plain_mean_up_to_the_steps(monkeypatch):
    run = Run(monkeypatch)
    for (mean, total, n), model in zip(run.means(), run.models, strict=True):
        bound = (n + 1) * masking(run.config).step * CONFIG["largest-samples"] / total
        print(f"{n} clients, {total} samples: {distance(mean, model):.2g}, at most {bound:.2g}")
        assert n == 4
        assert distance(mean, model) < bound + 1e-7  # of float32
    whole = federation_in_one_process()
    model = read_whole(Path("server/model.ckpt"))
    expected = whole.coordinator.server.model
    assert list(model) == list(expected)
    print("largest difference to a run in one process:", distance(model.values(), expected.values()))
    assert distance(model.values(), expected.values()) < 1e-5


def test_no_upload_leaves_its_node_unmasked(monkeypatch):
    run = Run(monkeypatch)
    assert len(run.masked) == len(run.trained) == 12
    assert not any(array for content in run.sent for array in content.array_records.values())
    own = masking(run.config)
    for (_, _, arrays, weight), (factor, *parts) in zip(run.trained, run.masked, strict=True):
        true = np.concatenate([array.ravel() for array in arrays]) * weight / CONFIG["largest-samples"]
        true = np.round((true + own.clip) / own.step)
        sent = np.concatenate([part.ravel() for part in parts])
        assert sent.min() >= 0
        assert sent.max() < MODULUS
        assert (sent == true).sum() == 0
        assert abs(np.corrcoef(sent, true)[0, 1]) < 5 / np.sqrt(len(true))
        assert abs(sent.mean() / MODULUS - 0.5) < 5 / np.sqrt(12 * len(true))  # any value is as likely
        assert factor != round(weight / CONFIG["largest-samples"] * own.levels)


def test_a_client_that_drops_out_while_it_trains_is_left_out(monkeypatch):
    run = Run(monkeypatch, drops={(2, 3)})
    counts = []
    for (mean, total, n), model in zip(run.means(), run.models, strict=True):
        counts.append(n)
        assert distance(mean, model) < (n + 1) * masking(run.config).step * CONFIG["largest-samples"] / total + 1e-7
    assert counts == [4, 3, 4]


@pytest.mark.parametrize("stage", [Stage.SETUP, Stage.SHARE_KEYS, Stage.COLLECT_MASKED_VECTORS, Stage.UNMASK])
def test_a_node_whose_answer_is_lost_is_left_out_at_every_stage(monkeypatch, stage):
    """While keys are exchanged, the round begins again without the node; later, the others' shares suffice."""
    run = Run(monkeypatch, lost=lambda node, at, round: (node, at, round) == (13, stage, "2"))
    steps = [masking(run.config).step * CONFIG["largest-samples"] / total for _, total, _ in run.means()]
    trained = [{client for of, client, *_ in run.trained if of == round} for round in (1, 2, 3)]
    assert trained[0] == trained[2] == {0, 1, 2, 3}
    if stage in (Stage.SETUP, Stage.SHARE_KEYS):
        assert trained[1] == {0, 1, 2}
    uploads = [(a, w) for of, client, a, w in run.trained if of == 2 and (stage == Stage.UNMASK or client < 3)]
    total = sum(w for _, w in uploads)
    mean = [sum(a[i] * w for a, w in uploads) / total for i in range(len(uploads[0][0]))]
    assert distance(mean, run.models[1]) < 5 * max(steps) + 1e-7


def test_too_many_that_drop_out_end_the_run_and_nothing_is_unmasked(monkeypatch):
    with pytest.raises(UploadError, match="Round 2: fewer than 3 clients have answered, which run-config quorum"):
        Run(monkeypatch, drops={(2, 3), (2, 0)})


@pytest.mark.parametrize("name", ["FedRep", "Ditto"])
def test_personal_parts_stay_and_the_shared_ones_are_averaged(monkeypatch, name):
    Run(monkeypatch, method=name)
    model, expected = read_whole(Path("server/model.ckpt")), federation_in_one_process(name).coordinator.server.model
    assert list(model) == list(expected)
    assert distance(model.values(), expected.values()) < 1e-5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "Scaffold"}, "run-config method=Scaffold: its server needs more than the mean of all uploads"),
        ({"method": "FedDyn"}, "run-config method=FedDyn: its server needs"),
        ({"method": "FedAMP"}, "run-config method=FedAMP: its server needs"),
        ({"clients": 2}, "run-config clients=2: of two, each learns the other's upload"),
        ({"quorum": 0.5}, r"run-config quorum=0.5: each half .* more than 0.5"),
        ({"participation": 0.5}, "run-config participation=0.5: all take part"),
        ({"clipping-range": 0.0}, r"run-config clipping-range=0.0: give a number above"),
        ({"largest-samples": 0}, "run-config largest-samples=0: give a whole number above 0"),
        ({"clients": 5, "timeout": 1.0}, "run-config clients=5: 4 have joined within 1 s"),
    ],
)
def test_what_cannot_be_protected_is_refused(monkeypatch, config, message):
    with pytest.raises(ConfigError, match=message):
        Run(monkeypatch, **config)
    assert not Path("server").exists()


@pytest.mark.parametrize("option", [{"clipping-range": 0.01}, {"largest-samples": 10}])
def test_a_client_does_not_send_what_would_be_clipped(monkeypatch, option, capsys):
    with pytest.raises(UploadError, match="Round 1: fewer than 3 clients"):
        Run(monkeypatch, **option)
    assert not Path("server").exists()
    [name] = option
    assert f"run-config {name} must be" in capsys.readouterr().out


@pytest.mark.slow
def test_with_processes_of_flowers_own(tmp_path):
    from loopback import Loopback

    from links.warm import Warm

    project = Path(server_app.__file__).parents[1]
    federation = Loopback(tmp_path, project)
    federation.environment["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] = "0.1"
    with Warm(tmp_path / "warm", federation.environment) as warm:
        federation.environment["PATH"] = f"{warm.bin}:{federation.environment['PATH']}"
        with federation:
            for client in range(4):
                federation.register(f"node{client}")
                federation.start_supernode(f"node{client}", [client])
            output = federation.run(rounds=3, clients=4).stdout
    assert "round 3: the mean of 4 clients" in output
    model = read_whole(tmp_path / "server/model.ckpt")
    assert distance(model.values(), federation_in_one_process().coordinator.server.model.values()) < 1e-5
