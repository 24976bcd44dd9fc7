"""One copy in memory of the weights that no client of a process trains."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lit_pfl.core import Client
from lit_pfl.errors import ConfigError
from lit_pfl_callbacks.frozen import hold_apart, hold_once

#: how many entries of a frozen tensor are compared in every round
ENTRIES = 2**14


def share_frozen(client: Client, first: Client) -> None:
    """Let a client's frozen weights lie in the memory of the first client's, where they are the same."""
    for weights in frozen_of(client).values():
        for others in frozen_of(first).values():
            hold_once(weights, others)
    if not client.frozen or client.frozen.keys() != first.frozen.keys():
        return
    if all(weight.data_ptr() == first.frozen[name].data_ptr() for name, weight in client.frozen.items()):
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


def constant(client: Client) -> frozenset[str]:
    """Return the names in a client's ``state_dict()`` of tensors that stay as they are: frozen in all learners."""
    return frozenset(f"{part}.{name}" for part in client.learners for name in client.frozen)


class FrozenWeights:
    """Sees whether weights that have no gradient stay as they are all the same.

    A module may change them itself, as it does a moving average of others. So the first client that trains has memory
    of its own for that round. What has changed afterwards is no longer held once, nor taken to be constant. If anything
    has, every client has memory of its own for the others in each of its rounds: they may change later.

    Args:
        clients: the clients of this process, by id.
        asleep: whether there are others, which are not in memory.
    """

    def __init__(self, clients: Mapping[int, Client], asleep: bool = False) -> None:
        self.clients, self.asleep = clients, asleep
        self._changed: set[str] = set()
        self._looking = True  # at those that train, as yet
        self._before: dict[int, dict[str, Tensor]] = {}  # by client, in memory that others hold too
        self._some: dict[int, dict[str, Tensor]] = {}  # by client, some entries of each

    def begin(self, client: int) -> None:
        """Take note of a client's frozen weights, which is about to train."""
        own = self.clients[client]
        if (len(self.clients) == 1 and not self.asleep) or not own.frozen:
            return
        if self._changed or (self._looking and not self._before):
            self._before[client] = {name: weight.detach() for name, weight in own.frozen.items()}
            for weights in frozen_of(own).values():
                hold_apart(weights.values())
        else:
            self._some[client] = {name: _some(weight).clone() for name, weight in own.frozen.items()}

    def look_at(self, client: int) -> None:
        """See what a client's round has made of its frozen weights.

        Raises:
            ConfigError: when they have changed and others hold the same memory, since none had changed before.
        """
        own = self.clients[client]
        some, before = self._some.pop(client, {}), self._before.pop(client, None)
        if before is None:
            for name, entries in some.items():
                if name in own.frozen and not torch.equal(_some(own.frozen[name]), entries):
                    self._refuse_if_shared(own, name)
            return
        changed = [name for name, weight in own.frozen.items() if not torch.equal(weight, before[name])]
        if changed and not self._changed:
            rank_zero_warn(
                f"{type(own.learner).__name__} changes {changed[0]!r} in training although it has requires_grad=False; "
                "such weights are not sent, and every client has its own."
            )
        self._looking = False
        self.note(changed, own)
        if (other := next((one for one in self.clients.values() if one is not own), None)) is not None:
            share_frozen(own, other)

    def note(self, changed: Collection[str], own: Client) -> None:
        """Take note that a client has changed some of its frozen weights: nobody has them for constant any more."""
        self._changed |= {*changed}
        for one in self.clients.values():
            if one is not own:
                for weights in frozen_of(one).values():
                    hold_apart(weights[name] for name in changed if name in weights)
            self.leave_out(one)

    def _refuse_if_shared(self, own: Client, name: str) -> None:
        memory = own.frozen[name].data_ptr()
        if self.asleep or any(one is not own and name in one.frozen and one.frozen[name].data_ptr() == memory
               for one in self.clients.values()):  # fmt: skip
            raise ConfigError(
                f"model.learner: {type(own.learner).__name__} has changed {name!r}, which has requires_grad=False and "
                "stayed as it was in earlier rounds, so that all clients hold it in one memory; continue from "
                "the last checkpoint, and every client has its own."
            )

    def leave_out(self, client: Client) -> None:
        """Take none of the weights that a module has been seen to change for a client's frozen ones."""
        for name in self._changed:
            client.frozen.pop(name, None)


def _some(tensor: Tensor) -> Tensor:
    """Return entries from all over a tensor; all of a small one."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, len(flat) // ENTRIES)]
