"""Which uploads were refused, and why."""

from typing import Any

import lightning as L

from lit_pfl_callbacks.protocols import HasRefusals
from lit_pfl_callbacks.rounds import RoundTable, round_of

COLUMNS = ["round", "client", "tensor", "reason"]


class RefusedUploads(L.Callback):
    """Writes every upload that was refused into ``refused.csv``; without any there is no file.

    It works with every module that tells what was ``refused`` (:class:`~lit_pfl_callbacks.protocols.HasRefusals`). A
    round that ends the run, because too few uploads were usable, is written too.
    """

    def __init__(self) -> None:
        self._table = RoundTable("refused.csv", COLUMNS)
        self._written = 0

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """See that the file can be gone on with."""
        self._table.check(trainer)
        self._written = 0

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write those of the round."""
        self._write(trainer, pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Write those of the round that ends the run."""
        if trainer.training and self._written != round_of(trainer):
            self._write(trainer, pl_module)

    def _write(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        refused = pl_module.refused if isinstance(pl_module, HasRefusals) else []
        self._written = round_of(trainer)
        self._table.add(trainer, [dict(zip(COLUMNS, (self._written, *one), strict=True)) for one in refused])

    def state_dict(self) -> dict[str, Any]:
        """Return where the file is."""
        return self._table.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over where the file is."""
        self._table.load_state_dict(state_dict)
