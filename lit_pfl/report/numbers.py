"""What is drawn and tabled: metrics over seeds, and every client's last score."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lit_pfl.report.runs import Group, Row, Run
from lit_pfl_callbacks.averages import LOSS, best_round, deviation, mean
from lit_pfl_callbacks.states import BY_OPTION, TRAINED, UNTRAINED, WORDS

#: the metric that an image classifier has, its title and unit, and what it is multiplied by
TITLES = {"acc": ("accuracy (%)", 100.0)}
DERIVED = re.compile(r"_(std|worst10)$")


class Metric(NamedTuple):
    """What runs are compared by.

    Args:
        name: as in ``clients.csv``.
        curve: its column in ``metrics.csv`` that has a value in every round.
        last: its column that has one after the last round.
    """

    name: str
    curve: str
    last: str

    @property
    def split(self) -> str:
        """On which data clients are compared after the last round: ``test`` or ``val``."""
        return self.last.partition("/")[0]

    @property
    def data(self) -> str:
        """The same in words."""
        return "test data" if self.split == "test" else "validation data"

    @property
    def title(self) -> str:
        """What it is, with its unit."""
        return TITLES.get(self.name, (self.name, 1.0))[0]

    @property
    def word(self) -> str:
        """What it is."""
        return self.title.partition(" (")[0]

    @property
    def scale(self) -> float:
        """What values are multiplied by to be shown."""
        return TITLES.get(self.name, (self.name, 1.0))[1]


def main_metric(runs: Sequence[Run]) -> Metric | None:
    """Choose what to compare by: accuracy, else a metric that says which end is good, else any, else the loss."""
    counts: dict[str, int] = {}
    for run in runs:
        for row in run.metrics:
            for name in row:
                counts[name] = counts.get(name, 0) + 1
    names = list(dict.fromkeys(name.partition("/")[2] for name in counts if name.startswith(("val/", "test/"))))
    own = [name for name in names if "/" not in name and not DERIVED.search(name)]

    def order(name: str) -> tuple[bool, bool, bool]:
        return name != "acc", f"{name}_worst10" not in names, bool(LOSS.search(name))

    if not own:
        return None
    name = min(own, key=order)
    # validation data are scored every round; where there are none, test data are
    curve = max((f"val/{name}", f"test/{name}"), key=lambda column: counts.get(column, 0))
    # a run that has gone on since its test, and was interrupted, has none of its last round
    tested = any(f"test/{name}" in row for run in runs for row in run.metrics[-1:])
    return Metric(name, curve, f"test/{name}" if tested else curve)


def state_of(group: Group) -> str:
    """Return the state in which a group's plain scores are, see :mod:`lit_pfl_callbacks.states`."""
    return BY_OPTION.get(str(group.options.get("federation.evaluate", "before")), TRAINED)


def column(group: Group, metric: Metric, state: str, suffix: str = "") -> str:
    """Return the column of ``metrics.csv`` that has a group's scores in a state, after the last round.

    Args:
        group: the group.
        metric: what groups are compared by.
        state: the state.
        suffix: ``_std`` or ``_worst10``, for the deviation over clients or the worst 10 % of them.
    """
    split, _, name = metric.last.partition("/")
    path = split if state == state_of(group) else f"{split}/{state}"
    return f"{path}/{name}{suffix}"


def states_there(groups: Sequence[Group], metric: Metric) -> list[str]:
    """Return the states in which any group has been scored after its last round."""
    return [state for state in WORDS if any(group.last(column(group, metric, state)) for group in groups)]


def best_validated(run: Run, metric: Metric) -> tuple[int, float] | None:
    """Return the round with the best score on validation data, and the score.

    None where a round was not validated, none has a finite score, there is one round only, or nobody knows which end
    of the metric is good.
    """
    name = f"val/{metric.name}"
    scores = {int(row["round"]): row[name] for row in run.metrics if name in row}
    higher = _higher_is_better(run, metric.name)
    if higher is None or len(scores) < 2 or scores.keys() != {*range(1, run.rounds + 1)}:
        return None
    best = best_round(scores, higher)
    return None if best is None else (best, scores[best])


def _higher_is_better(run: Run, name: str) -> bool | None:
    """Say which end of a metric is the good one: the worst 10 % of clients is at the other one."""
    if name == "acc" or LOSS.search(name):
        return name == "acc"
    below = [row[f"val/{name}"] - row[f"val/{name}_worst10"] for row in run.metrics if f"val/{name}_worst10" in row]
    known = sum(value for value in below if math.isfinite(value))
    return known > 0 if known else None


def over_seeds(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and the standard deviation (of a sample: n - 1); None of a single value."""
    return mean(values), deviation(values, of_sample=True) if len(values) > 1 else None


def curve(group: Group, column: str, scale: float = 1.0) -> list[Row]:
    """Return a metric over rounds: mean over seeds, one deviation below and above, and the bytes sent up to then."""
    by_round: dict[int, list[Mapping[str, float]]] = {}
    for run in group.runs:
        for row in run.metrics:
            if column in row:
                by_round.setdefault(int(row["round"]), []).append(row)
    rows = []
    for round, found in sorted(by_round.items()):
        middle, spread = over_seeds([row[column] * scale for row in found])
        spread = spread or 0.0
        rows.append({
            "method": group.name, "round": round, "mean": middle, "low": middle - spread, "high": middle + spread,
            "bytes": mean([row.get("comm/total_bytes", 0.0) for row in found]),
        })  # fmt: skip
    return rows


def last_scores(run: Run, metric: Metric) -> dict[int, float]:
    """Return what every client achieved after the run's last round, by id: on the data that the tables are of.

    None of an earlier round, such as the test of a run that has continued since, and none on other data.
    """
    last = [
        row
        for row in run.table("clients.csv", "client", "round", "split", "model", empty=("client", metric.name))
        if (row["split"], int(float(row["round"]))) == (metric.split, run.rounds)
        and row["client"] != ""  # as of a Trainer that is nobody's client
        and row.get(metric.name) not in ("", None)
    ]
    if not last:
        return {}
    own = _model_shown([row["model"] for row in last], run.options.get("federation.evaluate"))
    return {int(float(row["client"])): float(row[metric.name]) * metric.scale for row in last if row["model"] in own}


def _model_shown(models: Sequence[str], evaluate: str | None) -> tuple[str, str]:
    """Return one model of those scored, and its name for clients that have never trained.

    Of a method with several models, the first is the one that it is about. A later test may have scored it in another
    state than the run's own evaluation, which ``metrics.csv`` keeps: that of ``federation.evaluate``, else the first.
    """
    settled = [model for model in models if not model.endswith(UNTRAINED)] or models
    fitting = [model for model in settled if model.rpartition(":")[2] == evaluate] or settled
    return fitting[0], fitting[0].partition(":")[0] + UNTRAINED
