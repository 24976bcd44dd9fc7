"""Charts of clients next to each other: who has what data, who is like whom, where everybody is."""

from collections.abc import Sequence
from typing import Any

import altair as alt
import numpy as np

from lit_pfl.report.pictures import SHOWN, Picture, inline, slider, steps
from lit_pfl.report.runs import Group, Row
from lit_pfl.report.theme import Palette
from lit_pfl_callbacks.rounds import spread

#: the largest number of clients in a picture, of those whose data are shown, and of those compared in pairs
HOLDERS, PAIRED = 200, 32
#: what stands for a pair of which nothing is known, as of clients that did not take part
UNKNOWN = "-"
#: clients of a run whose samples are shown
DRAWN = 4
#: clients up to whose number each is a column of circles
CIRCLES = 40


def partitions(groups: Sequence[Group]) -> list[Picture]:
    """Return how many training samples of which class every client has: a picture for every partition that differs."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for group in groups:
        for run in group.runs:
            counts = tuple(
                (int(row["client"]), int(row["class"]), int(row["count"]))
                for row in run.table("partition.csv", "client", "class", "split", "count")
                if row["split"] == "train"
            )
            if counts:
                found.setdefault(counts, []).append(group.name)
    return [
        _partition(counts, "" if len(found) == 1 else ", ".join(dict.fromkeys(names)), number)
        for number, (counts, names) in enumerate(found.items(), start=1)
    ]


def _partition(counts: Sequence[tuple[int, int, int]], whose: str, number: int) -> Picture:
    ids, classes = (sorted({count[i] for count in counts}) for i in (0, 1))
    shown = spread(ids, HOLDERS)
    rows = [{"client": k, "class": c, "samples": n} for k, c, n in counts if k in set(shown)]
    few = len(shown) <= CIRCLES
    x_axis = alt.Axis(labelAngle=0, labelOverlap=True, ticks=False, grid=few, domain=False)
    y_axis = alt.Axis(labelOverlap=True, ticks=False, grid=few, domain=False)
    base = alt.Chart(inline(rows)).encode(
        x=alt.X("client:O", title="client", axis=x_axis),
        y=alt.Y("class:O", title="class", axis=y_axis),
        tooltip=["client:O", "class:O", "samples:Q"],
    )
    legend = "training samples"
    if few:
        most = max(row["samples"] for row in rows)
        key = alt.Legend(title=legend, values=sorted({max(1, most // 4), max(1, most // 2), most}))
        size = alt.Size("samples:Q", scale=alt.Scale(range=[0, 380], zero=True), legend=key)
        chart = base.mark_circle(color="var(--c0)", opacity=0.85).encode(size=size)
    else:
        chart = base.mark_rect().encode(color=alt.Color("samples:Q", title=legend, scale=alt.Scale(scheme="viridis")))
    says = "How many training samples of every class each client has."
    if len(shown) < len(ids):
        says += f" {len(shown)} of {len(ids)} clients are shown, evenly spread by id."
    title = "Who has which data" + (f": {whose}" if whose else "")
    wide = len(shown) > 16
    width = len(shown) * (max(5, min(52, 1040 // len(shown))) if wide else 24)
    height = max(14, min(24, 480 // len(classes))) * len(classes) if len(classes) <= 40 else 6 * len(classes)
    chart = chart.properties(width=width, height=height, title=title)
    return Picture(f"partition_{number}" if number > 1 else "partition", says, chart, wide)


def similarities(groups: Sequence[Group]) -> Picture | None:
    """Return how similar every two clients are, over rounds."""
    return _pairs(
        groups, "similarity.csv", "cosine", name="similarity", title="How similar clients are",
        says="Cosine similarity of every two clients, of the first seed: of what, stands above each map; the slider "
        "goes through the rounds, each with what was last measured. Pairs that were not measured then are empty.",
    )  # fmt: skip


def matchings(groups: Sequence[Group]) -> Picture | None:
    """Return who was mixed with whom, over rounds."""
    return _pairs(
        groups, "matching.csv", "frequency", name="matching", title="Who was mixed with whom",
        says="In which share of the rounds so far the client (row) was given something of the other (column); "
        "of the first seed.",
    )  # fmt: skip


def _pairs(groups: Sequence[Group], file: str, value: str, name: str, title: str, says: str) -> Picture | None:
    rows: list[Row] = []
    for group in groups:
        panels: dict[str, list[Row]] = {}
        for row in group.runs[0].table(file, "round", "client", "other", value):
            panels.setdefault(row.get("group", ""), []).append(row)
        for part, own in panels.items():
            panel = f"{group.name}: {part}" if part and len(groups) > 1 else part or group.name
            rows += [{"panel": panel, **row} for row in _matrices(own, value)]
    if not rows:
        return None
    percents = [int(cell) for row in rows for cell in row["cells"].split() if cell != UNKNOWN]
    compared = max(len(row["ids"].split()) for row in rows)
    order = list(dict.fromkeys(row["panel"] for row in rows))
    side = compared * max(6, min(24, (210 if len(order) > 1 else 320) // compared))
    columns = min(len(order), max(1, 1130 // (side + 64)))
    axis = alt.Axis(labelAngle=0, labelOverlap=True, ticks=False, domain=False)
    domain = [min(0, *percents) / 100, 1]
    chart = (
        alt.Chart(inline(rows))
        .transform_filter(SHOWN)
        .transform_calculate(id="split(datum.ids, ' ')", cell="split(datum.cells, ' ')")
        .transform_calculate(place="sequence(0, length(datum.cell))", size="length(datum.id)")
        .transform_flatten(["cell", "place"])
        .transform_filter(f"datum.cell != '{UNKNOWN}'")
        .transform_calculate(
            client="toNumber(datum.id[floor(datum.place / datum.size)])",
            other="toNumber(datum.id[datum.place % datum.size])",
            value="datum.cell / 100",
        )
        .mark_rect()
        .encode(
            x=alt.X("other:O", title="other client", axis=axis),
            y=alt.Y("client:O", title="client", axis=axis),
            color=alt.Color("value:Q", title=value, scale=alt.Scale(scheme="viridis", domain=domain)),
            tooltip=["round:Q", "client:O", "other:O", alt.Tooltip("value:Q", title=value)],
        )
        .properties(width=side, height=side)
        .add_params(slider([row["round"] for row in rows]))
        .facet(alt.Facet("panel:N", sort=order, title=None), columns=columns)
        .resolve_scale(x="independent", y="independent")
        .properties(title=title)
    )
    return Picture(name, says, chart, wide=len(order) > 1)


def _matrices(rows: Sequence[Row], value: str) -> list[Row]:
    """Return a row a round: the ``ids`` of the clients, and as ``cells`` the matrix in percent, line by line.

    A file may have one half of a matrix only, and has no diagonal; what is not there else, or NaN, is ``UNKNOWN``. Text
    of three characters a cell is a tenth of what a row a cell would be.
    """
    ids = spread(sorted({int(row[end]) for row in rows for end in ("client", "other")}), PAIRED)
    after = dict(steps(int(row["round"]) for row in rows))
    place = {client: i for i, client in enumerate(ids)}
    matrices = {when: np.full((len(ids), len(ids)), np.nan) for when in after}
    for row in rows:
        when, client, other = int(row["round"]), place.get(int(row["client"])), place.get(int(row["other"]))
        if when in after and client is not None and other is not None:
            matrices[when][client, other] = float(row[value])
    result = []
    for when, matrix in matrices.items():
        whole = np.where(np.isnan(matrix), matrix.T, matrix)
        np.fill_diagonal(whole, 1)
        cells = [UNKNOWN if not np.isfinite(share) else str(round(100 * share)) for share in whole.ravel().tolist()]
        result.append({
            "round": when, "next": after[when],
            "ids": " ".join(map(str, ids)), "cells": " ".join(cells),
        })  # fmt: skip
    return result


def embeddings(groups: Sequence[Group]) -> Picture | None:
    """Return the clients' places by their embeddings, over rounds."""
    rows: list[Row] = []
    for group in groups:
        own = group.runs[0].table("embeddings.csv", "round", "client", "x", "y")
        after = dict(steps(int(row["round"]) for row in own)) if own else {}
        rows += [
            {"panel": group.name, "round": int(row["round"]), "next": after[int(row["round"])],
             "client": int(row["client"]), "x": float(row["x"]), "y": float(row["y"])}
            for row in own if int(row["round"]) in after
        ]  # fmt: skip
    if not rows:
        return None
    panels = list(dict.fromkeys(row["panel"] for row in rows))
    base = alt.Chart(inline(rows)).transform_filter(SHOWN).encode(
        x=alt.X("x:Q", title="first principal component (no unit)"),
        y=alt.Y("y:Q", title="second principal component (no unit)"),
    )  # fmt: skip
    tone = alt.Color("client:Q", title="client", scale=alt.Scale(scheme="viridis"))
    spots = base.mark_circle(size=90, opacity=1, stroke="var(--line)", strokeWidth=1).encode(
        color=tone, tooltip=["round:Q", "client:Q"]
    )
    layers = [spots.add_params(slider([row["round"] for row in rows]))]
    if len({row["client"] for row in rows}) <= CIRCLES:
        layers.append(base.mark_text(dy=-11, fontSize=11, color="var(--ink)").encode(text="client:Q"))
    chart = (
        alt.layer(*layers)
        .properties(width=380, height=320)
        .facet(alt.Facet("panel:N", sort=panels, title=None), columns=min(2, len(panels)))
        .properties(title="Where clients are by their embeddings")
    )
    says = "The plane in which the embeddings that clients upload differ most; of the first seed, over rounds."
    return Picture("embeddings", says, chart, wide=len(panels) > 1)


def features(groups: Sequence[Group]) -> Picture | None:
    """Return how samples are represented: a map for every client, of a few."""
    rows: list[Row] = []
    for group in groups:
        own = group.runs[0].table("feature_map.csv", "label", "predicted", "x", "y")
        shown = list(dict.fromkeys(row.get("client", "") for row in own))[:DRAWN]
        for row in own:
            if (client := row.get("client", "")) in shown:
                of = [group.name] * (len(groups) > 1) + [f"client {client}"] * (client != "")
                rows.append({
                    "panel": ", ".join(of) or group.name, "x": float(row["x"]), "y": float(row["y"]),
                    "class": int(row["label"]), "predicted": int(row["predicted"]),
                })  # fmt: skip
    if not rows:
        return None
    panels, classes = list(dict.fromkeys(row["panel"] for row in rows)), sorted({row["class"] for row in rows})
    base = alt.Chart(inline(rows)).encode(
        x=alt.X("x:Q", title="first coordinate (no unit)"),
        y=alt.Y("y:Q", title="second coordinate (no unit)"),
        tooltip=["class:O", "predicted:O"],
    )
    if len(classes) <= CIRCLES:
        looks = Palette("class", classes)
        base = base.encode(color=looks.colour(), shape=looks.shape())
    else:
        base = base.encode(color=alt.Color("class:Q", title="class", scale=alt.Scale(scheme="turbo")))
    chart = (
        base.mark_point(size=26, filled=True, opacity=0.8)
        .properties(width=240, height=240)
        .facet(alt.Facet("panel:N", sort=panels, title=None), columns=min(4, len(panels)))
        .resolve_scale(x="independent", y="independent")
        .properties(title="How samples are represented")
    )
    says = (
        "Maps by t-SNE of what a client's last layer sees of its samples after the training, of the first seed: "
        "samples with similar features are near each other. Distances between groups mean little."
    )
    return Picture("features", says, chart, wide=len(panels) > 1)
