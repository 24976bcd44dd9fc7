"""How a classifier represents samples: a map of what its last layer sees."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lit_pfl_callbacks.batches import logits_in
from lit_pfl_callbacks.features.classifiers import check_logits, labelled, layers_of, looked
from lit_pfl_callbacks.protocols import HasClients
from lit_pfl_callbacks.random_state import torch_state_kept
from lit_pfl_callbacks.rounds import writes
from lit_pfl_callbacks.run_folder import run_folder, write_rows
from lit_pfl_callbacks.tensors import evaluating

#: samples of which there are too few for a map
FEWEST = 4


class FeatureMap(L.Callback):
    """Writes a place on a map for every sample into ``feature_map.csv``, by what a classifier's last layer sees of it.

    When the training has ended, t-SNE draws the map of every client on its own: samples with similar features are
    near each other. How far apart groups are, and how wide, means little.

    It works on any LightningModule that is a classifier, as :class:`~lit_pfl_callbacks.FeatureAlignment` says it, and
    on validation data, or on training data where there are none. A federation has clients
    (:class:`~lit_pfl_callbacks.protocols.HasClients`); of each its personalized model is looked at.

    Args:
        clients: ids of those that are looked at; by default the first four. A federation's only.
        samples: number of samples of each, at most. 500 take one to two seconds.
        inputs: the name of the inputs in batches that are dicts, where it is not a usual one.
        labels: that of the labels.

    Attributes:
        rows: what is in ``feature_map.csv``: ``client``, ``label``, ``predicted``, ``x`` and ``y``.

    Raises:
        MisconfigurationException: for a client that there is not, and when batches or logits of a federation are not
            such.

    Source:
        FedSLR, Fig. 4; van der Maaten and Hinton 2008.
    """

    def __init__(
        self,
        clients: Sequence[int] | None = None,
        samples: int = 500,
        inputs: str | None = None,
        labels: str | None = None,
    ) -> None:
        if samples < FEWEST:
            raise MisconfigurationException(f"FeatureMap(samples={samples}): give {FEWEST} or more.")
        self.clients = clients
        self.samples = samples
        self.names = {"inputs": inputs, "labels": labels}
        self.rows: list[dict[str, Any]] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Look whether it can draw what it is asked for."""
        there = list(pl_module.client_ids) if isinstance(pl_module, HasClients) else []
        if unknown := [client for client in self.clients or () if client not in there]:
            known = f"there are {there[0]} to {there[-1]}" if there else f"{type(pl_module).__name__} has none"
            raise MisconfigurationException(f"FeatureMap.clients: there is no client {unknown[0]}; {known}.")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw the maps."""
        if not trainer.is_global_zero:
            return
        self.rows = []
        chosen: list[int] | None = None
        look: Any = represented
        if isinstance(pl_module, HasClients):
            ids, look = list(pl_module.client_ids), represented_by_its_model
            chosen = ids[:4] if self.clients is None else [client for client in ids if client in self.clients]
        found = looked(trainer, pl_module, self, partial(look, limit=self.samples, **self.names), chosen, True)
        for client, (features, labels, predicted) in (found or {}).items():
            if len(features) < FEWEST or not features.isfinite().all():
                whose = f"client {client}" if client != "" else type(pl_module).__name__
                rank_zero_warn(f"FeatureMap leaves out {whose}: fewer than {FEWEST} samples, or features not finite.")
                continue
            for label, guess, (x, y) in zip(labels.tolist(), predicted.tolist(), t_sne(features).tolist(), strict=True):
                place = {"x": float(f"{x:.5g}"), "y": float(f"{y:.5g}")}
                self.rows.append({"client": client, "label": label, "predicted": guess, **place})
        if self.rows and writes(trainer):
            write_rows(run_folder(trainer) / "feature_map.csv", self.rows)


def represented_by_its_model(client: Any, batches: Iterable[Any], **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return :func:`represented` of a client's model: of its ``standalone()``, if it has one."""
    model = client.standalone() if callable(getattr(client, "standalone", None)) else client
    return represented(model, batches, **options)


def represented(
    module: nn.Module, batches: Iterable[Any], limit: int, inputs: str | None = None, labels: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the last layer of a classifier sees.

    Args:
        module: maps a batch's inputs to (B, classes) logits.
        batches: of inputs and (B,) labels; further entries are not looked at.
        limit: number of samples, at most.
        inputs: the name of the inputs in batches that are dicts, where it is not a usual one.
        labels: that of the labels.

    Returns:
        (n, d) inputs of the last layer that has run, (n,) labels, (n,) most probable classes.

    Raises:
        MisconfigurationException: when these are no such batches, or no such logits.
    """
    seen: list[Tensor] = []
    handles = [
        layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        for _, layer, dim in layers_of(module)
        if dim != 0  # no norm
    ]
    device = next(module.parameters()).device
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    try:
        with evaluating(module), torch_state_kept(), torch.no_grad():
            for batch in batches:
                entered, known = labelled(batch, device, "FeatureMap", inputs, labels)
                seen.clear()
                logits = logits_in(module(entered))
                check_logits(logits, known, "FeatureMap")
                if not seen or len(seen[-1]) != len(known):
                    raise MisconfigurationException(
                        f"FeatureMap: {type(module).__name__} has no last layer that sees sample by sample."
                    )
                found.append((seen[-1].flatten(1).float().cpu(), known.cpu(), logits.argmax(1).cpu()))
                if sum(len(classes) for _, classes, _ in found) >= limit:
                    break
    finally:
        for handle in handles:
            handle.remove()
    if not found:
        return torch.empty(0, 1), torch.empty(0), torch.empty(0)
    features, classes, predicted = (torch.cat(parts)[:limit] for parts in zip(*found, strict=True))
    return features, classes, predicted


def t_sne(features: Tensor) -> Tensor:
    """Return a map of (n, d) features, n at least 4, as (n, 2); those that are all the same are all at one place.

    Nothing is drawn from random generators.
    """
    from sklearn.manifold import TSNE  # takes a second

    spread = features.double() - features.double().mean(0)
    if not spread.abs().max() > 1e-12 * features.abs().max():
        return torch.zeros(len(features), 2)
    start = "pca" if min(features.shape) > 1 else "random"
    drawer = TSNE(2, perplexity=min(30.0, (len(features) - 1) / 3), init=start, random_state=0)
    return torch.from_numpy(drawer.fit_transform((spread / spread.abs().max()).numpy()))
