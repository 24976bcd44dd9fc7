"""The classifiers that a Trainer trains: a module, or the clients of a federation, with batches and layers."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import lightning as L
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, device, nn

from lit_pfl_callbacks.batches import INPUTS, LABELS, entry, some_names
from lit_pfl_callbacks.protocols import HasClients
from lit_pfl_callbacks.waiting import waits

T = TypeVar("T")


def _first(loaders: Any) -> list[Any]:
    """Return the first of a Trainer's loaders in a list, empty without one: loaders without a length have no truth."""
    while isinstance(loaders, list | tuple | Mapping):
        loaders = next(iter(loaders.values() if isinstance(loaders, Mapping) else loaders), None)
    return [] if loaders is None else [loaders]


def _transferred(trainer: L.Trainer, pl_module: L.LightningModule, loaders: Iterable[Any]) -> Iterator[Any]:
    """Return batches as the Trainer gives them to a validation step: of its precision, and after the module's hooks."""
    data = getattr(trainer, "datamodule", None)
    hooks: Any = data if is_overridden("on_before_batch_transfer", data) else pl_module
    for batch in itertools.chain.from_iterable(loaders):
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


def looked(
    trainer: L.Trainer,
    pl_module: L.LightningModule,
    asker: L.Callback,
    look: Callable[[Any, Iterable[Any]], T],
    clients: Sequence[int] | None = None,
    as_scored: bool = False,
) -> dict[int | str, T] | None:
    """Return what a look at every classifier gives, by client id, or under "" for a module on its own.

    Args:
        trainer: the Trainer.
        pl_module: a module, or one that has clients.
        asker: the callback that asks.
        look: a function of a classifier and its batches: validation data, or training data where there are none.
        clients: whom to look at; by default all.
        as_scored: whether clients are looked at in the state in which they are scored.

    Returns:
        The answers; None, and a warning, for a module on its own that is not a classifier.
    """
    if isinstance(pl_module, HasClients):
        answers: dict[int | str, T] = {}
        answers.update(pl_module.ask(partial(_of_client, look), clients, as_scored).items())
        return answers
    loaders = _first(trainer.val_dataloaders) or _first(trainer.train_dataloader)
    try:
        with validating(trainer):
            return {"": look(pl_module, _transferred(trainer, pl_module, loaders))}
    except Exception as error:  # whatever somebody's forward makes of inputs alone: it must not end a whole training
        why = error if isinstance(error, MisconfigurationException) else f"{type(error).__name__}: {error}"
        waits(trainer, asker, f"a classifier ({' '.join(str(why).split()).rstrip('.')})")
        return None


def _of_client(look: Callable[[Any, Iterable[Any]], T], client: Any) -> T:
    return look(client, client.data.val if sized_len(client.data.val) != 0 else client.data.train)


def labelled(
    batch: Any, where: device, asker: str, inputs: str | None = None, labels: str | None = None
) -> tuple[Any, Tensor]:
    """Return a batch's inputs and (B,) labels on a device.

    Args:
        batch: a tuple or list of these two, or a dict that has them by usual names.
        where: the device.
        asker: the callback that asks.
        inputs: the name of the inputs in a dict; by default the first of :data:`~lit_pfl_callbacks.batches.INPUTS`.
        labels: that of the labels; by default the first of :data:`~lit_pfl_callbacks.batches.LABELS`.

    Raises:
        MisconfigurationException: naming the callback that asks, when the batch has no such entries.
    """
    seen = entry(batch, INPUTS if inputs is None else [inputs], 0)
    known = entry(batch, LABELS if labels is None else [labels], 1)
    if seen is None or not isinstance(known, Tensor):
        how = f"; name them by {asker}(inputs=..., labels=...)" if isinstance(batch, Mapping) else ""
        raise MisconfigurationException(f"{asker} needs batches of inputs and labels, not {some_names(batch)}{how}.")
    seen, known = move_data_to_device([seen, known], where)
    return seen, known


def check_logits(logits: Any, labels: Tensor, asker: str) -> None:
    """Refuse outputs that are no logits of as many samples as there are labels."""
    fits = isinstance(logits, Tensor) and logits.dim() == 2 and labels.shape == logits.shape[:1]
    if not fits or labels.is_floating_point():
        raise MisconfigurationException(
            f"{asker} needs a module whose forward returns (B, classes) logits, and (B,) labels, whole numbers."
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
