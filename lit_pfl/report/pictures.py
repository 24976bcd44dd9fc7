"""What a picture is, and what all of them are made with."""

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import altair as alt

from lit_pfl_callbacks.rounds import spread


class Picture(NamedTuple):
    """A chart of the report.

    Args:
        name: of its files.
        says: a sentence or two on what it shows.
        chart: the chart, with its title.
        wide: whether it takes the whole width of the page.
    """

    name: str
    says: str
    chart: alt.TopLevelMixin
    wide: bool = False


def inline(rows: Sequence[dict[str, Any]]) -> alt.InlineData:
    """Return rows, at least one, as CSV within the chart, a quarter of the length of JSON."""
    columns = list(rows[0])
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([[_brief(row[column]) for column in columns] for row in rows])
    numbers = {column: "number" for column in columns if all(isinstance(row[column], int | float) for row in rows)}
    return alt.InlineData(values=text.getvalue(), format=alt.CsvDataFormat(type="csv", parse=numbers))


def steps(rounds: Iterable[int], most: int = 40) -> list[tuple[int, int]]:
    """Return the rounds that a slider shows, each with the one that comes next; at most this many, the last among them.

    Example:
        >>> steps([1, 6, 11])
        [(1, 6), (6, 11), (11, 1000000000)]
    """
    shown = spread(sorted(set(rounds)), most)
    return list(zip(shown, [*shown[1:], 10**9], strict=True))


def slider(rounds: Sequence[int]) -> alt.Parameter:
    """Return a slider over rounds; it begins at the last one."""
    return alt.param(
        name="shown", value=max(rounds), bind=alt.binding_range(min=min(rounds), max=max(rounds), step=1, name="round ")
    )


#: of rows with ``round`` and ``next``, those of the round that the slider shows
SHOWN = "datum.round <= shown && shown < datum.next"


def _brief(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value
