"""The page of a table: what the paper prints beside what was measured."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from results import Results
from tables import Cell, Table

from lit_pfl_callbacks.averages import deviation

#: bytes of an element, as the papers count
ELEMENT = 4


@dataclass(frozen=True)
class Measured:
    """What was measured for a cell: a number for every seed, and what else stands on the page."""

    values: tuple[float, ...]
    worst: tuple[float, ...] = ()
    cost: float = math.nan
    seconds: float = math.nan

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
    costs = [ELEMENT * result["elements"] / 1e9 for result in found]
    if cell.show == "cost":
        return Measured(tuple(costs), seconds=seconds)
    prefix = f"test/{cell.model}/" if cell.model else "test/"
    if cell.show == "parameters":
        # results of before had them among the scores
        names = (f"model/{cell.model}/parameters" if cell.model else "model/parameters", f"{prefix}parameters")
        counts = (next((r["scores"][name] for name in names if name in r["scores"]), r["parameters"]) for r in found)
        return Measured(tuple(count / 1e6 for count in counts), seconds=seconds)
    if cell.clients is None:
        values = [result["scores"][f"{prefix}acc"] for result in found]
        worst = [result["scores"].get(f"{prefix}acc_worst10") for result in found]
    else:
        values = [fmean(_of(result, cell.model)[client] for client in cell.clients) for result in found]
        worst = []
    return Measured(
        tuple(100 * value for value in values), tuple(100 * w for w in worst if w is not None), fmean(costs), seconds
    )


def _of(result: dict[str, Any], model: str | None) -> list[float]:
    """Return the accuracy of every client, of one of a method's models."""
    return result["clients"][model or next(iter(result["clients"]))]


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
    lines = [f"# {table.title}{at}", "", table.about, ""]
    if table.scale != "paper":
        lines += [f"{_header(table)} So the numbers are not meant to be the same; what may be is their order.", ""]
    lines += [
        "Ours is the mean and the standard deviation (of n - 1) over the seeds, after the last round; beside an"
        " accuracy its mean over the worst tenth of clients. The cost is of all clients and rounds both ways, 4 bytes"
        " an element, as the papers count. Seconds are those of training, the mean over the seeds, of cells "
        f"that ran {', '.join(places)}.",
        "",
        "```",
        command,
        "```",
        "",
    ]
    sections = (
        columns if table.sections == "columns" else [row for row in table.rows if any(row == r for r, _ in found)]
    )
    for section in sections:
        pairs = (
            [(row, section) for row in table.rows] if table.sections == "columns" else [(section, c) for c in columns]
        )
        lines += [f"## {section}", "", *_lines(table, pairs, found), ""]
    missing = [column for column in table.columns if column not in columns]
    if missing:
        lines += [f"Not measured: {'; '.join(missing)}.", ""]
    orders = [line for column in columns for line in orderings(table, column, found)]
    if orders:
        lines += ["## Which orderings hold", "", *orders, ""]
    return "\n".join([*lines, *_similarities(table, results)]).rstrip() + "\n"


def _header(table: Table) -> str:
    """Return what the file of a scale says of itself, its first comment."""
    comments = []
    for path in (table.paper.parent / f"{table.scale}.yaml", table.paper / f"{table.scale}.yaml"):
        text = path.read_text().splitlines() if path.is_file() else []
        comments += [line.lstrip("# ") for line in text if line.startswith("#")]
    return " ".join(comments)


def _lines(table: Table, pairs: Sequence[tuple[str, str]], found: dict[tuple[str, str], Measured]) -> list[str]:
    lines = [
        "| | printed | ours | difference | worst tenth | cost printed, GB | cost, GB | seconds | seeds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row, column in pairs:
        cell, got = table.cell(row, column), found.get((row, column))
        name = row if table.sections == "columns" else column
        cost = table.cost.get(table.stands_for(row), "")
        if got is None:
            lines.append(f"| {name} | {cell.printed} | | | | {cost} | | | |")
            continue
        digits = 3 if cell.show != "accuracy" else 2
        ours = f"{got.mean:.{digits}f}" + ("" if got.deviation is None else f" ± {got.deviation:.{digits}f}")
        difference = "" if cell.number is None else f"{got.mean - cell.number:+.{digits}f}"
        worst = f"{fmean(got.worst):.1f}" if got.worst else ""
        spent = "" if math.isnan(got.cost) else f"{got.cost:.3g}"
        lines.append(
            f"| {name} | {cell.printed} | {ours} | {difference} | {worst} | {cost} | {spent} | {got.seconds:.0f} "
            f"| {len(got.values)} |"
        )
    return lines


def orderings(table: Table, column: str, found: dict[tuple[str, str], Measured]) -> list[str]:
    """Return the sentences on which of a column's orderings of two rows hold.

    Of rows of our own, a sentence each: on the orderings of the printed row that they are beside.
    """
    own = [row for row in table.rows if (row, column) in found and table.cell(row, column).number is not None]
    printed = [row for row in own if table.stands_for(row) == row]
    sentences = [_sentence(table, column, found, [(a, b) for i, a in enumerate(printed) for b in printed[i + 1 :]], "")]
    for row in own:
        if row not in printed:
            pairs = [(row, other) for other in printed if other != table.stands_for(row)]
            sentences.append(_sentence(table, column, found, pairs, f" of {row}"))
    return [f"- {column}: {sentence}" for sentence in sentences if sentence]


def _sentence(
    table: Table, column: str, found: dict[tuple[str, str], Measured], pairs: list[tuple[str, str]], whose: str
) -> str:
    holding, clearly, known, not_holding = 0, 0, False, []
    for one, other in pairs:
        printed = {row: table.cell(row, column).number or 0.0 for row in (one, other)}
        if printed[one] == printed[other]:
            continue
        above, below = sorted((one, other), key=lambda row: -printed[row])
        a, b = found[above, column], found[below, column]
        gap = a.mean - b.mean
        spread = math.hypot(a.deviation, b.deviation) if a.deviation is not None and b.deviation is not None else None
        known |= spread is not None
        if gap > 0:
            holding += 1
            clearly += spread is not None and gap > spread
        else:
            within = " (within the deviations)" if spread is not None and -gap <= spread else ""
            not_holding.append(f"{above} above {below}, {gap:+.2f}{within}")
    total = holding + len(not_holding)
    if not total:
        return ""
    beyond = f", {clearly} of them by more than the deviations" if known else ""
    text = f"{holding} of {total} printed orderings of two rows{whose} hold{beyond}."
    return text + (f" Not: {'; '.join(not_holding)}." if not_holding else "")


def _similarities(table: Table, results: Results) -> list[str]:
    lines: list[str] = []
    for row in table.rows:
        cell = table.cell(row, next(iter(table.columns)))
        found = [r["similarity"] for r in results.of_all_seeds(cell.run) if "similarity" in r] if cell.run else []
        if found:
            groups = list(found[0])
            lines += [
                f"## {row}: how alike clients are", "",
                "Mean cosine over pairs of clients of the same domain / of different domains, mean over the seeds.", "",
                f"| round | {' | '.join(groups)} |", "|" + "---|" * (len(groups) + 1),
            ]  # fmt: skip
            for at in found[0][groups[0]]:
                pairs = [[fmean(one[group][at][i] for one in found) for i in (0, 1)] for group in groups]
                lines.append(f"| {at} | " + " | ".join(f"{same:.4f} / {other:.4f}" for same, other in pairs) + " |")
            lines.append("")
    return lines
