"""Several suites in one run: each reported apart and all together, resumed, compared, the same episodes as alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval import paired
from eval.harness.benchmark import Suite
from eval.harness.protocol import EpisodeKey, Protocol
from eval.harness.rollout import EpisodeResult
from eval.harness.statistics import smallest_difference
from tests.support import toy_benchmark as toy
from tests.support.toy_command import main
from vla_accel.errors import ConfigError

LIMITS = {"line": toy.MAX_STEPS, "long": 40, "short": 6}
"""The third goal is in reach of the long suite only."""


def load(name: str) -> Suite:
    suite = toy.load_suite(name)
    return replace(suite, tasks=suite.tasks[:2] if name == "short" else suite.tasks, max_steps=LIMITS[name])


SEVERAL = replace(toy.TOY, suites=tuple(LIMITS), load_suite=load, expert_suites=tuple(LIMITS))


def run(output: Path, *words: str) -> dict[str, Any]:
    assert main(["--expert", "--output", str(output), *words], SEVERAL) == 0
    return json.loads(output.read_text())


def test_each_suite_has_a_rate_and_so_have_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    both = run(tmp_path / "both.json", "--suite", "line,long")
    line = json.loads(capfd.readouterr().out)
    assert both["protocol"]["suite"] == "line,long" == line["suite"]
    assert both["protocol"]["max_steps"] == [toy.MAX_STEPS, 40]
    (row,) = both["summary"]["rows"]
    assert [(s["suite"], s["successes"], s["episodes"]) for s in row["suites"]] == [("line", 4, 6), ("long", 6, 6)]
    assert (row["success"]["successes"], row["success"]["episodes"]) == (10, 12)
    assert [(t["suite"], t["task_id"], t["successes"]) for t in row["tasks"]] == [
        *(("line", i, n) for i, n in enumerate((2, 2, 0))),
        *(("long", i, 2) for i in range(3)),
    ]
    for name in ("line", "long"):
        alone = run(tmp_path / f"{name}.json", "--suite", name)
        mine = [
            {k: v for k, v in e.items() if k not in ("suite", "wall_s")} for e in both["episodes"] if e["suite"] == name
        ]
        assert mine == [{k: v for k, v in e.items() if k != "wall_s"} for e in alone["episodes"]]
        assert "suites" not in alone["summary"]["rows"][0] and "suite" not in alone["episodes"][0]


def test_the_table_shows_suites_and_their_sum(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "both.json", "--suite", "line,long", "--tasks", "1-2")
    err = " ".join(capfd.readouterr().err.split())
    assert "long 2: go to 3.0" in err
    assert "2 tasks of each x 2 trials, 12 and 40 actions at most" in err
    for cells in (
        "line, own steps │ 2 │ 4 │ 50.0% │",
        "long, own steps │ 4 │ 4 │ 100.0% │",
        "own steps │ 6 │ 8 │ 75.0% │",
    ):
        assert cells in err


def test_a_run_of_several_suites_resumes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output, log = tmp_path / "both.json", tmp_path / "both.episodes.jsonl"
    first = run(output, "--suite", "line,long")
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:9]))  # header, launch and seven episodes
    capfd.readouterr()
    again = run(output, "--suite", "line,long")
    assert "7 of 12 episodes are on record" in capfd.readouterr().err
    outcomes = [[(e["suite"], e["task_id"], e["trial"], e["env_steps"]) for e in r["episodes"]] for r in (first, again)]
    assert outcomes[0] == outcomes[1]


def test_comparisons_have_a_row_a_suite(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    whole = run(tmp_path / "whole.json", "--suite", "line,long")
    for episode in whole["episodes"]:
        episode["success"] = episode["success"] and episode["suite"] == "line"
    (tmp_path / "worse.json").write_text(json.dumps(whole))
    capfd.readouterr()
    names = [str(tmp_path / f"{name}.json") for name in ("whole", "worse")]
    assert paired.main([*names, "--output", str(tmp_path / "paired.json")]) == 0
    (row,) = json.loads((tmp_path / "paired.json").read_text())["rows"]
    assert (row["pairs"], row["lost"]) == (12, 6)
    assert [(s["suite"], s["pairs"], s["lost"]) for s in row["suites"]] == [("line", 6, 0), ("long", 6, 6)]
    assert {d["suite"] for d in row["discordant"]} == {"long"} and len(row["discordant"]) == 6
    run(tmp_path / "line.json", "--suite", "line")
    capfd.readouterr()
    assert paired.main([names[0], str(tmp_path / "line.json")]) == 1
    assert "line: expected suite 'line,long' as in whole, got 'line'" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("line,lang", "suite: expected one of line, long, short, got 'lang': did you mean long?"),
        ("line,line", "suite: expected distinct suites, got 'line,line'"),
        ("line,short", "suite: expected suites of equally many tasks, or --tasks, got {'line': 3, 'short': 2}"),
        ("line,short --tasks 2", "tasks: expected indices 0 to 1, got 2 in '2'"),
        ("line,", "suite: expected one of line, long, short, got ''"),
    ],
)
def test_suites_that_cannot_be_one_run(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--expert", "--suite", *words.split()], SEVERAL) == 2
    assert capfd.readouterr().err == f"error: {message}\n" and list(tmp_path.iterdir()) == []


def test_a_protocol_of_several_suites_is_read_back_and_an_episode_says_its_suite() -> None:
    protocol = Protocol("line,long", (0, 2), 1, (None,), (12, 40), settings={"step": 0.1})
    assert Protocol.from_json(protocol.to_json()) == protocol
    keys = protocol.plan()
    assert [(key.suite, key.task_id, protocol.limit(key)) for key in keys] == [
        ("line", 0, 12), ("line", 2, 12), ("long", 0, 40), ("long", 2, 40)
    ]  # fmt: skip
    result = EpisodeResult(keys[2], True, 5, None, 1.0, 0)
    assert EpisodeResult.from_json(result.to_json()).key == keys[2] and str(keys[2]) == "long task 0, trial 0"
    assert Protocol("line", (0,), 1, (None,), 12).plan() == (EpisodeKey(None, 0, 0),)
    with pytest.raises(ConfigError, match=r"max_steps: expected one for each of line,long, got \[12\]"):
        Protocol("line,long", (0,), 1, (None,), (12,))


@pytest.mark.parametrize(("pairs", "discordant"), [(1000, 100), (400, 200)])
def test_the_smallest_difference_is_found_in_four_of_five_runs(pairs: int, discordant: int) -> None:
    difference, share = smallest_difference(pairs, discordant), discordant / pairs
    assert difference is not None
    shares = [(share + difference) / 2, (share - difference) / 2, 1 - share]
    lost, gained, _ = np.random.default_rng(0).multinomial(pairs, shares, size=20_000).T
    assert np.mean((lost - gained) ** 2 > 1.96**2 * (lost + gained)) == pytest.approx(0.8, abs=0.02)


def test_more_pairs_see_more_and_too_few_see_nothing() -> None:
    seen = [smallest_difference(n, n // 10) for n in (100, 400, 1600)]
    assert all(seen) and seen == sorted(seen, reverse=True)  # type: ignore[type-var]
    # Of nothing but lost pairs eight are needed, or so.
    assert smallest_difference(500, 0) == pytest.approx(8 / 500, rel=0.05)
    assert smallest_difference(0, 0) is None and smallest_difference(3, 0) is None
