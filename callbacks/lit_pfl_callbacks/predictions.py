"""What the models say of every test sample: ``predictions.csv``."""

from pathlib import Path
from typing import Any

import lightning as L
from torch import Tensor

from lit_pfl_callbacks.run_folder import run_folder, write_rows


class Predictions(L.Callback):
    """Writes ``predictions.csv`` into the run folder: client, sample, label, prediction, probability.

    ``sample`` is the sample's place in the data set, ``label`` and ``prediction`` are in the client's own numbering of
    classes, ``probability`` is the prediction's. The module's predictions of a batch are (n, classes) logits by client
    id; the data module's ``client(id).test`` has ``dataset``, (n,) places, and ``labels``, (n,).
    """

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []

    def on_predict_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: dict[int, Tensor],
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Take in the predictions of some clients."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        for client, logits in outputs.items():
            test = data.client(client).test
            probability, prediction = logits.float().softmax(1).max(1)
            columns = (test.dataset.tolist(), test.labels.tolist(), prediction.tolist(), probability.tolist())
            self._rows += [
                {"client": client, "sample": sample, "label": label, "prediction": guess, "probability": f"{p:.6f}"}
                for sample, label, guess, p in zip(*columns, strict=True)
            ]

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write."""
        path: Path = run_folder(trainer) / "predictions.csv"
        write_rows(path, self._rows)
        print(f"{len(self._rows)} predictions: {path}")
