"""The table of all clients that is printed when a run ends."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from lit_pfl_callbacks.averages import best_round, deviation, from_the_worst, mean, worst_tenth
from lit_pfl_callbacks.protocols import Row
from lit_pfl_callbacks.states import GLOBAL, JOINING, UNTRAINED, WORDS

TITLES = {"acc": "accuracy"}
WIDE = 10_000  # characters
UNITS = [("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12)]


def print_scores(
    console: Console,
    rows: Sequence[Row],
    others: Sequence[Row],
    directions: Mapping[str, bool],
    traffic: Mapping[int, Sequence[int]],
    most: int,
) -> None:
    """Print clients' scores, further states of the same models next to them, and what they come to.

    Args:
        console: where to.
        rows: the scores of every client's own model, at least one.
        others: scores in further states.
        directions: by metric, whether higher values are better.
        traffic: by client, bytes sent and received.
        most: the largest number of clients to print one by one; of more, the worst and the best are shown.
    """
    new = _by_state([row for row in others if row.split == "new"])
    states = _by_state([*rows, *(row for row in others if row.split != "new")])
    apart = [state for state in states if (state == GLOBAL) != (_state(rows[0]) == GLOBAL)]  # one model, or clients'
    below = {state: states.pop(state) for state in apart}
    names = list(dict.fromkeys(name for row in rows for name in row.scores))
    first = next(iter(states))
    # of a further state only what tells good from bad, or one score, so that the table fits into a narrow window
    telling = [name for name in names if name in directions] or names[:1]
    columns = [(name, state) for name in names for state in states if state == first or name in telling]
    twice = {name for name, state in columns if state != first}
    table = Table(title=_title(rows, states), title_justify="left", title_style="bold", pad_edge=not twice)
    headings = (_heading(name) + f" {WORDS.get(state, state)}" * (name in twice) for name, state in columns)
    for heading in ("client", "samples", *headings, "sent", "received"):
        table.add_column(heading, justify="right", no_wrap=heading in ("client", "sent", "received"))
    found = {state: {row.client: row.scores for row in scored} for state, scored in states.items()}
    for row in _shown(rows, names, directions, most):
        if row is None:
            table.add_row(*["..."] * (4 + len(columns)))
            continue
        sent = map(human_bytes, traffic.get(row.client, (0, 0)))
        cells = (_number(found[state].get(row.client, {}).get(name)) for name, state in columns)
        table.add_row(str(row.client), str(row.n), *cells, *sent)
    table.add_section()
    total = [human_bytes(sum(sizes[way] for sizes in traffic.values())) for way in (0, 1)]
    values = [[scores[name] for scores in found[state].values() if name in scores] for name, state in columns]
    table.add_row("mean", "", *(_number(mean(column)) for column in values), *total)
    spread = ("" if n.endswith("loss") else _number(deviation(v)) for (n, _), v in zip(columns, values, strict=True))
    table.add_row("std", "", *spread, "(all)", "(all)")
    if directions.keys() & {*names}:
        worst = (
            _number(mean(worst_tenth(v, directions[n]))) if n in directions else ""
            for (n, _), v in zip(columns, values, strict=True)
        )
        table.add_row("worst 10%", "", *worst, "", "")
    wanted = console.measure(table, options=console.options.update(width=WIDE))
    if wanted.minimum > console.width and not console.is_terminal:  # a file has room for whole words
        console.width = wanted.maximum
    console.print(table)
    for state, scored in below.items():
        console.print(_line(state, scored), highlight=False, soft_wrap=True)
    for state in (state for state in JOINING if state in new):
        who = f"New clients ({len(new[state])}), {JOINING[state]}, mean"
        console.print(f"{who}: {_means(new[state])}.", highlight=False, soft_wrap=True)
    untrained = sum(row.model.endswith(UNTRAINED) for row in rows)
    if untrained and rows[0].round:
        console.print(f"Clients that have never trained, scored as they would join now: {untrained}.")


def best_validated(lines: Sequence[Mapping[str, Any]], row: Row, directions: Mapping[str, bool]) -> str | None:
    """Return a sentence on the validation scores of the last round and of the best one.

    Args:
        lines: of ``clients.csv``.
        row: a score of the last round: its model, and its metrics.
        directions: by metric, whether higher values are better.

    Returns:
        The sentence; None where not every round was validated, or none with a finite score.
    """
    name, model = next((name for name in row.scores if name in directions), ""), row.model.partition(":")[0]
    scores: dict[int, list[float]] = {}
    for line in lines:
        if line["split"] == "val" and line["model"].partition(":")[0] == model and line.get(name):
            scores.setdefault(int(float(line["round"])), []).append(float(line[name]))
    if len(scores) < 2 or scores.keys() != {*range(1, row.round + 1)}:
        return None
    means = {round: mean(values) for round, values in scores.items()}
    best = best_round(means, directions[name])
    if best is None:
        return None
    return (
        f"On validation data, {_heading(name)}: {means[row.round]:.4f} after round {row.round}, the last; "
        f"{means[best]:.4f} after round {best}, the best by these data."
    )


def of_own_models(rows: Sequence[Any]) -> list[Any]:
    """Return the scores of every client's own model, the first kind that there is; methods may have further ones."""
    kinds = [row.model.partition(":")[0] for row in rows]
    return [row for row, kind in zip(rows, kinds, strict=True) if kind == kinds[0]]


def _state(row: Row) -> str:
    return getattr(row, "state", "")  # modules of other projects need not tell


def _by_state(rows: Sequence[Row]) -> dict[str, list[Row]]:
    states: dict[str, list[Row]] = {}
    for row in rows:
        states.setdefault(_state(row), []).append(row)
    return {state: of_own_models(scored) for state, scored in states.items()}


def _title(rows: Sequence[Row], states: Mapping[str, Any]) -> str:
    first = next((row for row in rows if not row.model.endswith(UNTRAINED)), rows[0])
    which = first.model.partition(":")[0]
    if which == GLOBAL:
        return f"Global model after round {first.round}, on all {first.split} data"
    after = f"{which.capitalize()} models after round {first.round}" if first.round else "Untrained models"
    state = WORDS.get(_state(first), "") if len(states) == 1 and first.round else ""
    return f"{after}, on each client's {first.split} data" + f" ({state})" * bool(state)


def _line(state: str, rows: Sequence[Row]) -> str:
    if state == GLOBAL:
        return f"Global model, on all {rows[0].split} data: {_means(rows)}."
    return (
        f"Personalized models {WORDS.get(state, state)}, on each client's {rows[0].split} data, mean: {_means(rows)}."
    )


def _means(rows: Sequence[Row]) -> str:
    names = dict.fromkeys(name for row in rows for name in row.scores)
    values = {name: mean([row.scores[name] for row in rows if name in row.scores]) for name in names}
    return ", ".join(f"{_heading(name)} {value:.4f}" for name, value in values.items())


def _shown(rows: Sequence[Row], names: list[str], directions: Mapping[str, bool], most: int) -> list[Row | None]:
    """Return the rows to print: all, or the worst and the best, with None in between."""
    by = next((name for name in names if name in directions), None)
    if len(rows) <= most:
        return [*rows]
    if by is not None:
        scored = [row for row in rows if by in row.scores]
        scored.sort(key=lambda row: from_the_worst(row.scores[by], directions[by]))
        middle = len(scored) // 2  # those without a score, such as without a sample, are neither good nor bad
        rows = [*scored[:middle], *(row for row in rows if by not in row.scores), *scored[middle:]]
    half = most // 2
    return [*rows[: most - half], None, *rows[len(rows) - half :]]


def _heading(name: str) -> str:
    return TITLES.get(name, name)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def human_bytes(size: float) -> str:
    """Write a number of bytes for people, in powers of 1000.

    Example:
        >>> human_bytes(20_388_400)
        '20.39 MB'
    """
    unit, one = byte_unit(size)
    return f"{size / one:.{0 if unit == 'B' else 2}f} {unit}"


def byte_unit(largest: float) -> tuple[str, float]:
    """Return the unit in which the largest number of bytes is at least 1.00, and how many bytes it is."""
    return next((unit for unit in reversed(UNITS) if largest >= unit[1] * (1 - 5e-6)), UNITS[0])
