"""How sparse weights are, and of what rank, layer by layer."""

from statistics import fmean
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lit_pfl_callbacks.dashboard import Dashboard
from lit_pfl_callbacks.protocols import HasClients, HasWeightParts, WeightParts
from lit_pfl_callbacks.rounds import RoundTable, due, ends_round, round_of, spread

COLUMNS = ["round", "client", "layer", "nonzeros", "elements", "rank"]
MEAN = "mean"


class Measured(NamedTuple):
    """What was found of a layer.

    Args:
        nonzeros: entries of the sparse part that are not zero; without one, of the other part.
        elements: all of its entries.
        rank: of the other part.
        parameters: how many numbers it takes to write the weight down: the sparse part's entries that are not zero, and
            the other part's, or its factors' if these are fewer.
    """

    nonzeros: float
    elements: float
    rank: float
    parameters: float


class SparsityMonitor(L.Callback):
    """Writes non-zero entries and ranks of weights into ``sparsity.csv``, and shows how many parameters they come to.

    It works on any module: of every weight of two or more dimensions it counts the entries that are not zero, and the
    rank as a matrix of outputs times all else. A module that knows better says so in ``weight_parts()``
    (:class:`~lit_pfl_callbacks.protocols.HasWeightParts`): mu and the rank of ``u v^T`` of factorized weights, p and
    the rank of w of FedSLR. Of a module that has clients (:class:`~lit_pfl_callbacks.protocols.HasClients`) each
    is measured on its own.

    The file has a line a layer, the mean over clients, called ``mean``; with ``per_client`` a line a layer and client.

    Args:
        every_n_rounds: the first round is measured, and then every this many.
        per_client: whether every client has lines of its own.
        most: the largest number of clients to measure; of more, this many that are evenly spread by id. None for all.

    Raises:
        MisconfigurationException: for ``every_n_rounds`` or ``most`` below 1.

    Attributes:
        latest: what was measured last, by layer; the mean over clients.
    """

    def __init__(self, every_n_rounds: int = 10, per_client: bool = False, most: int | None = 8) -> None:
        if every_n_rounds < 1 or (most is not None and most < 1):
            raise MisconfigurationException(
                f"SparsityMonitor(every_n_rounds={every_n_rounds}, most={most}): give 1 or more."
            )
        self.every_n_rounds, self.per_client, self.most = every_n_rounds, per_client, most
        self.latest: dict[str, Measured] = {}
        self._table = RoundTable("sparsity.csv", COLUMNS)
        self._dashboard = Dashboard()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Look whether the run can continue its file."""
        self._table.check(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure, as the weights are after training and before a reply is loaded."""
        round = round_of(trainer)
        if not trainer.is_global_zero or not ends_round(trainer) or not due(round, self.every_n_rounds):
            self._table.add(trainer, [])
            return
        found: dict[Any, dict[str, Measured]] = {}
        if isinstance(pl_module, HasClients):
            found.update(pl_module.ask(measured, spread(pl_module.client_ids, self.most)))
        else:
            found[""] = measured(pl_module)
        self.latest = _means(list(found.values()))
        shown = found if self.per_client or "" in found else {MEAN: self.latest}
        self._table.add(trainer, [
            dict(zip(COLUMNS, (round, client, layer, *map(_plain, (m.nonzeros, m.elements, m.rank))), strict=True))
            for client, layers in shown.items()
            for layer, m in layers.items()
        ])  # fmt: skip
        elements, nonzeros, parameters = (
            sum(getattr(m, name) for m in self.latest.values()) for name in ("elements", "nonzeros", "parameters")
        )
        if elements:
            shares = {"sparsity/density": nonzeros / elements, "sparsity/parameters": parameters}
            ranks = {f"rank/{layer}": m.rank for layer, m in self.latest.items()}
            self._dashboard.scalars(trainer, round, shares | ranks)

    def state_dict(self) -> dict[str, Any]:
        """Return where the file is."""
        return {"table": self._table.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state."""
        self._table.load_state_dict(state_dict["table"])


def dense_parts(module: nn.Module) -> dict[str, WeightParts]:
    """Return the weights of two or more dimensions of any module, as matrices of outputs times all else."""
    return {
        name.removesuffix(".weight"): WeightParts(None, (weight.detach().flatten(1),))
        for name, weight in module.named_parameters()
        if weight.dim() > 1
    }


@torch.no_grad()
def measured(module: nn.Module) -> dict[str, Measured]:
    """Return what the weights of a module come to, by layer."""
    layers = module.weight_parts() if isinstance(module, HasWeightParts) else dense_parts(module)
    return {name: _measured(parts) for name, parts in layers.items()}


def _measured(parts: WeightParts) -> Measured:
    sparse, factors = parts
    counts = [int(torch.count_nonzero(part)) for part in factors]
    rank = rank_of(*factors)
    own = sum(counts)
    if len(factors) == 1:
        own = min(own, rank * sum(factors[0].shape))
    if sparse is None:
        return Measured(sum(counts), sum(part.numel() for part in factors), rank, own)
    nonzeros = int(torch.count_nonzero(sparse))
    return Measured(nonzeros, sparse.numel(), rank, nonzeros + own)


def rank_of(matrix: Tensor, other: Tensor | None = None) -> int:
    """Return the rank of a matrix, or of ``matrix @ other.T``, as ``torch.linalg.matrix_rank`` has it.

    Of single precision, singular values are found by the smaller Gram matrix in double precision, in a tenth of the
    time: they are exact to the square root of that precision, which is finer than what counts as zero. That none does
    is seen by a Cholesky decomposition, sooner still. What is not finite has rank 0.

    Example:
        >>> rank_of(torch.ones(3, 5))
        1
        >>> rank_of(torch.eye(4, 2), torch.eye(3, 2))
        2
    """
    matrix = _at_least_single(matrix)
    if other is not None:
        other = _at_least_single(other)
        if matrix.shape[1] == 1:
            return int(all(factor.any() and factor.isfinite().all() for factor in (matrix, other)))
        if matrix.shape[1] >= min(len(matrix), len(other)):
            return rank_of(matrix @ other.T)
        left, right = (torch.linalg.qr(factor.double(), mode="r").R for factor in (matrix, other))
        matrix = (left @ right.T).to(matrix.dtype)
    if not matrix.numel() or not matrix.isfinite().all():
        return 0
    if matrix.dtype == torch.float64:
        return int(torch.linalg.matrix_rank(matrix))
    wide = (matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T).double()
    gram, zero = wide @ wide.T, max(matrix.shape) * torch.finfo(matrix.dtype).eps
    shifted = gram - (zero**2 * gram.trace()) * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    if not torch.linalg.cholesky_ex(shifted).info:  # even next to the sum of all values no value counts as zero
        return len(gram)
    values = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    return int((values > zero * values.max()).sum())


def _at_least_single(matrix: Tensor) -> Tensor:
    """Return a matrix in single precision if it is narrower: by that of half, all of a large matrix counts as zero."""
    return matrix.to(torch.promote_types(matrix.dtype, torch.float32))


def _means(found: list[dict[str, Measured]]) -> dict[str, Measured]:
    """Return the mean of every layer over those who have it."""
    names = dict.fromkeys(name for layers in found for name in layers)
    columns = {name: [layers[name] for layers in found if name in layers] for name in names}
    return {name: Measured(*map(fmean, zip(*own, strict=True))) for name, own in columns.items()}


def _plain(value: float) -> float:
    """Return a whole number as such."""
    return int(value) if value == int(value) else round(value, 3)
