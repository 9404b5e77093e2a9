"""Reports of evaluations: figures of the JSON, films of differing episodes side by side, stored runs for comparison."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from eval import paired
from eval.harness import pages
from eval.harness.report import stored_like
from tests.support.reports import ROOT, figures_in
from vla_accel.report.page import Films, Page, Section, Text, render

RUN = json.loads((ROOT / "benchmarks/results/libero_spatial_quick_cpu.json").read_text())
STEPS = (1, 10)
"""Of the five step counts of that run, so that tests are quick."""
RUN["episodes"] = [e for e in RUN["episodes"] if e["steps"] in STEPS]
RUN["summary"]["rows"] = [r for r in RUN["summary"]["rows"] if r["steps"] in STEPS]


def rates(row: dict[str, Any]) -> set[float]:
    return {row["success"][n] for n in ("successes", "rate", "wilson_95_low", "wilson_95_high")}


def test_a_runs_page_holds_the_figures_of_its_json() -> None:
    found = figures_in(render(pages.run_page(RUN)))
    for row in RUN["summary"]["rows"]:
        total = row["breakdown"]["components"]["total"]
        assert rates(row) | {total["mean_ms"], total["p99_ms"], row["breakdown"]["hz"]} <= found


def test_a_page_without_latencies_has_no_picture_of_them() -> None:
    run = copy.deepcopy(RUN)
    for row in run["summary"]["rows"]:
        row["breakdown"] = row["target"] = None
    run["summary"]["denoise_fit"] = None
    assert section(pages.run_page(RUN), "Latency").items
    assert not section(pages.run_page(run), "Latency").items


def section(page: Page, title: str) -> Section:
    return next(s for s in page.sections if s.title == title)


def test_differing_episodes_are_shown_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for name, failed in (("reference", (0,)), ("other", (3, 7))):
        run, folder = copy.deepcopy(RUN), tmp_path / name
        folder.mkdir()
        for number, episode in enumerate(run["episodes"]):
            episode["video"] = f"{number}.mp4"
            episode["success"] = number not in failed
            (folder / f"{number}.mp4").write_bytes(f"{name} {number}".encode())
        (folder / "7.mp4").unlink()
        run["videos"] = [str(folder / e["video"]) for e in run["episodes"]]
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(run))
        paths.append(str(path))
    report = tmp_path / "paired.html"
    assert paired.main([*paths, "--report", str(report)]) == 0
    compared = json.loads(capsys.readouterr().out.splitlines()[-1])
    results = {Path(p).stem: json.loads(Path(p).read_text()) for p in paths}
    films = [i for i in section(pages.paired_page(compared, results), "Episodes that only one of them won").items
             if isinstance(i, Films)]  # fmt: skip
    # One of two regressions has no film any more. Regressions come before improvements, the reference is on the left.
    shown = [[path.read_text() for _, path in pair.films] for pair in films]
    assert shown == [["reference 3", "other 3"], ["reference 0", "other 0"]]
    page = pages.paired_page(compared, results)
    assert page.summary.startswith("other, "), "a run has the name of its file"
    for row in compared["rows"]:
        row["discordant"] = []
    same = section(pages.paired_page(compared, results), "Episodes that only one of them won")
    assert same.items == [Text("None.")]
    found = figures_in(report.read_text())
    assert {r["mcnemar_exact_p"] for r in compared["rows"]} <= found
    assert report.read_text().count("<video") == 4


@pytest.mark.parametrize("damage", [{"rows": None}, {"rows": [{"steps": 3}]}, []])
def test_a_report_of_a_damaged_summary_is_one_error(
    damage: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, damaged, report = (tmp_path / name for name in ("whole.json", "damaged.json", "report.html"))
    whole.write_text(json.dumps(RUN))
    damaged.write_text(json.dumps({**RUN, "summary": damage}))
    assert paired.main([str(whole), str(damaged), "--report", str(report)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: {damaged}: expected a whole result, what its report shows is damaged")
    assert said.count("\n") == 1 and not report.exists()


def test_only_runs_of_the_same_model_and_kind_of_device_are_compared() -> None:
    assert list(stored_like(RUN, "libero")) == ["stored: libero_spatial_quick_cpu"]
    other = copy.deepcopy(RUN)
    for row in other["summary"]["rows"]:
        row["breakdown"]["hardware"]["device"] = "another"
    assert stored_like(other, "libero") == {}
    bars = pages.bars_of({"this run": RUN, "stored": RUN})
    assert bars[0].label == "this run, 1 step" and bars[-1].label == "stored, 10 steps"
