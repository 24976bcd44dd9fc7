"""The scores of a module on its own, such as one site's: what its evaluation logs."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import lightning as L

from lit_pfl_callbacks.rounds import epochs_a_round

OWN = "own"  # the model's name


class OwnRow(NamedTuple):
    """One evaluation; of a :class:`~lit_pfl_callbacks.protocols.Row` it has all but an id of the client."""

    client: str
    round: int
    split: str
    model: str
    n: int | str
    scores: Mapping[str, float]
    state: str = ""


class OwnScores:
    """The metrics that a validation or a test logs, found among all that a Trainer has.

    Attributes:
        rows: of the latest evaluation, one or none.
    """

    def __init__(self) -> None:
        self.rows: list[OwnRow] = []
        self._known: set[str] = set()  # names that an evaluation has logged
        self._before: dict[str, float] = {}
        self._loaded = 0  # epochs behind the checkpoint that is scored

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Take note of how far the run was that wrote a checkpoint."""
        epochs = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_progress", {}).get("current", {})
        self._loaded = int(epochs.get("ready", 0))

    def forget(self) -> None:
        """Forget the checkpoint: what is scored next is as the Trainer has trained it."""
        self._loaded = 0

    def begin(self, trainer: L.Trainer) -> None:
        """Begin to evaluate: what is logged now is of the training."""
        self._before = _metrics(trainer)

    def end(self, trainer: L.Trainer, split: str) -> None:
        """Take in what has been logged."""
        found = _metrics(trainer)
        self._known |= {name for name, value in found.items() if self._before.get(name) != value}
        scores = {name: value for name, value in found.items() if name in self._known}
        row = OwnRow("", self._round(trainer), split, OWN, _samples(trainer, split), _plain_names(scores, split))
        self.rows = [row] if scores else []

    def _round(self, trainer: L.Trainer) -> int:
        if trainer.state.fn == "fit":
            return trainer.current_epoch // epochs_a_round(trainer) + 1
        return -(-(self._loaded or trainer.current_epoch) // epochs_a_round(trainer))


def _metrics(trainer: L.Trainer) -> dict[str, float]:
    """Return what has been logged; of a metric that is logged by step and by epoch, the epoch's alone."""
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {
        name: value
        for name, value in found.items()
        if not any(name.endswith(end) and name.removesuffix(end) in found for end in ("_step", "_epoch"))
    }


def _plain_names(scores: Mapping[str, float], split: str) -> dict[str, float]:
    """Return scores without the split in their names, unless two would have the same: ``val_loss`` is ``loss``."""
    short = {name: name.removeprefix(f"{split}/").removeprefix(f"{split}_") or name for name in scores}
    twice = {plain for plain in short.values() if list(short.values()).count(plain) > 1}
    return {name if short[name] in twice else short[name]: value for name, value in scores.items()}


def _samples(trainer: L.Trainer, split: str) -> int | str:
    """Return how many samples have been scored; nothing where that is not known, or not all were."""
    loaders: Any = trainer.val_dataloaders if split == "val" else trainer.test_dataloaders
    batches = trainer.num_val_batches if split == "val" else trainer.num_test_batches
    loaders = loaders if isinstance(loaders, list | tuple) else [loaders]
    try:
        whole = [len(loader) for loader in loaders] == list(batches)
        return sum(len(loader.dataset) for loader in loaders) if whole and trainer.world_size == 1 else ""
    except (TypeError, AttributeError):
        return ""
