"""The episode log survives kills, refuses other runs, and counts nothing twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.harness.log import EpisodeLog
from eval.harness.protocol import EpisodeKey
from eval.harness.rollout import EpisodeResult
from vla_accel.errors import ConfigError

SCHEMA = "vla_accel.toy.log/1"
IDENTITY = {"protocol": {"trials": 3, "seed": 7}, "policy": {"kind": "expert"}}


def result(trial: int, *, error: str | None = None) -> EpisodeResult:
    return EpisodeResult(EpisodeKey(3, 0, trial), not error, 90 + trial, error, 1.5, 2, {"wall": [1.0]})


def open_log(path: Path, warnings: list[str] | None = None, mark: str = "abc") -> EpisodeLog:
    return EpisodeLog(path, SCHEMA, mark, IDENTITY, (warnings if warnings is not None else []).append)


def filled(path: Path, *results: EpisodeResult) -> Path:
    with open_log(path) as log:
        log.begin_launch({"workers": 1})
        for one in results:
            log.append(one)
    return path


def test_what_was_logged_is_there_again(tmp_path: Path) -> None:
    path = filled(tmp_path / "deep" / "log", result(0), result(1, error="ValueError: x"))
    warnings: list[str] = []
    with open_log(path, warnings) as log:
        assert list(log.results.values()) == [result(0), result(1, error="ValueError: x")]
        assert log.launches == [{"workers": 1}]
        log.begin_launch({"workers": 2})
        log.append(result(2))
        assert log.launch_of == {EpisodeKey(3, 0, i): s for i, s in enumerate((0, 0, 1))}
    with open_log(path) as log:
        assert list(log.launch_of.values()) == [0, 0, 1]
    assert warnings == []


@pytest.mark.parametrize("cut", [1, 60])
def test_a_line_cut_by_a_kill_is_dropped_with_a_warning_and_written_anew(tmp_path: Path, cut: int) -> None:
    path = filled(tmp_path / "log", result(0), result(1))
    path.write_bytes(path.read_bytes()[:-cut])
    warnings: list[str] = []
    with open_log(path, warnings) as log:
        assert list(log.results) == [EpisodeKey(3, 0, 0)]
        assert len(warnings) == 1 and "dropped the last line" in warnings[0]
        log.append(result(1))
    with open_log(path, warnings) as log:
        assert list(log.results.values()) == [result(0), result(1)]
    path.write_text('{"kind":"hea')
    with open_log(path, warnings) as log:
        assert log.results == {} and len(warnings) == 2
    assert json.loads(path.read_text())["fingerprint"] == "abc"


def test_an_episode_counts_once(tmp_path: Path) -> None:
    path = filled(tmp_path / "log", result(0))
    with open_log(path) as log, pytest.raises(ConfigError, match="task 0, trial 0, 3 steps"):
        log.append(result(0))
    assert len(path.read_text().splitlines()) == 3
    lost = {**result(0).to_json(), "kind": "episode", "success": False}
    path.write_text(path.read_text() + json.dumps(lost) + "\n")
    warnings: list[str] = []
    with open_log(path, warnings) as log:
        assert list(log.results.values()) == [result(0)]
    assert "appears twice; the first counts" in warnings[0]


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"kind":"episode","steps":3}', '{"kind":"?"}'])
def test_other_damage_is_an_error_that_names_the_line(tmp_path: Path, line: str) -> None:
    path = filled(tmp_path / "log", result(0))
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], line, *lines[2:]]) + "\n")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"log, line 3: .*--overwrite starts afresh"):
        open_log(path)
    assert path.read_bytes() == before


def test_a_log_of_another_run_is_refused_and_says_why(tmp_path: Path) -> None:
    path = filled(tmp_path / "log", result(0))
    other = {"protocol": {"trials": 50, "seed": 7}, "policy": {"kind": "local"}}
    message = r'another run: policy.kind was "expert", now "local"; protocol.trials was 3, now 50\.'
    with pytest.raises(ConfigError, match=message):
        EpisodeLog(path, SCHEMA, "def", other, [].append)


def test_two_processes_cannot_write_one_log(tmp_path: Path) -> None:
    path = filled(tmp_path / "log", result(0))
    with open_log(path), pytest.raises(ConfigError, match="another process is writing"):
        open_log(path)
    open_log(path).close()


def test_errors_can_be_struck_to_run_again(tmp_path: Path) -> None:
    path = filled(tmp_path / "log", result(0), result(1, error="ValueError: x"), result(2))
    with open_log(path) as log:
        assert log.forget_errors() == 1
        assert log.forget_errors() == 0
        with pytest.raises(ConfigError, match="another process is writing"):
            open_log(path)  # the new file is locked like the old one
        log.append(result(1))
    with open_log(path) as log:
        assert list(log.results.values()) == [result(0), result(2), result(1)]
