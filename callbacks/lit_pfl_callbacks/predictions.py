"""What the models say of every test sample: ``predictions.csv``."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lit_pfl_callbacks.run_folder import run_folder, write_rows


class Predictions(L.Callback):
    """Writes ``predictions.csv`` into the run folder: client, sample, label, prediction, probability.

    ``sample`` is the sample's place in the data set, ``label`` and ``prediction`` are in the client's own numbering of
    classes, ``probability`` is the prediction's. Where predictions are no logits of classes, as a single one a sample,
    ``prediction`` is the model's output and ``probability`` empty.

    The module's predictions of a batch are (n, classes) logits, or other tensors, by client id; its
    ``test_samples(client)`` returns the (n,) places of the client's test samples and their (n,) labels, or None.

    Raises:
        MisconfigurationException: when a client's predictions are not one a sample.
    """

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin anew."""
        self._rows = []

    def on_predict_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: dict[int, Any],
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Take in the predictions of some clients."""
        if not trainer.is_global_zero:
            return
        module: Any = pl_module
        for client, predicted in outputs.items():
            samples, labels = module.test_samples(client)
            guesses = list(_guesses(predicted, labels))
            if len(guesses) != len(samples):
                raise MisconfigurationException(
                    f"Client {client}: predict_step does not return one prediction a sample: {len(guesses)} for "
                    f"{len(samples)} samples. It must be a tensor with a row a sample."
                )
            self._rows += [
                {"client": client, "sample": sample, "label": label, "prediction": guess, "probability": probability}
                for sample, label, (guess, probability) in zip(
                    samples.tolist(), ["" for _ in samples] if labels is None else labels.tolist(), guesses, strict=True
                )
            ]  # fmt: skip

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write."""
        if not trainer.is_global_zero:
            return
        path: Path = run_folder(trainer) / "predictions.csv"
        write_rows(path, self._rows)
        print(f"{len(self._rows)} predictions: {path}")


def _guesses(predicted: Any, labels: Tensor | None) -> Iterator[tuple[Any, str]]:
    if labels is not None and isinstance(predicted, Tensor) and predicted.dim() == 2 and predicted.shape[1] > 1:
        probability, guess = predicted.float().softmax(1).max(1)
        yield from ((g, f"{p:.6f}") for g, p in zip(guess.tolist(), probability.tolist(), strict=True))
    else:
        batches = [predicted] if isinstance(predicted, Tensor) else predicted
        rows = (x for batch in batches if not isinstance(batch, Mapping) for x in batch)
        yield from ((x.squeeze().tolist() if isinstance(x, Tensor) else x, "") for x in rows)
