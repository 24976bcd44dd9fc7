"""A federation without a seed of its own takes the process's once, and keeps it."""

import numpy as np
import pytest
import torch

from lit_pfl import Federation
from lit_pfl.lightning_internals import AtomicCheckpointIO, LastCheckpoint
from lit_pfl.methods import FactorizedFL, FedFOMO, SimFed
from lit_pfl.randomness import normal_number_kept, scoring_draws
from tiny import assert_equal, client, digits, trainer, weights

DRAWS = {
    "SimFed, random partners": lambda: client(SimFed, match="random"),
    "FactorizedFL, random partners": lambda: client(FactorizedFL, match="random"),
    "FactorizedFL, in random order": lambda: client(FactorizedFL, mixing="sequential", min_matches=4),
    "FedFOMO": lambda: client(FedFOMO, num_models=1, epsilon=1.0, epsilon_decay=0.0),
}


@pytest.mark.seconds
@pytest.mark.few(2)
@pytest.mark.parametrize("method", DRAWS)
def test_what_a_server_draws_after_a_resume_in_another_process(tmp_path, method):
    def run(folder, rounds, process, resume=False):
        torch.manual_seed(process)
        checkpoint = LastCheckpoint(tmp_path / folder)
        federation = Federation(DRAWS[method](), threads=1)
        fitting = trainer(rounds, callbacks=[checkpoint], enable_checkpointing=True)
        fitting.fit(federation, datamodule=digits(), ckpt_path=tmp_path / folder / "last.ckpt" if resume else None)
        state = AtomicCheckpointIO().load_checkpoint(tmp_path / folder / "last.ckpt")
        return weights(federation), state["federation"]["coordinator"]

    whole = run("whole", 6, process=1)
    run("parts", 2, process=1)
    assert_equal(run("parts", 6, process=2, resume=True), whole)


def test_the_normal_number_that_numpy_has_in_advance_comes_after_others_were_drawn():
    seed, draw = np.random.seed, np.random.randn
    seed(1)
    expected = draw(3)
    seed(1)
    found = [draw()]
    with normal_number_kept(), scoring_draws(5):
        draw(3)
    found += [draw(), draw()]
    assert found == expected.tolist()
