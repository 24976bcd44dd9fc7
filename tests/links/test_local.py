"""Fits in one process, as the server counts them."""

import torch

from lit_pfl import Payload, Server
from lit_pfl.links import LocalHub
from lit_pfl_callbacks import JoinInfo


def test_what_clients_mark_as_sparse_on_joining_is_sent_back_as_sparse():
    hub, shared = LocalHub(), Payload({"mu": torch.zeros(1000)}, sparse=["mu"])

    def fit() -> None:
        hub.link.join(JoinInfo(1, shared))
        hub.link.exchange(shared)

    hub.add(0, fit)
    ledger = hub.run(Server()).ledger
    assert ledger.clients == {0: [shared.nbytes, 2 * shared.nbytes]}  # the first reply, and the last
    assert ledger.total < 1000
