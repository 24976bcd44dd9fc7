"""Weights that nobody trains: found, distinguished by fingerprint, held once in memory."""

import hashlib
import json
from collections.abc import Iterable, Mapping

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lit_pfl_callbacks.tensors import bytes_of

#: name under which a site sends, once on joining, what its frozen weights are; packed bytes, no numbers
FROZEN = "frozen#bits"


def frozen_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that never train, by their first name: those with ``requires_grad=False``.

    Copies of trained parts are not among them, such as a momentum encoder: a module changes them itself. A part counts
    as a copy if it starts with the values of a trained part.
    """
    named = dict(module.named_parameters())
    frozen = {name: weight for name, weight in named.items() if not weight.requires_grad and not is_lazy(weight)}
    if not frozen or len(frozen) == len(named):
        return frozen
    copies = _copies(frozen, {name: weight for name, weight in named.items() if weight.requires_grad})
    return {name: weight for name, weight in frozen.items() if name not in copies}


def _copies(frozen: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> set[str]:
    """Return the names of frozen tensors in parts that are copies of trained parts."""
    by_leaf: dict[tuple[str, torch.Size], list[str]] = {}
    for name, tensor in trained.items():
        if not is_lazy(tensor):
            by_leaf.setdefault((name.rpartition(".")[2], tensor.shape), []).append(name)
    prefixes: set[tuple[str, str]] = set()
    for name, tensor in frozen.items():
        for other in by_leaf.get((name.rpartition(".")[2], tensor.shape), []):
            pair = _prefixes(name, other)
            if pair not in prefixes and _equal_and_no_constant(tensor, trained[other]):
                prefixes.add(pair)
    return {
        name
        for name in frozen
        for own, other in prefixes
        if name.startswith(own) and other + name[len(own) :] in trained
    }


def _prefixes(name: str, other: str) -> tuple[str, str]:
    """Return what two names begin with before all that they end in alike, each with its dot."""
    a, b = name.split("."), other.split(".")
    while a and b and a[-1] == b[-1]:
        a, b = a[:-1], b[:-1]
    return "".join(f"{part}." for part in a), "".join(f"{part}." for part in b)


def _equal_and_no_constant(tensor: Tensor, other: Tensor) -> bool:
    return tensor.numel() > 1 and bool((tensor != tensor.flatten()[0]).any()) and torch.equal(tensor, other.to(tensor))


def table_of(weights: Mapping[str, Tensor]) -> Tensor:
    """Return bytes, as a uint8 tensor, that say what some weights are: names, types, shapes and fingerprints."""
    table = {
        name: [str(weight.dtype).removeprefix("torch."), list(weight.shape), fingerprint(weight)]
        for name, weight in weights.items()
    }
    return torch.frombuffer(bytearray(json.dumps(table).encode()), dtype=torch.uint8)


def read_table(data: Tensor) -> dict[str, tuple[torch.dtype, tuple[int, ...], str]]:
    """Return what :func:`table_of` says: type, shape and fingerprint by name.

    Raises:
        ValueError: when it is none.
    """
    try:
        table = json.loads(data.cpu().numpy().tobytes())
        read = {
            str(name): (getattr(torch, kind), tuple(int(n) for n in shape), str(digest))
            for name, (kind, shape, digest) in table.items()
        }
    except (AttributeError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"no table of frozen weights: {error}") from None
    if not all(isinstance(kind, torch.dtype) for kind, _, _ in read.values()):
        raise ValueError("no table of frozen weights: a type is none")
    return read


def fingerprint(tensor: Tensor) -> str:
    """Return 16 hexadecimal digits that tell a tensor's values from others."""
    return hashlib.blake2b(bytes_of(tensor), digest_size=8).hexdigest()


@torch.no_grad()
def hold_once(weights: Mapping[str, nn.Parameter], others: Mapping[str, nn.Parameter]) -> None:
    """Let parameters lie in the memory of others of the same names, where these have the same values."""
    for name, weight in weights.items():
        other = others.get(name)
        if (
            other is not None
            and weight.data_ptr() != other.data_ptr()
            and (weight.device, weight.dtype, weight.shape) == (other.device, other.dtype, other.shape)
            and torch.equal(weight, other)
        ):
            weight.data = other.data


@torch.no_grad()
def hold_apart(weights: Iterable[nn.Parameter]) -> None:
    """Give parameters memory of their own, before somebody changes them in place."""
    for weight in weights:
        weight.data = weight.data.clone()


def refuse_other_weights(own: Tensor, first: Tensor, site: str) -> None:
    """See that a site's frozen weights are those of the first one, by the tables of both, see :func:`table_of`."""
    if torch.equal(own.cpu(), first.cpu()):
        return
    mine, theirs = read_table(own), read_table(first)
    for name in {**theirs, **mine}:
        if mine.get(name) != theirs.get(name):
            both = name in mine and name in theirs
            how = "differs from the first client's" if both else "is frozen at one client and not at another"
            raise MisconfigurationException(
                f"{site}: weight {name!r} {how}; frozen weights are not sent, so load the same pretrained model and "
                "freeze the same layers everywhere."
            )
