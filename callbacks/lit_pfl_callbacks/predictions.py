"""What models say of every sample: ``predictions.csv``."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch.distributed
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lit_pfl_callbacks.batches import ids_of, labels_of
from lit_pfl_callbacks.protocols import HasTestSamples
from lit_pfl_callbacks.run_folder import run_folder, write_rows

COLUMNS = ("client", "loader", "sample", "label")


class Predictions(L.Callback):
    """Writes ``predictions.csv`` into the run folder: client, sample, label, prediction, probability.

    ``sample`` is the sample's place in the data set, ``label`` and ``prediction`` are in the client's own numbering of
    classes, ``probability`` is the prediction's. Where predictions are no logits of classes, as a single one a sample,
    ``prediction`` is the model's output and ``probability`` empty; ``label`` is the number that should be predicted.

    A federation's predictions of a batch are (n, classes) logits, or other tensors, by client id; its
    ``test_samples(client)`` returns the (n,) places of the client's test samples and their (n,) labels, or None.

    Of any other module it writes what ``predict_step`` returns, with no client: a row a sample. ``sample`` is the id in
    a batch that is a dict with ``id``, ``index`` or the like, else the place in the data set. Labels are those of a
    batch that has some. Rows of probabilities are of classes, as are logits next to labels that are whole numbers. Of a
    dict or a named tuple every entry is a column; of several loaders ``loader`` is the number. The processes of a
    Trainer are written together.

    Raises:
        MisconfigurationException: when a client's predictions are not one a sample.
    """

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._seen: dict[int, int] = {}  # samples of every loader whose places nobody knows

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin again."""
        self._rows, self._seen = [], {}

    def on_predict_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Take in the predictions of some clients, or of a batch."""
        if not isinstance(pl_module, HasTestSamples):
            self._rows += self._of_batch(trainer, outputs, batch, batch_idx, dataloader_idx)
        elif trainer.is_global_zero:
            self._rows += _of_clients(pl_module, outputs)

    def _of_batch(self, trainer: L.Trainer, outputs: Any, batch: Any, number: int, loader: int) -> list[dict[str, Any]]:
        labels, ids = labels_of(batch), ids_of(batch) or _places(trainer, number, loader)
        size = len(ids) if ids else _size(labels if labels is not None else batch)
        columns = _columns(outputs, labels, size)
        if not columns:
            return []
        length = max(map(len, columns.values()))
        first = self._seen.get(loader, 0)
        self._seen[loader] = first + length
        if ids is None or len(ids) != length:
            ids = list(range(first, first + length))
        known = ["" for _ in ids] if labels is None or len(labels) != length else labels.tolist()
        several = {"loader": loader} if _several(trainer) else {}
        named = {name + "_predicted" * (name in COLUMNS): values for name, values in columns.items()}
        return [
            {"client": "", **several, "sample": sample, "label": label}
            | {name: values[i] if i < len(values) else "" for name, values in named.items()}
            for i, (sample, label) in enumerate(zip(ids, known, strict=True))
        ]

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write."""
        if trainer.world_size > 1 and not isinstance(pl_module, HasTestSamples):
            self._rows = _of_all_processes(self._rows, trainer)
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        path: Path = run_folder(trainer) / "predictions.csv"
        write_rows(path, self._rows)
        print(f"{len(self._rows)} predictions: {path}")


def _of_clients(module: HasTestSamples, outputs: Mapping[int, Any]) -> Iterator[dict[str, Any]]:
    """Return the rows of some clients' predictions."""
    for client, predicted in outputs.items():
        samples, labels = module.test_samples(client)
        guesses = list(_guesses(predicted, labels))
        if len(guesses) != len(samples):
            raise MisconfigurationException(
                f"Client {client}: predict_step does not return one prediction a sample: {len(guesses)} for "
                f"{len(samples)} samples. It must be a tensor with a row a sample."
            )
        known = ["" for _ in samples] if labels is None else labels.tolist()
        for sample, label, (guess, probability) in zip(samples.tolist(), known, guesses, strict=True):
            yield {
                "client": client, "sample": sample, "label": label, "prediction": guess, "probability": probability,
            }  # fmt: skip


def _guesses(predicted: Any, labels: Tensor | None) -> Iterator[tuple[Any, str]]:
    classes = labels is not None and not labels.is_floating_point()
    if classes and isinstance(predicted, Tensor) and predicted.dim() == 2 and predicted.shape[1] > 1:
        yield from _classes(predicted.float().softmax(1))
    else:
        batches = [predicted] if isinstance(predicted, Tensor) else predicted
        rows = (x for batch in batches if _has_rows(batch) for x in batch)
        yield from ((_plain(x), "") for x in rows)


def _has_rows(batch: Any) -> bool:
    if isinstance(batch, Tensor):
        return batch.dim() > 0
    return isinstance(batch, Iterable) and not isinstance(batch, Mapping)


def _classes(shares: Tensor) -> Iterator[tuple[int, str]]:
    """Return the most probable class of every row, and its probability."""
    probability, guess = shares.max(1)
    yield from ((g, f"{p:.6f}") for g, p in zip(guess.tolist(), probability.tolist(), strict=True))


def _columns(outputs: Any, labels: Tensor | None, size: int | None) -> dict[str, list[Any]]:
    """Return what is said of every sample of a batch, by column."""
    if outputs is None:
        return {}
    if hasattr(outputs, "_asdict"):
        outputs = outputs._asdict()
    if isinstance(outputs, Mapping):
        return {str(name): _values(value, size) for name, value in outputs.items() if value is not None}
    if not isinstance(outputs, Tensor):
        if isinstance(outputs, tuple) and all(isinstance(part, Tensor) and _size(part) == size for part in outputs):
            return {f"prediction_{i}": _values(part, size) for i, part in enumerate(outputs)}
        return {"prediction": _values(outputs, size)}
    shares = _shares(outputs, labels)
    if shares is None:
        values = _values(outputs, size)
        return {"prediction": values, "probability": ["" for _ in values]}
    guesses = list(_classes(shares))
    return {"prediction": [guess for guess, _ in guesses], "probability": [share for _, share in guesses]}


def _shares(outputs: Tensor, labels: Tensor | None) -> Tensor | None:
    """Return the probabilities of (n, classes) outputs; None of what is not of classes."""
    if outputs.dim() != 2 or outputs.shape[1] < 2 or not outputs.is_floating_point():
        return None
    shares = outputs.detach().float()
    if bool((shares >= 0).all()) and torch.allclose(shares.sum(1), torch.ones(()).to(shares), atol=1e-3):
        return shares
    classes = labels is not None and labels.shape == outputs.shape[:1] and not labels.is_floating_point()
    return shares.softmax(1) if classes else None


def _values(part: Any, size: int | None) -> list[Any]:
    """Return a value a sample, of what has one, or all there is as the only one."""
    if isinstance(part, Tensor):
        return [_plain(row) for row in part] if part.dim() else [_plain(part)]
    if isinstance(part, list | tuple):
        inside = [row for inner in part for row in inner] if all(isinstance(inner, Tensor) for inner in part) else []
        for rows in (part, inside):  # a list of samples, or of batches
            if len(rows) == size:
                return [_plain(row) for row in rows]
    return [_plain(part)]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().squeeze().tolist()
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _size(part: Any) -> int | None:
    """Return the number of samples of a batch, or of a part of it: of its first tensor."""
    if isinstance(part, Tensor):
        return len(part) if part.dim() else None
    if isinstance(part, Mapping):
        part = list(part.values())
    if isinstance(part, list | tuple):
        return next((size for inner in part if (size := _size(inner)) is not None), len(part))
    return None


def _places(trainer: L.Trainer, number: int, loader: int) -> list[int] | None:
    """Return the places of a batch's samples in their data set, where Lightning has taken note of them."""
    loaders: Any = trainer.predict_dataloaders
    own = loaders[loader] if isinstance(loaders, list | tuple) else loaders
    seen = getattr(getattr(own, "batch_sampler", None), "seen_batch_indices", [])
    return list(seen[number]) if number < len(seen) else None


def _several(trainer: L.Trainer) -> bool:
    loaders: Any = trainer.predict_dataloaders
    return isinstance(loaders, list | tuple) and len(loaders) > 1


def _of_all_processes(rows: list[dict[str, Any]], trainer: L.Trainer) -> list[dict[str, Any]]:
    """Return the rows of all processes at process 0, in the order of their samples."""
    everybody: list[Any] | None = [None] * trainer.world_size if trainer.is_global_zero else None
    torch.distributed.gather_object(rows, everybody)
    found = [row for own in everybody or () for row in own]
    try:
        return sorted(found, key=lambda row: (row.get("loader", 0), row["sample"]))
    except TypeError:  # ids that have no order
        return found
