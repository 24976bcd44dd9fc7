"""One copy in memory of the weights that no client of a process trains."""

from collections.abc import Mapping

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lit_pfl.client import Client
from lit_pfl_callbacks.frozen import hold_apart, hold_once


def share_frozen(client: Client, first: Client) -> None:
    """Let a client's frozen weights lie in the memory of the first client's, where they are the same."""
    for weights in frozen_of(client).values():
        for others in frozen_of(first).values():
            hold_once(weights, others)
    shared = all(weight.data_ptr() == first.frozen[name].data_ptr() for name, weight in client.frozen.items())
    if client.frozen and shared and client.frozen.keys() == first.frozen.keys():
        client.__dict__["frozen_table"] = first.frozen_table  # its fingerprints need not be taken again


def frozen_of(client: Client) -> dict[str, dict[str, nn.Parameter]]:
    """Return the frozen weights of all learners of a client, by the learner's name and the weight's."""
    return {
        part: {name: learner.get_parameter(name) for name in client.frozen} for part, learner in client.learners.items()
    }


class FrozenWeights:
    """Sees whether weights that have no gradient stay as they are all the same.

    A module may change them itself, as it does a moving average of others. The first client that trains has frozen
    weights of its own for that round. If they have changed afterwards, no client shares them.

    Args:
        clients: the clients of this process, by id.
        first: the id of the one that trains first.
    """

    def __init__(self, clients: Mapping[int, Client], first: int) -> None:
        self.clients, self.first = clients, first
        self._before = {name: weight.detach() for name, weight in clients[first].frozen.items()}
        self._looked = len(clients) == 1 or not self._before
        if not self._looked:
            for weights in frozen_of(clients[first]).values():
                hold_apart(weights.values())

    def look_at(self, client: int) -> None:
        """See what a client's round has made of its frozen weights, if it is the first one."""
        if self._looked or client != self.first:
            return
        self._looked, own = True, self.clients[client].frozen
        changed = [name for name, weight in own.items() if not torch.equal(weight, self._before[name])]
        for other in self.clients.values():
            if other is not self.clients[client]:
                for weights in frozen_of(other).values():
                    hold_apart(weight for name, weight in weights.items() if name in changed)
        for part, weights in frozen_of(self.clients[client]).items():
            others = next((one for id, one in self.clients.items() if id != client))
            hold_once(weights, {n: w for n, w in frozen_of(others)[part].items() if n not in changed})
        if changed:
            rank_zero_warn(
                f"{type(self.clients[client].learner).__name__} changes {changed[0]!r} in training although it has "
                "requires_grad=False; such weights are not sent, and every client has its own."
            )
        self._before = {}
