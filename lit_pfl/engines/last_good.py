"""Back to the last good state, for a client whose training diverged."""

import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_pfl.core import Client
from lit_pfl.core.payload import Payload, all_finite
from lit_pfl.core.shared_tensors import EXTRA
from lit_pfl.errors import UploadError
from lit_pfl_callbacks.tensors import copied, load_tensors, tensors_of

BACK = " The client begins its next round from where it began this one."


class LastGoodState:
    """A client's network, memory and optimizer as they are before a round, to be taken up again should it go wrong.

    It is held only while that client trains: one client's state more in memory, whatever their number. What a reply
    overwrites is not copied but taken from the reply again, which for a large network is most of the work.

    Args:
        module: the client.
        optimizers: its optimizers.
        reply: what it is about to load, by name in its ``state_dict()``, of what is then the same whatever it was.
        constant: names in its ``state_dict()`` of what nobody changes in place, and so needs no copy.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        reply: Mapping[str, Tensor],
        constant: Collection[str] = (),
    ) -> None:
        self.module, self.optimizers, self._reply, self._constant = module, optimizers, reply, constant
        everything = _most_entries(module) <= len(reply)
        kept = {} if everything else {k: value for k, value in module.state_dict().items() if k not in reply}
        self._module = copied({name: value for name, value in kept.items() if name not in constant})
        self._module |= {name: value for name, value in kept.items() if name in constant}
        self._optimizers = [
            {parameter: copied(state) for parameter, state in optimizer.state.items()} for optimizer in optimizers
        ]

    def trouble(self, client: int, upload: Payload) -> UploadError | None:
        """Return what the round left that is not finite, of what a client uploads or never sends; None if nothing."""
        if upload.not_finite is not None:
            name = upload.not_finite
            return UploadError(f"Client {client}: tensor {name!r} holds NaN or infinity.{BACK}", name)
        if all_finite([*self._stays(upload), *self._momenta()]):
            return None
        for name, tensor in tensors_of(self.module).items():
            if all_finite([tensor]):  # sparse ones are not asked one by one
                continue
            before = self._module.get(name)
            if not tensor.isfinite().all() and (before is None or before.isfinite().all()):
                return UploadError(f"Client {client}: its own tensor {name!r} holds NaN or infinity.{BACK}", name)
        if not all(tensor.isfinite().all() for tensor in self._momenta()):
            return UploadError(f"Client {client}: its optimizer's state holds NaN or infinity.{BACK}")
        return None

    def _stays(self, upload: Payload) -> list[Tensor]:
        """Return the module's tensors that are not uploaded."""
        if not self._module and len(upload) == len(self._reply):
            return []  # all of it travels
        sent = {_place(tensor) for tensor in upload.values()}  # mostly the module's own memory
        own = tensors_of(self.module).items()
        return [tensor for name, tensor in own if name not in self._constant and _place(tensor) not in sent]

    def _momenta(self) -> Iterator[Tensor]:
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))

    def restore(self) -> None:
        """Take up the state again. Schedules continue."""
        self.module.load_state_dict({**self._module, **self._reply})
        load_tensors(self.module, self._reply)  # what has two names was kept under the second, as it was before
        for optimizer, states in zip(self.optimizers, self._optimizers, strict=True):
            optimizer.state.clear()
            optimizer.state.update(states)


def overwritten(client: Client, reply: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what a client's ``download`` makes equal to a reply whatever it was, by name in ``state_dict()``."""
    if type(client).download is not Client.download or client.factorization is not None:
        return {}
    return {name if name.startswith(EXTRA) else f"learner.{name}": tensor for name, tensor in reply.items()}


def _most_entries(module: nn.Module) -> float:
    """Return how many entries a module's ``state_dict()`` has at most, in a third of the time that it takes."""
    kind: Any = type(module)
    if not _is_plain(kind) or module._state_dict_hooks or module._state_dict_pre_hooks:
        return math.inf
    own = len(module._parameters) + len(module._buffers)
    return own + sum(_most_entries(part) for part in module._modules.values() if part is not None)


@cache
def _is_plain(kind: Hashable) -> bool:
    names = ("state_dict", "_save_to_state_dict", "get_extra_state")
    return all(getattr(kind, name) is getattr(nn.Module, name) for name in names)


def _place(tensor: Tensor) -> tuple[object, ...]:
    """Return what two tensors have in common that are the same memory."""
    if tensor.layout is not torch.strided:  # in several places; what is sent of it is looked at once more
        return (id(tensor),)
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()
