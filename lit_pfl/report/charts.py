"""Charts of methods: how good over rounds and bytes, clients, traffic, time, sparsity."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np

from lit_pfl.report.numbers import Metric, curve, last_scores
from lit_pfl.report.pictures import Picture, inline
from lit_pfl.report.runs import Group, Row
from lit_pfl.report.theme import Palette
from lit_pfl_callbacks.averages import mean
from lit_pfl_callbacks.round_timer import PHASES
from lit_pfl_callbacks.rounds import spread
from lit_pfl_callbacks.scores_shown import byte_unit

#: the largest number of clients that are drawn one by one
CLIENTS = 40
ROUNDS = alt.X("round:Q", title="round", axis=alt.Axis(tickMinStep=1), scale=alt.Scale(nice=False))
#: columns of ``sparsity.csv``
SPARSITY = ("round", "layer", "nonzeros", "elements", "rank")


def over_rounds(groups: Sequence[Group], metric: Metric) -> Picture | None:
    """Return the main metric over rounds, with bands over seeds."""
    rows = [row for group in groups for row in curve(group, metric.curve, metric.scale)]
    if not rows:
        return None
    split = {"val": "validation", "test": "test"}[metric.curve.partition("/")[0]]
    says = f"Mean over clients, on their {split} data, and over seeds; the band is one standard deviation over seeds."
    chart = _curves(rows, groups, ROUNDS, metric.title).properties(title=f"{metric.word.capitalize()} over rounds")
    return Picture("over_rounds", says, chart)


def over_bytes(groups: Sequence[Group], metric: Metric) -> Picture | None:
    """Return the main metric over the bytes sent up to then."""
    rows = [row for group in groups for row in curve(group, metric.curve, metric.scale)]
    sent = [row for row in rows if row["bytes"] > 0]
    if not sent:
        return None
    most = {row["method"]: row["bytes"] for row in sent}  # the last round's
    unit, size = byte_unit(max(most.values()))
    for row in sent:
        row["sent"] = row["bytes"] / size
    scale = alt.Scale(type="log" if max(most.values()) > 10 * min(most.values()) else "linear", nice=False)
    x = alt.X("sent:Q", title=f"sent up to then by all, both ways ({unit})", scale=scale)
    chart = _curves(sent, groups, x, metric.title, among={row["method"] for row in rows})
    silent = {row["method"]: row for row in rows if row["method"] not in most}
    if silent:
        lines = alt.Chart(inline(list(silent.values()))).mark_rule(strokeWidth=1.8)
        palette = _methods(groups)
        chart += lines.encode(
            y=_score("mean", metric.title), color=palette.colour(lines=True), strokeDash=palette.dash()
        )
    says = "The same over what was sent until then. A method that sends nothing is a line at its last score."
    return Picture("over_bytes", says, chart.properties(title=f"{metric.word.capitalize()} over bytes"))


def losses(groups: Sequence[Group]) -> Picture | None:
    """Return the training loss over rounds."""
    rows = [row for group in groups for row in curve(group, "train/loss")]
    if not rows:
        return None
    chart = _curves(rows, groups, ROUNDS, "training loss (of its objective)")
    chart = chart.properties(title="Training loss over rounds")
    return Picture("loss", "Mean over the samples that were trained on in the round; band as above.", chart)


def _score(column: str, title: str, zero: bool = False) -> alt.Y:
    return alt.Y(f"{column}:Q", title=title, scale=alt.Scale(zero=zero))


def _methods(groups: Sequence[Group]) -> Palette:
    return Palette("method", [group.name for group in groups])


def _curves(
    rows: Sequence[Row],
    groups: Sequence[Group],
    x: alt.X,
    title: str,
    among: Collection[str] | None = None,
    zero: bool = False,
) -> Any:
    """Return lines of ``mean``, bands from ``low`` to ``high``, and a legend of those drawn, or of those given."""
    palette, shown = _methods(groups), {row["method"] for row in rows} if among is None else among
    chosen = alt.selection_point(fields=["method"], bind="legend")
    base = alt.Chart(inline(rows)).encode(x=x)
    points = {"size": 30} if len({row["round"] for row in rows}) <= 30 else False
    lines = base.mark_line(strokeWidth=2.2, point=points).encode(
        y=_score("mean", title, zero),
        color=palette.colour(shown, lines=True),
        strokeDash=palette.dash(shown),
        opacity=alt.condition(chosen, alt.value(1), alt.value(0.15)),
        tooltip=["method:N", "round:Q", alt.Tooltip("mean:Q", title=title)],
    )  # fmt: skip
    bands = base.mark_area(clip=True).encode(
        y=_score("low", title, zero),
        y2="high:Q",
        color=palette.colour(shown, lines=True),
        opacity=alt.condition(chosen, alt.value(0.2), alt.value(0.03)),
    )
    return alt.layer(bands, lines.add_params(chosen)).properties(width="container", height=300)


def distributions(groups: Sequence[Group], metric: Metric) -> Picture | None:
    """Return how clients are spread: boxes, and where they are few, every client of every seed."""
    names = [group.name for group in groups]
    boxes, points = [], []
    found = [[last_scores(run, metric) for run in group.runs] for group in groups]
    for group, runs in zip(groups, found, strict=True):
        scores = [score for run in runs for score in run.values() if math.isfinite(score)]
        if len(scores) < 2:
            continue
        low, q1, median, q3, high = np.quantile(scores, [0, 0.25, 0.5, 0.75, 1]).tolist()
        boxes.append({"method": group.name, "low": low, "q1": q1, "median": median, "q3": q3, "high": high})
        if len(scores) <= CLIENTS * 5:
            points += [{"method": group.name, "score": s, "place": i * 0.618 % 1 - 0.5} for i, s in enumerate(scores)]
    if not boxes:
        return None
    y = alt.Y("method:N", sort=names, title="method", axis=alt.Axis(ticks=False))
    base = alt.Chart(inline(boxes)).encode(y=y)
    tone = _methods(groups).colour({box["method"] for box in boxes})
    x = alt.X("low:Q", title=f"{metric.title} of a client", scale=alt.Scale(zero=False))
    layers: list[alt.Chart] = [
        base.mark_rule(strokeWidth=1.5).encode(x=x, x2="high:Q", color=tone),
        base.mark_bar(size=22, opacity=0.35).encode(x="q1:Q", x2="q3:Q", color=tone),
        base.mark_tick(size=22, thickness=3).encode(x="median:Q", color=tone),
    ]
    if points:
        spot = alt.Chart(inline(points)).mark_circle(size=16, opacity=0.55)
        offset = alt.YOffset("place:Q", scale=alt.Scale(domain=[-1.4, 1.4]))
        layers.append(spot.encode(x="score:Q", y=y, yOffset=offset, color=tone))
    chart = alt.layer(*layers).properties(
        width="container", height=max(110, 46 * len(boxes)), title="Clients after the last round"
    )
    says = (
        f"Every client of every seed, on {metric.data}: the middle half is in the box, with the median as a line; the "
        f"thin line goes from the worst client to the best.{_left_out(found)}"
    )
    return Picture("clients", says, chart)


def _left_out(found: Sequence[Sequence[Mapping[int, float]]]) -> str:
    """Say how many runs have no scores, being interrupted before a test next to others' tests, and how many are NaN."""
    runs = [scores for group in found for scores in group]
    missing = sum(not scores for scores in runs)
    text = f" Left out, without such scores of the last round: {missing} of {len(runs)} runs." if missing else ""
    scores = [score for run in runs for score in run.values()]
    bad = sum(not math.isfinite(score) for score in scores)
    return text + (f" Not drawn, since they are no numbers: {bad} of {len(scores)} scores." if bad else "")


def client_by_client(groups: Sequence[Group], metric: Metric) -> Picture | None:
    """Return every client's score under every method, mean over seeds; of a sample where clients are many."""
    palette = _methods(groups)
    rows: list[Row] = []
    found = [[last_scores(run, metric) for run in group.runs] for group in groups]
    for group, runs in zip(groups, found, strict=True):
        scores: dict[int, list[float]] = {}
        for run in runs:
            for client, score in run.items():
                scores.setdefault(client, []).append(score)
        rows += [{"method": group.name, "client": c, "score": mean(s)} for c, s in sorted(scores.items())]
    ids = sorted({row["client"] for row in rows})
    if len(ids) < 2:
        return None
    shown = spread(ids, CLIENTS)
    rows = [row for row in rows if row["client"] in shown]
    base = alt.Chart(inline(rows)).encode(x=alt.X("client:O", title="client", axis=alt.Axis(labelAngle=0)))
    dots = base.mark_point(size=55, filled=True, opacity=0.9).encode(
        y=_score("score", metric.title),
        color=palette.colour(),
        shape=palette.shape(),
        tooltip=["method:N", "client:O", alt.Tooltip("score:Q", title=metric.title)],
    )
    span = base.mark_rule(color="var(--line)").encode(y=_score("min(score)", metric.title), y2="max(score):Q")
    who = "Every client under every method"
    if len(shown) < len(ids):
        who = f"{len(shown)} of {len(ids)} clients, evenly spread by id"
    says = f"{who}, on {metric.data}, mean over seeds.{_left_out(found)}"
    title = f"{metric.word.capitalize()}, client by client"
    chart = alt.layer(span, dots).properties(width="container", height=300, title=title)
    return Picture("client_by_client", says, chart)


def traffic(groups: Sequence[Group]) -> Picture | None:
    """Return bytes a round by direction and group of tensors."""
    rows: list[Row] = []
    for group in groups:
        sent = _a_round(group, "communication.csv", "bytes", "direction", "group")
        rows += [{"method": group.name, "way": way, "part": part, "sent": size} for (way, part), size in sent.items()]
    if not rows:
        return None
    totals: dict[tuple[str, str], float] = {}
    for row in rows:
        totals[row["method"], row["way"]] = totals.get((row["method"], row["way"]), 0.0) + row["sent"]
    unit, size = byte_unit(max(totals.values()))
    ways = {"up": "up, clients to server", "down": "down, server to clients"}
    header = alt.Header(orient="top", labelAnchor="start")
    for row in rows:
        row.update(sent=row["sent"] / size, way=ways.get(row["way"], row["way"]))
    parts = list(dict.fromkeys(row["part"] for row in rows))
    bars = alt.Chart(inline(rows)).mark_bar().encode(
        x=alt.X("sent:Q", title=f"sent a round, all clients ({unit})"),
        y=alt.Y("method:N", sort=[group.name for group in groups], title="method"),
        color=Palette("part", parts).colour(),
        row=alt.Row("way:N", title=None, sort=list(ways.values()), header=header),
        tooltip=["method:N", "way:N", "part:N", alt.Tooltip("sent:Q", title=unit)],
    )  # fmt: skip
    chart = bars.properties(width=380, height=max(40, 26 * len(groups)), title="What is sent")
    return Picture("traffic", "By direction and kind of tensor, mean over rounds and seeds.", chart)


def _a_round(group: Group, file: str, value: str, *keys: str) -> dict[tuple[str, ...], float]:
    """Return what a column of a file adds up to in a round, mean over rounds and seeds, by what is in other columns."""
    tables = [run.table(file, "round", *keys, value) for run in group.runs]
    sums: dict[tuple[str, ...], float] = {}
    for row in (row for table in tables for row in table):
        key = tuple(row[name] for name in keys)
        sums[key] = sums.get(key, 0.0) + float(row[value])
    rounds = sum(len({row["round"] for row in table}) for table in tables)
    return {key: total / rounds for key, total in sums.items()}


def times(groups: Sequence[Group]) -> Picture | None:
    """Return where the time of a round goes."""
    rows: list[Row] = []
    for group in groups:
        spent = _a_round(group, "times.csv", "seconds", "phase")
        rows += [{"method": group.name, "phase": phase, "seconds": seconds} for (phase,), seconds in spent.items()]
    if not rows:
        return None
    found = dict.fromkeys(row["phase"] for row in rows)
    phases = sorted(found, key=lambda phase: PHASES.index(phase) if phase in PHASES else len(PHASES))
    rows.sort(key=lambda row: phases.index(row["phase"]))
    bars = alt.Chart(inline(rows)).mark_bar(size=22).encode(
        x=alt.X("seconds:Q", title="time of a round (seconds)"),
        y=alt.Y("method:N", sort=[group.name for group in groups], title="method"),
        color=Palette("phase", phases).colour(),
        order=alt.Order("index:Q"),
        tooltip=["method:N", "phase:N", "seconds:Q"],
    ).transform_calculate(index=f"indexof({phases!r}, datum.phase)")  # fmt: skip
    chart = bars.properties(width="container", height=max(60, 40 * len(groups)), title="Where the time goes")
    return Picture("time", "Mean over rounds and seeds.", chart)


def densities(groups: Sequence[Group]) -> Picture | None:
    """Return the share of entries that are not zero, over rounds."""
    rows: list[Row] = []
    for group in groups:
        by_round: dict[int, list[tuple[float, float]]] = {}
        for row in (row for run in group.runs for row in run.table("sparsity.csv", *SPARSITY, empty=("rank",))):
            counts = float(row["nonzeros"]), float(row["elements"])
            by_round.setdefault(int(row["round"]), []).append(counts)
        for round, found in sorted(by_round.items()):
            share = 100 * sum(nonzeros for nonzeros, _ in found) / max(1.0, sum(elements for _, elements in found))
            rows.append({"method": group.name, "round": round, "mean": share, "low": share, "high": share})
    if not rows:
        return None
    chart = _curves(rows, groups, ROUNDS, "entries that are not zero (%)", zero=True)
    chart = chart.properties(title="Sparsity over rounds")
    return Picture("sparsity", "Of all layers that are measured, mean over clients and seeds.", chart)


def layers(groups: Sequence[Group]) -> list[Picture]:
    """Return share of non-zero entries and rank, layer by layer, after the last round that was measured."""
    rows: list[Row] = []
    for group in groups:
        found: dict[str, list[Any]] = {}
        for run in group.runs:
            table = run.table("sparsity.csv", *SPARSITY, empty=("rank",))
            last = max((int(row["round"]) for row in table), default=0)
            for row in table:
                if int(row["round"]) == last:
                    found.setdefault(row["layer"], []).append(row)
        for layer, measured in found.items():
            nonzeros, elements = (sum(float(row[name]) for row in measured) for name in ("nonzeros", "elements"))
            ranks = [float(row["rank"]) for row in measured if row["rank"] not in ("", None)]
            row = {"method": group.name, "layer": layer, "share": 100 * nonzeros / elements if elements else 0.0}
            rows.append(row | {"rank": mean(ranks) if ranks else None})
    says = "After the last round that was measured; mean over clients and seeds."
    titles = {"share": "entries that are not zero (%)", "rank": "rank"}
    pictures = []
    for column, title in titles.items():
        own = [{k: row[k] for k in ("method", "layer", column)} for row in rows if row[column] is not None]
        if not own:
            continue
        palette, shown = _methods(groups), {row["method"] for row in own}
        count = len({row["layer"] for row in own})
        dots = alt.Chart(inline(own)).mark_point(size=60, filled=True, opacity=0.9).encode(
            x=alt.X(f"{column}:Q", title=title),
            y=alt.Y("layer:N", sort=None, title="layer", axis=alt.Axis(grid=True)),
            color=palette.colour(shown),
            shape=palette.shape(shown),
            tooltip=["method:N", "layer:N", alt.Tooltip(f"{column}:Q", title=title)],
        )  # fmt: skip
        title = f"{title.partition(' (')[0].capitalize()}, layer by layer"
        chart = dots.properties(width="container", height=max(80, 22 * count), title=title)
        pictures.append(Picture(f"layers_{column}", says, chart))
    return pictures
