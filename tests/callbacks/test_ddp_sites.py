"""Sites whose Trainers have several processes, started as scripts."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from callbacks.plain import Echo, Line
from callbacks.test_sites_of_every_method import METHODS, OTHERS
from lit_pfl_callbacks import FederatedLoop

#: their losses are no means over the samples of a batch, so that two halves give another one
LOSSES_OF_BATCHES = {"FedCP", "FedKD"}


def run(script: str, folder: Path, *starter: str) -> list:
    """Run a script in two processes; return what each has written."""
    command = [sys.executable, *starter, str(Path(__file__).with_name(script)), str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    came = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert came.returncode == 0, came.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_a_site_of_two_processes_is_one_client(tmp_path):
    first, second = run("ddp_site.py", tmp_path)
    assert (first["samples"], first["exchanged"], first["epochs"]) == (8, 3, 3)
    assert (second["samples"], second["exchanged"], second["epochs"]) == (None, 0, 3)
    assert first["weight"] == second["weight"]
    assert first["fits"] == second["fits"]  # of a hub, which every process has
    assert first["rounds"] == 2


@pytest.mark.slow
def test_a_method_trains_in_two_processes_as_in_one_or_is_refused(tmp_path):
    first, second = run("ddp_methods.py", tmp_path, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
    assert first == second
    assert first.pop("Own") == (
        "FederatedLoop: 'learner.head.bias' differs among this client's processes, since Own changes it by more than "
        "its averaged gradients; give Trainer(devices=1)."
    )
    assert first.keys() == {name for name, method in METHODS.items() if not issubclass(method, OTHERS)}
    refused = {name: words for name, words in first.items() if isinstance(words, str)}
    assert all(words.startswith(name) and words.endswith("give Trainer(devices=1).") for name, words in refused.items())
    assert not refused.keys() & {"Ditto", "FactorizedFL", "FedAvg", "FedProx", "FedSLR", "Scaffold", "SimFed"}
    assert all(first[name] < 1e-5 for name in first.keys() - refused.keys() - LOSSES_OF_BATCHES)


def test_processes_that_do_not_hold_the_whole_model_are_refused():
    trainer = SimpleNamespace(current_epoch=0, world_size=2, strategy=SimpleNamespace())
    with pytest.raises(MisconfigurationException, match=r"2 processes needs strategy='ddp', .*Trainer\(devices=1\)"):
        FederatedLoop(Echo()).on_train_start(trainer, Line())
