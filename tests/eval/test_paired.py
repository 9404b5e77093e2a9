"""Pairing of runs over the same episodes: counts by hand, the exact test, and files that cannot be compared."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from eval import paired
from eval.harness import pairs
from eval.harness.statistics import mcnemar_exact
from vla_accel.errors import ConfigError

CONFIG = {"vision": {"engine": "native"}, "engines": {"unet": {"engine": "eager"}}, "rtc": {"schedule": "x"}, "seed": 0}
RULES = {"suite": "line", "tasks": [4], "trials": 7, "steps": [3, 10], "max_steps": 7, "seed": 7, "step": 7}
WON, LOST, CRASHED = True, False, None


def result(outcomes: Mapping[int, Sequence[bool | None]]) -> dict[str, Any]:
    """A run of one task: step count to the outcomes of its trials."""
    return {
        "schema": "vla_accel.toy.result/1",
        "protocol": dict(RULES),
        "policy": {"name": "demo", "sha256": "ab", "config": CONFIG},
        "launches": [{"hardware": {"gpu": "a GPU"}, "software": {"torch": "2"}, "workers": 3}],
        "episodes": [
            {"steps": s, "task_id": 4, "trial": i, "success": bool(o), "error": None if o is not None else "crash"}
            for s, row in outcomes.items()
            for i, o in enumerate(row)
        ],
    }


def write(folder: Path, name: str, content: Any) -> Path:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content))
    return path


def test_a_servers_run_has_the_steps_and_weights_that_the_server_reports() -> None:
    local, remote = result({3: [WON, LOST]}), result({3: [WON, WON]})
    for episode in remote["episodes"]:
        episode["steps"] = None
    (row,) = pairs.compare(remote, {"two": copy.deepcopy(remote)}, "one")["rows"]
    assert row["steps"] is None and row["pairs"] == 2
    with pytest.raises(ConfigError, match=r"expected episodes at 3 .* got no denoising steps"):
        pairs.compare(local, {"remote": remote}, "local")
    remote["policy"]["metadata"] = {"num_steps": 3, "weights": "abc"}
    report = pairs.compare(local, {"remote": remote}, "local")
    (row,) = report["rows"]
    assert (row["steps"], row["pairs"], row["gained"]) == (3, 2, 1)
    assert report["policies"]["remote"]["weights"] == "abc"


def test_every_pair_is_counted_once_and_errors_stay_apart() -> None:
    one = result({3: [WON, WON, WON, LOST, LOST, CRASHED, WON], 10: [WON] * 7})
    two = result({3: [WON, LOST, LOST, WON, LOST, WON, CRASHED], 10: [WON] * 7})
    low, high = pairs.compare(one, {"two": two}, "one")["rows"]
    assert (low["steps"], high["steps"]) == (3, 10)
    assert [low[k] for k in ("pairs", "both", "lost", "gained", "neither")] == [5, 1, 2, 1, 1]
    assert (low["reference"]["successes"], low["reference"]["episodes"], low["reference"]["errors"]) == (3, 5, 1)
    assert (low["other"]["successes"], low["other"]["episodes"], low["other"]["errors"]) == (2, 5, 1)
    assert low["reference"]["wilson_95_low"] < 0.6 < low["reference"]["wilson_95_high"]
    assert low["mcnemar_exact_p"] == 1.0
    assert [(d["trial"], d["won_by"]) for d in low["discordant"]] == [(1, "reference"), (2, "reference"), (3, "other")]
    assert high["pairs"] == 7 and not high["discordant"] and high["reference"]["errors"] == 0


@pytest.mark.parametrize(
    ("lost", "gained", "p"),
    [(0, 0, 1.0), (1, 0, 1.0), (5, 0, 2 / 32), (0, 5, 2 / 32), (8, 1, 20 / 512), (3, 3, 1.0), (2, 6, 74 / 256)],
)
def test_mcnemar_by_hand(lost: int, gained: int, p: float) -> None:
    assert mcnemar_exact(lost, gained) == pytest.approx(p, rel=1e-12)


def test_mcnemar_of_many_pairs() -> None:
    assert mcnemar_exact(1000, 1000) == 1.0 and 0 < mcnemar_exact(1500, 500) < 1e-100
    with pytest.raises(ConfigError, match=r"at least 0 .*, got -1"):
        mcnemar_exact(-1, 3)


def test_an_unpaired_episode_is_an_error_on_either_side() -> None:
    few, many = result({3: [WON] * 4}), result({3: [WON] * 6})
    message = "few: expected the episodes of many, 2 of them are missing, the first task 4, trial 4, 3 steps"
    for reference, other, names in ((few, many, ("few", "many")), (many, few, ("many", "few"))):
        with pytest.raises(ConfigError, match=message):
            pairs.compare(reference, {names[1]: other}, names[0])


@pytest.mark.parametrize(("mine", "theirs"), [((3, 10), (3,)), ((3,), (1, 3))])
def test_other_denoising_steps_are_named(mine: tuple[int, ...], theirs: tuple[int, ...]) -> None:
    a, b = (result({steps: [WON] * 2 for steps in given}) for given in (mine, theirs))
    listed = [", ".join(map(str, steps)) for steps in (mine, theirs)]
    with pytest.raises(ConfigError, match=f"^b: expected episodes at {listed[0]} .* as in a, got {listed[1]} "):
        pairs.compare(a, {"b": b}, "a")


def test_two_runs_of_one_step_count_each_are_paired_by_task_and_trial() -> None:
    ten, three = result({10: [WON, WON, LOST]}), result({3: [WON, LOST, LOST]})
    (row,) = pairs.compare(ten, {"three": three}, "ten")["rows"]
    assert (row["reference_steps"], row["steps"], row["both"], row["lost"], row["neither"]) == (10, 3, 1, 1, 1)
    assert [(d["trial"], d["won_by"]) for d in row["discordant"]] == [(1, "reference")]


@pytest.mark.parametrize("field", ["max_steps", "seed", "step"])
def test_another_protocol_is_an_error(field: str) -> None:
    one = result({3: [WON]})
    two = copy.deepcopy(one)
    two["protocol"][field] = 8
    with pytest.raises(ConfigError, match=f"two: expected {field} 7 as in one, got 8"):
        pairs.compare(one, {"two": two}, "one")


def test_an_episode_there_twice_is_an_error() -> None:
    one = result({3: [WON]})
    one["episodes"] *= 2
    with pytest.raises(ConfigError, match="one: expected every episode once, got task 4, trial 0, 3 steps twice"):
        pairs.compare(one, {"two": result({3: [WON]})}, "one")
    with pytest.raises(ConfigError, match="two: expected at least one episode, got none"):
        pairs.compare(result({3: [WON]}), {"two": result({})}, "one")


def test_the_command_writes_what_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [write(tmp_path, n, result({3: o})) for n, o in (("a", [WON, LOST]), ("b", [WON, WON]), ("c", [LOST] * 2))]
    output = tmp_path / "out" / "paired.json"
    assert paired.main([*map(str, files), "--output", str(output), "--note", "why"]) == 0
    stored = json.loads(output.read_text())
    assert stored == json.loads(capsys.readouterr().out.splitlines()[-1])
    assert stored["schema"] == "vla_accel.toy.paired/1" and stored["reference"] == "a" and stored["note"] == "why"
    assert [(r["name"], r["lost"], r["gained"]) for r in stored["rows"]] == [("b", 0, 1), ("c", 1, 0)]
    assert stored["policies"]["b"]["asked"] == {"vision": {"engine": "native"}, "unet": {"engine": "eager"}}
    assert str(tmp_path) not in output.read_text()
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert paired.main([*map(str, files)]) == 0
    assert "{" not in capsys.readouterr().out, "it would push the table out of sight"


def test_files_that_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write(tmp_path, "good", result({3: [WON]}))
    other = write(tmp_path, "other", {"schema": "something/1"})
    listed = write(tmp_path, "listed", [])
    for path, message in (
        (other, "expected a result of schema 'vla_accel.BENCHMARK.result/1', got schema 'something/1'"),
        (listed, "got schema None"),
        (
            tmp_path / "missing.json",
            "missing.json: expected a readable evaluation result, got: No such file or directory\n",
        ),
        (good, "expected different names, which the table has, got good, good"),
    ):
        assert paired.main([str(good), str(path), "--output", str(tmp_path / "out.json")]) == 1
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()
    begun = write(tmp_path, "begun", {**result({3: [WON]}), "launches": []})
    assert paired.main([str(good), str(begun)]) == 1
    assert f"{begun}: expected a whole result, its launches is missing or damaged" in capsys.readouterr().err
