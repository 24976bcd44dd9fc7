"""The classifiers that a Trainer trains: a module, or the clients of a federation, with batches and layers."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning as L
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, device, nn

from lit_pfl_callbacks.protocols import HasClients


def classifiers(trainer: L.Trainer, pl_module: L.LightningModule) -> Iterator[tuple[int | str, Any, Iterable[Any]]]:
    """Return the modules to look at, each with a client's id, or "" if it is none, and its batches.

    These are validation data, or training data where there are none.
    """
    if isinstance(pl_module, HasClients):
        clients: Mapping[int, Any] = pl_module.clients
        for client, module in clients.items():
            yield client, module, module.data.val if len(module.data.val) else module.data.train
        return
    loaders: Any = trainer.val_dataloaders or trainer.train_dataloader
    loader = next(iter(loaders)) if isinstance(loaders, list | tuple) else loaders
    yield "", pl_module, _transferred(trainer, pl_module, loader)


def _transferred(trainer: L.Trainer, pl_module: L.LightningModule, batches: Iterable[Any]) -> Iterator[Any]:
    """Return batches as the Trainer gives them to a validation step: of its precision, and after the module's hooks."""
    data = getattr(trainer, "datamodule", None)
    hooks: Any = data if is_overridden("on_before_batch_transfer", data) else pl_module
    for batch in batches:
        batch = hooks.on_before_batch_transfer(trainer.precision_plugin.convert_input(batch), 0)
        yield trainer.strategy.batch_to_device(batch)


@contextmanager
def validating(trainer: L.Trainer) -> Iterator[None]:
    """Let the Trainer validate, by its own precision, for hooks that ask what it does."""
    stage, trainer.validating = trainer.state.stage, True
    try:
        with trainer.precision_plugin.forward_context():
            yield
    finally:
        trainer.state.stage = stage


def one_process(trainer: L.Trainer, pl_module: L.LightningModule, asker: str) -> None:
    """Refuse a federation whose clients are spread over several processes.

    Raises:
        MisconfigurationException: naming the callback that asks.
    """
    if trainer.world_size > 1 and isinstance(pl_module, HasClients):
        raise MisconfigurationException(f"{asker} measures clients of one process: trainer.devices=1.")


def labelled(batch: Any, where: device, asker: str) -> tuple[Any, Tensor]:
    """Return a batch's inputs and (B,) labels on a device.

    Raises:
        MisconfigurationException: naming the callback that asks, when it has no such entries.
    """
    if not isinstance(batch, list | tuple) or len(batch) < 2 or not isinstance(batch[1], Tensor):
        raise MisconfigurationException(f"{asker} needs batches of inputs and labels.")
    inputs, labels = move_data_to_device(list(batch[:2]), where)
    return inputs, labels


def check_logits(logits: Any, labels: Tensor, asker: str) -> None:
    """Refuse outputs that are no logits of as many samples as there are labels.

    Raises:
        MisconfigurationException: naming the callback that asks.
    """
    if not isinstance(logits, Tensor) or logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise MisconfigurationException(
            f"{asker} needs a module whose forward returns (B, classes) logits, and (B,) labels."
        )


def layers_of(module: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """Return a network's layers, each with its name and the dimension of its output's channels, 0 for a norm.

    A layer is a module with a weight matrix or kernel, or a norm's vector.
    """
    for name, layer in module.named_modules():
        parts = [part for part, _ in layer.named_children() if part != "parametrizations"]  # as of a spectral norm
        weight = None if parts else getattr(layer, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() and not isinstance(layer, nn.Embedding):
            yield name, layer, {1: 0, 2: -1}.get(weight.dim(), 1)
