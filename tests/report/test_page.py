"""The page and its pictures: whole, small, legible, and nothing leaves it."""

import errno
import json
import os
import re
from html import unescape
from itertools import combinations
from pathlib import Path

import pytest

from lit_pfl.cli.report import read, run_folders, write_report
from lit_pfl.report.page import write_picture
from lit_pfl.report.theme import DARK, DASHES, HUES, LIGHT, SHAPES
from report.browser import opened
from report.made import make_run, make_runs, write

CHARTS = {
    "over_rounds", "over_bytes", "loss", "clients", "client_by_client", "partition", "traffic", "time", "similarity",
    "matching", "embeddings", "features", "sparsity", "layers_share",
    "layers_rank",
}  # fmt: skip
#: what has no unit
BARE = {"round", "client", "other client", "class", "layer", "rank", "method"}


def report_of(folder: Path, pictures: bool = False) -> Path:
    return write_report([read(run) for run in run_folders(folder)], folder / "report.html", pictures)


def specs(page: Path) -> dict:
    found = re.search(r'<script id="charts" type="application/json">(.*?)</script>', page.read_text(), re.DOTALL)
    return json.loads(found[1])["specs"]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("comparison")
    make_runs(folder)
    return report_of(folder)


def check_charts(page) -> None:
    """See that every chart on an open page has a title, axes that say what and in which unit, and a legend."""
    charts = page.query_selector_all(".chart")
    assert charts
    for chart in charts:
        name = chart.get_attribute("id")
        texts = {
            role: [node.text_content() for node in chart.query_selector_all(f".role-{role} text")]
            for role in ("title-text", "axis-title", "legend-title", "legend-label")
        }
        assert texts["title-text"][0], name
        assert len(set(texts["axis-title"])) >= 2, name
        for title in texts["axis-title"]:
            assert title in BARE or re.search(r"\(.+\)", title), f"{name}: {title}"
        assert texts["legend-title"], name
        assert texts["legend-label"], name


def test_every_chart_has_title_axes_and_legend_and_nothing_leaves_the_page(comparison):
    with opened(comparison) as page:
        assert {chart.get_attribute("id") for chart in page.query_selector_all(".chart")} == {
            f"chart-{n}" for n in CHARTS
        }
        check_charts(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280
        ids = page.evaluate("[...document.querySelectorAll('[id]')].map(node => node.id)")
        assert len(ids) == len(set(ids))


@pytest.mark.seconds
def test_every_chart_is_described_to_who_does_not_see_it(comparison):
    said = unescape(comparison.read_text().partition('<script id="charts"')[0])
    described = {name: spec["description"] for name, spec in specs(comparison).items()}
    assert all(f"<figcaption>{says.partition('. ')[2]}</figcaption>" in said for says in described.values())
    assert described["loss"].startswith("Training loss over rounds. Mean over the samples ")
    with opened(comparison) as page:
        for name, says in described.items():
            svg = page.query_selector(f"#chart-{name} svg")
            assert (svg.get_attribute("role"), svg.get_attribute("aria-label")) == ("img", says)


@pytest.mark.seconds
def test_titles_are_whole_on_a_narrow_screen(comparison):
    beyond = """chart => Math.max(...[...chart.querySelectorAll('.role-title-text text')].map(
        text => text.getBoundingClientRect().right)) - chart.querySelector('svg').getBoundingClientRect().right"""
    with opened(comparison, viewport={"width": 375, "height": 800}) as page:
        cut = {chart.get_attribute("id"): chart.evaluate(beyond) for chart in page.query_selector_all(".chart")}
        assert not {name: by for name, by in cut.items() if by > 0}


@pytest.mark.seconds
def test_the_slider_shows_another_round(comparison):
    with opened(comparison) as page:
        before = page.inner_html("#chart-similarity svg")
        slider = page.query_selector("#chart-similarity input")
        assert slider.input_value() == "6"
        slider.evaluate("node => { node.value = 1; node.dispatchEvent(new Event('input')); }")
        page.wait_for_function(
            "before => document.querySelector('#chart-similarity svg').innerHTML != before", arg=before
        )
        labels = "[...document.querySelectorAll('#chart-similarity .mark-rect path')].map(node => node.ariaLabel || '')"
        shown = [label for label in page.evaluate(labels) if "client" in label]
        assert len(shown) == 8 * 25  # four methods, two groups each, five clients
        assert all("round: 1;" in label for label in shown)


@pytest.mark.slow
def test_the_colours_follow_the_reader(comparison):
    ink = "getComputedStyle(document.querySelector('#chart-over_rounds .role-title-text text')).fill"
    with opened(comparison, color_scheme="dark") as page:
        assert page.evaluate(ink) == "rgb(232, 235, 239)"
        page.emulate_media(media="print")
        assert page.evaluate(ink) == "rgb(28, 33, 39)"


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colours", [LIGHT, DARK])
def test_text_and_lines_stand_out(colours):
    """As the Web Content Accessibility Guidelines 2.2 ask of text (7, or 4.5) and of graphics (3)."""
    assert contrast(colours["ink"], colours["paper"]) > 7
    assert contrast(colours["soft"], colours["paper"]) > 4.5
    for i in range(8):
        assert contrast(colours[f"c{i}"], colours["paper"]) > 3


def test_no_two_of_many_methods_look_the_same():
    looks = [(HUES[i % 8], tuple(DASHES[i % 5]), SHAPES[i % 5]) for i in range(40)]
    assert all(one != other for one, other in combinations(looks, 2))
    # the first five, also without colours
    assert len({look[1] for look in looks[:5]}) == len({look[2] for look in looks[:5]}) == 5


@pytest.mark.seconds
def test_only_what_a_run_has_is_shown(tmp_path):
    write(
        tmp_path / "metrics.csv", "round train/loss val/acc comm/total_bytes", [[1, 2.0, 0.1, 50], [2, 1.0, 0.2, 100]]
    )
    assert set(specs(report_of(tmp_path))) == {"over_rounds", "over_bytes", "loss"}


@pytest.mark.seconds
def test_a_run_of_one_round_and_one_client(tmp_path):
    make_run(tmp_path, "StandAlone", 1, clients=1, rounds=1)
    with opened(report_of(tmp_path)) as page:
        check_charts(page)


@pytest.mark.slow
def test_the_lead_names_only_what_all_runs_have(tmp_path):
    make_run(tmp_path / "a", "FedAvg", 1, clients=3, rounds=2)
    make_run(tmp_path / "b", "FedAvg", 1, clients=4, rounds=2)
    assert "2 runs · Digits · 2 rounds" in report_of(tmp_path).read_text()
    write(tmp_path / "c/metrics.csv", "round val/acc", [[1, 0.1]])  # nobody knows of what
    assert "3 runs · 2 rounds" in report_of(tmp_path).read_text()


@pytest.mark.slow
def test_names_from_outside_stay_text(tmp_path):
    name = "<!--<script></script><script>alert(1)</script>"
    make_run(tmp_path / "a", "FedAvg", 1)
    rows = [[1, "all", "up", name, 5]]
    write(tmp_path / "a/communication.csv", "round client direction group bytes", rows)
    (tmp_path / "a/config.yaml").write_text("model: {class_path: '<b>&{{title}}M'}\nseed_everything: 1\n")
    page = report_of(tmp_path)
    html = page.read_text().partition('<script id="charts"')[0]
    assert "<h1>&lt;b&gt;&amp;{{title}}M</h1>" in html
    assert "<b>" not in html
    assert specs(page).keys() >= {"traffic"}
    with opened(page):
        pass


@pytest.mark.slow
def test_twenty_clients_and_a_hundred_rounds_are_less_than_five_megabytes(tmp_path):
    make_runs(tmp_path, clients=20, rounds=100, every=1)
    assert report_of(tmp_path).stat().st_size < 5e6


@pytest.mark.slow
def test_a_thousand_clients_open(tmp_path):
    make_runs(tmp_path, ["SimFed", "FedAvg"], [1, 2], clients=1000, rounds=20, every=5)
    page = report_of(tmp_path)
    assert page.stat().st_size < 5e6
    with opened(page) as shown:
        check_charts(shown)
        assert "200 of 1000 clients" in shown.text_content("#data")


@pytest.mark.slow
def test_pictures_are_files_in_the_colours_for_paper(tmp_path):
    make_run(tmp_path / "run", "SimFed", 1, clients=3, rounds=2, every=1)
    report_of(tmp_path / "run", pictures=True)
    for name in CHARTS:
        svg = (tmp_path / f"run/report/{name}.svg").read_text()
        assert svg.startswith('<svg role="img" aria-label="')
        assert "var(--" not in svg
        assert (tmp_path / f"run/report/{name}.png").read_bytes().startswith(b"\x89PNG")


def full(handle):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_the_former_pictures(tmp_path, monkeypatch):
    spec = {"data": {"values": [{"x": 1}]}, "mark": "bar", "encoding": {"x": {"field": "x", "type": "quantitative"}}}
    write_picture(spec, tmp_path / "bar")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert set(before) == {"bar.svg", "bar.png"}
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_picture({**spec, "mark": "point"}, tmp_path / "bar")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.slow
def test_a_full_disk_leaves_the_former_page(tmp_path, monkeypatch):
    make_run(tmp_path / "a", "FedAvg", 1)
    page = report_of(tmp_path)
    before = page.read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        report_of(tmp_path)
    assert page.read_bytes() == before
    assert not list(page.parent.glob("*.part"))
