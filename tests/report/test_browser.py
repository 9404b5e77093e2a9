"""Reports in a real browser, Debian's chromium: they open offline, show the JSON's figures, and are read at 400 and at
1600 pixels, by keyboard and by screen readers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from eval.harness.pages import paired_page, run_page
from eval.harness.pairs import compare
from tests.support.contrast import LEAST, least_contrast
from tests.support.reports import ROOT
from tests.tune.test_search import ALL, Machine, candidate
from vla_accel.report import bench, parity, tune
from vla_accel.report.page import Page, write
from vla_accel.tune.journal import Journal
from vla_accel.tune.search import Search, Settings, outcome

pytestmark = pytest.mark.slow
WIDTHS = (400, 1600)
CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="NOT RUN: needs playwright (pip install '.[browser]')")
    if CHROMIUM is None:
        pytest.skip("NOT RUN: needs chromium (apt-get install chromium)")
    with api.sync_playwright() as play:
        # Containers run tests as root, where chromium's sandbox refuses to start.
        started = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


def stored(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks/results" / f"{name}.json").read_text())


def compared(folder: Path) -> tuple[Page, dict[str, Any]]:
    """A stored run compared with itself, except for the episodes that each of them fails, with a film of each."""
    results = {}
    for name, failed in (("reference", {0}), ("other", {3, 7})):
        run, films = stored("libero_spatial_quick_cpu"), folder / name
        films.mkdir()
        for number, episode in enumerate(run["episodes"]):
            episode |= {"success": number not in failed, "video": f"{number}.gif"}
        run["videos"] = [str(films / episode["video"]) for episode in run["episodes"]]
        for path in run["videos"]:
            Image.new("RGB", (128, 64), "teal").save(path)
        results[name] = run
    report = compare(results["reference"], {"other": results["other"]}, "reference")
    made = {"note": "a note", "command": ["python", "-m", "eval.paired"], **report}
    return paired_page(made, results), made


def tuned(folder: Path) -> tuple[Page, dict[str, Any]]:
    """A search among candidates whose truth is known."""
    machine = Machine()
    with Journal(folder / "journal.jsonl", {}) as journal:
        found = Search(candidate("eager_fp32"), [lambda _: [candidate(n) for n in ALL]], machine, journal, Settings(),
                       machine)  # fmt: skip
        about = {name: stored("bench_pi0_h200")[name] for name in ("hardware", "software")}
        settings: dict[str, Any] = {"command": "vla-accel tune", "checkpoint": "demo", "settings": {}, "seconds": 1.0,
                                    "measured_before": 3}  # fmt: skip
        made = outcome(found, found.run(), {"tensorrt": "no library"}, {**about, **settings})
    for row in made["tried"]:
        if row["latency"]:
            row["latency"] |= {"parts_ms": {"vision": 1.0}, "engines": []}
    return tune.page(made), made


def of(make: Callable[[dict[str, Any]], Page], name: str) -> Callable[[Path], tuple[Page, dict[str, Any]]]:
    """The page of a stored run, and that run."""
    return lambda _: (make(stored(name)), stored(name))


PAGES: dict[str, Callable[[Path], tuple[Page, dict[str, Any]]]] = {
    "run": of(run_page, "libero_spatial_quick_cpu"),
    "paired": compared,
    "bench": of(bench.page, "bench_pi0_h200"),
    "parity": of(lambda report: parity.page(report, ["vla-accel", "parity"]), "parity_native_fp8"),
    "tune": tuned,
}


@pytest.fixture(scope="module", params=PAGES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("reports")
    page, result = PAGES[request.param](folder)
    return write(page, folder / f"{request.param}.html"), result


def opened(browser: Any, path: Path, width: int) -> tuple[Any, list[str]]:
    """The page in a window of some width, and what went wrong: console lines, requests beyond the file."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("requestfailed", lambda request: wrong.append(request.url[:200]))
    page.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else wrong.append(r.url))
    page.goto(path.as_uri())
    page.wait_for_load_state("load")
    return page, wrong


@pytest.mark.parametrize("width", WIDTHS)
def test_it_opens_offline_and_fits(browser: Any, made: tuple[Path, dict[str, Any]], width: int) -> None:
    page, wrong = opened(browser, made[0], width)
    assert wrong == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "it must not scroll sideways"
    pictures = page.evaluate("[...document.images].map(i => [i.complete, i.naturalWidth, i.clientWidth, i.alt])")
    assert pictures and all(done and natural > 0 and words for done, natural, _, words in pictures)
    # What is drawn for a narrow window is not shrunk there: a letter of 7 points stays one.
    assert all(shown >= 0.9 * natural for _, natural, shown, _ in pictures)
    sizes = page.evaluate(
        "[...document.querySelectorAll('p, td, th, li')].map(e => parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(sizes) >= 14


def test_its_text_is_readable_in_light_and_in_dark(browser: Any, made: tuple[Path, dict[str, Any]]) -> None:
    backgrounds = set()
    for scheme in ("light", "dark"):
        page, _ = opened(browser, made[0], 1600)
        page.emulate_media(color_scheme=scheme)
        ratio, words, background = least_contrast(page)
        backgrounds.add(background)
        assert ratio >= LEAST, (scheme, words)
    assert len(backgrounds) == 2


def test_the_figures_are_the_jsons(browser: Any, made: tuple[Path, dict[str, Any]]) -> None:
    page, _ = opened(browser, made[0], 1600)
    shown = {float(v) for v in page.evaluate("[...document.querySelectorAll('data')].map(e => e.value)")}
    result = made[1]
    if "summary" in result:
        rows = result["summary"]["rows"]
        expected = {r["success"]["wilson_95_low"] for r in rows} | {r["breakdown"]["hz"] for r in rows}
    elif "tried" in result:
        played = [row["success"] for row in result["tried"] if row["success"]]
        expected = {row["latency"]["median_ms"] for row in result["tried"] if row["latency"]}
        expected |= {s[n] for s in played for n in ("lost", "pairs", "lower_bound", "tango_95_low")}
        assert {row["name"] for row in result["tried"]} <= set(page.get_by_role("rowheader").all_inner_texts())
    elif "reference" in result and "rows" in result:
        names = ("pairs", "both", "lost", "gained", "neither", "mcnemar_exact_p")
        expected = {row[name] for row in result["rows"] for name in names}
        expected |= {row[side]["wilson_95_low"] for row in result["rows"] for side in ("reference", "other")}
        differing = sum(len(row["discordant"]) for row in result["rows"])
        assert page.get_by_role("table", name="Episodes that only one of them won").get_by_role("row").count() == (
            1 + differing
        )
    elif "rows" in result:
        expected = {r["median_ms"] for r in result["rows"]} | {r["per_second"] for r in result["throughput"]}
    else:
        expected = {d["max_error"] for d in result["dimensions"]} | {result["actions"]["cosine"]}
    assert expected <= shown
    told = result.get("software") or result.get("policies", {}).get("reference", {}).get("software", {})
    for name, version in told.items():
        assert page.get_by_role("row", name=f"{name.replace('_', ' ')} {version}", exact=True).count() == 1


def test_it_is_read_by_keyboard_and_by_screen_readers(browser: Any, made: tuple[Path, dict[str, Any]]) -> None:
    page, _ = opened(browser, made[0], 400)
    assert page.evaluate("document.documentElement.lang") == "en" and page.title()
    assert page.get_by_role("heading", level=1).count() == 1 and page.get_by_role("main").count() == 1
    assert page.get_by_role("link", name="Skip to the results").count() == 1
    for role in ("img", "table", "figure", "region", "navigation"):
        for element in page.get_by_role(role).all():
            assert "name" in element.evaluate(NAMED), f"a {role} without a name"
    # The first stop leads past the links to the results; what scrolls sideways can be reached, too.
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the results"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('main') !== null")
    wide = "[...document.querySelectorAll('.wide')].filter(e => e.scrollWidth > e.clientWidth)"
    assert page.evaluate(f"{wide}.every(e => e.tabIndex === 0)")


@pytest.mark.parametrize("width", WIDTHS)
def test_films_of_a_differing_episode_are_side_by_side(browser: Any, tmp_path: Path, width: int) -> None:
    """Or below each other on a narrow page: the reference first, regressions before improvements."""
    page, wrong = opened(browser, write(compared(tmp_path)[0], tmp_path / "paired.html"), width)
    films = page.evaluate("[...document.querySelectorAll('.film')].map(e => [e.innerText.trim(), e.offsetLeft])")
    assert wrong == [] and [label for label, _ in films] == ["reference", "other"] * 3
    beside = [left < right for (_, left), (_, right) in zip(films[::2], films[1::2], strict=True)]
    assert beside == [width > 600] * 3
    titles = page.get_by_role("figure").filter(has=page.locator(".films")).locator("figcaption").all_inner_texts()
    assert [title.split(" ")[1] for title in titles] == ["regression", "regression", "improvement"]


NAMED = """e => (e.getAttribute('aria-label') || e.getAttribute('aria-labelledby') || e.alt || e.title ||
    (e.querySelector('caption, figcaption') || {}).textContent) ? 'has a name' : e.outerHTML.slice(0, 80)"""
