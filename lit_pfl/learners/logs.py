"""What a learner logs, caught outside of any loop of a Trainer, and the losses that it trains on."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torchmetrics import Metric

from lit_pfl.data.batches import described
from lit_pfl.errors import ConfigError
from lit_pfl.learners.forward import with_methods

#: "val_loss" of one module and "loss" of another are the same score; of a module that logs both they are two
STAGE = re.compile(r"^(val|valid|validate|validation|test)[/_.]")
#: what Lightning puts behind names that are logged in steps on one of several loaders
LOADER = "/dataloader_idx_"
REDUCTIONS = {"mean": torch.mean, "sum": torch.sum, "min": torch.min, "max": torch.max}


class Recorder:
    """Takes the place of ``LightningModule.log``: keeps values, and makes one number of each name at the end.

    Values are averaged over samples, or reduced as ``log(reduce_fx=...)`` says; torchmetrics are computed at the end.

    Attributes:
        batch_size: number of samples of the present batch; the weight of a value that is logged without one.
        loader: number of the loader that the batch is of, where there are several: then it is in the names.
    """

    def __init__(self) -> None:
        self.batch_size = 1
        self.loader: int | None = None
        self._values: dict[str, list[tuple[Tensor, int]]] = {}
        self._reductions: dict[str, Any] = {}
        self._metrics: dict[str, Metric] = {}
        self._per_step: dict[str, str] = {}  # by name another one that a Trainer knows too, with "_epoch" in it

    def log(
        self,
        name: str,
        value: Any,
        *_: Any,
        on_step: bool | None = None,
        reduce_fx: Any = "mean",
        batch_size: int | None = None,
        add_dataloader_idx: bool = True,
        **__: Any,
    ) -> None:
        """Keep a value."""
        which = f"{LOADER}{self.loader}" if self.loader is not None and add_dataloader_idx else ""
        epoch, name = f"{name}_epoch{which}", f"{name}{which}"
        if on_step:
            self._per_step[name] = epoch
        if isinstance(value, Metric):
            self._metrics[name] = value
            return
        value = torch.as_tensor(value).detach()
        self._values.setdefault(name, []).append((value, self.batch_size if batch_size is None else batch_size))
        self._reductions[name] = reduce_fx

    def compute(self) -> dict[str, float]:
        """Return one number for each name that was logged."""
        scores = {name: self._reduced(name) for name in self._values}
        return scores | {name: _number(name, metric.compute()) for name, metric in self._metrics.items()}

    def as_scores(self, logged: Mapping[str, float]) -> dict[str, float]:
        """Return what :meth:`compute` has returned, under the names of scores."""
        names = self._names()
        return {names[name]: value for name, value in logged.items()}

    def as_in_a_trainer(self, logged: Mapping[str, float]) -> dict[str, float]:
        """Return what :meth:`compute` has returned, under all names that ``trainer.callback_metrics`` would have."""
        return {**logged, **{epoch: logged[name] for name, epoch in self._per_step.items() if name in logged}}

    def _names(self) -> dict[str, str]:
        """Return under which name each is a score: without the stage, where that leaves no two of one name.

        Lightning does not let a module log a number of a loader in a name, as a federation would.
        """
        logged = {name: name.replace(LOADER, "/loader_") for name in self._values.keys() | self._metrics.keys()}
        short = Counter(STAGE.sub("", name) for name in logged.values())
        return {k: stripped if short[stripped := STAGE.sub("", name)] == 1 else name for k, name in logged.items()}

    def _reduced(self, name: str) -> float:
        values = torch.stack([value.double().mean() for value, _ in self._values[name]])
        reduction = self._reductions[name]
        if reduction not in ("mean", torch.mean):
            return float(REDUCTIONS.get(reduction, reduction)(values))
        weights = torch.tensor([weight for _, weight in self._values[name]], dtype=torch.float64, device=values.device)
        return float((values * weights).sum() / weights.sum())

    def reset(self) -> None:
        """Reset the metrics."""
        for metric in self._metrics.values():
            metric.reset()

    @property
    def directions(self) -> dict[str, bool]:
        """Whether higher is better, by name, of those metrics that know."""
        names = self._names()
        return {
            names[name]: metric.higher_is_better
            for name, metric in self._metrics.items()
            if metric.higher_is_better is not None
        }


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(
            f"self.log({name!r}): its metric computes {described(value)}, and a score is one number; log each of them "
            "with self.log_dict."
        ) from None


class LossTally:
    """Adds up the training losses of a round."""

    def __init__(self) -> None:
        self._losses: list[tuple[Tensor, int]] = []

    def note(self, loss: Any, size: int) -> None:
        """Take note of the loss of a batch of this many samples; of what is not a loss, a single number, nothing."""
        # Kept here, on the device: one self.log costs as much as a small network's step.
        if isinstance(loss, Tensor) and loss.numel() == 1 and size:  # the mean over no samples is no number
            self._losses.append((loss.detach().reshape(()), size))

    def total(self) -> tuple[float, int]:
        """Return the sum of the loss over the samples, and their number, and begin again."""
        if not self._losses:
            return 0.0, 0
        losses = torch.stack([loss for loss, _ in self._losses]).tolist()
        sizes = [size for _, size in self._losses]
        self._losses.clear()
        return sum(loss * size for loss, size in zip(losses, sizes, strict=True)), sum(sizes)


@contextmanager
def recorded(learner: L.LightningModule) -> Iterator[Recorder]:
    """Record what a learner logs instead of telling its Trainer."""
    recorder = Recorder()
    with with_methods(learner, log=recorder.log):  # log_dict calls it too
        yield recorder


@contextmanager
def silenced(learner: L.LightningModule) -> Iterator[None]:
    """Tell nobody what a learner logs; metrics that it logs are reset, as a Trainer would have done in the end."""
    with recorded(learner) as recorder:
        yield
    recorder.reset()
