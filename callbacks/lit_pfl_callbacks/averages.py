"""What numbers come to over clients or runs, where some may be infinite or none at all: NaN."""

import math
import re
import statistics
from collections.abc import Collection, Mapping

#: names of metrics that are losses, of which lower values are better
LOSS = re.compile(r"(^|[/_.])loss$")


def mean(values: Collection[float]) -> float:
    """Return the mean; NaN where there is none, as of infinities of both signs."""
    try:
        return statistics.fmean(values)
    except ValueError:  # of which the module says so only of no values at all, and of these two
        if not values:
            raise
        return math.nan


def deviation(values: Collection[float], of_sample: bool = False) -> float:
    """Return the standard deviation, of all that there is or of a sample (n - 1); NaN unless all values are finite.

    Example:
        >>> deviation([1.0, 3.0]), deviation([1.0, math.nan])
        (1.0, nan)
    """
    if not all(map(math.isfinite, values)):  # of which the module knows no deviation
        return math.nan
    return statistics.stdev(values) if of_sample else statistics.pstdev(values)


def from_the_worst(value: float, higher_is_better: bool) -> tuple[bool, float]:
    """Return a key that sorts values with the worst first; NaN is worse than any number."""
    return not math.isnan(value), value if higher_is_better else -value


def worst_tenth(values: Collection[float], higher_is_better: bool) -> list[float]:
    """Return the worst 10 % of some values, at least one, the worst first.

    Example:
        >>> worst_tenth([0.7, 0.9, 0.5], higher_is_better=True)
        [0.5]
    """
    ordered = sorted(values, key=lambda value: from_the_worst(value, higher_is_better))
    return ordered[: math.ceil(len(values) / 10)]


def best_round(scores: Mapping[int, float], higher_is_better: bool) -> int | None:
    """Return the round with the best score, of equal ones the first; None where no score is finite.

    Example:
        >>> best_round({1: math.nan, 2: 0.5, 3: 0.9}, higher_is_better=True)
        3
    """
    finite = {round: score for round, score in scores.items() if math.isfinite(score)}
    return (max if higher_is_better else min)(finite, key=finite.__getitem__, default=None)
