"""Scores of clients, and what they come to over all of them."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from lit_pfl_callbacks.averages import LOSS, deviation, mean, worst_tenth
from lit_pfl_callbacks.states import GLOBAL


class Row(NamedTuple):
    """One client's score, a line of ``clients.csv``; ``state`` is one of :mod:`lit_pfl_callbacks.states`."""

    client: int
    round: int
    split: str
    model: str
    n: int
    scores: Mapping[str, float]
    sizes: Mapping[str, float] = MappingProxyType({})
    state: str = ""


def summary(rows: list[Row], split: str, higher_is_better: Mapping[str, bool], state: str = "") -> dict[str, float]:
    """Summarize scores over clients, each client counting once; clients without samples do not count.

    Args:
        rows: the scores.
        split: which of them.
        higher_is_better: the directions of metrics that have one.
        state: goes into the names, as ``{split}/{state}/{name}``: for further states than that of the run's own scores.

    Returns:
        For every metric ``{split}/{name}``, the mean; its standard deviation ``{name}_std`` over clients; and where
        its direction is known, ``{name}_worst10``, the mean over the worst 10 % of clients (at least one). Of a loss
        the mean only. Of the second model of a method and further ones ``{split}/{model}/{name}``. What is reported of
        models besides their scores stands under ``model/{name}`` and ``model/{model}/{name}``, the mean.
    """
    models: dict[str, list[Row]] = {}
    for row in rows:
        if row.split == split and row.n:
            models.setdefault(row.model.partition(":")[0], []).append(row)
    metrics: dict[str, float] = {}
    for i, (model, scored) in enumerate(models.items()):
        path = [*filter(None, [state]), *([model] if i else [])]
        metrics |= _summary_of_one(scored, "/".join([split, *path]), higher_is_better, spread=state != GLOBAL)
        for name in dict.fromkeys(name for row in scored for name in row.sizes):
            metrics["/".join(["model", *path, name])] = mean([row.sizes[name] for row in scored])
    return metrics


def _summary_of_one(
    scored: list[Row], prefix: str, higher_is_better: Mapping[str, bool], spread: bool
) -> dict[str, float]:
    names = dict.fromkeys(name for row in scored for name in row.scores)
    metrics: dict[str, float] = {}
    for name in names:
        values = [row.scores[name] for row in scored if name in row.scores]
        metrics[f"{prefix}/{name}"] = mean(values)
        if LOSS.search(name) or not spread:
            continue
        metrics[f"{prefix}/{name}_std"] = deviation(values)
        if (higher := higher_is_better.get(name)) is not None:
            metrics[f"{prefix}/{name}_worst10"] = mean(worst_tenth(values, higher))
    return metrics


def mean_over_samples(losses: Iterable[tuple[float, int]]) -> float:
    """Return the mean of losses that clients have added up over their samples, each with the number of these."""
    total, n = 0.0, 0
    for loss, samples in losses:
        total, n = total + loss, n + samples
    return total / n if n else float("nan")
