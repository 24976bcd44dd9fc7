"""Processes that tell each other things: what is said of one that is gone."""

from types import SimpleNamespace

import pytest
from lightning.fabric.plugins.environments.lightning import find_free_network_port

from lit_pfl.engines.processes import Processes
from lit_pfl.errors import RankError


class Lost:
    """What came of talking to a process whose connections are closed."""

    def is_completed(self):
        return True

    def wait(self):
        raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize("looks", [3, None], ids=["started by this one", "started by another"])
def test_how_a_process_ended_is_known_a_little_later_than_that_it_is_gone(looks):
    """Linux closes the connections of a killed process before whoever started it can hear of its end."""
    looked = 0

    def check():
        nonlocal looked
        looked += 1
        if looked == looks:
            raise RankError("ended by signal 9")

    group = Processes(0, 1, "127.0.0.1", find_free_network_port())
    group.check, group._gloo = check, SimpleNamespace(allgather=lambda *_: Lost())
    with pytest.raises(RankError, match="ended by signal 9" if looks else "is gone; its own output says why"):
        group.all_gather(b"")
