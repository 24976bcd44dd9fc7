"""A mean that the processes of a run compute together, each a part of it."""

from collections.abc import Iterable, Sequence

import torch

from lit_pfl.core.averaging import weighted_mean
from lit_pfl.core.payload import Payload
from lit_pfl.engines.ranks import Ranks

#: bytes of all payloads together below which telling each other takes longer than what it saves
WORTH_SHARING = 32 * 2**20
#: bytes of a tensor below which it is computed by everybody
SMALL = 64 * 2**10


def shared_mean(
    ranks: Ranks, payloads: Sequence[Payload], weights: Sequence[float], names: Iterable[str] | None = None
) -> Payload:
    """Return what :func:`~lit_pfl.weighted_mean` returns, bit for bit, everywhere. All processes call this alike.

    Of a large tensor every process computes some rows. It reads the payloads of all, which is what takes the time: the
    machine's memory is shared as well.

    Args:
        ranks: the processes.
        payloads: those of everybody, see :func:`~lit_pfl.engines.parcels.of_all_ranks`.
        weights: as many numbers that sum to 1.
        names: which tensors to average; by default all of the first payload's.
    """
    first = payloads[0]
    wanted = list(first) if names is None else list(names)
    large = [n for n in wanted if first[n].dim() and first[n].nbytes >= SMALL and first[n].device.type == "cpu"]
    if ranks.size == 1 or len(payloads) * sum(first[name].nbytes for name in large) < WORTH_SHARING:
        return weighted_mean(payloads, weights, wanted)

    def rows(name: str, rank: int) -> slice:
        n = len(first[name])
        return slice(n * rank // ranks.size, n * (rank + 1) // ranks.size)

    own = [Payload({name: payload[name][rows(name, ranks.rank)] for name in large}) for payload in payloads]
    parts = ranks.exchange(tensors=list(weighted_mean(own, weights).values()))
    means = dict(weighted_mean(payloads, weights, [name for name in wanted if name not in large]))
    for place, name in enumerate(large):
        means[name] = torch.empty_like(first[name])
        for rank, part in enumerate(parts):
            means[name][rows(name, rank)] = part.tensors[place]
    return Payload({name: means[name] for name in wanted}, first.sparse)
