"""The page: one file with everything in it, and the pictures as files of their own."""

import html
import json
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import vl_convert

from lit_pfl.report import charts, maps, tables
from lit_pfl.report.numbers import Metric
from lit_pfl.report.pictures import Picture
from lit_pfl.report.runs import Group, differing, short
from lit_pfl.report.tables import Table
from lit_pfl.report.theme import CONFIG, DARK, FONT, LIGHT, printable, style_sheet
from lit_pfl_callbacks.files import write_whole

TEMPLATE = Path(__file__).with_name("page.html")
#: how much larger a PNG is than the chart, for paper
SCALE = 2.5


class Section(NamedTuple):
    """A part of the page, which is left out where it has nothing to show."""

    title: str
    tables: Sequence[Table | None] = ()
    pictures: Sequence[Picture | None] = ()
    texts: Sequence[Table | None] = ()


def sections(groups: Sequence[Group], metric: Metric | None) -> list[Section]:
    """Return what the files of the runs have to show."""
    results: list[Section] = []
    if metric is not None:
        results = [
            Section(
                "Results",
                tables=[
                    tables.summary(groups, metric),
                    *tables.paired_by_state(groups, metric),
                    tables.validated(groups, metric),
                ],
                pictures=[charts.over_rounds(groups, metric), charts.over_bytes(groups, metric), charts.losses(groups)],
            ),
            Section(
                "Clients", pictures=[charts.distributions(groups, metric), charts.client_by_client(groups, metric)]
            ),
        ]
    return [
        *results,
        Section("Data", pictures=maps.partitions(groups)),
        Section("Cost", pictures=[charts.traffic(groups), charts.times(groups)]),
        Section("Similarity", pictures=[maps.similarities(groups), maps.matchings(groups), maps.embeddings(groups)]),
        Section("Representation", pictures=[maps.features(groups)]),
        Section("Weights", pictures=[charts.densities(groups), *charts.layers(groups)]),
        Section(
            "Configuration",
            texts=[tables.options_that_differ(groups), tables.runs_there(groups), tables.options_in_common(groups)],
        ),
    ]


def write(groups: Sequence[Group], metric: Metric | None, path: Path, pictures: Path | None) -> None:
    """Write a report.

    Args:
        groups: the runs, those together that differ in the seed only.
        metric: what they are compared by; None where they have none.
        path: the page's file.
        pictures: the folder of the pictures as files, SVG and PNG; None for none.
    """
    parts = sections(groups, metric)
    drawn = {p.name: specification(p) for part in parts for p in part.pictures if p is not None}
    write_whole(path, page(groups, parts, drawn))
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
        for name, spec in drawn.items():
            write_picture(spec, pictures / name)


def specification(picture: Picture) -> dict[str, Any]:
    """Return a chart as Vega-Lite, described for those who do not see it."""
    spec = picture.chart.to_dict()
    spec.pop("config", None)  # the page has one for all
    return {**spec, "description": f"{spec['title']}. {picture.says}"}


def write_picture(spec: dict[str, Any], path: Path) -> None:
    """Write a chart as SVG and PNG, in the colors for paper.

    Args:
        spec: the chart.
        path: the files', without an ending.
    """
    whole = json.loads(printable(json.dumps({**spec, "config": {**CONFIG, "background": "white"}})))
    if whole.get("width") == "container":
        whole["width"] = 520
    label = html.escape(whole.get("description", path.name))
    svg = vl_convert.vegalite_to_svg(whole).replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
    write_whole(path.with_name(f"{path.name}.svg"), svg)
    write_whole(path.with_name(f"{path.name}.png"), vl_convert.svg_to_png(svg, scale=SCALE))


def page(groups: Sequence[Group], parts: Sequence[Section], drawn: dict[str, dict[str, Any]]) -> str:
    """Return the page as HTML. It holds the charting library too, and loads nothing."""
    bodies = {part.title: body for part in parts if (body := _body(part))}
    data = json.dumps({"config": CONFIG, "specs": drawn}, separators=(",", ":")).replace("<", "\\u003c")
    fill = {
        "title": html.escape(_title(groups)),
        "lead": html.escape(_lead(groups)),
        "light": style_sheet(LIGHT),
        "dark": style_sheet(DARK),
        "font": FONT,
        "contents": " ".join(f'<a href="#{title.lower()}">{title}</a>' for title in bodies),
        "body": "\n".join(f'<section id="{t.lower()}"><h2>{t}</h2>{body}</section>' for t, body in bodies.items()),
        "footer": "Deviations over seeds are those of a sample (n - 1), over clients those of all. Made by lit-pfl "
        f"{version('lit-pfl')}.",
        "charts": data,
        "library": vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace("</script", "<\\/script"),
    }
    # at once, since a run's name may look like a place to fill
    return re.sub(r"\{\{(\w+)\}\}", lambda place: fill[place[1]], TEMPLATE.read_text(encoding="utf-8"))


def _title(groups: Sequence[Group]) -> str:
    if len(groups) > 4:
        return f"{len(groups)} methods compared"
    names = [group.name for group in groups]
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _lead(groups: Sequence[Group]) -> str:
    apart = differing([group.options for group in groups])
    everyone = groups[0].options if all(group.options for group in groups) else {}
    options = {name: value for name, value in everyone.items() if name not in apart}
    number = sum(len(group.runs) for group in groups)
    said = [f"{number} run{'s' * (number > 1)}"]
    if "data" in options:
        said.append(short(options["data"]))
    if clients := options.get("data.num_clients"):
        said.append(f"{clients} clients")
    said.append(f"{max(run.rounds for group in groups for run in group.runs)} rounds")
    unfinished = sum(not run.finished for group in groups for run in group.runs)
    if unfinished:
        said.append(f"{unfinished} not finished")
    return " · ".join(said)


def _body(part: Section) -> str:
    pieces = [_table(table, f"{part.title.lower()}-{i}") for i, table in enumerate(part.tables) if table is not None]
    figures = ""
    column = 0  # in which the next narrow picture goes, of two
    pictures = [picture for picture in part.pictures if picture is not None]
    for i, picture in enumerate(pictures):
        alone = column == 0 and all(following.wide for following in pictures[i + 1 : i + 2])
        wide = picture.wide or alone
        figures += _figure(picture, wide)
        column = 0 if wide else 1 - column
    if figures:
        pieces.append(f'<div class="grid">{figures}</div>')
    for table in part.texts:
        if table is not None and table.rows:
            long = "" if len(table.rows) > 30 else " open"
            title = f"<summary>{html.escape(table.title)}</summary>"
            pieces.append(f'<div class="table texts"><details{long}>{title}{table.html()}</details></div>')
    return "\n".join(pieces)


def _table(table: Table, name: str) -> str:
    copies = ""
    for kind, text in (("Markdown", table.markdown()), ("LaTeX", table.latex())):
        key = f"{name}-{kind.lower()}"
        copies += f'<button data-copy="{key}">Copy as {kind}</button><pre id="{key}">{html.escape(text)}</pre>'
    return f'<div class="table"><h3>{html.escape(table.title)}</h3>{table.html()}{copies}</div>'


def _figure(picture: Picture, wide: bool) -> str:
    kind = ' class="wide"' if wide else ""
    says = html.escape(picture.says)
    return f'<figure{kind}><div class="chart" id="chart-{picture.name}"></div><figcaption>{says}</figcaption></figure>'
