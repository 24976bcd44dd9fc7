"""FedCAC: critical weights are averaged over clients with the same ones, all others over everybody."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jsonargparse.typing import ClosedUnitInterval, PositiveInt
from torch import Tensor

from lit_pfl.core import Client
from lit_pfl.core.mixing import MixingServer
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import Server
from lit_pfl.core.sharing import EVERYTHING
from lit_pfl.ops import pack_bits, unpack_bits

CRITICAL = "critical"


class FedCAC(Client):
    """A client receives the mean of all for weights that its data hardly change, and of similar clients for the others.

    After training, the entries of a weight w with the largest ``|(w - w_t) w|`` are critical, a share ``tau`` of every
    tensor; w_t is what the round began with. With m_i marking client i's critical entries, the overlap is ``o_ij = 1 -
    |m_i - m_j|_1 / (2 |m_i|_1)``. After round t, client i's partners are those with ``o_ij >= mean + t / beta (max -
    mean)``, mean and max being over all pairs, and itself. Its critical entries become the plain mean of its partners'
    models, the others the mean of the round's models by samples. With ``tau=0`` this is FedAvg, bit for bit.

    Where clients are absent, the last model and marks of everybody who has ever taken part count, in the partners'
    mean and in overlaps; the authors have all clients in every round. A client sends one bit more for every weight.
    PFLlib takes t + 1 for t.

    Args:
        tau: share of critical entries; 0.4 in the authors' run on CIFAR-100.
        beta: after how many rounds partners are only the pair with the largest overlap, and after it nobody.
        kwargs: see :class:`~lit_pfl.Client`.

    Source:
        Wu et al. 2023 (Bold but Cautious), as in the authors' code.
    """

    may_unfreeze = False
    remembers = True

    shares = EVERYTHING
    reserved = (CRITICAL,)

    critical: Tensor

    def __init__(self, tau: ClosedUnitInterval = 0.5, beta: PositiveInt = 170, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tau, self.beta = tau, beta

    def configure_state(self) -> None:
        masks = [torch.zeros_like(weight, dtype=torch.bool) for weight in self.shared_weights().values()]
        self.register_buffer(CRITICAL, pack_bits(masks) if masks else torch.zeros(0, dtype=torch.uint8))

    def configure_server(self) -> "FedCACServer":
        return FedCACServer({name: weight.shape for name, weight in self.shared_weights().items()}, self.beta)

    @torch.no_grad()
    def end_round(self) -> None:
        """Mark the critical entries."""
        weights = self.shared_weights()
        if weights:
            self.critical.copy_(pack_bits(critical(w, self.received[name], self.tau) for name, w in weights.items()))

    def upload(self) -> Payload:
        """Return the weights, and which entries are critical, eight a byte."""
        return super().upload().with_({CRITICAL: self.critical})


def critical(weight: Tensor, before: Tensor, tau: float) -> Tensor:
    """Return which entries of a weight are critical, as bool of its shape.

    Where the least of them has not moved, or is zero, all that has moved is, and everything if nothing has.

    Args:
        weight: as trained, of any shape.
        before: as the round began, of the same shape.
        tau: the share of them, of which more may be equal to the least.

    Source:
        Wu et al. 2023, as in the authors' code (``evaluate_critical_parameter``).
    """
    metric = ((weight - before) * weight).abs()
    count = int(tau * metric.numel())
    if not count:
        return torch.zeros_like(metric, dtype=torch.bool)
    least = metric.flatten().topk(count).values[-1]
    moved = metric > 1e-20
    return moved if least <= 1e-10 and moved.any() else metric >= least


class FedCACServer(MixingServer):
    """Mixes critical entries over partners, and all else over everybody.

    Args:
        shapes: of the trained parameters among what is uploaded, by name.
        beta: see :class:`FedCAC`.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], beta: int) -> None:
        self.shapes, self.beta = shapes, beta

    def is_averaged(self, name: str) -> bool:
        return name != CRITICAL

    def aggregate(self, round: int, uploads: Mapping[int, Payload]) -> None:
        super().aggregate(round, uploads)
        Server.aggregate(self, round, uploads)

    def mixing_matrix(self, round: int, latest: Mapping[int, Payload]) -> Tensor:
        marks = [unpack_bits(upload[CRITICAL], self.shapes) for upload in latest.values()]
        chosen = partners(overlaps(marks), round / self.beta).double()
        return chosen / chosen.sum(1, keepdim=True)

    def reply(self, client: int) -> Payload:
        if client not in self.latest:
            return self.model
        mixed, masks = super().reply(client), unpack_bits(self.latest[client][CRITICAL], self.shapes)
        return self.model.with_(
            {name: torch.where(mask, mixed[name], self.model[name]) for name, mask in masks.items()}
        )


def overlaps(marks: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Return (J, J) double ``1 - |m_i - m_j|_1 / (2 |m_i|_1)``; of a client without marks the difference counts whole.

    Args:
        marks: of J clients bool tensors of the same names and shapes.
    """
    common = torch.zeros(len(marks), len(marks), dtype=torch.float64)
    for name in marks[0]:
        rows = torch.stack([own[name].flatten() for own in marks]).float()
        for part in rows.split(2**24, dim=1):  # so that sums are exact
            common += (part @ part.T).double().cpu()
    counts = common.diagonal()
    apart = counts[:, None] + counts - 2 * common
    return 1 - apart / (2 * counts[:, None]).clamp_min(1)


def partners(overlap: Tensor, progress: float) -> Tensor:
    """Return (J, J) bool: row i marks client i and those whose overlap reaches the threshold.

    Args:
        overlap: (J, J) double.
        progress: how far the threshold is from the mean over pairs, at 0, to their maximum, at 1; also beyond.
    """
    itself = torch.eye(len(overlap), dtype=torch.bool)
    others = overlap[~itself]
    if not len(others):
        return itself
    mean = others.mean()
    return itself | (overlap >= mean + progress * (others.max() - mean))
