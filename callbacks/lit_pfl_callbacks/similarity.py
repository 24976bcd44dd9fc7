"""How similar clients are, round by round: their parameters, uploads and updates; and who is mixed with whom."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lit_pfl_callbacks.dashboard import Dashboard
from lit_pfl_callbacks.federated_loop import NOT_RUNNING_STATISTICS
from lit_pfl_callbacks.listening import Listening
from lit_pfl_callbacks.protocols import HasClients, HasMixing, Transfer
from lit_pfl_callbacks.rounds import RoundTable, due, round_of, spread
from lit_pfl_callbacks.tensors import check_patterns, tensors_of
from lit_pfl_callbacks.waiting import waits

COLUMNS = ["round", "group", "client", "other", "cosine"]
MATCHING_COLUMNS = ["round", "client", "other", "frequency"]
FACTORS = {"u": r"\.body\..*\.u$", "v": r"\.body\..*\.v$"}
EMBEDDINGS = {"embedding": "^embedding$"}
UPDATE, MATCHING = "update", "matching"
CHUNK = 2**14  # columns that are multiplied at once, so that long vectors need little memory and lose no digits


class Similarity(Listening):
    """Writes the cosine similarity of every two clients into ``similarity.csv``, and who is mixed with whom.

    The module has clients (:class:`~lit_pfl_callbacks.protocols.HasClients`). One that has ``traffic``
    is also measured by what clients upload, such as SimFed's embeddings, and by their updates: what they upload less
    what they had been sent, of the tensors in both. One that has ``mixing()`` gets ``matching.csv``: how often,
    of the rounds so far, a client was given something of another one. Loggers get every matrix as a heat map.

    A module on its own, or one site, has nobody to be compared with, which a warning says.

    The files have a line a pair of clients. Among more than ``most`` clients those of this many are compared, evenly
    spread by id, so that neither grows with their number.

    Args:
        groups: regular expressions by the name of a group of parameters. All of a client's ``state_dict()`` whose names
            are found by it are one vector. By default the factors u and v of factorized bodies; without any, all
            ``parameters``.
        every_n_rounds: the first round is measured, and then every this many.
        uploads: likewise, of what is uploaded; a group that finds nothing is left out.
        updates: whether the clients' updates are compared.
        most: the largest number of clients to compare. None for all.

    Raises:
        MisconfigurationException: when a group of parameters finds none, or is not a regular expression.

    Source:
        Factorized-FL, Fig. 8 (a) to (f); SimFed, Eq. 3, of embeddings; Sattler et al. 2020, of updates.
    """

    def __init__(
        self,
        groups: dict[str, str] | None = None,
        every_n_rounds: int = 5,
        uploads: dict[str, str] | None = None,
        updates: bool = True,
        most: int | None = 32,
    ) -> None:
        if every_n_rounds < 1 or (most is not None and most < 2):
            raise MisconfigurationException(
                f"Similarity(every_n_rounds={every_n_rounds}, most={most}): give 1 or more rounds, 2 or more clients."
            )
        check_patterns("Similarity(groups=...)", *(groups or {}).values())
        check_patterns("Similarity(uploads=...)", *(uploads or {}).values())
        self.groups, self.every_n_rounds = groups, every_n_rounds
        self.uploads = EMBEDDINGS if uploads is None else uploads
        self.updates, self.most = updates, most
        self._table = RoundTable("similarity.csv", COLUMNS)
        self._matching_table = RoundTable("matching.csv", MATCHING_COLUMNS)
        self._dashboard = Dashboard()
        self._ids: list[int] = []
        self._up: dict[int, Mapping[str, Tensor]] = {}
        self._down: dict[int, Mapping[str, Tensor]] = {}
        self._began: dict[int, Mapping[str, Tensor]] = {}  # what those of _up had been sent before
        self._matched: Counter[tuple[int, int]] = Counter()
        self._mixed: Counter[int] = Counter()  # rounds in which a client was among those that are mixed

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Choose whom to look at, and listen."""
        if not isinstance(pl_module, HasClients):
            waits(trainer, self, f"several clients to compare; {type(pl_module).__name__} has no `client_ids`")
            return
        self._table.check(trainer)
        self._matching_table.check(trainer)
        self._ids = spread(pl_module.client_ids, self.most)
        if self.uploads or self.updates:
            super().on_fit_start(trainer, pl_module)

    def _note(self, sent: Transfer) -> None:
        if sent.client not in self._ids or not sent.tensors:
            return
        if sent.direction == "down":  # kept until the client's next upload, which may be of a later round
            if self.updates:
                self._down[sent.client] = sent.tensors
            return
        began = self._down.pop(sent.client, {})
        if due(sent.round, self.every_n_rounds):
            self._up[sent.client], self._began[sent.client] = sent.tensors, began

    @torch.no_grad()
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure, as the clients are after training and before they load a reply."""
        if not isinstance(pl_module, HasClients):
            return
        round = round_of(trainer)
        self._count(pl_module)
        if not due(round, self.every_n_rounds):
            self._table.add(trainer, [])
            self._matching_table.add(trainer, [])
            return
        found = self._of_states(pl_module.ask(partial(_floats, self.groups), self._ids))
        if not trainer.is_global_zero:
            self._up, self._began = {}, {}
            return
        found |= self._of_transfers()
        rows: list[dict[str, Any]] = []
        for group, vectors in found.items():
            if len(vectors) < 2:
                continue
            ids, cosines = list(vectors), cosine_matrix(list(vectors.values()))
            values = cosines.tolist()
            rows += [
                dict(zip(COLUMNS, (round, group, ids[i], ids[j], round_off(values[i][j])), strict=True))
                for i in range(len(ids))
                for j in range(i + 1, len(ids))
            ]
            self._dashboard.heat_map(trainer, round, f"similarity/{group}", cosines)
        self._table.add(trainer, rows)
        self._show_matching(trainer, round)
        self._up, self._began = {}, {}

    def _of_states(self, states: Mapping[int, Mapping[str, Tensor]]) -> dict[str, dict[int, list[Tensor]]]:
        """Return, by group of parameters, every client's vector in parts, of its named tensors."""
        found = {group: _parts(states, pattern) for group, pattern in (self.groups or FACTORS).items()}
        if self.groups is None:
            found = {group: own for group, own in found.items() if own} or {
                "parameters": _parts(states, NOT_RUNNING_STATISTICS)
            }
        for group, own in found.items():
            if self.groups is not None and not own:
                names = list(next(iter(states.values())))
                raise MisconfigurationException(
                    f"Similarity(groups={self.groups}) finds no parameter that all clients have for {group!r}; there "
                    f"are {', '.join(names[:5])}, ..."
                )
        return found

    def _of_transfers(self) -> dict[str, dict[int, list[Tensor]]]:
        """Return the same of what was uploaded, and of updates."""
        found = {group: _parts(self._up, pattern) for group, pattern in self.uploads.items()}
        if self.updates:
            updates = {client: self._update(client) for client in self._up}
            found[UPDATE] = _parts({client: update for client, update in updates.items() if update}, "")
        return found

    def _update(self, client: int) -> dict[str, Tensor]:
        """Return how what a client sends differs from what it was sent."""
        up, down = self._up[client], self._began[client]
        return {
            name: up[name] - down[name]
            for name in up
            if name in down and up[name].is_floating_point() and up[name].shape == down[name].shape
        }

    def _count(self, pl_module: L.LightningModule) -> None:
        """Count who is given something of whom."""
        mixing = pl_module.mixing() if isinstance(pl_module, HasMixing) else None
        if mixing is None:
            return
        ids, weights = mixing
        place = {client: i for i, client in enumerate(ids)}
        own = [client for client in self._ids if client in place]
        rows = [place[client] for client in own]
        for client, row in zip(own, (weights[rows][:, rows] > 0).tolist(), strict=True):
            self._mixed[client] += 1
            for other, given in zip(own, row, strict=True):
                if given and other != client:
                    self._matched[client, other] += 1

    def _show_matching(self, trainer: L.Trainer, round: int) -> None:
        if not self._mixed:
            return
        ids = sorted(self._mixed)
        matrix = torch.eye(len(ids))
        for i, client in enumerate(ids):
            for j, other in enumerate(ids):
                if i != j:
                    matrix[i, j] = self._matched[client, other] / self._mixed[client]
        values = matrix.tolist()
        self._matching_table.add(trainer, [
            dict(zip(MATCHING_COLUMNS, (round, client, other, round_off(values[i][j])), strict=True))
            for i, client in enumerate(ids)
            for j, other in enumerate(ids)
            if i != j
        ])  # fmt: skip
        self._dashboard.heat_map(trainer, round, MATCHING, matrix)

    def _leave(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._up, self._down, self._began = {}, {}, {}
        super()._leave(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of who was mixed with whom."""
        return {
            "matched": [[*pair, times] for pair, times in self._matched.items()],
            "mixed": dict(self._mixed),
            "tables": [self._table.state_dict(), self._matching_table.state_dict()],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over counts."""
        self._matched = Counter({(client, other): times for client, other, times in state_dict["matched"]})
        self._mixed = Counter(state_dict["mixed"])
        for table, state in zip((self._table, self._matching_table), state_dict["tables"], strict=True):
            table.load_state_dict(state)


def _floats(groups: Mapping[str, str] | None, module: nn.Module) -> dict[str, Tensor]:
    """Return those of a module's tensors that may be in one of some groups, by name; all if there are groups of none.

    Of those that it does not want there is an empty one, since a message tells of all names.
    """
    patterns = [NOT_RUNNING_STATISTICS] if groups is None else list(groups.values())
    return {
        name: tensor.detach() if any(re.search(pattern, name) for pattern in patterns) else torch.empty(0)
        for name, tensor in tensors_of(module).items()
    }


def cosine_matrix(vectors: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the cosines of every two of K vectors, as (K, K) double; NaN with a vector of zeros.

    Args:
        vectors: each in parts, tensors of any shape; the parts of all vectors have the same shapes.

    Example:
        >>> cosine_matrix([[torch.tensor([1.0, 0.0])], [torch.tensor([3.0, 3.0])]])[0, 1]
        tensor(0.7071, dtype=torch.float64)
    """
    gram = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    for parts in zip(*vectors, strict=True):
        for block in torch.stack([part.detach().flatten().float() for part in parts]).split(CHUNK, dim=1):
            gram += (block @ block.T).double().cpu()
    norms = gram.diagonal().sqrt()
    return (gram / norms[:, None] / norms).clamp(-1, 1)


def _parts(states: Mapping[int, Mapping[str, Tensor]], pattern: str) -> dict[int, list[Tensor]]:
    """Return every client's tensors whose names are found, of those that all have in the same shape; none without."""
    if not states:
        return {}
    first, *others = states.values()
    names = [
        name
        for name, tensor in first.items()
        if re.search(pattern, name)
        and tensor.is_floating_point()
        and all(name in other and other[name].shape == tensor.shape for other in others)
    ]
    return {client: [state[name] for name in names] for client, state in states.items()} if names else {}


def round_off(value: float) -> float:
    """Return a share or a cosine with as many digits as a file needs."""
    return round(value, 6)
