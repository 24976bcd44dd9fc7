"""The models that a run ends with, as files."""

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from safetensors.torch import save
from torch import nn

from lit_pfl_callbacks.dashboard import Dashboard
from lit_pfl_callbacks.files import write_whole
from lit_pfl_callbacks.protocols import HasClients, HasScores
from lit_pfl_callbacks.rounds import keeps, spread
from lit_pfl_callbacks.run_folder import run_folder
from lit_pfl_callbacks.scores_shown import of_own_models
from lit_pfl_callbacks.tensors import tensors_of


class PersonalizedModels(L.Callback):
    """Writes clients' models into the folder ``models`` when a fit ends; W&B and MLflow keep them as artifacts.

    Of a module that has clients (:class:`~lit_pfl_callbacks.protocols.HasClients`) every client's model is
    written, that of its ``standalone()`` if it has one; of any other module its own tensors. The files are
    ``client_3.safetensors``, or ``model.safetensors``; sparse tensors are dense there.

    Args:
        clients: whose models; by default everybody's.
        most: of more clients, this many that are evenly spread by id. None for all.

    Raises:
        MisconfigurationException: for a client that there is not.
    """

    def __init__(self, clients: list[int] | None = None, most: int | None = 20) -> None:
        self.clients, self.most = clients, most
        self._dashboard = Dashboard()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """See that these clients are there, before they are trained."""
        there = list(pl_module.client_ids) if isinstance(pl_module, HasClients) else []
        for client in self.clients or ():
            if client not in there:
                raise MisconfigurationException(
                    f"PersonalizedModels(clients={self.clients}): there is no client {client}; there are "
                    f"{', '.join(map(str, there[:10]))}{', ...' if len(there) > 10 else ''}."
                )

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Write the models of the last round."""
        if stage != "fit" or not keeps(trainer):
            return
        files = self._files(pl_module) if isinstance(pl_module, HasClients) else {"model": _file(pl_module)}
        if not trainer.is_global_zero:
            return
        folder, paths = run_folder(trainer) / "models", []
        for name, content in files.items():
            paths.append(folder / f"{name}.safetensors")
            write_whole(paths[-1], content)
        self._dashboard.files(trainer, "models", paths, _scores(pl_module))

    def _files(self, pl_module: HasClients) -> dict[str, bytes]:
        chosen = spread(pl_module.client_ids, self.most) if self.clients is None else self.clients
        files = pl_module.ask(_file_of_client, chosen, as_scored=True)
        return {f"client_{client}": file for client, file in files.items()}


def _file_of_client(client: Any) -> bytes:
    return _file(client.standalone() if callable(getattr(client, "standalone", None)) else client)


def _file(network: nn.Module) -> bytes:
    # dense copies, since safetensors takes neither sparse tensors nor shared memory nor strides
    tensors = {name: tensor.detach().cpu() for name, tensor in tensors_of(network).items()}
    dense = {name: t if t.layout is torch.strided else t.to_dense() for name, t in tensors.items()}
    return save({name: tensor.contiguous().clone() for name, tensor in dense.items()})


def _scores(pl_module: Any) -> Mapping[str, Any]:
    rows = pl_module.rows if isinstance(pl_module, HasScores) else ()
    return {f"client_{row.client}": dict(row.scores) for row in of_own_models(rows)}
