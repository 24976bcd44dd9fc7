"""What an upload counts, samples or steps, cannot be negative or absurd."""

import pytest
import torch

from lit_pfl import Federation
from lit_pfl.methods import CCVR, FD, FedGen, FedGH, FedMA, FedNova, FedPAC, FedProto
from lit_pfl.testing import MethodTester
from tiny import assert_equal, digits, trainer

FURTHER = (pytest.param(method, marks=pytest.mark.slow) for method in (CCVR, FedGH, FedGen, FedMA, FedPAC, FedProto))


@pytest.mark.few(2)
@pytest.mark.parametrize("method", [FD, FedNova, *FURTHER])
@pytest.mark.parametrize("number", [-1, 10**9])
@pytest.mark.filterwarnings("ignore:.*continues without one upload")
def test_a_count_that_is_none_is_refused(method, number):
    """The model is that of a round in which the client's upload did not come."""

    def fit(spoil: bool) -> Federation:
        def change(round, uploads):
            names = [name for name in uploads[1] if name in federation.coordinator.server.count_tensors]
            if not names:  # FedMA sends its counts with the last layer only
                return uploads
            spoiled = uploads[1].with_({name: torch.full_like(uploads[1][name], number) for name in names})
            others = {k: upload for k, upload in uploads.items() if k != 1}
            return {**others, 1: spoiled} if spoil else others

        federation = Federation(MethodTester(method).method(), seed=3, threads=1, local_epochs=2)
        fitting = trainer(4, callbacks=[])
        federation.on_fit_start = lambda: federation.coordinator.changes.append(change)
        fitting.fit(federation, datamodule=digits(4))
        return federation

    spoiled, without = fit(True), fit(False)
    assert_equal(spoiled.coordinator.server.state_dict(), without.coordinator.server.state_dict())
    if spoiled.refused:
        [refusal] = spoiled.refused
        assert refusal.client == 1
        assert refusal.tensor in spoiled.coordinator.server.count_tensors
        assert "it must be from 0 to" in refusal.reason
    assert spoiled.refused or method is FedMA
