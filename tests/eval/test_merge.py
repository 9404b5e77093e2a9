"""Jobs play a part of the plan each; the parts make one result, or an error that says which does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval import merge, paired
from eval.harness.protocol import Protocol, Shard
from tests.support import toy_benchmark as toy
from tests.support.toy_command import main
from vla_accel.errors import ConfigError

PLAN = Protocol("line", tasks=(0, 1, 2), trials=2, steps=(1, 3), max_steps=6).plan()


@pytest.mark.parametrize("count", [1, 5, 12])
def test_the_shards_of_a_plan_are_the_plan(count: int) -> None:
    parts = [Shard(number, count).part(PLAN) for number in range(1, count + 1)]
    assert tuple(key for part in parts for key in part) == PLAN
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_bad_shard_is_named() -> None:
    assert Shard.parse("3/16") == Shard(3, 16)
    for text in ("0/4", "5/4", "3", "a/4", "-1/4", "1/0"):
        with pytest.raises(ConfigError, match=f"shard: expected a part such as 3/16, counted from 1, got '{text}'"):
            Shard.parse(text)
    with pytest.raises(ConfigError, match="expected at most 12 parts of 12 episodes, got 1/13"):
        Shard(1, 13).part(PLAN)


def played(folder: Path, name: str, *words: str) -> Path:
    output = folder / f"{name}.json"
    assert main(["--expert", "--output", str(output), *words]) == 0
    return output


def merged(output: Path, *parts: Path) -> int:
    return merge.main([*map(str, parts), "--output", str(output)])


def without_times(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [{k: v for k, v in episode.items() if k not in ("wall_s", "launch")} for episode in result["episodes"]]


def test_merged_parts_are_the_run_of_one_job(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    whole = played(tmp_path, "whole")
    parts = [played(tmp_path, f"part{i}", "--shard", f"{i}/3") for i in (1, 2, 3)]
    capfd.readouterr()
    assert merged(tmp_path / "merged.json", *reversed(parts)) == 0
    out, err = capfd.readouterr()
    one, all_parts = (json.loads(path.read_text()) for path in (whole, tmp_path / "merged.json"))
    assert without_times(all_parts) == without_times(one)
    assert [row["success"] for row in all_parts["summary"]["rows"]] == [r["success"] for r in one["summary"]["rows"]]
    assert "shard" not in all_parts and len(all_parts["launches"]) == 3
    assert {episode["launch"] for episode in all_parts["episodes"]} == {0, 1, 2}
    assert all_parts["episodes"][0]["launch"] == 2, "the first episodes are those of the part that was named last"
    assert json.loads(out)["episodes"] == 6 and "3 tasks x 2 trials, 12 actions" in err
    assert paired.main([str(whole), str(tmp_path / "merged.json")]) == 0


def test_parts_that_do_not_make_one_run_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first, second, third = (played(tmp_path, f"part{i}", "--shard", f"{i}/3") for i in (1, 2, 3))
    halves = played(tmp_path, "half", "--shard", "2/2")
    seed = played(tmp_path, "seed", "--shard", "3/3", "--seed", "8")
    capfd.readouterr()
    for parts, message in (
        ((first, third), "expected all 6 episodes of the run, no part has task 1, trial 0; task 1, trial 1"),
        (
            (first, second, halves),
            f"{halves}: expected no episode of another part, {second} also has task 1, trial 1",
        ),
        ((first, second, seed), f"{seed} is not of the same run as {first}: protocol.seed was 7, now 8"),
        ((first, first), "parts: expected different result files"),
        ((tmp_path / "part1.episodes.jsonl",), "expected a readable evaluation result"),
    ):
        assert merged(tmp_path / "merged.json", *parts) == 1
        out, err = capfd.readouterr()
        assert out == "" and message in err
    assert not (tmp_path / "merged.json").exists()
    kept = first.read_bytes()
    for command in (merge.main, paired.main):
        assert command([str(third), str(first), "--output", f"{first.parent}/../{tmp_path.name}/{first.name}"]) == 1
        assert "output: expected another file than those that are read, got " in capfd.readouterr().err
        assert command([str(third), str(first), "--output", str(first.with_suffix(".episodes.jsonl"))]) == 1
        assert "output: expected another file than those that are read, got " in capfd.readouterr().err
    assert first.read_bytes() == kept


@pytest.mark.slow
def test_latencies_of_the_parts_are_summarised_together(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wire = pytest.importorskip("tests.support.openpi_wire")

    def answer(obs: dict[str, Any]) -> bytes:
        action = np.clip(obs["to_go"] / toy.STEP, -1, 1)
        timing = {"eyes_ms": 2.0, "total_ms": 2.0}
        return wire.openpi_pack({"actions": np.tile(action, (5, 1)), "policy_timing": timing})

    with wire.serving(answer) as address:
        for i in (1, 2):
            words = ["--policy", address, "--replan", "1", "--shard", f"{i}/2", "--output", str(tmp_path / f"{i}.json")]
            assert main(words) == 0
    capfd.readouterr()
    assert merged(tmp_path / "merged.json", tmp_path / "1.json", tmp_path / "2.json") == 0
    (row,) = json.loads(capfd.readouterr().out.splitlines()[-1])["rows"]
    assert row["components_ms"] == {"eyes": 2.0, "total": 2.0} and row["mean_ms"] == 2.0
    results = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("1", "2", "merged")]
    one, two, both = (result["summary"]["rows"][0]["breakdown"] for result in results)
    assert both["samples"] == one["samples"] + two["samples"] and both["components"]["eyes"]["mean_ms"] == 2.0
    assert results[2]["figure"] == str(tmp_path / "merged.latency.png") and Path(results[2]["figure"]).exists()


def test_a_shard_has_a_name_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--expert", "--shard", "2/3"]) == 0
    line = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert line["shard"] == "2/3" and "expert-line-shard2of3-" in line["output"]
    assert main(["--expert", "--shard", "2/7"]) == 2
    assert "shard: expected at most 6 parts of 6 episodes, got 2/7" in capfd.readouterr().err
