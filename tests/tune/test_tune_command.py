"""`vla-accel tune` end to end on a small real policy: files, gates, continuing, a benchmark by name, bad input."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.published_folders import write_openpi
from tests.support.reports import figures_in
from tests.support.tiny import write_robot, write_tiny_checkpoint
from tests.tune.test_candidates import FLOW
from vla_accel.cli import main, tune
from vla_accel.cli.tune import Tune, find_benchmark
from vla_accel.config import PolicyConfig, load_config
from vla_accel.errors import ConfigError
from vla_accel.measure.recording import save_observations
from vla_accel.policy import OptimizedPolicy
from vla_accel.tune import candidates
from vla_accel.tune.measuring import PolicyBench
from vla_accel.tune.search import Candidate


class Coins:
    """Episodes that everybody wins."""

    name = "coins"
    keys = tuple(f"coin {i}" for i in range(400))

    def __init__(self, checkpoint: str, **options: Any) -> None:
        self.options = options

    def play(self, candidate: Candidate, keys: Sequence[str]) -> Iterator[tuple[str, bool | None]]:
        assert OptimizedPolicy.from_pretrained  # a real one would load candidate.config
        return iter([(key, True) for key in keys])

    def film(self, candidate: Candidate, key: str) -> Path | None:
        return None


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tune") / "checkpoint"
    write_tiny_checkpoint(folder)
    return folder


def observations(checkpoint: Path) -> list[dict[str, Any]]:
    """Of two tasks, whose prompts differ in length."""
    example = OptimizedPolicy.from_pretrained(checkpoint, device="cpu", num_steps=1).processor.example
    rng = np.random.default_rng(0)
    return [
        {**example(prompt), "observation/image": rng.integers(0, 256, (224, 224, 3), np.uint8)}
        for prompt in ("pick up the bowl", "place it")
    ]


@pytest.mark.slow
def test_candidates_are_measured_against_the_same_answers(checkpoint: Path) -> None:
    seen = observations(checkpoint)
    base = PolicyConfig(num_steps=2, device="cpu", strict=True)
    parts = ("vision", "kv_cache", "denoise")
    reference = candidates.reference(base, parts)
    bench = PolicyBench(str(checkpoint), reference, seen, draws=2, calls=2)
    eager = Candidate("eager", replace(reference.config, precision="bf16"), "")
    found = bench.agreement(eager)
    itself = bench.agreement(reference)
    assert itself["passed"] and itself["cosine"] == pytest.approx(1.0) and 0.9 < found["cosine"] < 1.0
    assert found["passed"] == (not found["reasons"]) and found["relative_error"] > itself["relative_error"]
    assert found["chunks"] == 4 and found["engines"][0]["used"] == "eager"
    fewer = bench.agreement(Candidate("fewer", reference.config.with_steps(3, (1.0, 0.3, 0.1, 0.0)), ""))
    assert fewer["passed"] and fewer["cosine"] == pytest.approx(1.0), "FP32 eager takes the candidate's steps, too"
    row = bench.latency(eager)
    assert row["median_ms"] > 0 and row["calls"] == 2 and "vision" in row["parts_ms"]
    both = bench.in_turns(eager)
    assert both["median_ms"] > 0 and both["reference_ms"] > 0 and both["calls"] == 2
    assert bench.lower()["vision"] == {} and "native" in bench.lower()["denoise"], "no scales: weights only"


@pytest.mark.slow
def test_tune_finds_writes_and_continues(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = observations(checkpoint) * 4
    save_observations(seen, tmp_path / "observations.npz")
    out = tmp_path / "out"
    judged: list[Any] = []
    monkeypatch.setattr(PolicyBench, "flow", lambda self, steps, progress: judged.append(steps) or FLOW)
    words = [
        "tune", str(checkpoint), "--observations", str(tmp_path / "observations.npz"), "--quick", "--num-steps", "2",
        "--calls", "2", "--device", "cpu", "--output", str(out), "--benchmark",
        "tests.tune.test_tune_command:Coins", "--allow-steps", "1",
    ]  # fmt: skip
    monkeypatch.setattr("vla_accel.measure.host.Others.cores", lambda self: 500.0)
    assert main(words) == 0
    captured = capsys.readouterr()
    assert "warning: other processes kept 500.0 of " in captured.err
    assert "continuing" not in captured.err
    line = json.loads(captured.out.splitlines()[-1])
    result = json.loads((out / "tune.json").read_text())
    assert f"configuration: {out}/tuned.yaml, as in `vla-accel serve {checkpoint} --config " in captured.err
    assert f"report: {out}/report.html" in captured.err
    assert [row["name"] for row in result["tried"]][:2] == ["eager_fp32", "eager bf16"]
    assert result["left_out"].keys() >= {"native", "tensorrt"}
    bf16 = result["tried"][1]
    assert judged == [(5, 4, 3, 2, 1)] and result["flow"] == FLOW
    (fewer,) = [row for row in result["tried"] if row["name"].endswith(", 1 uniform")]
    assert (
        not fewer["other_policy"] and fewer["agreement"]["cosine"] > 0.99 and fewer["config"]["schedule"] == "uniform"
    )
    assert bf16["agreement"]["cosine"] > 0.99 and bf16["latency"]["median_ms"] > 0 and bf16["latency"]["calls"] == 2
    assert result["settings"]["benchmark"] == "coins" and line["chosen"] == result["chosen"]
    # The file runs as it is.
    config = load_config(out / "tuned.yaml")
    chosen = next(row for row in result["tried"] if row["chosen"])
    assert config.num_steps == chosen["config"].get("num_steps", 10)
    assert OptimizedPolicy.from_pretrained(checkpoint, out / "tuned.yaml").infer(seen[0])
    found = figures_in((out / "report.html").read_text())
    assert {row["latency"]["median_ms"] for row in result["tried"]} <= found
    assert chosen["name"] == "eager_fp32" or {chosen["success"]["lower_bound"]} <= found
    # The same command measures nothing again.
    monkeypatch.setattr("vla_accel.measure.bench.run", lambda *a, **k: pytest.fail("timed twice"))
    monkeypatch.setattr("vla_accel.measure.parity.compare", lambda *a, **k: pytest.fail("compared twice"))
    assert main(words) == 0
    assert f"continuing {out}/journal.jsonl: " in capsys.readouterr().err
    again = json.loads((out / "tune.json").read_text())
    # What took no time now did so in an earlier launch.
    assert result["measured_before"] == 0 < again["measured_before"]
    assert f">{again['measured_before']}</" in (out / "report.html").read_text()
    assert again["tried"] == result["tried"] and len(judged) == 1


def test_a_journal_is_of_one_robot_and_one_checkpoint(tmp_path: Path) -> None:
    folder, robot = tmp_path / "openpi", write_robot(tmp_path / "robot.yaml")
    write_openpi(folder, "pi05")
    base = PolicyConfig(preset=str(robot), device="cpu")

    def about() -> dict[str, Any]:
        return tune._about(Tune(str(folder)), str(folder), base, None)

    first = about()
    (folder / "parity_mine.json").write_text("{}")
    assert about() == first, "kept reports decide nothing in a search"
    (statistics,) = folder.glob("assets/**/norm_stats.json")
    statistics.write_text(statistics.read_text().replace("0.5", "0.6"))
    second = about()
    assert first["checkpoint"] != second["checkpoint"] and first["robot"] == second["robot"]
    robot.write_text(robot.read_text().replace("front, wrist", "wrist, front"))
    assert about()["robot"] != second["robot"] and about()["checkpoint"] == second["checkpoint"]


def test_a_suite_that_is_not_there_leaves_the_journal_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*_: Any, **__: Any) -> Any:
        raise ConfigError("suite: expected another")

    monkeypatch.setattr("vla_accel.cli.tune.find_benchmark", lambda name: opened)
    words = ["tune", "demo", "--device", "cpu", "--quick", "--benchmark", "toy", "--output", str(tmp_path)]
    assert main(words) == 1 and not list(tmp_path.iterdir())
    journal = tmp_path / "journal.jsonl"
    journal.write_text("evidence")
    assert main([*words, "--overwrite"]) == 1 and journal.read_text() == "evidence"
    assert capsys.readouterr().err.count("suite: expected another") == 2


def test_libero_is_found_by_its_name() -> None:
    from eval.libero.tune import episodes

    assert find_benchmark("libero") is episodes
    for name in ("os:getcwd", "os:nothing", "os:path", "nothing", "no-name:of python"):
        with pytest.raises(ConfigError, match=f"benchmark: expected libero or MODULE:FUNCTION, got '{name}'"):
            find_benchmark(name)
