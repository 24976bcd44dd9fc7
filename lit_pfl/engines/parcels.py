"""Objects with tensors, on their way to another process: the tensors' bytes apart, so that they need not be copied."""

import io
import pickle
import warnings
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from torch import Tensor

from lit_pfl.core.payload import Payload


class Parcel(NamedTuple):
    """A pickled object.

    Args:
        head: all but the tensors' bytes.
        tensors: (n,) uint8 arrays, the bytes of every distinct tensor once.
    """

    head: bytes
    tensors: list[np.ndarray]


def packed(content: Any) -> Parcel:
    """Pickle an object; classes and functions of a script go along. A Trainer stays behind, and None comes out."""
    file = io.BytesIO()
    pickler = _pickler()(file)
    pickler.dump(content)
    return Parcel(file.getvalue(), pickler.tensors)


def unpacked(parcel: Parcel, copy: bool = True) -> Any:
    """Return the object again, with tensors on the CPU in the layout that they had.

    Args:
        parcel: the parcel.
        copy: whether tensors may be written to; otherwise they are in the parcel's own memory, and only read.
    """
    _let_arrays_be_read_only()
    return _Unpickler(parcel, copy).load()


@cache
def _let_arrays_be_read_only() -> None:
    """Let PyTorch warn of a read-only array here, unseen: it does so once in a process."""
    array = np.zeros(1, np.uint8)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(array)


@cache
def _pickler() -> Any:
    """Return the class that pickles; Ray brings along what it is made of, and takes its time to import."""
    from ray import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def __init__(self, file: io.BytesIO) -> None:
            super().__init__(file, protocol=5)
            self.tensors: list[np.ndarray] = []

        def persistent_id(self, content: Any) -> Any:
            return "trainer" if isinstance(content, L.Trainer) else None

        def reducer_override(self, content: Any) -> Any:
            if isinstance(content, partial) and _of_a_parser(content.func):  # which holds all of a command line
                first = next(place for place, value in enumerate(content.args) if isinstance(value, type))
                return _factory, (content.args[first:], content.keywords)
            if type(content) is not Tensor or content.layout is not torch.strided:
                return super().reducer_override(content)
            tensor = content.detach().cpu()
            if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
                tensor = tensor.contiguous()
            flat = tensor.as_strided((tensor.numel(),), (1,)) if tensor.numel() else tensor.reshape(0)
            self.tensors.append(flat.view(torch.uint8).numpy())
            shape, stride = tuple(tensor.shape), tensor.stride()
            return _tensor, (len(self.tensors) - 1, tensor.dtype, shape, stride, content.requires_grad)

    return Pickler


def _of_a_parser(function: Any) -> bool:
    return str(getattr(function, "__module__", type(function).__module__)).startswith("jsonargparse")


def _factory(args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Return what a command line's factory does without its parser: it makes an object of the class that is first."""
    make: Any = partial
    return make(*args, **options)


def _tensor(*args: Any) -> Tensor:
    raise NotImplementedError("unpacked() does this")


class _Unpickler(pickle.Unpickler):
    def __init__(self, parcel: Parcel, copy: bool) -> None:
        super().__init__(io.BytesIO(parcel.head))
        self._arrays, self._copy = parcel.tensors, copy

    def persistent_load(self, pid: Any) -> None:
        return None

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name == "_tensor":
            return self._tensor
        return super().find_class(module, name)

    def _tensor(
        self, place: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], grad: bool
    ) -> Tensor:
        array = self._arrays[place]
        if not array.size:
            return torch.empty(shape, dtype=dtype, requires_grad=grad)
        flat = torch.from_numpy(np.array(array) if self._copy else array).view(dtype)
        return flat.as_strided(shape, stride).requires_grad_(grad)


class Replies:
    """Replies on their way to workers. One reply for all is put into Ray's memory once.

    Args:
        ray: the module ``ray``, connected.
        replies: by client id; None where there is none.
    """

    def __init__(self, ray: Any, replies: Mapping[int, Payload | None]) -> None:
        self.ray, self.replies = ray, replies
        distinct = {id(reply): reply for reply in replies.values() if reply is not None}
        self._common = ray.put(packed(list(distinct.values()))) if len(distinct) <= 1 else None

    def of(self, some: Sequence[int]) -> tuple[Any, dict[int, Any]]:
        """Return a reference to the distinct replies of some clients, and by client which of them it is."""
        own = {id(reply): reply for client in some if (reply := self.replies[client]) is not None}
        places = {key: place for place, key in enumerate(own)}
        which = {client: places.get(id(self.replies[client])) for client in some}
        return (self.ray.put(packed(list(own.values()))) if self._common is None else self._common), which


def alike(payloads: Mapping[int, Payload]) -> dict[int, Payload]:
    """Return payloads in which equal tensors of one name are one, so that they are sent once: clients start alike."""
    first: dict[str, Tensor] = {}

    def known(name: str, tensor: Tensor) -> Tensor:
        one = first.setdefault(name, tensor)
        same = one is tensor or (one.shape == tensor.shape and one.dtype == tensor.dtype and torch.equal(one, tensor))
        return one if same else tensor

    return {
        client: payload
        if payload.low_rank
        else Payload({name: known(name, tensor) for name, tensor in payload.items()}, payload.sparse)
        for client, payload in payloads.items()
    }
