"""Clients in worker processes come to what they come to in one process, bit for bit."""

import gc
import importlib.util
import os
import signal
import subprocess
import sys
import time
import warnings
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from ray_runs import fit_saved, same, same_files, workers_kept

from lit_pfl import Client, Federation
from lit_pfl import methods as M
from lit_pfl.core.deadline import Deadline, Speeds
from lit_pfl.core.payload import Payload
from lit_pfl.engines import Local, Ray, workforce
from lit_pfl.engines.answers import Warned, keep_warnings, opened
from lit_pfl.engines.parcels import packed, unpacked
from lit_pfl.engines.placement import assigned
from lit_pfl.engines.switches import Switches
from lit_pfl.engines.workforce import Handle, Workforce
from lit_pfl.errors import ConfigError, UploadError
from lit_pfl.testing import MethodTester
from lit_pfl_callbacks import FeatureMap, PersonalizedModels, RunLogger, Similarity, SparsityMonitor
from tiny import ALWAYS, assert_equal, client, digits, run, trainer

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs Ray", allow_module_level=True)
NAMES = [name for name in M.__all__ if issubclass(getattr(M, name), Client)]


@pytest.fixture(scope="module")
def cluster():
    """Ray for three workers, which serve all tests of this file."""
    from lit_pfl.engines.cluster import connect

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SLURM_PROCID", "1")  # as on the second of the machines on which srun has started Ray
        ray = connect(None, 3)
    with workers_kept(ray):
        yield ray
    ray.shutdown()


class Writes(L.LightningModule):
    """Writes to its logger, and into its folder, in every step."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(10))
        self.net(torch.zeros(1, 1, 8, 8))

    def training_step(self, batch, batch_idx):
        self.logger.experiment.add_scalar("step", batch_idx)
        self.logger.log_metrics({"step": batch_idx})
        folder = Path(self.trainer.log_dir)
        folder.mkdir(exist_ok=True, parents=True)
        (folder / "seen.txt").write_text(self.logger.name or "")
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.trainer.estimated_stepping_batches * 0.01)


def test_what_a_module_writes_to_its_logger_is_left_out(cluster, tmp_path):
    def run_by(engine, name):
        torch.manual_seed(0)
        federation = Federation(M.SimFed(learner=Writes(), factorization=None, encoder="net"), seed=1, engine=engine)
        logger = RunLogger(str(tmp_path), name=name)
        trainer(1, logger=logger).fit(federation, datamodule=digits(3))
        return federation.coordinator.state_dict()

    with pytest.warns(match="what clients' modules write to self.logger is left out"):
        by_ray = run_by(Ray(workers=2), "ray")
    assert_equal(by_ray, run_by(None, "local"))
    for name in ("ray", "local"):
        assert {path.parent.name for path in (tmp_path / name).rglob("seen.txt")} == {f"client_{k}" for k in range(3)}


def pid(module):
    return os.getpid()


# ------------------------------------------------------------------------------------------------ without any process


def test_the_longest_go_first_and_stay_where_they_are_while_that_is_fair():
    assert assigned({0: 5.0, 1: 3.0, 2: 3.0, 3: 1.0}, {}, 2) == {0: 0, 1: 1, 2: 1, 3: 0}
    assert assigned({0: 1.0, 1: 1.0}, {0: 1, 1: 0}, 2) == {0: 1, 1: 0}
    assert assigned({0: 1.0, 1: 1.0}, {0: 1, 1: 1}, 2) == {0: 1, 1: 0}
    assert assigned({0: 1.0, 1: 1.0}, {0: 1, 1: 1}, 2, float("inf")) == {0: 1, 1: 1}
    assert assigned({0: 1.0, 1: 1.0}, {0: 1, 1: None}, 2, float("inf")) == {0: 1, 1: 0}


@pytest.mark.parametrize("copy", [True, False])
def test_what_comes_out_of_a_parcel(copy):
    image = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    content = {
        "image": image, "number": torch.tensor(2.5), "none": torch.empty(0, 3), "half": torch.ones(3).bfloat16(),
        "turned": torch.arange(6).view(2, 3).T, "spread": torch.ones(3).expand(2, 3),
    }  # fmt: skip
    assert torch.equal(unpacked(packed(torch.eye(3).to_sparse()), copy).to_dense(), torch.eye(3))
    layer = torch.nn.Linear(2, 2)
    layer.tied, layer.outer = layer.weight, trainer(1)
    payload = Payload({"p": image}, {"p"})
    found, other, again, twice = unpacked(packed((content, layer, payload, payload)), copy)
    assert again is twice
    assert again.sparse == {"p"}
    assert_equal(found, content)
    for name in ("image", "turned"):
        assert found[name].stride() == content[name].stride()
    assert other.tied is other.weight
    assert other.weight.requires_grad
    assert other.outer is None


@pytest.mark.parametrize(("options", "name"), [({"workers": 0}, "workers"), ({"awake": 0}, "awake")])
def test_what_cannot_be_is_refused(options, name):
    with pytest.raises(ConfigError, match=rf"^federation\.engine\.{name}=0: give a whole number above 0\.$"):
        Ray(**options)


def test_a_warning_that_comes_twice_in_one_answer_is_given_once(recwarn):
    one, told = Warned("Short steps.", UserWarning, "module.py", 1), set()
    assert opened(packed(("answer", [one, one])), True, told) == "answer"
    assert opened(packed(("other", [one])), True, told) == "other"
    assert [str(given.message) for given in recwarn] == ["Short steps."]


class OfTwo(DeprecationWarning):
    def __init__(self, one, other):
        super().__init__(f"{one} is not {other}")


def test_a_warning_that_is_not_made_of_a_text_comes_as_what_it_is_a_kind_of(monkeypatch):
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    kept = keep_warnings()
    warnings.showwarning(OfTwo(1, 2), OfTwo, "module.py", 1)
    assert kept == [Warned("1 is not 2", DeprecationWarning, "module.py", 1)]


def test_who_waits_for_cores_is_told_once_what_is_lacking():
    waits = iter([([], ["ready"]), ([], ["ready"]), (["ready"], []), (["ready"], [])])
    fake = SimpleNamespace(
        remote=lambda _: SimpleNamespace(options=lambda **_: None),
        wait=lambda *_, timeout=None: next(waits) if timeout else (["ready"] if next(come) else [], []),
        cluster_resources=lambda: {"CPU": 2.0},
        available_resources=lambda: {},
        get=lambda answer: ("here", "node") if answer == "ready" else answer,
    )
    come = iter([False, False, True])
    crew = Workforce(fake, {"num_cpus": 1.0}, (), lambda _: packed((None, [])), lambda *_: None)
    crew.coming = [Handle(None, "ready")]
    with pytest.warns(match=r"no worker has started in 60 s, .* takes {'num_cpus': 1.0}; of 2 cores 0 are") as said:
        crew._wait()
    assert len(said) == 1
    assert [worker.where for worker in crew.at_work] == ["here"]


def test_an_earlier_federation_that_nobody_has_any_more_ends_before_workers_are_waited_for(monkeypatch):
    """It has cycles, so Python may have kept it, and its workers their cores."""
    before, ended = torch.nn.Module(), []
    before.__dict__["itself"] = before
    weakref.finalize(before, ended.append, True)
    crew = Workforce(SimpleNamespace(remote=lambda _: SimpleNamespace(options=lambda **_: None)), {}, (), None, None)
    monkeypatch.setattr(crew, "call_up", lambda *_: ended.append("started"))
    gc.disable()
    try:
        del before
        with pytest.raises(ConfigError, match="no worker could be started"):
            crew.gather(1, 1)
    finally:
        gc.enable()
    assert ended == [True, "started"]


def test_files_keep_the_states_of_clients_anyway():
    with pytest.raises(ConfigError, match=r"^federation\.engine\.recover=false: federation\.engine\.awake keeps"):
        Ray(recover=False, awake=2)


# ------------------------------------------------------------------------------------------------------- on two cores


@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=pytest.mark.slow if name in ALWAYS else pytest.mark.full) for name in NAMES],
)
def test_every_method_comes_to_the_same_bits(cluster, method, tmp_path):
    """Weights, scores, ledgers, tables and checkpoints; a checkpoint of one engine resumes in the other."""
    make = MethodTester(getattr(M, method)).method
    one = fit_saved(make(), Local(), tmp_path / "one", 3)
    resumed = fit_saved(make(), Local(), tmp_path / "resumed", 4, tmp_path / "one" / "last.ckpt")
    for workers in (1, 2, 3):
        folder = tmp_path / str(workers)
        other = fit_saved(make(), Ray(workers), folder, 3)
        same(one, other)
        same_files(tmp_path / "one", folder)
        other.engine.abort()
    again = fit_saved(make(), Ray(2), tmp_path / "again", 4, tmp_path / "one" / "last.ckpt")
    same(resumed, again)
    same_files(tmp_path / "resumed", tmp_path / "again")
    again.engine.abort()


@pytest.mark.parametrize("method", [M.FedAvg, M.SimFed])
def test_two_workers_come_to_the_same_bits(cluster, method, monkeypatch):
    monkeypatch.setattr(workforce, "GATHERING", 600.0)  # on a busy machine the second one is late
    one, two = (run(client(method), rounds=2, engine=engine) for engine in (Local(), Ray(2)))
    same(one, two)
    assert len(set(two.ask(pid).values())) == 2
    assert not two.clients
    assert two.client_ids == [0, 1, 2, 3]
    assert_equal(one.standalone(1).state_dict(), two.standalone(1).state_dict())
    two.engine.abort()


def test_workers_do_the_same_part_of_the_work(cluster):
    options = {"deadline": Deadline(4, late="partial", speeds=Speeds(spread=0.8)), "quorum": 0.0}
    one, two = (run(client(M.FedAvg), digits(5), rounds=2, engine=engine, **options) for engine in (Local(), Ray(2)))
    same(one, two)
    assert one.refused == two.refused
    two.engine.abort()


def test_a_checkpoint_of_one_engine_resumes_in_the_other(cluster, tmp_path):
    def fit(engine, rounds, **options):
        fitting = trainer(rounds)
        federation = Federation(client(M.Ditto), seed=3, threads=1, participation=0.5, engine=engine)
        fitting.fit(federation, datamodule=digits(), weights_only=False, **options)
        return fitting, federation

    _, whole = fit(Local(), 4)
    for first, second in ((Ray(2), Local()), (Local(), Ray(2)), (Local(awake=2), Ray(2))):
        half, former = fit(first, 2)
        half.save_checkpoint(tmp_path / "half.ckpt")
        former.engine.abort()
        _, resumed = fit(second, 4, ckpt_path=tmp_path / "half.ckpt")
        same(whole, resumed)
        resumed.engine.abort()


class InMemory(L.Callback):
    """Counts the clients in the memory of each worker after each round's training and validation."""

    def __init__(self):
        self.most = 0

    def count(self, trainer, pl_module, *args):
        engine = pl_module.engine
        for worker in engine._crew.at_work:
            here = worker.actor.__ray_call__.remote(lambda self: len(self.engine.clients))
            self.most = max(self.most, engine.ray.get(here))

    on_train_batch_end = on_validation_end = count


@pytest.mark.parametrize(
    "make",
    [
        *(pytest.param(partial(client, one), id=one.__name__) for one in (M.FedAvg, M.Ditto, M.SimFed)),
        pytest.param(MethodTester(M.PsiNet).method, id="PsiNet", marks=pytest.mark.slow),
        pytest.param(MethodTester(M.Scaffold).method, id="Scaffold", marks=pytest.mark.slow),
    ],
)
def test_states_on_disk_come_to_the_same_bits(cluster, make, tmp_path):
    """With states of clients in files as without, of any number of workers, and resumed in either engine."""
    whole = fit_saved(make(), Local(), tmp_path / "whole", 3)
    one = fit_saved(make(), Local(awake=2), tmp_path / "one", 3)
    further = fit_saved(make(), Local(), tmp_path / "further", 4, tmp_path / "whole" / "last.ckpt")
    for workers, share in ((1, 2), (2, 1)):
        folder, counted = tmp_path / str(workers), InMemory()
        other = fit_saved(make(), Ray(workers, awake=2), folder, 3, callbacks=[counted])
        assert counted.most == share
        same(whole, other)
        same_files(tmp_path / "one", folder)
        other.engine.abort()
        back = fit_saved(make(), Local(awake=2), tmp_path / f"back {workers}", 4, folder / "last.ckpt")
        same(further, back)
    for before in ("one", "whole"):
        after = tmp_path / f"after {before}"
        resumed = fit_saved(make(), Ray(2, awake=3), after, 4, tmp_path / before / "last.ckpt")
        same(further, resumed)
        same_files(tmp_path / "back 2", after)
        resumed.engine.abort()
    assert not one.engine.left


def test_what_replies_replace_is_neither_sent_nor_in_a_file(cluster, tmp_path):
    options = {"evaluate": "after", "keep_trained": False}
    one = fit_saved(client(M.FedPer), Local(awake=2), tmp_path / "one", 3, **options)
    other = fit_saved(client(M.FedPer), Ray(2, awake=2), tmp_path / "other", 3, **options)
    assert one.rows == other.rows
    assert_equal(one.coordinator.state_dict(), other.coordinator.state_dict())
    same_files(tmp_path / "one", tmp_path / "other")
    other.engine.abort()


class Kill(L.Callback):
    """Ends a worker before a round's training."""

    def __init__(self, completed):
        self.completed = completed

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.current_epoch == self.completed:
            os.kill(next(iter(pl_module.ask(pid).values())), signal.SIGKILL)


def test_a_lost_worker_costs_time_only(cluster):
    def fit(engine, *callbacks):
        federation = Federation(client(M.Ditto), seed=3, threads=1, participation=0.75, engine=engine)
        trainer(3, callbacks=list(callbacks)).fit(federation, datamodule=digits())
        return federation

    whole = fit(Local())
    with pytest.warns(match=r"A worker on .* is lost \(.*\); its 2 clients continue from where they were"):
        lost = fit(Ray(2), Kill(1))
    same(whole, lost)
    lost.engine.abort()
    with pytest.warns(match=r"A worker on .* is lost"):
        lost = fit(Ray(2, awake=2), Kill(1))
    same(whole, lost)
    lost.engine.abort()
    with pytest.raises(RuntimeError, match="engine.recover=false keeps no states of its clients"):
        fit(Ray(2, recover=False), Kill(1))


class Fails(torch.optim.SGD):
    def step(self, closure=None):
        raise UploadError("on purpose")


def test_what_goes_wrong_with_a_client_names_it_and_its_machine(cluster):
    with pytest.raises(UploadError, match="on purpose") as error:
        run(client(M.FedAvg, optimizer=lambda parameters: Fails(parameters, lr=0.1)), engine=Ray(2))
    notes = " ".join(error.value.__notes__)
    assert "(in the fit of client " in notes
    assert f"of {os.uname().nodename}" in notes


class Warns(torch.optim.SGD):
    def step(self, closure=None):
        warnings.warn("This step is a short one.", stacklevel=2)
        super().step(closure)


@pytest.mark.parametrize("engine", [None, Local(awake=1), Ray(2)], ids=["Local", "awake", "Ray"])
def test_a_warning_of_clients_is_given_once(cluster, engine):
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("default")
        run(client(M.FedAvg, optimizer=lambda parameters: Warns(parameters, lr=0.1)), engine=engine)
    assert sum("a short one" in str(one.message) for one in given) == 1


class Leaves(torch.optim.SGD):
    def step(self, closure=None):
        os._exit(1)


class TwoWords(Exception):
    def __init__(self, one, other):
        super().__init__(f"{one} is not {other}")


class Says(torch.optim.SGD):
    def step(self, closure=None):
        raise TwoWords(1, 2)


class IsStopped(torch.optim.SGD):
    def __init__(self, parameters, path):
        super().__init__(parameters, lr=0.1)
        self.path = path

    def step(self, closure=None):
        if not self.path.exists():
            self.path.touch()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
        super().step(closure)


def test_a_worker_that_is_told_to_stop_costs_time_only(cluster, tmp_path):
    method = client(M.FedAvg, optimizer=lambda parameters: IsStopped(parameters, tmp_path / "stopped"))
    with pytest.warns(match=r"A worker on .* is lost"):
        federation = run(method, engine=Ray(2))
    assert federation.coordinator.round == 2
    federation.engine.abort()


def test_a_client_that_ends_every_worker_ends_the_run(cluster, monkeypatch):
    monkeypatch.setattr("lit_pfl.engines.ray.LOSSES", 1)
    with pytest.raises(RuntimeError, match=r"2 workers were lost in one round, all with client \d.*more memory"):
        run(client(M.FedAvg, optimizer=lambda parameters: Leaves(parameters, lr=0.1)), engine=Ray(1))


def test_errors_travel_whatever_they_are_made_of(cluster):
    with pytest.raises(RuntimeError, match="TwoWords: 1 is not 2") as raised:
        run(client(M.FedAvg, optimizer=lambda parameters: Says(parameters, lr=0.1)), engine=Ray(1))
    assert "(in a worker: " in " ".join(raised.value.__notes__)


def rank(module):
    return rank_zero_only.rank


def test_workers_on_any_machine_of_slurm_call_what_only_the_first_process_calls(cluster):
    federation = run(client(M.FedAvg), digits(3), engine=Ray(workers=2))
    assert set(federation.ask(rank).values()) == {0}


def switches(module):
    return Switches.now()


def test_workers_have_the_switches_of_the_process_that_commands_them(cluster):
    before, others = Switches.now(), Switches(True, True, torch.float64, "medium", False)
    try:
        others.apply()
        federation = run(client(M.FedAvg), rounds=1, engine=Ray(1))
        assert set(federation.ask(switches).values()) == {others}
        federation.engine.abort()
    finally:
        before.apply()


class Locked:
    def __reduce__(self):
        raise TypeError("not to be packed")

    def __deepcopy__(self, memory):
        return self


def test_what_cannot_go_to_another_process_is_named(cluster):
    method, data = client(M.FedAvg), digits()
    method.note = Locked()
    cannot = r"cannot go to other processes, as federation.engine=Ray needs: not to be packed; make .* in"
    with pytest.raises(ConfigError, match=rf"^model: {cannot} configure_model\.$"):
        run(method, engine=Ray(1))
    data.note = Locked()
    with pytest.raises(ConfigError, match=rf"^data: {cannot} setup\.$"):
        run(client(M.FedAvg), data, engine=Ray(1))
    watching = L.Callback()
    watching.note = Locked()
    with pytest.raises(ConfigError, match=rf"^federation.client_trainer: {cannot} a callback's setup\.$"):
        run(client(M.FedAvg), client_trainer={"callbacks": [watching]}, engine=Ray(1))


class CannotBeSaved(L.Callback):
    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        raise ValueError("not to be saved")


def test_a_state_that_cannot_be_saved_is_an_error_and_no_lost_worker(cluster):
    with pytest.raises(ValueError, match="not to be saved"):
        run(client(M.FedAvg), engine=Ray(2), client_trainer={"callbacks": [CannotBeSaved()]})


def test_callbacks_ask_clients_wherever_they_are(cluster, tmp_path):
    def fit(engine, name):
        callbacks = [
            Similarity(every_n_rounds=1),
            SparsityMonitor(every_n_rounds=1),
            FeatureMap(),
            PersonalizedModels(),
        ]
        logger = RunLogger(tmp_path, name=name, version="run")
        federation = Federation(client(M.FactorizedFL), seed=3, threads=1, engine=engine)
        trainer(1, callbacks=callbacks, logger=logger).fit(federation, datamodule=digits())
        federation.engine.abort()
        return tmp_path / name / "run"

    one, two = fit(Local(), "one"), fit(Ray(2), "two")
    files = sorted(path.relative_to(one) for path in one.rglob("*.csv")) + [Path("models/client_2.safetensors")]
    assert len(files) > 4
    for path in files:
        if path.name not in ("timing.csv",):
            assert (one / path).read_bytes() == (two / path).read_bytes(), path


SCRIPT = """
import os, signal, sys
import lightning as L
from lit_pfl import Federation, methods as M
from lit_pfl.engines import Ray
from tiny import client, digits, trainer

class End(L.Callback):
    def on_train_epoch_end(self, *_):
        os.kill(os.getpid(), signal.{signal})

trainer(3, callbacks=[End()]).fit(Federation(client(M.FedAvg), seed=3, engine=Ray(1)), datamodule=digits())
"""


@pytest.mark.full
@pytest.mark.parametrize("number", ["SIGKILL", "SIGINT", "SIGTERM"])
def test_nothing_is_left_however_a_run_ends(number):
    before = set(Path("/tmp").glob("lit-pfl-ray-*"))
    paths = os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT.format(signal=number)]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths})
    new: set[Path] = set()
    while process.poll() is None:
        new |= set(Path("/tmp").glob("lit-pfl-ray-*")) - before
        time.sleep(0.2)
    assert len(new) == 1
    [folder] = new
    for _ in range(150):
        found = [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(folder).encode() in _read(p)]
        if not found and not folder.exists():
            return
        time.sleep(0.2)
    raise AssertionError(f"left: {found}, {folder.exists()}")


def _read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.full
def test_nobody_outside_can_reach_it():
    script = """
import subprocess
from lit_pfl.engines.cluster import connect
ray = connect(None, 1)
print(subprocess.run(["ss", "-ltnp"], capture_output=True, text=True).stdout)
"""
    if not Path("/usr/bin/ss").exists() and not Path("/bin/ss").exists():
        pytest.skip("needs ss")
    came = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    lines = [line for line in came.stdout.splitlines() if "raylet" in line or "gcs_server" in line or "ray::" in line]
    assert lines
    for line in lines:
        assert "127.0.0.1" in line.split()[3], line
