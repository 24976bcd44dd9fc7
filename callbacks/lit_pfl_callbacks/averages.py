"""What numbers come to over clients or runs, where some may be infinite or none at all: NaN."""

import math
import statistics
from collections.abc import Collection


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


def worst_tenth(values: Collection[float], higher_is_better: bool) -> list[float]:
    """Return the worst 10 % of some values, at least one, the worst first; NaN is worse than any number.

    Example:
        >>> worst_tenth([0.7, 0.9, 0.5], higher_is_better=True)
        [0.5]
    """
    sign = 1 if higher_is_better else -1
    ordered = sorted(values, key=lambda value: (not math.isnan(value), sign * value))
    return ordered[: math.ceil(len(values) / 10)]
