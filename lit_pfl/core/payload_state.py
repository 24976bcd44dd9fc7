"""What a checkpoint holds of payloads, as tensors and plain values."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from lit_pfl.core.payload import Payload
from lit_pfl.ops.low_rank import LowRank

#: under which a checkpoint has a payload's tensors that are in factors
FACTORS = "factors"


def plain(value: Any) -> Any:
    """Return what a checkpoint holds of a value: a mapping as a dict, a payload as one of what is not in factors."""
    if isinstance(value, Payload):
        return {name: tensor for name, tensor in value.items() if name not in value.low_rank}
    return {key: _dense(one) for key, one in value.items()} if isinstance(value, Mapping) else value


def _dense(value: Any) -> Any:
    """Return what a checkpoint holds of a part of a value, which has no factors next to it."""
    return dict(value) if isinstance(value, Payload) else plain(value)


def factors_of(value: Any) -> dict[str, tuple[Tensor, Tensor, tuple[int, ...]]]:
    """Return what a checkpoint holds of those tensors of a payload that are in factors; of other values nothing."""
    own = value.low_rank if isinstance(value, Payload) else {}
    return {name: (f.left, f.right, f.shape) for name, f in own.items()}


def payload_state(payload: Payload) -> dict[str, Any]:
    """Return what a checkpoint holds of a payload, as tensors and plain values."""
    return {"tensors": plain(payload), "sparse": sorted(payload.sparse), FACTORS: factors_of(payload)}


def payload_from(state: Mapping[str, Any]) -> Payload:
    """Return the payload that a state of :func:`payload_state` is of."""
    return Payload(state["tensors"], state["sparse"], low_rank_of(state[FACTORS]))


def low_rank_of(factors: Mapping[str, Any]) -> dict[str, LowRank]:
    """Return the tensors in factors that a checkpoint's are of."""
    return {name: LowRank(*parts) for name, parts in factors.items()}


def payloads_from(value: Mapping[Any, Any], sparse: Iterable[str], factors: Mapping[str, LowRank], like: Any) -> Any:
    """Return the payload, or the dict of payloads, that a checkpoint's value is of."""
    if isinstance(like, Payload):
        return Payload(value, sparse, factors)
    return {key: Payload(tensors, sparse) for key, tensors in value.items()}
