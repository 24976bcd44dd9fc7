"""What loggers are told of a round."""

from collections.abc import Iterable, Mapping, Sequence

from lightning.pytorch.loggers import Logger, WandbLogger


class RoundLog:
    """Writes metrics to loggers at once: what a checkpoint holds must have been logged before."""

    def __init__(self) -> None:
        self._named: set[str] = set()

    def write(self, loggers: Sequence[Logger], round: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a round."""
        self.name_axes(loggers, metrics)
        for logger in loggers:
            logger.log_metrics({"round": round, **metrics}, step=round)

    def name_axes(self, loggers: Sequence[Logger], metrics: Mapping[str, float]) -> None:
        """Tell W&B to draw over rounds; name by name, since it resolves overlapping patterns at random."""
        new = metrics.keys() - self._named
        self._named |= new
        for logger in loggers:
            if isinstance(logger, WandbLogger):
                for name in sorted(new):
                    logger.experiment.define_metric(name, step_metric="round")


def mean_over_samples(losses: Iterable[tuple[float, int]]) -> float:
    """Return the mean of losses that clients have added up over their samples, each with the number of these."""
    total, n = 0.0, 0
    for loss, samples in losses:
        total, n = total + loss, n + samples
    return total / n if n else float("nan")
