"""One copy in memory of the weights that no client of a process trains."""

from collections.abc import Mapping
from typing import Any

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


def keep_apart(client: Client, saved: Mapping[str, Any]) -> None:
    """Give a client memory of its own for those frozen weights that are to become others than they are.

    Args:
        client: the client, whose frozen weights lie in one memory with all other clients'.
        saved: what they are to become, by name in its ``state_dict()``: its module has changed them itself.
    """
    for part, weights in frozen_of(client).items():
        new = {name: saved.get(f"{part}.{name}") for name in weights}
        hold_apart(
            weight
            for name, weight in weights.items()
            if (x := new[name]) is not None and not torch.equal(x.to(weight), weight)
        )


class FrozenWeights:
    """Sees whether weights that have no gradient stay as they are all the same.

    A module may change them itself, as it does a moving average of others. So the first client that trains has memory
    of its own for that round. What has changed afterwards is no longer held once, nor taken to be constant.

    Args:
        clients: the clients of this process, by id.
        first: the id of the one that trains first.
        alone: whether there is no other.
    """

    def __init__(self, clients: Mapping[int, Client], first: int, alone: bool) -> None:
        self.clients, self.first, self._changed = clients, first, frozenset[str]()
        self._before = {name: weight.detach() for name, weight in clients[first].frozen.items()}
        self._looked = alone or not self._before
        if not self._looked:
            for weights in frozen_of(clients[first]).values():
                hold_apart(weights.values())

    def look_at(self, client: int) -> None:
        """See what a client's round has made of its frozen weights, if it is the first one."""
        if self._looked or client != self.first:
            return
        self._looked, own = True, self.clients[client]
        changed = [name for name, weight in own.frozen.items() if not torch.equal(weight, self._before[name])]
        self._changed = frozenset(changed)
        for one in self.clients.values():
            if one is not own:
                for weights in frozen_of(one).values():
                    hold_apart(weights[name] for name in changed if name in weights)
            self.leave_out(one)
        if (other := next((one for one in self.clients.values() if one is not own), None)) is not None:
            share_frozen(own, other)
        self._before = {}
        if changed:
            rank_zero_warn(
                f"{type(own.learner).__name__} changes {changed[0]!r} in training although it has requires_grad=False; "
                "such weights are not sent, and every client has its own."
            )

    def leave_out(self, client: Client) -> None:
        """Take none of the weights that a module has been seen to change for a client's frozen ones."""
        for name in self._changed:
            client.frozen.pop(name, None)
