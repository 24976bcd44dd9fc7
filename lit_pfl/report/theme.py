"""Colors and lines: distinguished by color-blind readers, on paper without colors, on light and on dark screens.

Colors in charts are CSS variables of the page, so that a page changes from light to dark, and for the printer, by
itself. Files that stand alone get the light ones.
"""

import re
from collections.abc import Collection, Sequence
from typing import Any

import altair as alt

#: eight hues after Okabe and Ito's set for color-blind readers: shades for light paper, and for dark screens
LIGHT = {
    "ink": "#1c2127", "soft": "#525b66", "line": "#9aa3ad", "grid": "#e3e7eb", "paper": "#ffffff", "page": "#f5f6f8",
    "c0": "#0072b2", "c1": "#d55e00", "c2": "#009e73", "c3": "#b5548c",
    "c4": "#b98500", "c5": "#3b9bd4", "c6": "#5b5f97", "c7": "#6f6f6f",
}  # fmt: skip
DARK = {
    "ink": "#e8ebef", "soft": "#aab3bd", "line": "#66707b", "grid": "#2f353c", "paper": "#1b1f24", "page": "#131619",
    "c0": "#4aa8e0", "c1": "#ff8a3d", "c2": "#2fc79a", "c3": "#e58fc0",
    "c4": "#e8b93b", "c5": "#9bd4f5", "c6": "#a9abe6", "c7": "#b5b5b5",
}  # fmt: skip
HUES = [f"var(--c{i})" for i in range(8)]
DASHES = [[1, 0], [7, 3], [2, 2], [10, 3, 2, 3], [4, 2, 1, 2]]
SHAPES = ["circle", "square", "triangle-up", "diamond", "cross"]
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"

CONFIG: dict[str, Any] = {
    "background": "transparent",
    "padding": {"left": 4, "top": 4, "right": 16, "bottom": 4},
    "font": FONT,
    "view": {"stroke": None, "continuousWidth": 460, "continuousHeight": 300},
    "title": {
        "color": "var(--ink)", "fontSize": 15, "fontWeight": 600, "anchor": "start", "offset": 12, "frame": "bounds",
    },
    "axis": {
        "labelColor": "var(--soft)", "titleColor": "var(--ink)", "gridColor": "var(--grid)",
        "domainColor": "var(--line)", "tickColor": "var(--line)", "labelFontSize": 12, "titleFontSize": 12.5,
        "titleFontWeight": 500, "titlePadding": 8, "labelLimit": 260, "labelFlush": False,
    },
    "legend": {
        "labelColor": "var(--ink)", "titleColor": "var(--ink)", "labelFontSize": 12, "titleFontSize": 12.5,
        "titleFontWeight": 500, "labelLimit": 420, "orient": "top", "symbolStrokeWidth": 2.5, "symbolSize": 110,
        "columnPadding": 18,
    },
    "header": {
        "labelColor": "var(--ink)", "titleColor": "var(--ink)", "labelFontSize": 12.5, "titleFontSize": 12.5,
        "labelLimit": 320,
    },
}  # fmt: skip


class Palette:
    """Names by color, dash and shape: the same ones in every chart, whichever of them it shows.

    Args:
        field: the column in which a chart's data have the name; the legends' title.
        names: all names, or numbers.
    """

    def __init__(self, field: str, names: Sequence[str] | Sequence[int]) -> None:
        self.field, self.names = field, list[str | int](names)

    def colour(self, shown: Collection[str | int] | None = None, lines: bool = False) -> alt.Color:
        """Return the encoding by color, for a chart that shows some of the names, maybe as lines."""
        return alt.Color(f"{self.field}:N", scale=self._scale(HUES, shown), legend=self._legend(lines), sort=None)

    def dash(self, shown: Collection[str | int] | None = None) -> alt.StrokeDash:
        """Return the encoding of lines by dashes; its legend joins that of the colors."""
        return alt.StrokeDash(f"{self.field}:N", scale=self._scale(DASHES, shown), legend=self._legend(True), sort=None)

    def shape(self, shown: Collection[str | int] | None = None) -> alt.Shape:
        """Return the encoding of points by shapes, likewise."""
        return alt.Shape(f"{self.field}:N", scale=self._scale(SHAPES, shown), legend=self._legend(False), sort=None)

    def _scale(self, values: Sequence[Any], shown: Collection[str | int] | None) -> alt.Scale:
        chosen = [(n, values[i % len(values)]) for i, n in enumerate(self.names) if shown is None or n in shown]
        return alt.Scale(domain=[name for name, _ in chosen], range=[value for _, value in chosen])

    def _legend(self, lines: bool) -> alt.Legend:
        columns = max(1, 72 // (max(len(str(name)) for name in self.names) + 6))
        if lines:
            return alt.Legend(title=self.field, columns=columns, symbolOpacity=1, symbolType="stroke", symbolSize=350)
        return alt.Legend(title=self.field, columns=columns, symbolOpacity=1)


def style_sheet(colours: dict[str, str]) -> str:
    """Write colors as CSS variables."""
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


def printable(text: str) -> str:
    """Put the light colors instead of the variables."""
    return re.sub(r"var\(--(\w+)\)", lambda found: LIGHT[found[1]], text)
