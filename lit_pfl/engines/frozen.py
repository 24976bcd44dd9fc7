"""One copy in memory of the weights that no client of a process trains."""

from collections.abc import Mapping

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lit_pfl.core import Client
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

    A module may change them itself, as it does a moving average of others. So the first client that trains has memory
    of its own for that round. What has changed afterwards is no longer held once, nor taken to be constant.

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
        self._looked, own = True, self.clients[client]
        changed = [name for name, weight in own.frozen.items() if not torch.equal(weight, self._before[name])]
        for one in self.clients.values():
            if one is not own:
                for weights in frozen_of(one).values():
                    hold_apart(weights[name] for name in changed if name in weights)
            one.frozen = {name: weight for name, weight in one.frozen.items() if name not in changed}
        share_frozen(own, next(one for one in self.clients.values() if one is not own))
        self._before = {}
        if changed:
            rank_zero_warn(
                f"{type(own.learner).__name__} changes {changed[0]!r} in training although it has requires_grad=False; "
                "such weights are not sent, and every client has its own."
            )
