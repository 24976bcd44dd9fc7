"""The page of a table: what the paper prints next to what was measured."""

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from judge import (
    AS_AGGREGATED,
    AS_TRAINED,
    LEVEL,
    READINGS,
    SEEDS,
    Judgement,
    Reading,
    counts,
    gaps,
    judge,
    path_of,
    verdict,
)
from results import Results
from tables import Cell, Run, Table

from lit_pfl import Federation
from lit_pfl.data import PartitionedDataModule
from lit_pfl_callbacks.averages import deviation

#: bytes of an element, as the papers count
ELEMENT = 4
#: the state of the models that are scored, by ``federation.evaluate``
STATES = {
    "before": "personalized models as trained, before aggregation",
    "after": "personalized models as aggregated",
    "global": "the global model",
}
#: the test data of a client, by ``data.evaluate_on``
TEST_DATA = {
    "own": "on a part of the test data with each client's own shares of classes",
    "all": "on all test data for every client, under its own labels",
    "alike": "on {eval_samples} test samples a client at most, drawn with its own shares of classes",
}
#: the title of what is chosen on test data, which a paper may print
BEST = "best round on test data"
#: the title of how far the two states of a difference are apart
BETWEEN = "between the states"
#: a global model has one state to score; costs and numbers of parameters are of no state
ONE_READING = (Reading("", frozenset(STATES), ""),)


@dataclass(frozen=True)
class Measured:
    """What was measured for a cell: a number for every seed, and what else stands on the page.

    ``states``: the numbers in every state of clients' own models, by the name of the reading; ``best``: those of the
    best round on test data, where test data were scored in several rounds, and ``rounds``, which these are.
    """

    values: tuple[float, ...]
    worst: tuple[float, ...] = ()
    cost: float = math.nan
    seconds: float = math.nan
    states: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    best: tuple[float, ...] = ()
    rounds: tuple[int, ...] = ()

    @property
    def mean(self) -> float:
        return fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """The standard deviation over seeds, of n - 1; None of a single one."""
        return deviation(self.values, of_sample=True) if len(self.values) > 1 else None


def measured(cell: Cell, results: Results) -> Measured | None:
    """Return what the results say of a cell; None where they say nothing."""
    found = results.of_all_seeds(cell.run) if cell.run is not None else []
    if not found:
        return None
    seconds = fmean(result["seconds"] for result in found)
    values = tuple(_value(cell, result) for result in found)
    if cell.show != "accuracy":
        return Measured(values, seconds=seconds)
    worst = [result["scores"].get(f"{_metric(cell)}_worst10") for result in found if cell.clients is None]
    cost = fmean(_cost(result) for result in found)
    assert cell.run is not None
    # beside a global model, clients' own are not what a table is of
    readings = [] if evaluate(cell.run) == "global" else READINGS
    states = {reading.name: tuple(scores_by_seed(cell, results, reading).values()) for reading in readings}
    best = [result["best"][_metric(cell)] for result in found if cell.clients is None and "best" in result]
    return Measured(
        values, tuple(100 * w for w in worst if w is not None), cost, seconds,
        {name: numbers for name, numbers in states.items() if numbers},
        tuple(100 * score for _, score in best), tuple(round for round, _ in best),
    )  # fmt: skip


def _metric(cell: Cell, path: str = "") -> str:
    return f"test/{path}{cell.model}/acc" if cell.model else f"test/{path}acc"


def _cost(result: dict[str, Any]) -> float:
    return float(ELEMENT * result["elements"] / 1e9)


def _value(cell: Cell, result: dict[str, Any], path: str = "") -> float:
    """Return a cell's number in a result; ``path``: what its accuracies have in their names there, see ``path_of``."""
    if cell.show == "cost":
        return _cost(result)
    if cell.show == "parameters":
        # results of before have them among the scores
        names = ("model/" + ("" if cell.model is None else f"{cell.model}/"), _metric(cell).removesuffix("acc"))
        counts = (result["scores"].get(f"{name}parameters") for name in names)
        return float(next((n for n in counts if n is not None), result["parameters"]) / 1e6)
    if cell.clients is None:
        return float(100 * result["scores"][_metric(cell, path)])
    of_clients = result["clients"][f"{path}{cell.model or next(iter(result['clients']))}"]
    return 100 * fmean(of_clients[client] for client in cell.clients)


def scores_by_seed(cell: Cell, results: Results, reading: Reading) -> dict[int, float]:
    """Return a cell's number for every seed that has been scored in this state."""
    found: dict[int, float] = {}
    if cell.run is None:
        return found
    for result in results.of_all_seeds(cell.run):
        path = path_of(reading, result, evaluate(cell.run)) if cell.show == "accuracy" else ""
        if path is not None:
            found[result["seed"]] = _value(cell, result, path)
    return found


def _option(run: Run, part: str, name: str, of: type) -> Any:
    """Return an option of a run: what its configuration says, or the default of its class."""
    section = run.configuration.get(part, {})
    return section.get("init_args", section).get(name, inspect.signature(of).parameters[name].default)


def evaluate(run: Run) -> str:
    """Return ``federation.evaluate`` of a run."""
    return str(_option(run, "federation", "evaluate", Federation))


def scored(runs: Sequence[Run]) -> str:
    """Return the sentence on what the scores of some runs are of, from their configurations."""

    def test_data(run: Run) -> str:
        if evaluate(run) == "global":
            return "on all test data"
        options = {name: _option(run, "data", name, PartitionedDataModule) for name in ("evaluate_on", "eval_samples")}
        return TEST_DATA[options["evaluate_on"]].format(**options)

    def either(values: Iterable[str | int]) -> str:
        return " or ".join(map(str, sorted(set(values))))

    epochs = either(_option(run, "federation", "local_epochs", Federation) or "the fewest" for run in runs)
    means = ("one score" if evaluate(run) == "global" else "mean over clients, each counting once" for run in runs)
    return (
        f"Scored: {either(STATES[evaluate(run)] for run in runs)}; {either(test_data(run) for run in runs)}; after the "
        f"last of {either(run.rounds for run in runs)} rounds x {epochs} local epochs; {either(means)}."
    )


def page(table: Table, results: Results) -> str:
    """Return the page, in Markdown.

    Args:
        table: the table.
        results: the results of its paper.
    """
    found = {
        (row, column): got
        for row in table.rows
        for column in table.columns
        if (got := measured(table.cell(row, column), results)) is not None
    }
    columns = [column for column in table.columns if any((row, column) in found for row in table.rows)]
    shown = [result for place in found for result in results.of_all_seeds(table.cell(*place).run)]
    places = sorted({f"{result['at_once']} at a time on {result['device']}" for result in shown})
    seeds = " ".join(map(str, sorted({result["seed"] for result in shown})))
    scale = "" if table.scale == "paper" else f" --scale {table.scale}"
    command = f"python examples/reproduce/run.py {table.paper.name} {table.name}{scale} --seeds {seeds} --root FOLDER"
    at = "" if table.scale == "paper" else f", at the {table.scale} scale"
    best = any(got.best for got in found.values())
    orders = [order for column in columns for order in orderings(table, column, results)]
    lines = [f"# {table.title}{at}", "", table.about, ""]
    if orders:
        lines += ["How many of the paper's orderings of two rows hold ([which ones](#which-orderings-hold)):", ""]
        lines += [*(f"- {order.summary}" for order in orders), ""]
    lines += ["```", command, "```", ""]
    if table.scale != "paper":
        lines += [*_header(table), "Compare the order of the rows, not the numbers: the scale is not the paper's.", ""]
    lines += [
        f"{scored([run for place in found if (run := table.cell(*place).run) is not None])}"
        " [What a score is of](../what_a_score_is_of.md) describes what else it could be.",
        "",
        *_legend(table, ", ".join(places)),
        *([f"- **{BEST}**: chosen by these data, so it is too high"] if best else []),
        "",
    ]
    if table.sections == "one":
        lines += [*_in_one(table, columns, found), ""]
    else:
        for section in columns if table.sections == "columns" else table.rows:
            by_column = table.sections == "columns"
            pairs = [(row, section) for row in table.rows] if by_column else [(section, c) for c in columns]
            if any(pair in found for pair in pairs):
                lines += [f"## {section}", "", *_lines(table, pairs, found), ""]
    missing = [column for column in table.columns if column not in columns]
    if missing:
        lines += [f"Not measured: {'; '.join(missing)}.", ""]
    if orders:
        between = (
            " An ordering that holds in one state and is undecided in the other need not depend on the state: the "
            f"column *{BETWEEN}* says by how much that difference is larger as trained than as aggregated, judged in "
            "the same way."
        ) * any(BETWEEN in line for order in orders for line in order.lines)
        lines += [
            "## Which orderings hold",
            "",
            "Each pair of rows is judged by a paired t-test over the seeds that both have: two-sided, p below "
            f"{LEVEL}, not corrected for the number of orderings. Fewer than {SEEDS} seeds are too few. An ordering is "
            "open where it holds in no scored state, and in one of the two the seeds do not decide it or there is no "
            "score.",
            "",
            "The tables list every ordering that does not hold in all scored states, with the mean difference of the "
            f"two rows. All others hold.{between}",
            "",
            *(line for order in orders for line in (f"**{order.summary}**", "", *order.lines)),
        ]
    return "\n".join([*lines, *_similarities(table, results)]).rstrip() + "\n"


def _legend(table: Table, places: str) -> list[str]:
    """Return what the columns of the page's tables are."""
    if table.sections == "one":
        return [
            f"- **every cell**: {AS_TRAINED.name} / {AS_AGGREGATED.name}, in percent: mean and, of several seeds, "
            "standard deviation (of n - 1), after the last round",
            "- **MB**: of all clients and rounds, both ways, 4 bytes an element, mean over the columns",
            f"- Cells ran {places}.",
        ]
    return [
        "- **ours**: mean and standard deviation (of n - 1) over the seeds, after the last round",
        "- **worst 10 %**: mean accuracy of the worst 10 % of clients",
        "- **cost**: of all clients and rounds, both ways, 4 bytes an element, as the papers count",
        f"- **seconds**: of training, mean over the seeds, of cells that ran {places}",
    ]


def _in_one(table: Table, columns: Sequence[str], found: dict[tuple[str, str], Measured]) -> list[str]:
    """Return one table of everything that was measured, and one of what is printed."""

    def lines(titles: Iterable[str], rows: Iterable[Sequence[str]]) -> list[str]:
        titles = ["", *titles]
        return [f"| {' | '.join(line)} |" for line in (titles, ["---"] * len(titles), *rows)]

    def shown(got: Measured | None) -> str:
        if got is None:
            return ""
        states = got.states or dict.fromkeys((reading.name for reading in READINGS), got.values)
        return " / ".join(_over_seeds(states.get(reading.name, ()), 1) for reading in READINGS)

    rows = [(row, [found.get((row, column)) for column in columns]) for row in table.rows]
    measured = [
        (row, *map(shown, own), f"{1000 * fmean(got.cost for got in own if got):.1f}", _seeds(own))
        for row, own in rows
        if any(own)
    ]
    printed = [(row, *(table.cell(row, column).printed for column in columns)) for row in table.printed]
    return [*lines([*columns, "MB", "seeds"], measured), "", "## What is printed", "", *lines(columns, printed)]


def _seeds(own: Iterable[Measured | None]) -> str:
    counts = sorted({len(got.values) for got in own if got})
    return " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))


def _header(table: Table) -> list[str]:
    """Return the comments of the files of a scale, a paragraph for every file and after every empty comment."""
    lines = []
    for path in (table.paper.parent / f"{table.scale}.yaml", table.paper / f"{table.scale}.yaml"):
        text = path.read_text() if path.is_file() else ""
        comment = "\n".join(line[1:].strip() for line in text.splitlines() if line.startswith("#"))
        lines += [line for part in comment.split("\n\n") if part for line in (part.replace("\n", " "), "")]
    return lines


def _lines(table: Table, pairs: Sequence[tuple[str, str]], found: dict[tuple[str, str], Measured]) -> list[str]:
    there = [found[pair] for pair in pairs if pair in found]
    others = [r.name for r in READINGS if any(got.states.get(r.name, got.values) != got.values for got in there)]
    best = [BEST] if any(got.best for got in there) else []
    titles = ["", "printed", "ours", *others, *best, "difference", "worst 10 %", "cost printed, GB", "cost, GB",
              "seconds", "seeds"]  # fmt: skip
    lines = [f"| {' | '.join(titles)} |".replace("|  |", "| |"), "|---" * len(titles) + "|"]
    for row, column in pairs:
        cell, got = table.cell(row, column), found.get((row, column))
        name = row if table.sections == "columns" else column
        cost = table.cost.get(table.stands_for(row), "")
        if got is None:
            empty = " |" * len([*others, *best])
            lines.append(f"| {name} | {cell.printed} | |{empty} | | {cost} | | | |")
            continue
        digits = 3 if cell.show != "accuracy" else 2
        ours = " | ".join([
            _over_seeds(got.values, digits),
            *(_over_seeds(got.states.get(other, ()), digits) for other in others),
            *(f"{_over_seeds(got.best, digits)} ({', '.join(map(str, got.rounds))})" if got.best else "" for _ in best),
        ])  # fmt: skip
        difference = "" if cell.number is None else f"{got.mean - cell.number:+.{digits}f}"
        worst = f"{fmean(got.worst):.1f}" if got.worst else ""
        spent = "" if math.isnan(got.cost) else f"{got.cost:.3g}"
        lines.append(
            f"| {name} | {cell.printed} | {ours} | {difference} | {worst} | {cost} | {spent} | {got.seconds:.0f} "
            f"| {len(got.values)} |"
        )
    return lines


def _over_seeds(values: tuple[float, ...], digits: int) -> str:
    """Write the mean over seeds and the deviation, if there are several; nothing without any."""
    if not values:
        return ""
    spread = Measured(values).deviation
    return f"{fmean(values):.{digits}f}" + ("" if spread is None else f" ± {spread:.{digits}f}")


@dataclass(frozen=True)
class Orderings:
    """How many of some orderings hold, in a sentence, and a table of those that do not hold in every state."""

    summary: str
    lines: list[str]


def orderings(table: Table, column: str, results: Results) -> list[Orderings]:
    """Return which of a column's orderings of two rows hold, by the seeds that were measured.

    Each row of our own has a part for itself, with the orderings of the printed row that it stands for.
    """
    own = [
        row
        for row in table.rows
        if (cell := table.cell(row, column)).number is not None and measured(cell, results) is not None
    ]
    printed = [row for row in own if table.stands_for(row) == row]
    found = _judged(table, column, results, [(a, b) for i, a in enumerate(printed) for b in printed[i + 1 :]], column)
    for row in own:
        if row not in printed:
            pairs = [(row, other) for other in printed if other != table.stands_for(row)]
            found += _judged(table, column, results, pairs, f"{column}, of {row}")
    return found


def _judged(table: Table, column: str, results: Results, pairs: list[tuple[str, str]], title: str) -> list[Orderings]:
    cells = {row: table.cell(row, column) for pair in pairs for row in pair}
    numbers = {row: cell.number or 0.0 for row, cell in cells.items()}
    ordered = [sorted(pair, key=lambda row: -numbers[row]) for pair in pairs if len({numbers[r] for r in pair}) == 2]
    if not ordered:
        return []
    of_states = (cell.run for cell in cells.values() if cell.show == "accuracy" and cell.run is not None)
    readings = ONE_READING if {evaluate(run) for run in of_states} <= {"global"} else READINGS
    seeds = {
        (row, reading): scores_by_seed(cell, results, reading) for row, cell in cells.items() for reading in readings
    }
    found = {
        (above, below): {reading.name: judge(seeds[above, reading], seeds[below, reading]) for reading in readings}
        for above, below in ordered
    }
    summary = counts([verdict(judgements) for judgements in found.values()])
    states = [reading.name for reading in readings]
    between = {
        (above, below): [judge(*(gaps(seeds[above, reading], seeds[below, reading]) for reading in readings))]
        for above, below in ordered
        if len(readings) > 1
    }
    in_one = table.sections == "one"  # with this many rows, pairs that nothing is known of would fill pages
    shown = {"reversed"} if in_one else {"reversed", "level", "undecided", "too few seeds"}
    failing = {
        pair: [*(_outcome(judgements[state]) for state in states), *map(str, between.get(pair, []))]
        for pair, judgements in found.items()
        if {one.outcome for one in judgements.values()} & shown
    }
    titles = ["the paper's order", *(state or "outcome" for state in states)]
    titles += [BETWEEN] if between else []
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    lines += [f"| {above} above {below} | {' | '.join(cells)} |" for (above, below), cells in failing.items()]
    lines = [*lines, ""] if failing else []
    for state in states if in_one else ():
        same = sum((judgements[state].gap or 0.0) > 0 for judgements in found.values())
        lines += [f"{state}, in the printed order, if only by chance: {same}.".capitalize(), ""]
    return [Orderings(f"{title}: {len(found)} orderings ({summary})", lines)]


def _outcome(judgement: Judgement) -> str:
    return f"{judgement.outcome}, {judgement}" if judgement.gap is not None else judgement.outcome


def _similarities(table: Table, results: Results) -> list[str]:
    lines: list[str] = []
    for row in table.rows:
        cell = table.cell(row, next(iter(table.columns)))
        found = [r["similarity"] for r in results.of_all_seeds(cell.run) if "similarity" in r] if cell.run else []
        if found:
            groups = list(found[0])
            lines += [
                f"## {row}: how similar clients are", "",
                "Mean cosine over pairs of clients of the same domain / of different domains, mean over the seeds.", "",
                f"| round | {' | '.join(groups)} |", "|" + "---|" * (len(groups) + 1),
            ]  # fmt: skip
            for at in found[0][groups[0]]:
                pairs = [[fmean(one[group][at][i] for one in found) for i in (0, 1)] for group in groups]
                lines.append(f"| {at} | " + " | ".join(f"{same:.4f} / {other:.4f}" for same, other in pairs) + " |")
            lines.append("")
    return lines
