"""The harness on a benchmark that it does not know: plan, processes, a kill, the report and pairs."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import store
from eval import paired
from eval.harness.protocol import Protocol
from tests.support import toy_benchmark as toy
from tests.support.toy_command import main

ROOT = Path(__file__).parents[2]
PLAN = [(task, trial) for task in range(3) for trial in range(2)]
WON = [True, True, True, True, False, False]  # the third goal is out of reach


def played(output: Path) -> dict[str, Any]:
    return json.loads(output.read_text())


def outcomes(result: Mapping[str, Any]) -> list[tuple[int, int, bool, int, str | None]]:
    """Each episode's task, trial, success, actions and error."""
    return [(e["task_id"], e["trial"], e["success"], e["env_steps"], e["error"]) for e in result["episodes"]]


@pytest.mark.slow
def test_processes_play_the_plan_and_the_result_is_that_of_one_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    results = []
    for workers in (1, 2):
        output = tmp_path / f"{workers}.json"
        assert main(["--expert", "--workers", str(workers), "--output", str(output)]) == 0
        results.append(played(output))
    one, two = results
    assert outcomes(one) == outcomes(two)
    assert [(task, trial, won) for task, trial, won, _, _ in outcomes(two)] == [
        (*episode, won) for episode, won in zip(PLAN, WON, strict=True)
    ]
    assert {steps for _, _, won, steps, _ in outcomes(two) if not won} == {toy.MAX_STEPS}
    assert two["schema"] == "vla_accel.toy.result/1" and two["fingerprint"] == one["fingerprint"]
    assert (two["protocol"]["step"], two["protocol"]["max_steps_source"]) == (toy.STEP, "the benchmark")
    (row,) = two["summary"]["rows"]
    assert (row["success"]["successes"], row["success"]["episodes"]) == (4, 6)
    assert [(t["task"], t["successes"]) for t in row["tasks"]][1:] == [("go to -0.7", 2), ("go to 3.0", 0)]
    line = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert line["benchmark"] == "toy" and line["rows"][0]["rate"] == pytest.approx(4 / 6)


@pytest.mark.slow
def test_a_killed_run_resumes_and_plays_each_episode_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output, log = tmp_path / "run.json", tmp_path / "run.episodes.jsonl"
    words = ["--expert", "--workers", "2", "--output", str(output)]
    script = tmp_path / "run.py"
    script.write_text(
        "import sys\n"
        "if __name__ == '__main__':\n"
        "    from tests.support import toy_command, toy_deadly\n"
        "    toy_command.main(sys.argv[1:], toy_deadly.DEADLY)\n"
    )
    env = {**os.environ, "TOY_LOG": str(log), "PYTHONPATH": str(ROOT)}
    # Returns when nobody holds the pipes any more: no worker may outlive the run.
    done = subprocess.run([sys.executable, str(script), *words], env=env, capture_output=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert not output.exists()
    before = [line for line in log.read_text().splitlines() if '"kind":"episode"' in line]
    assert 1 <= len(before) < len(PLAN)
    with open(log, "a") as file:  # a kill in the middle of a write leaves half a line
        file.write('{"kind":"episode","steps":null,"task_')

    assert main(words) == 0
    err = capfd.readouterr().err
    assert f"{len(before)} of 6 episodes are on record" in err and "dropped the last line" in err
    result = played(output)
    assert [episode[:3] for episode in outcomes(result)] == [
        (*episode, won) for episode, won in zip(PLAN, WON, strict=True)
    ]
    after = [line for line in log.read_text().splitlines() if '"kind":"episode"' in line]
    assert after[: len(before)] == before and len(after) == len(PLAN)
    assert len(result["launches"]) == 2 and {e["launch"] for e in result["episodes"]} == {0, 1}


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_run_goes_on_later(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output, log = tmp_path / "run.json", tmp_path / "run.episodes.jsonl"
    assert main(["--expert", "--output", str(output)]) == 0
    room = sum(map(len, log.read_text().splitlines(keepends=True)[:-2])) + 20
    output.unlink()
    log.unlink()
    code = "import sys; from tests.support import toy_command; sys.exit(toy_command.main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "--expert", "--output", str(output)], cwd=ROOT, capture_output=True, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room)),
    )  # fmt: skip
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert last == f"error: {log}: cannot be written: File too large; the same command goes on from what it holds"
    held = log.read_text().splitlines(keepends=True)
    assert 2 < len(held) < 2 + len(PLAN) and held[-1].endswith("}\n") and not output.exists()
    assert main(["--expert", "--output", str(output)]) == 0
    assert "dropped" not in capfd.readouterr().err and log.read_text().startswith("".join(held))
    assert [episode[:3] for episode in outcomes(played(output))] == [
        (*episode, won) for episode, won in zip(PLAN, WON, strict=True)
    ]


@pytest.mark.slow
def test_a_served_policy_is_timed_and_two_of_them_are_paired(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wire = pytest.importorskip("tests.support.openpi_wire")

    def policy(backwards: bool) -> Any:
        """Walks to the goal, but one of the two cannot go backwards."""

        def answer(obs: dict[str, Any]) -> bytes:
            assert obs["prompt"].startswith("go to ")
            action = np.clip(obs["to_go"] / toy.STEP, -1.0 if backwards else 0.0, 1.0)
            # Both parts are named as no policy here names its own.
            timing = {"eyes_ms": 2.0, "hands_ms": 5.0, "total_ms": 7.0}
            return wire.openpi_pack({"actions": np.tile(action, (5, 1)), "policy_timing": timing})

        return answer

    for name, backwards in (("whole", True), ("half", False)):
        with wire.serving(policy(backwards)) as address:
            words = ["--policy", address, "--replan", "1", "--output", str(tmp_path / f"{name}.json")]
            assert main([*words, "--workers", "2"] if backwards else words) == 0
    whole = played(tmp_path / "whole.json")
    assert [won for _, _, won, _, _ in outcomes(whole)] == WON
    (row,) = whole["summary"]["rows"]
    parts = row["breakdown"]["components"]
    assert list(parts) == ["eyes", "hands", "total"] and parts["hands"]["mean_ms"] == 5.0
    assert list(row["target"]["components"]) == ["eyes", "hands"]
    capfd.readouterr()

    report = tmp_path / "paired.json"
    names = [str(tmp_path / f"{name}.json") for name in ("whole", "half")]
    assert paired.main([*names, "--output", str(report)]) == 0
    found = played(report)
    assert found["schema"] == "vla_accel.toy.paired/1" and found["protocol"]["step"] == toy.STEP
    (pairs,) = found["rows"]
    assert [pairs[k] for k in ("pairs", "both", "lost", "gained", "neither")] == [6, 2, 2, 0, 2]
    assert [(d["task_id"], d["won_by"]) for d in pairs["discordant"]] == [(1, "reference")] * 2


def test_any_benchmarks_result_is_stored(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "run.json"
    assert main(["--expert", "--output", str(output)]) == 0
    assert store.main([str(output), "--name", "toy", "--note", "why", "--folder", str(tmp_path / "results")]) == 0
    kept, whole = played(tmp_path / "results" / "toy.json"), played(output)
    assert kept["note"] == "why" and kept["summary"] == whole["summary"] and outcomes(kept) == outcomes(whole)
    assert str(tmp_path) not in json.dumps(kept)
    capfd.readouterr()
    assert store.main([str(tmp_path / "run.episodes.jsonl"), "--name", "toy"]) == 1
    assert "expected a readable evaluation result" in capfd.readouterr().err


def test_what_a_benchmark_does_not_have_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--expert"], replace(toy.TOY, make_expert=None)) == 2
    assert main(["--expert", "--video", "films"]) == 2
    said = capfd.readouterr()
    assert said.out == "" and said.err == "error: expert: toy has none\nerror: video: toy has no cameras\n"
    assert list(tmp_path.iterdir()) == []


def test_another_benchmarks_files_are_not_taken_for_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--expert", "--output", str(tmp_path / "run.json")]
    assert main(words) == 0
    other = replace(toy.TOY, name="line")
    assert main(words, other) == 2
    assert "expected a header of schema 'vla_accel.line.log/1', got 'vla_accel.toy.log/1'" in capfd.readouterr().err
    assert main(["--expert", "--output", str(tmp_path / "other.json")], other) == 0
    assert paired.main([str(tmp_path / "run.json"), str(tmp_path / "other.json")]) == 1
    assert "expected one benchmark, got line, toy" in capfd.readouterr().err


def test_a_setting_must_not_hide_a_rule() -> None:
    from vla_accel.errors import ConfigError

    with pytest.raises(ConfigError, match=r"other names than the protocol's own, got \['seed'\]"):
        Protocol("line", tasks=(0,), trials=1, steps=(None,), max_steps=1, settings={"seed": 3})
