"""Which uploads were refused, and why."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import lightning as L

from lit_pfl_callbacks.protocols import HasRefusals, Refusal
from lit_pfl_callbacks.rounds import RoundTable


class RefusedUploads(L.Callback):
    """Writes every upload that was refused into ``refused.csv``; without any, the file is not written.

    It works with every module that has what was ``refused`` (:class:`~lit_pfl_callbacks.protocols.HasRefusals`). A
    round that ends the run, because too few uploads were usable, is written too.
    """

    def __init__(self) -> None:
        self._table = RoundTable("refused.csv", list(Refusal._fields))
        self._written = 0  # the latest round that is written, or was there before

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """See that the file can be continued with."""
        self._table.check(trainer)
        self._written = max((refusal.round for refusal in _refused(pl_module)), default=0)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write those of the round."""
        self._table.add(trainer, self._new(pl_module))

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Write those of the round that ends the run."""
        if new := self._new(pl_module):
            with suppress(OSError):  # which may be what ends it
                self._table.add(trainer, new)

    def _new(self, pl_module: L.LightningModule) -> list[dict[str, Any]]:
        new = [refusal for refusal in _refused(pl_module) if refusal.round > self._written]
        self._written = max((refusal.round for refusal in new), default=self._written)
        return [refusal._asdict() for refusal in new]

    def state_dict(self) -> dict[str, Any]:
        """Return where the file is."""
        return self._table.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over where the file is."""
        self._table.load_state_dict(state_dict)


def _refused(pl_module: L.LightningModule) -> Sequence[Refusal]:
    return pl_module.refused if isinstance(pl_module, HasRefusals) else []
