"""Statistics against known values, the summary from episodes, and files that are never half."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import store
from eval.harness import figures, pages, report
from eval.harness.protocol import EpisodeKey, Protocol
from eval.harness.rollout import EpisodeResult
from eval.harness.statistics import fit_line, rate_goals
from eval.libero.benchmark import LIBERO
from eval.script import run_script
from tests.support.eval_support import PARTS
from vla_accel import latency
from vla_accel.errors import ConfigError, DependencyError
from vla_accel.measure.proportion import wilson
from vla_accel.report.colours import PARTS as COLOURS

STORED = Path(__file__).parents[2] / "benchmarks" / "results" / "libero_spatial_quick_cpu.json"
PROTOCOL = Protocol("libero_spatial", tasks=(0, 1), trials=2, steps=(1, 10), max_steps=220)


# Wilson's interval without continuity correction, from R's prop.test(correct = FALSE) and
# from R. G. Newcombe, Stat. Med. 17 (1998) 857, table I.
@pytest.mark.parametrize(
    ("successes", "episodes", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (9, 9, 0.7009, 1.0), (0, 0, 0.0, 1.0)],
)
def test_wilson_against_published_values(successes: int, episodes: int, low: float, high: float) -> None:
    assert wilson(successes, episodes) == pytest.approx((low, high), abs=5e-5)
    for bad in (-1, episodes + 1):
        with pytest.raises(ConfigError, match=f"successes: expected 0 to {episodes}"):
            wilson(bad, episodes)


def test_the_fit_is_least_squares_and_its_error_relative_to_the_prediction() -> None:
    times = {1: 10.10, 2: 19.70, 3: 29.38, 5: 48.87, 10: 97.69}
    fit = fit_line(times)
    assert fit is not None
    slope, intercept = np.polyfit(list(times), list(times.values()), 1)
    assert (fit["slope_ms"], fit["intercept_ms"]) == pytest.approx((slope, intercept))
    row, predicted = fit["rows"][-1], intercept + 10 * slope
    assert (row["steps"], row["measured_ms"], row["predicted_ms"]) == (10, 97.69, pytest.approx(predicted))
    assert row["error_percent"] == pytest.approx(100 * (97.69 - predicted) / predicted)
    assert fit_line({3: 29.0}) is None and fit_line({}) is None, "one point is no line"


def test_what_each_component_must_reach_for_20_hz() -> None:
    # One step of a published pipeline: 83.50 ms, of which 3.99 ms are in none of the parts.
    parts = {"vision": 17.26, "kv_cache": 52.14, "denoise": 10.10}
    data = rate_goals(parts, 83.50, 20)
    goals = data["components"]
    assert goals["kv_cache"]["allowed_ms"] == pytest.approx(50 - (83.50 - 52.14))
    assert goals["kv_cache"]["speedup"] == pytest.approx(52.14 / 18.64)
    assert goals["vision"]["allowed_ms"] is None and goals["vision"]["speedup"] is None
    assert not data["met"] and data["overall_speedup"] == pytest.approx(1.67)
    assert rate_goals(parts, 83.50, 10)["met"]


def episode(steps: int, task: int, trial: int, outcome: str = "success", slow: float = 1.0) -> EpisodeResult:
    error = "ValueError: x" if outcome == "error" else None
    denoise = 2.0 + 3.0 * steps
    timings = {k: [v * slow] * 2 for k, v in {**PARTS, "denoise": denoise}.items()}
    total = (sum(PARTS.values()) + denoise) * slow
    timings |= {"total": [total] * 2, "infer": [total] * 2, "wall": [total + 0.2] * 2}
    return EpisodeResult(EpisodeKey(steps, task, trial), outcome == "success", 90, error, 3.0, 2, timings)


def breakdown(steps: int | None, samples: report.Samples) -> dict[str, Any]:
    components = latency.summarise(samples.sections, samples.totals)
    total = components["total"]["mean_ms"]
    return {"components": components, "samples": len(samples.totals), "hz": 1e3 / total}


def run(results: list[EpisodeResult], launches: list[int] | None = None) -> report.Played:
    """Episodes of one launch, or each of its own; the second launch had another CPU."""
    by_key = {result.key: result for result in results}
    conditions = [{"hardware": {"cpu": cpu}, "workers": 1} for cpu in ("old", "new")]
    return report.Played(PROTOCOL, by_key, conditions, dict(zip(by_key, launches or [1] * len(by_key), strict=True)))


def summary(results: list[EpisodeResult], launches: list[int] | None = None) -> dict[str, Any]:
    names = {("", 0): "the first task", ("", 1): "the second task"}
    return report.summarise_run(run(results, launches), names, 20, breakdown)


def all_episodes() -> list[EpisodeResult]:
    outcomes = {EpisodeKey(10, 0, 1): "failure", EpisodeKey(10, 1, 0): "error"}
    return [episode(key.steps or 0, key.task_id, key.trial, outcomes.get(key, "success")) for key in PROTOCOL.plan()]


def test_errors_stand_apart_from_failures() -> None:
    rows = {row["steps"]: row for row in summary(all_episodes())["rows"]}
    counts = ("successes", "episodes", "errors", "rate")
    assert [rows[1]["success"][k] for k in counts] == [4, 4, 0, 1.0]
    assert [rows[10]["success"][k] for k in counts] == [2, 3, 1, pytest.approx(2 / 3)]
    assert rows[10]["success"]["wilson_95_low"] == pytest.approx(wilson(2, 3)[0])
    tasks = rows[10]["tasks"]
    assert [[task[k] for k in counts] for task in tasks] == [[1, 2, 0, 0.5], [1, 1, 1, 1.0]]
    assert [task["task"] for task in tasks] == ["the first task", "the second task"]
    alone = summary([episode(1, 0, 0, "error")])["rows"][0]
    assert alone["success"]["rate"] is None and alone["breakdown"] is None, "a crash has neither rate nor latency"


def test_the_sweep_holds_latency_shares_and_fit() -> None:
    result = summary(all_episodes())
    one, ten = result["rows"]
    assert one["breakdown"]["samples"] == 8 and ten["breakdown"]["samples"] == 6
    parts = ten["breakdown"]["components"]
    assert parts["denoise"]["mean_ms"] == pytest.approx(32.0)
    assert sum(v["share"] for k, v in parts.items() if k != "total") == pytest.approx(1.0)
    assert ten["breakdown"]["hz"] == pytest.approx(1e3 / 47.5)
    assert ten["wall_mean_ms"] == pytest.approx(47.7)
    fit = result["denoise_fit"]
    assert fit["component"] == "denoise" and (fit["intercept_ms"], fit["slope_ms"]) == pytest.approx((2.0, 3.0))
    assert one["target"]["met"] and result["warnings"] == []


def test_doubtful_latencies_have_a_warning() -> None:
    one = episode(1, 0, 0)
    one.timings["total"] = [v + 3 for v in one.timings["total"]]
    apart = summary([one])
    assert apart["warnings"] == ["the parts at 1 step sum to 20.50 ms, the total is 23.50 ms"]
    assert report.mean_parts(apart["rows"][0]["breakdown"])["other"] == pytest.approx(3.0)
    assert summary([episode(1, 0, trial, slow=1.0 + 0.1 * trial) for trial in (0, 1)])["warnings"] == []
    (warning,) = summary([episode(1, 0, 0), episode(1, 0, 1, slow=4.0), episode(1, 1, 0, slow=4.0)])["warnings"]
    assert warning.startswith("calls at 1 step vary from 20.5 ms (p10) to 82.0 ms (p90)")


def test_latencies_of_other_conditions_are_left_out_with_a_warning() -> None:
    result = summary([episode(1, 0, 0, slow=9.0), episode(1, 0, 1)], [0, 1])
    assert result["rows"][0]["breakdown"]["components"]["denoise"]["mean_ms"] == pytest.approx(5.0)
    assert result["rows"][0]["success"]["episodes"] == 2
    assert "leave out 1 episodes" in result["warnings"][0]


def printed(results: list[EpisodeResult], capsys: pytest.CaptureFixture[str]) -> str:
    summed = summary(results)
    for row in summed["rows"]:
        if row["breakdown"]:
            row["breakdown"] |= {"hardware": {"cpu": "a CPU"}, "engines": []}
    rules = {**PROTOCOL.to_json(), "max_steps_source": "openpi"}
    launches = [{"hardware": {}, "software": {}}]
    content = {
        "protocol": rules,
        "policy": {"kind": "local", "name": "demo"},
        "launches": launches,
        "command": [],
        "episodes": [],
    }
    pages.print_run({**content, "summary": summed})
    return capsys.readouterr().out


def test_the_tables_hold_rates_latencies_the_fit_and_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(all_episodes(), capsys)
    for expected in (
        *("demo on libero_spatial: 2 tasks x 2 trials, 220 actions at most (limit: openpi)", "preprocess"),
        *("66.7%", "20.8%", "93.9%", "32.00", "47.50", "21.1", "0: the first task", "50% (1/2)"),
        *("denoise time = 2.00 ms + 3.00 ms x steps", "+0.0%", "20 Hz is met: a call takes 20.5 ms (48.8 Hz)."),
    ):
        assert expected in text


def test_the_target_table_names_what_is_too_slow(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed([episode(10, 0, 0, slow=2.0)], capsys)
    # 95 ms in all, 64 of them denoising: 50 - 31 = 19 ms would do.
    assert "19.00" in text and "3.4x" in text and "not enough alone" in text
    assert "20 Hz is not met: a call takes 95.0 ms (10.5 Hz), 1.90x too long." in text
    assert "denoise is the largest part, and making it faster alone can be enough." in text


def test_the_latency_picture_is_a_png_of_stacked_bars(tmp_path: Path) -> None:
    path = figures.draw_result(json.loads(STORED.read_text()), tmp_path / "p" / "x.json")
    assert path is not None and path == str(tmp_path / "p" / "x.latency.png")
    import imageio.v2 as imageio

    picture = np.asarray(imageio.imread(path))[..., :3]
    for colour in (COLOURS["vision"], COLOURS["kv_cache"], COLOURS["denoise"]):
        rgb = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        assert (picture == rgb).all(-1).sum() > 200
    assert len(list((tmp_path / "p").iterdir())) == 1


@pytest.mark.parametrize("ffmpeg", [True, False])
def test_a_video_shows_both_cameras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ffmpeg: bool) -> None:
    if ffmpeg:
        pytest.importorskip("imageio_ffmpeg", reason="no ffmpeg: the GIF case is tested")
    found = figures.find_spec
    monkeypatch.setattr(figures, "find_spec", lambda name: None)
    with pytest.raises(DependencyError, match="pip install imageio"):
        figures.check_video_packages()
    monkeypatch.setattr(figures, "find_spec", lambda name: found(name) if ffmpeg or name == "imageio" else None)
    recorder = figures.VideoRecorder(LIBERO.cameras, every=2, control_hz=LIBERO.control_hz)
    image, wrist = np.full((224, 224, 3), 250, np.uint8), np.zeros((224, 224, 3), np.uint8)
    for _ in range(10):
        recorder.add({"observation/image": image, "observation/wrist_image": wrist})
    path = figures.write_video(recorder, tmp_path / "v" / "rollout")
    assert path.name == ("rollout.mp4" if ffmpeg else "rollout.gif")
    import imageio.v2 as imageio

    frame = np.asarray(imageio.mimread(path)[0])
    assert frame.shape[:2] == (224, 448)
    assert frame[:, :216].min() > 230 and frame[:, 232:].max() < 20
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("name", ["protocol", "policy", "episodes"])
def test_an_incomplete_result_is_refused(tmp_path: Path, name: str) -> None:
    whole, path = json.loads(STORED.read_text()), tmp_path / "half.json"
    for content in ({k: v for k, v in whole.items() if k != name}, whole | {name: 3}):
        path.write_text(json.dumps(content))
        with pytest.raises(ConfigError, match=rf"half\.json: expected a whole result, its {name} is missing"):
            report.read_result(path)
    path.write_text(json.dumps(whole | {"episodes": [{"steps": 3}]}))
    with pytest.raises(ConfigError, match=r"half\.json: .*got an episode of \{'steps': 3\}"):
        report.read_result(path)


@pytest.mark.parametrize("name", ["", "../a", "a/b"])
def test_a_name_to_store_under_is_no_path(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert store.main([str(STORED), "--name", name, "--folder", str(tmp_path)]) == 1
    assert "error: name: expected a file's name without folder" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_script_says_what_it_cannot_read_and_that_it_was_interrupted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(error: BaseException) -> int:
        def raising(_: store.Arguments) -> None:
            raise error

        return run_script("benchmarks.store", store.Arguments, raising, ["a.json", "--name", "a"])

    assert run(FileNotFoundError(2, "No such file or directory", "task_00.npz")) == 1
    assert capsys.readouterr().err == "error: task_00.npz: No such file or directory\n"
    assert run(KeyboardInterrupt()) == 130 and capsys.readouterr().err == "interrupted\n"
    with pytest.raises(OSError, match="a mistake of ours"):
        run(OSError("a mistake of ours"))


def test_a_script_that_is_interrupted_while_it_imports_says_so(tmp_path: Path) -> None:
    """Its first import here is a package that presses Ctrl-C; what goes wrong otherwise keeps its traceback."""
    for work, said, status in (
        ("raise KeyboardInterrupt", "interrupted\n", 130),
        ("raise ImportError('broken')", "Traceback .*ImportError: broken\n", 1),
    ):
        (tmp_path / "numpy.py").write_text(work)
        done = subprocess.run(
            [sys.executable, "-B", "-m", "eval.merge"], capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )  # fmt: skip
        assert done.returncode == status and re.fullmatch(said, done.stderr, re.DOTALL), done.stderr


def test_a_program_that_imports_eval_keeps_its_own_end() -> None:
    program = "import sys, eval\nassert sys.excepthook is sys.__excepthook__"
    subprocess.run([sys.executable, "-c", program], check=True)
