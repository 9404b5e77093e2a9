"""Pages of results: what they say, that they hold everything, and that no name breaks them."""

from __future__ import annotations

import itertools
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.reports import ROOT, figures_in
from vla_accel.errors import ConfigError
from vla_accel.report import bench, parity, tune
from vla_accel.report.charts import Bar, Point, scatter, stacked
from vla_accel.report.page import Films, Number, Page, Section, Table, Text, render, write


def stored(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks/results" / f"{name}.json").read_text())


def parity_page(report: dict[str, Any]) -> Page:
    return parity.page(report, ["vla-accel", "parity"])


@pytest.mark.parametrize(
    ("make", "name", "expected"),
    [
        (bench.page, "bench_record_h200", lambda r: [row["median_ms"] for row in r["rows"]]),
        (parity_page, "parity_native_fp8", lambda r: [r["actions"]["cosine"], r["actions"]["max_error"]]),
    ],
)
def test_a_page_holds_the_figures_of_its_json(
    make: Callable[[dict[str, Any]], Page], name: str, expected: Callable[[dict[str, Any]], list[float]]
) -> None:
    report = stored(name)
    if "rows" in report:
        report["rows"] = report["rows"][:2]
    text = render(make(report))
    assert set(expected(report)) <= figures_in(text)
    assert all(version in text for version in report["software"].values())
    assert all(engine["detail"] in text for row in report.get("rows", [report]) for engine in row.get("engines", []))
    assert not re.findall(r'(?:src|href|srcset)="(?!data:|#)', text), "something would be loaded"
    assert len(text) < 2_000_000


@pytest.mark.parametrize(("ms", "hz"), [(2059.8, "0.485 Hz"), (8.33, "120 Hz")])
def test_a_slow_calls_rate_is_no_zero(ms: float, hz: str) -> None:
    report = stored("bench_record_h200")
    report["rows"] = [{**report["rows"][0], "median_ms": ms}]
    assert f" a call (median), {hz}, on " in bench.page(report).summary


@pytest.mark.parametrize("narrow", [False, True])
def test_many_points_close_together_stay_apart_and_their_names_do_not_overlap(narrow: bool) -> None:
    points = [Point(f"dropped {i}", 1.0 + 0.1 * i, 1e-4 * (1 + i), dropped=True) for i in range(9)]
    points += [Point("chosen", 1.1, 1e-5, chosen=True), Point("reference", 46.0, 0.0, front=True)]
    (axes,) = scatter(points, x="ms", y="1 - cosine", narrow=narrow, finest=1e-6).axes
    assert {text.get_text() for text in axes.texts} == {"chosen", "reference"}
    places = [axes.transAxes.inverted().transform(axes.transData.transform((p.x, p.y)))[0] for p in points]
    assert places[8] - places[0] > 0.05, "evenly they would share one place: 0.02"
    alike = [Point("a", 10.0, 0.0), Point("b", 9.0, 8e-7)]
    (even,) = scatter(alike, x="ms", y="1 - cosine", narrow=narrow, finest=1e-6).axes
    assert axes.get_yscale() == "symlog" and even.get_yscale() == "linear", "all of them below the finest"
    (near,) = scatter(points[:-1], x="ms", y="1 - cosine", narrow=narrow).axes
    assert near.get_xscale() == "linear"


@pytest.mark.parametrize("slowest", [1302.0, 5000.0, 240000.0])
def test_the_numbers_below_a_picture_stay_apart_on_a_phone(slowest: float) -> None:
    points = [Point("fast", 240.0, 1e-4, chosen=True), Point("slow", slowest, 0.0, front=True)]
    figure = scatter(points, x="ms", y="1 - cosine", narrow=True)
    figure.canvas.draw()
    (axes,) = figure.axes
    labels = [t for t in (*axes.xaxis.get_majorticklabels(), *axes.xaxis.get_minorticklabels()) if t.get_text()]
    boxes = sorted((t.get_window_extent() for t in labels), key=lambda box: box.x0)
    shown = [box for box in boxes if axes.bbox.x0 <= (box.x0 + box.x1) / 2 <= axes.bbox.x1]
    assert len(shown) >= 2 and all(left.x1 < right.x0 for left, right in itertools.pairwise(shown))


def test_the_same_result_gives_the_same_page() -> None:
    report = stored("parity_native")
    assert render(parity_page(report)) == render(parity_page(report))


def test_what_agrees_has_the_name_of_what_ran() -> None:
    report = stored("parity_native_fp8")
    assert parity_page(report).summary.startswith("native_fp8 agrees with FP32 eager")
    report["engines"][1].update(used="eager")
    assert parity_page(report).summary.startswith("native_fp8 (kv_cache ran eager) agrees with FP32 eager")


def test_names_are_words_and_never_markup() -> None:
    bad = '<img src=x onerror="alert(1)">&'
    table = Table(bad, [bad], [[bad, Number(None)]])
    text = render(Page(bad, bad, [Section(bad, [Text(bad), table])]))
    assert "<img" not in text and text.count("&lt;img") >= 7


def test_films_lie_inside_the_page(tmp_path: Path) -> None:
    for name in ("a.mp4", "b.gif"):
        (tmp_path / name).write_bytes(b"film")
    films = Films("task 1", [("reference", tmp_path / "a.mp4"), ("candidate", tmp_path / "b.gif")])
    text = render(Page("t", "s", [Section("Films", [films]), Section("Nothing", [])]))
    assert 'aria-label="task 1: reference" src="data:video/mp4;base64,ZmlsbQ=="' in text
    assert 'alt="task 1: candidate"' in text and "Nothing" not in text


def test_a_report_is_an_html_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"report: expected a file name ending in \.html, got 'x\.pdf'"):
        write(Page("t", "s", []), Path("x.pdf"))
    assert write(Page("t", "s", []), tmp_path / "x.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("narrow", [False, True])
def test_bars_of_no_length_are_drawn(narrow: bool) -> None:
    """As where a policy is compared with itself: no error has a length."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stacked([Bar("eager", {"error": 0.0})], unit="%", narrow=narrow)


def test_a_bar_ends_at_the_median_of_the_call() -> None:
    """Medians of parts may add up to more; the table next to the bars keeps them."""
    timed = {"median_ms": 6.0, "parts_ms": {"vision": 3.0, "denoise": 5.0}}
    assert bench.call_parts(timed) == {"vision": 2.25, "denoise": 3.75}
    assert bench.call_parts({**timed, "median_ms": 9.0}) == {"vision": 3.0, "denoise": 5.0, "other": 1.0}
    row = {"system": "eager", "steps": 1, "p10_ms": 5.0, "p90_ms": 7.0, "floors_ms": None, **timed}
    for picture in (tune._parts([{"name": "eager", "latency": timed}]), bench._calls([row], "all")):
        assert [str(cell) for cell in picture.figures.rows[0][-2:]] == ["3.00", "5.00"]


def test_a_cosine_that_rounds_to_more_than_one_is_drawn() -> None:
    report = stored("parity_native")
    for part in (report["actions"], report["robot_actions"], *report["components"].values()):
        part["cosine"] = 1 + 2**-52
    report["actions"]["cosine"] = 1 - 2**-53
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "-2.22e-16" not in render(parity_page(report))
