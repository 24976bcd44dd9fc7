"""Where clients stand to each other by their embeddings: a map."""

import re
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lit_pfl_callbacks.dashboard import Dashboard
from lit_pfl_callbacks.listening import Listening
from lit_pfl_callbacks.protocols import HasTraffic, Transfer
from lit_pfl_callbacks.rounds import RoundTable, due, round_of
from lit_pfl_callbacks.tensors import check_patterns
from lit_pfl_callbacks.waiting import waits

COLUMNS = ["round", "client", "x", "y"]


class EmbeddingMap(Listening):
    """Writes a place on a map for every client into ``embeddings.csv``, by what it uploads, such as SimFed's embedding.

    The map is the plane in which the clients' latest embeddings differ most (their two first principal components),
    turned so that clients move as little as possible from one map to the next. It takes a module that has
    ``traffic`` (:class:`~lit_pfl_callbacks.protocols.HasTraffic`); where nobody uploads an embedding it does nothing.
    Of a module on its own, or of one site, there is no map, which a warning says.
    The file has a line a client and map, some 30 bytes.

    Args:
        tensor: a regular expression for the name of the embedding among what is uploaded.
        every_n_rounds: the first round has a map, and then every this many.

    Raises:
        MisconfigurationException: for ``every_n_rounds`` below 1, or when ``tensor`` is not a regular expression.

    Attributes:
        places: the latest map, (x, y) by client.
    """

    def __init__(self, tensor: str = "^embedding$", every_n_rounds: int = 5) -> None:
        if every_n_rounds < 1:
            raise MisconfigurationException(f"EmbeddingMap(every_n_rounds={every_n_rounds}): give 1 or more.")
        check_patterns("EmbeddingMap(tensor=...)", tensor)
        self.tensor, self.every_n_rounds = tensor, every_n_rounds
        self.places: dict[int, tuple[float, float]] = {}
        self._latest: dict[int, Tensor] = {}
        self._table = RoundTable("embeddings.csv", COLUMNS)
        self._dashboard = Dashboard()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Listen."""
        self._table.check(trainer)
        if not isinstance(pl_module, HasTraffic):
            sender = f"a method that sends an `embedding` (SimFed); {type(pl_module).__name__} is one client at most"
            waits(trainer, self, f"uploads of several clients under {sender}")
        super().on_fit_start(trainer, pl_module)

    def _note(self, sent: Transfer) -> None:
        if sent.direction == "up" and sent.client is not None:
            for name, tensor in sent.tensors.items():
                if re.search(self.tensor, name):
                    self._latest[sent.client] = tensor.detach().flatten().float().cpu().clone()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw the map."""
        round = round_of(trainer)
        if len(self._latest) < 2 or not due(round, self.every_n_rounds) or not trainer.is_global_zero:
            self._table.add(trainer, [])
            return
        ids = sorted(self._latest)
        points = principal_plane(torch.stack([self._latest[client] for client in ids]))
        known = [i for i, client in enumerate(ids) if client in self.places]
        if known:
            points = turned(points, known, torch.tensor([self.places[ids[i]] for i in known], dtype=points.dtype))
        self.places = {client: (x, y) for client, (x, y) in zip(ids, points.tolist(), strict=True)}
        rows = [
            {"round": round, "client": client, "x": float(f"{x:.6g}"), "y": float(f"{y:.6g}")}
            for client, (x, y) in self.places.items()
        ]
        self._table.add(trainer, rows)
        self._dashboard.map(trainer, round, "embeddings", rows)

    def state_dict(self) -> dict[str, Any]:
        """Return the latest embeddings and their map."""
        return {"places": dict(self.places), "latest": dict(self._latest), "table": self._table.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state."""
        self.places = {client: (x, y) for client, (x, y) in state_dict["places"].items()}
        self._latest = {client: tensor.cpu() for client, tensor in state_dict["latest"].items()}
        self._table.load_state_dict(state_dict["table"])


def principal_plane(vectors: Tensor) -> Tensor:
    """Return the coordinates of (K, d) vectors along the two directions in which they differ most, as (K, 2) double.

    Of each direction the client that is farthest out is on the positive side. Without a second one it is all zeros.

    Example:
        >>> principal_plane(torch.tensor([[0.0, 0.0], [2.0, 0.0], [7.0, 0.0]])).tolist()
        [[-3.0, 0.0], [-1.0, 0.0], [4.0, 0.0]]
    """
    centred = vectors.double() - vectors.double().mean(0)
    if len(centred) <= centred.shape[1]:  # the smaller of the two Gram matrices; both have the same scores
        values, directions = torch.linalg.eigh(centred @ centred.T)
        scores = directions * values.clamp(min=0).sqrt()
    else:
        values, directions = torch.linalg.eigh(centred.T @ centred)
        scores = centred @ directions
    plane = scores.flip(1)[:, :2]
    plane = torch.nn.functional.pad(plane, (0, 2 - plane.shape[1]))
    farthest = plane.gather(0, plane.abs().argmax(0, keepdim=True))
    return plane * torch.where(farthest < 0, -1.0, 1.0) + 0.0  # no zeros with a sign


def turned(points: Tensor, known: list[int], before: Tensor) -> Tensor:
    """Return (K, 2) points turned, and maybe mirrored, so that some come as near as possible to where they were.

    Args:
        points: (K, 2).
        known: which of them were there before.
        before: (len(known), 2) where these were.

    Source:
        Schoenemann 1966, the orthogonal Procrustes problem.
    """
    left, _, right = torch.linalg.svd(points[known].T @ before)
    return points @ (left @ right)
