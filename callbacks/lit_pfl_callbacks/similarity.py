"""How alike the clients' parameters are, round by round."""

import re
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lit_pfl_callbacks.run_folder import read_rows_before, run_folder, write_rows

COLUMNS = ["round", "group", "client", "other", "cosine"]


class Similarity(L.Callback):
    """Writes the cosine similarity of every two clients' parameters into ``similarity.csv`` of the run folder.

    The module tells its clients in ``clients``: modules by id. One in several processes has some of them in each, and
    brings tensors together by its ``from_all_ranks(tensors by id)``. A W&B logger also gets every matrix as an image.

    Args:
        groups: regular expressions by the name of a group of parameters. All of a client's ``state_dict()`` whose names
            are found by it are one vector; by default the factors u and v of factorized bodies.
        every_n_rounds: rounds between two measurements; the first round is always measured.

    Raises:
        MisconfigurationException: when a group finds no parameter.

    Source:
        Factorized-FL, Fig. 8 (a) to (e).
    """

    def __init__(self, groups: dict[str, str] | None = None, every_n_rounds: int = 1) -> None:
        self.groups = groups or {"u": r"\.body\..*\.u$", "v": r"\.body\..*\.v$"}
        self.every_n_rounds = every_n_rounds
        self._rows: list[dict[str, Any]] | None = None

    @torch.no_grad()
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure, as the clients are after training and before they load a reply."""
        if trainer.current_epoch % self.every_n_rounds:
            return
        own: Any = pl_module.clients
        vectors = {
            group: {client: _vector(module, group, pattern) for client, module in own.items()}
            for group, pattern in self.groups.items()
        }
        if trainer.world_size > 1:  # every process has some of the clients
            gather: Any = pl_module.from_all_ranks
            vectors = {group: gather(by_client) for group, by_client in vectors.items()}
        if not trainer.is_global_zero:
            return
        path = run_folder(trainer) / "similarity.csv"
        round = trainer.current_epoch + 1
        if self._rows is None:
            self._rows = read_rows_before(path, round, "round")
        for group, by_client in vectors.items():
            cosines = cosine_matrix(torch.stack(list(by_client.values())))
            ids = list(by_client)
            self._rows += [
                dict(zip(COLUMNS, (round, group, ids[i], ids[j], float(cosines[i, j])), strict=True))
                for i in range(len(ids))
                for j in range(i + 1, len(ids))
            ]
            for logger in trainer.loggers:
                if isinstance(logger, WandbLogger):
                    image = (cosines.clamp(0, 1) * 255).byte().cpu().numpy()
                    logger.log_image(f"similarity/{group}", [image], step=round)
        if trainer.loggers:
            write_rows(path, self._rows)


def cosine_matrix(vectors: Tensor) -> Tensor:
    """Return the cosines of every two rows of (K, d), as (K, K)."""
    directions = torch.nn.functional.normalize(vectors.double(), dim=1)
    return directions @ directions.T


def _vector(client: torch.nn.Module, group: str, pattern: str) -> Tensor:
    parts = [tensor.flatten().double() for name, tensor in client.state_dict().items() if re.search(pattern, name)]
    if not parts:
        raise MisconfigurationException(
            f"Similarity(groups={{{group!r}: {pattern!r}}}) finds no parameter; there are "
            f"{', '.join(list(client.state_dict())[:5])}, ..."
        )
    return torch.cat(parts)
