"""A second device where there is none: tensors that say they are elsewhere, and do not mix with those of the CPU."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lit_pfl.core import Client
from lit_pfl.core.coordinator import Coordinator
from lit_pfl.core.payload import Payload, Upload
from lit_pfl.core.server import ClientInfo
from lit_pfl.errors import UploadError

OTHER = torch.device("meta")
COPIES = (torch.ops.aten._to_copy, torch.ops.aten.copy_, torch.ops.aten.index)  # may have both devices


class There(Tensor):
    """A tensor on the second device; its values are in a CPU tensor, ``here``."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, here: Tensor) -> "There":
        options: Any = {"dtype": here.dtype, "strides": here.stride(), "storage_offset": here.storage_offset()}
        return Tensor._make_wrapper_subclass(cls, here.shape, device=OTHER, **options)

    def __init__(self, here: Tensor) -> None:
        self.here = here

    def tolist(self) -> Any:
        return self.here.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return run(func, args, kwargs or {})


class TwoDevices(TorchDispatchMode):
    """Lets CPU tensors be sent to the second device, and be made there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation where its tensors are; as on a GPU, only CPU tensors without dimensions mix with others."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    there = any(isinstance(x, There) for x in tensors)
    packet = func.overloadpacket
    if there and packet not in COPIES and any(not isinstance(x, There) and x.dim() for x in tensors):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device")
    device = kwargs.get("device")
    if device is not None:
        there = torch.device(device) == OTHER
        kwargs = {**kwargs, "device": torch.device("cpu")}
    args, kwargs = tree_map(lambda x: x.here if isinstance(x, There) else x, (args, kwargs))
    return tree_map(lambda x: There(x) if there and isinstance(x, Tensor) else x, func(*args, **kwargs))


@contextmanager
def servers_elsewhere() -> Iterator[None]:
    """Let servers see what clients upload on the second device, as on a GPU; checkpoints are read into CPU memory."""
    placed: set[int] = set()
    place, start = Client.place_on, Coordinator.start
    collect, state_dict, load = Coordinator.collect, Coordinator.state_dict, Coordinator.load_state_dict

    def on_two_devices(method: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            with TwoDevices():
                return method(*args, **kwargs)

        return called

    def sent(payload: Mapping[str, Tensor]) -> Payload:
        return Payload({k: There(x.detach()) for k, x in payload.items()}, getattr(payload, "sparse", ()))

    def received(reply: Payload) -> Payload:
        return Payload({k: x.here if isinstance(x, There) else x for k, x in reply.items()}, reply.sparse)

    def placing(self: Client, device: torch.device) -> None:
        placed.add(self.spec.client_id)
        place(self, device)

    def starting(self: Coordinator, clients: Mapping[int, ClientInfo]) -> None:
        if placed >= clients.keys():  # only then are they on their device
            clients = {k: ClientInfo(info.num_samples, sent(info.initial)) for k, info in clients.items()}
        on_two_devices(start)(self, clients)
        reply = on_two_devices(self.server.reply)
        self.server.reply = lambda client: received(reply(client))  # type: ignore[method-assign]

    def collecting(self: Coordinator, uploads: Mapping[int, Upload]) -> None:
        arrived = {k: upload if isinstance(upload, UploadError) else sent(upload) for k, upload in uploads.items()}
        on_two_devices(collect)(self, arrived)

    def saving(self: Coordinator) -> Any:
        state = on_two_devices(state_dict)(self)
        return tree_map(lambda x: x.here if isinstance(x, There) else x, state)

    with (
        patch.object(Client, "place_on", placing),
        patch.multiple(Coordinator, start=starting, collect=collecting, state_dict=saving),
        patch.object(Coordinator, "load_state_dict", on_two_devices(load)),
    ):
        yield
