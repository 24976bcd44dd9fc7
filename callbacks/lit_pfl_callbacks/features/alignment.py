"""Which classes the neurons of a classifier stand for, layer by layer."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lit_pfl_callbacks.batches import logits_in
from lit_pfl_callbacks.features.classifiers import check_logits, labelled, layers_of, looked
from lit_pfl_callbacks.features.measures import (
    class_preferences,
    preference_shares,
    sharing_depth,
    top_classes,
    total_variance,
)
from lit_pfl_callbacks.random_state import torch_state_kept
from lit_pfl_callbacks.rounds import keeps, writes
from lit_pfl_callbacks.run_folder import checked_rows, read_rows_before, run_folder, write_rows
from lit_pfl_callbacks.tensors import evaluating


class FeatureAlignment(L.Callback):
    """Writes what the neurons of a classifier have learnt into ``features.csv`` of the run folder.

    For every layer, in the order in which they run: its number of neurons, its total variance (how far its neurons are
    apart in the classes that they prefer) and the class that every neuron prefers most, or -1 for none. At the end it
    shows the total variance of all layers, the mean over clients, and suggests from which depth on to divide the
    network into groups of classes.

    It works on any LightningModule that is a classifier: its ``forward`` maps a batch's inputs to (B, classes) logits.
    Inputs and (B,) labels are a batch's first two entries, or those of a dict that have usual names, such as ``image``
    and ``label``. Validation data are used, or training data where there are none. A module that is not such a
    classifier is not measured, which a warning says. A federation has clients
    (:class:`~lit_pfl_callbacks.protocols.HasClients`), modules with their ``data``; then each is measured on its own.

    Args:
        every_n_epochs: epochs, or rounds, between two measurements; by default the end of the training alone.
        batches: number of batches to measure on.
        preferences: whether to write every neuron's preference of every class too, as shares of one, into
            ``preferences.csv``.
        inputs: the name of the inputs in batches that are dicts, where it is not a usual one.
        labels: that of the labels.

    Attributes:
        rows: what is in ``features.csv``.
        depth: the suggested number of layers to share, once measured.

    Raises:
        MisconfigurationException: when batches or logits of a federation are not what is described above.

    Source:
        Psi-Net, Fig. 1, Fig. 7, Eq. 2 and 5.
    """

    def __init__(
        self,
        every_n_epochs: int | None = None,
        batches: int = 8,
        preferences: bool = False,
        inputs: str | None = None,
        labels: str | None = None,
    ) -> None:
        if batches < 1 or (every_n_epochs is not None and every_n_epochs < 1):
            raise MisconfigurationException(
                f"FeatureAlignment(every_n_epochs={every_n_epochs}, batches={batches}): give 1 or more."
            )
        self.every_n_epochs = every_n_epochs
        self.batches = batches
        self.preferences = preferences
        self.names = {"inputs": inputs, "labels": labels}
        self.rows: list[dict[str, Any]] | None = None
        self.depth: int | None = None
        self._neurons: list[dict[str, Any]] | None = None
        self._measured = -1

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Look whether it can measure, and continue its files."""
        self.rows = self._neurons = None
        self._measured = -1
        for name in ("features.csv", "preferences.csv") if writes(trainer) else ():
            checked_rows(run_folder(trainer) / name, ["epoch"], "epoch")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure once every few epochs."""
        if self.every_n_epochs is not None and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._measure(trainer, pl_module, trainer.current_epoch + 1)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure what the training ends with, and say which depth it speaks for."""
        if self._measured != trainer.current_epoch:
            self._measure(trainer, pl_module, trainer.current_epoch)
        if self.depth is not None:
            rank_zero_info("\n".join(self._table()))

    def _measure(self, trainer: L.Trainer, pl_module: L.LightningModule, epoch: int) -> None:
        if not trainer.is_global_zero:
            return
        self._measured, folder = epoch, run_folder(trainer)
        path, neurons_path = folder / "features.csv", folder / "preferences.csv"
        if self.rows is None or self._neurons is None:
            self.rows = read_rows_before(path, epoch, "epoch") if keeps(trainer) else []
            self._neurons = read_rows_before(neurons_path, epoch, "epoch") if keeps(trainer) else []
        new: list[dict[str, Any]] = []
        look: Any = partial(measure_features, limit=self.batches, **self.names)  # type: ignore[arg-type]
        found = looked(trainer, pl_module, self, look)
        if found is None:
            return
        for client, measured in found.items():
            for position, (layer, preferences) in enumerate(measured.items(), start=1):
                where = {"epoch": epoch, "client": client, "position": position, "layer": layer}
                new.append({
                    **where, "neurons": len(preferences), "total_variance": total_variance(preferences),
                    "top_classes": " ".join(map(str, top_classes(preferences))),
                })  # fmt: skip
                for neuron, shares in enumerate(preference_shares(preferences).tolist() if self.preferences else ()):
                    self._neurons.append({**where, "neuron": neuron, **{f"class_{c}": p for c, p in enumerate(shares)}})
        self.rows += new
        self.depth = _suggested_depth(new)
        if keeps(trainer):
            write_rows(path, self.rows)
            if self.preferences:
                write_rows(neurons_path, self._neurons)

    def _table(self) -> list[str]:
        """Return lines that show the latest total variance of every layer, and what it suggests."""
        latest = [row for row in self.rows or () if row["epoch"] == self._measured]
        layers = {row["position"]: (row["layer"], row["neurons"]) for row in latest}
        variances, greatest = _mean_variances(latest), max(_mean_variances(latest))
        width = max(len(layer) for layer, _ in layers.values())
        lines = [f"{'':>4} {'layer':<{width}} {'neurons':>7} total variance"]
        for (position, (layer, neurons)), variance in zip(sorted(layers.items()), variances, strict=True):
            bar = "#" * round(40 * variance / greatest) if greatest else ""
            lines.append(f"{position:>4} {layer:<{width}} {neurons:>7} {variance:.3f} {bar}")
        return [
            *lines,
            f"Half of the rise is reached after {self.depth} layers; Psi-Net would share these: depth={self.depth}.",
        ]


def measure_features(
    module: nn.Module,
    batches: Iterable[Any],
    limit: int | None = None,
    inputs: str | None = None,
    labels: str | None = None,
) -> dict[str, Tensor]:
    """Return the class preferences of all neurons of a classifier.

    Args:
        module: maps a batch's inputs to (B, classes) logits.
        batches: of inputs and (B,) labels; further entries are not looked at.
        limit: number of batches to use; None for all.
        inputs: the name of the inputs in batches that are dicts, where it is not a usual one.
        labels: that of the labels.

    Returns:
        (neurons, classes) preferences of every layer by name, in the order in which layers run. A layer is a module
        with a weight matrix or kernel; where a norm comes next, its output is the layer's. A neuron is a channel. The
        classifier itself, whose neurons are the classes, is left out.

    Raises:
        MisconfigurationException: when these are no such batches, or no such logits.
    """
    sums: dict[str, Tensor] = {}
    device = next(module.parameters()).device
    with evaluating(module), torch_state_kept(), torch.enable_grad():
        for batch in islice(batches, limit):  # here, since a shuffling loader draws as soon as it is asked for batches
            seen, known = labelled(batch, device, "FeatureAlignment", inputs, labels)
            if isinstance(seen, Tensor) and seen.is_floating_point():
                seen = seen.detach().requires_grad_().clone()  # so that layers that do not train are measured too
            with _watching(module) as outputs:
                logits = logits_in(module(seen))
            check_logits(logits, known, "FeatureAlignment")
            known = known.long()  # bytes choose as a mask does
            layers = {name: noted for name, noted in outputs.items() if noted[0] is not logits}
            own = logits.gather(1, known[:, None]).sum()
            activations = [activation for activation, _ in layers.values()]
            if not activations:
                raise MisconfigurationException(
                    f"FeatureAlignment: {type(module).__name__} has no layer before its classifier to look at."
                )
            gradients = torch.autograd.grad(own, activations, allow_unused=True, materialize_grads=True)
            for (name, (activation, dim)), gradient in zip(layers.items(), gradients, strict=True):
                # sums of half precision would lose what comes last
                kind = torch.promote_types(activation.dtype, torch.float32)
                values = activation.detach().movedim(dim, 1).to(kind), gradient.movedim(dim, 1).to(kind)
                sums[name] = sums.get(name, 0) + class_preferences(*values, known, logits.shape[1])
    return sums


@contextmanager
def _watching(module: nn.Module) -> Iterator[dict[str, tuple[Tensor, int]]]:
    """Note the output of every layer, and the dimension of its channels, by the layer's name."""
    outputs: dict[str, tuple[Tensor, int]] = {}
    latest: list[tuple[str, Tensor]] = []

    def note(name: str, dim: int) -> Any:
        def hook(_: nn.Module, inputs: Any, output: Tensor) -> None:
            if not output.requires_grad:
                return
            if dim == 0:  # a norm: if it follows a layer directly, it is part of it
                if not latest or inputs[0] is not latest[-1][1]:
                    return
                outputs[latest[-1][0]] = (output, outputs[latest[-1][0]][1])
            else:
                outputs[name] = (output, dim)
                latest.append((name, output))

        return hook

    handles = [layer.register_forward_hook(note(name, dim)) for name, layer, dim in layers_of(module)]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _mean_variances(rows: list[dict[str, Any]]) -> list[float]:
    """Return every layer's total variance, the mean over clients."""
    positions = sorted({row["position"] for row in rows})
    values = [[float(row["total_variance"]) for row in rows if row["position"] == position] for position in positions]
    return [sum(v) / len(v) for v in values]


def _suggested_depth(rows: list[dict[str, Any]]) -> int | None:
    """Return the depth that the mean over clients speaks for."""
    means = _mean_variances(rows)
    return sharing_depth(means) if means and all(mean == mean for mean in means) else None
