"""Tables, to read and to copy."""

import html
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from lit_pfl.report.numbers import Metric, best_validated, column, over_seeds, states_there
from lit_pfl.report.runs import SEED, Group, differing, short
from lit_pfl_callbacks.scores_shown import human_bytes
from lit_pfl_callbacks.states import GLOBAL, JOINING, WORDS

NOTHING = "–"  # noqa: RUF001 - a dash as in printed tables


@dataclass(frozen=True)
class Table:
    """A table of texts.

    Args:
        title: what it shows.
        columns: their titles.
        rows: the cells.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """Write it in Markdown."""
        lines = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *self.rows]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"

    def latex(self) -> str:
        """Write it in LaTeX, with the rules of the package booktabs."""
        lines = [" & ".join(map(_latex, row)) + r" \\" for row in (self.columns, *self.rows)]
        body = [r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"]
        return "\n".join([rf"\begin{{tabular}}{{l{'r' * (len(self.columns) - 1)}}}", *body, r"\end{tabular}", ""])

    def html(self) -> str:
        """Write it in HTML."""
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in self.columns)
        rows = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in self.rows)
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def summary(groups: Sequence[Group], metric: Metric) -> Table:
    """Return what every group achieved after the last round: mean and deviation over seeds.

    Where models were scored in several states, each has a column. Columns that no run has are left out: the worst 10 %
    of clients, second models, bytes.
    """
    split, _, name = metric.last.partition("/")
    found = dict.fromkeys(chain.from_iterable(run.metrics[-1] for group in groups for run in group.runs))
    states = states_there(groups, metric)
    measures = {metric.title: "", "deviation over clients": "_std", "worst 10 % of clients": "_worst10"}
    scores = {
        f"{title}, {WORDS[state]}" if len(states) > 1 else title: [column(g, metric, state, suffix) for g in groups]
        for title, suffix in measures.items()
        for state in states
        if not suffix or state != GLOBAL or len(states) == 1  # of one model there is one score
    }
    for other in found:
        second = re.fullmatch(rf"{split}/(.+)/{re.escape(name)}", other)
        if second and second[1] not in WORDS:
            state, _, model = second[1].rpartition("/")
            title = f"{metric.title}, {model} model" + f", {WORDS.get(state, state)}" * bool(state)
            scores[title] = [other for _ in groups]
    for state, words in JOINING.items():
        scores[f"{metric.title} of new clients, {words}"] = [f"new/{state}/{name}" for _ in groups]
    scores = {title: columns for title, columns in scores.items() if any(name in found for name in columns)}
    sent = "comm/total_bytes"
    rows = []
    for i, group in enumerate(groups):
        row = [group.name, str(len(group.last(metric.last)))]
        row += [written(group.last(columns[i]), metric.scale) for columns in scores.values()]
        if sent in found:
            totals = group.last(sent)
            row.append(human_bytes(over_seeds(totals)[0]) if totals else NOTHING)
        rows.append(row)
    columns = ["method", "seeds", *scores, *(["sent, both ways"] if sent in found else [])]
    return Table(f"After the last round, on {metric.data}: mean and standard deviation over seeds", columns, rows)


def validated(groups: Sequence[Group], metric: Metric) -> Table | None:
    """Return the scores on validation data of the last round and of the best one; None if no group has them."""
    rows = []
    for group in groups:
        best = [(run, found) for run in group.runs if (found := best_validated(run, metric)) is not None]
        last = [run.metrics[-1][f"val/{metric.name}"] for run, _ in best]
        rounds = ", ".join(str(round) for _, (round, _) in best) or NOTHING
        scores = [score for _, (_, score) in best]
        rows.append([group.name, str(len(best)), written(last, metric.scale), written(scores, metric.scale), rounds])
    if all(row[1] == "0" for row in rows):
        return None
    title = f"{metric.title} on validation data, of the last round and of the best one, which these data choose"
    columns = ["method", "seeds", "last round", "best validated round", "which round"]
    return Table(title[0].upper() + title[1:], columns, rows)


def paired_by_state(groups: Sequence[Group], metric: Metric) -> list[Table]:
    """Return :func:`paired` for every state in which models were scored."""
    states = states_there(groups, metric)
    return [table for state in states if (table := paired(groups, metric, state if len(states) > 1 else None))]


def paired(groups: Sequence[Group], metric: Metric, state: str | None = None) -> Table | None:
    """Return by how much one group is above another: mean and deviation of the differences at the same seeds.

    None where no two groups have a seed in common; two runs whose seeds nobody knows have not.

    Args:
        groups: the runs.
        metric: what they are compared by.
        state: the state of the models; None for that of each group's own scores.
    """
    scores = [group.by_seed(column(group, metric, state) if state else metric.last) for group in groups]
    rows, any_there = [], False
    for group, own in zip(groups, scores, strict=True):
        row = [group.name]
        for other in scores:
            pairs = [own[seed] - other[seed] for seed in own if seed in other]
            if other is own or not pairs:
                row.append("" if other is own else NOTHING)
                continue
            any_there = True
            row.append(written(pairs, metric.scale, signed=True))
        rows.append(row)
    if not any_there:
        return None
    what = f"{metric.title}, {WORDS[state]}" if state else metric.title
    title = f"{what}: by how much the row's method is above the column's, at the same seeds"
    return Table(title[0].upper() + title[1:], ["row less column", *(group.name for group in groups)], rows)


def options_that_differ(groups: Sequence[Group]) -> Table | None:
    """Return the options of which groups have not the same value; None where there are none."""
    names = differing([group.options for group in groups])
    if not names:
        return None
    rows = [
        [name, *(short(group.options[name]) if name in group.options else NOTHING for group in groups)]
        for name in names
    ]
    return Table("What differs in the configurations", ["option", *(group.name for group in groups)], rows)


def options_in_common(groups: Sequence[Group]) -> Table:
    """Return the options of which all groups have the same value, except for those whose options nobody knows."""
    known = [group.options for group in groups if group.options]
    apart = {*differing(known), SEED}
    rows = [[name, short(value)] for name, value in (known[0] if known else {}).items() if name not in apart]
    whose = "all" if len(known) == len(groups) else "all with a configuration"
    return Table(f"What {whose} have in common", ["option", "value"], rows)


def runs_there(groups: Sequence[Group]) -> Table:
    """Return which runs the report is of."""
    rows = [
        [group.name, short(run.seed) + why, f"{run.rounds}{'' if run.finished else ', not finished'}", str(run.folder)]
        for group in groups
        for why, runs in (("", group.runs), (", does not count: another run has it", group.copies))
        for run in runs
    ]
    return Table("The runs", ["method", "seed", "rounds", "folder"], rows)


def written(values: Sequence[float], scale: float = 1.0, signed: bool = False) -> str:
    """Write mean and deviation: with two digits after the point if in percent, otherwise with those that matter.

    Example:
        >>> written([0.5, 0.7], 100.0)
        '60.00 ± 14.14'
    """
    if not values:
        return NOTHING
    mean, deviation = over_seeds([value * scale for value in values])
    digits = 2 if scale != 1.0 else _digits(mean, deviation or 0.0)
    text = f"{mean:{'+' if signed else ''}.{digits}f}"
    return text if deviation is None else f"{text} ± {deviation:.{digits}f}"


def _digits(mean: float, deviation: float) -> int:
    """Return the digits after the point that show four digits of the larger, and two of the deviation.

    Example:
        >>> _digits(0.6, 0.1), _digits(0.00012, 0.0), _digits(12.3, 0.003), _digits(1e9, 1e7)
        (4, 7, 4, 0)
    """
    sizes = ((max(abs(mean), deviation), 3), (deviation, 1))
    wanted = [digits - math.floor(math.log10(size)) for size, digits in sizes if 0 < size < math.inf]
    return min(12, max(0, *wanted)) if wanted else 4


def _latex(cell: str) -> str:
    if number := re.fullmatch(r"([+-]?[\d.]+|[+-]?nan|[+-]?inf) ± ([\d.]+|nan|inf)", cell):
        return rf"${number[1]} \pm {number[2]}$"
    if re.fullmatch(r"[+-][\d.]+", cell):
        return f"${cell}$"
    cell = (
        cell.replace(NOTHING, "--")
        .replace("\\", "\0")
        .translate(
            {ord(c): f"\\{c}" for c in "&%$#_{}"} | {ord("~"): r"\textasciitilde{}", ord("^"): r"\textasciicircum{}"}
        )
    )
    return cell.replace("\0", r"\textbackslash{}")
