"""The models that a run ends with, as files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from safetensors.torch import save
from torch import nn

from lit_pfl_callbacks.dashboard import Dashboard
from lit_pfl_callbacks.files import replacing
from lit_pfl_callbacks.protocols import HasModels, HasScores
from lit_pfl_callbacks.rounds import spread
from lit_pfl_callbacks.run_folder import run_folder


class PersonalizedModels(L.Callback):
    """Writes clients' models into the folder ``models`` when a fit ends; W&B and MLflow keep them as artifacts.

    A module that has a model for every client tells so (:class:`~lit_pfl_callbacks.protocols.HasModels`); of any other
    one its own tensors are written. The files are ``client_3.safetensors``, or ``model.safetensors``.

    Args:
        clients: whose models; by default everybody's.
        most: of more clients, so many that are evenly spread by id. None for all.

    Raises:
        MisconfigurationException: for a client that there is not.
    """

    def __init__(self, clients: list[int] | None = None, most: int | None = 20) -> None:
        self.clients, self.most = clients, most
        self._dashboard = Dashboard()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """See that these clients are there, before they are trained."""
        if trainer.world_size > 1 and isinstance(pl_module, HasModels):
            raise MisconfigurationException("PersonalizedModels writes those of one process: trainer.devices=1.")
        there = list(pl_module.clients) if isinstance(pl_module, HasModels) else []
        for client in self.clients or ():
            if client not in there:
                raise MisconfigurationException(
                    f"PersonalizedModels(clients={self.clients}): there is no client {client}; there are "
                    f"{', '.join(map(str, there[:10]))}{', ...' if len(there) > 10 else ''}."
                )

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Write the models of the last round."""
        if stage != "fit" or trainer.fast_dev_run or not trainer.loggers or not trainer.is_global_zero:  # type: ignore[attr-defined]
            return
        folder, paths = run_folder(trainer) / "models", []
        if isinstance(pl_module, HasModels):
            for client in self.clients or spread(list(pl_module.clients), self.most):
                paths.append(folder / f"client_{client}.safetensors")
                _write(paths[-1], pl_module.standalone(client))
        else:
            paths.append(folder / "model.safetensors")
            _write(paths[-1], pl_module)
        self._dashboard.files(trainer, "models", paths, _scores(pl_module))


def _write(path: Path, network: nn.Module) -> None:
    # copies, since safetensors takes neither shared memory nor strides
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in network.state_dict().items()}
    with replacing(path) as file:
        file.write(save(tensors))


def _scores(pl_module: Any) -> Mapping[str, Any]:
    rows = pl_module.rows if isinstance(pl_module, HasScores) else ()
    return {f"client_{row.client}": dict(row.scores) for row in rows}
