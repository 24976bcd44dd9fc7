"""Write the page of the table ``simfed states``: in which state do the orders of SimFed's Table 1 hold?

    python examples/reproduce/run.py simfed states --scale middle --seeds 1 2 3 --root FOLDER
    python examples/reproduce/states.py --scale middle

The first command runs what is missing; the second one draws what there is, at any time.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import altair as alt
from judge import READINGS, judge, verdict
from page import scores_by_seed
from results import Results
from tables import PAPERS, ROOT, Table

from lit_pfl.errors import ConfigError
from lit_pfl_callbacks.files import replacing

#: a column of the table: the split, the number of local epochs, and what becomes of running statistics
COLUMN = re.compile(r"(?P<split>.*), (?P<epochs>\d+) epochs?, statistics (?P<statistics>.*)")
#: the printed orderings that the other pages' verdicts rest on
ORDERS = (("Stand-Alone", "FedAvg"), ("SimFed", "FedAvg"), ("SimFed", "Stand-Alone"))


def points(table: Table, results: Results) -> list[dict[str, Any]]:
    """Return the mean over seeds of every row, column and state that has been scored."""
    found = []
    for column in table.columns:
        setting = COLUMN.fullmatch(column)
        assert setting is not None, column
        for row in table.rows:
            for reading in READINGS:
                if scores := scores_by_seed(table.cell(row, column), results, reading):
                    found.append({
                        **setting.groupdict(), "epochs": int(setting["epochs"]), "method": row, "state": reading.name,
                        "accuracy": fmean(scores.values()), "seeds": len(scores),
                    })  # fmt: skip
    return found


def figure(found: list[dict[str, Any]]) -> alt.TopLevelMixin:
    """Return accuracy against local epochs: a line a method and state, a panel a split and kind of statistics."""
    base = alt.Chart(alt.Data(values=found)).encode(
        x=alt.X("epochs:O", title="local epochs"),
        y=alt.Y("accuracy:Q", title="test accuracy (%)", scale=alt.Scale(zero=False)),
        color=alt.Color("method:N"),
    )
    points = base.mark_circle(size=40).encode(detail="state:N")
    return (
        alt.layer(base.mark_line().encode(strokeDash=alt.StrokeDash("state:N")), points)
        .properties(width=220, height=200)
        .facet(column=alt.Column("statistics:N", title="running statistics"), row=alt.Row("split:N", title=None))
        .resolve_scale(y="independent")
    )


def orders(table: Table, results: Results) -> list[str]:
    """Return a table of the orderings: for every column, in which state each holds, and the differences."""
    lines = [
        f"| | {' | '.join(f'{above} above {below}' for above, below in ORDERS)} |",
        "|---" * (len(ORDERS) + 1) + "|",
    ]
    for column in table.columns:
        cells = []
        for pair in ORDERS:
            judgements = {
                reading.name: judge(*(scores_by_seed(table.cell(row, column), results, reading) for row in pair))
                for reading in READINGS
            }
            gaps = "; ".join(f"{name} {one}" for name, one in judgements.items() if one.gap is not None)
            cells.append(f"{verdict(judgements)} ({gaps})" if gaps else "")
        if any(cells):
            lines.append(f"| {column} | {' | '.join(cells)} |")
    return lines


def write(table: Table, folder: Path) -> Path | None:
    """Write the page and its figure; return the page's path, None where nothing has been measured.

    Args:
        table: the table, at some scale.
        folder: where the results are, and where the page is to be.
    """
    results = Results(folder / "simfed.jsonl")
    found = points(table, results)
    if not found:
        return None
    name, drawn = f"simfed_states_by_epochs_{table.scale}", []
    if len({point["epochs"] for point in found}) > 1:  # else there are no lines to draw
        figure(found).save(folder / f"{name}.svg")
        drawn = [f"![Test accuracy against local epochs, a line for each method and state]({name}.svg)", ""]
    lines = [
        f"# In which state do SimFed's orders hold? The {table.scale} scale", "",
        "SimFed's paper says neither in which state a client's model is scored nor how many local epochs a round has. "
        "For each choice, this table shows in which state a printed ordering holds (paired t-test over seeds), and by "
        "how many points of accuracy the first method is above the second.", "",
        *orders(table, results), "",
        *drawn,
        f"Measured: {len(found)} means of {len(table.columns) * len(table.rows) * len(READINGS)}, each over "
        f"{min(point['seeds'] for point in found)} or more seeds. [All numbers](simfed_states_{table.scale}.md).", "",
    ]  # fmt: skip
    path = folder / f"{name}.md"
    with replacing(path) as file:
        file.write("\n".join(lines).encode())
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", default="middle", help="paper, middle (the default) or reduced")
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "reproduction", help="folder of the results")
    options = parser.parse_args(arguments)
    try:
        path = write(Table(PAPERS / "simfed", "states", options.scale), options.results)
    except (ConfigError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    print("Nothing has been measured yet." if path is None else f"Page: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
