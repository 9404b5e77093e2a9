"""Timings: percentiles and shares by hand, the breakdown's schema, the stopwatch."""

from __future__ import annotations

import json
import subprocess
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import vla_accel
from vla_accel import latency, machine
from vla_accel.latency import LatencyLog, Sample, Stopwatch, breakdown, in_turns, summarise
from vla_accel.machine import commit, hardware, software

CPU = torch.device("cpu")


def test_percentiles_means_and_shares_by_hand() -> None:
    # 1..101 ms: the q-th percentile of evenly spaced samples is 1 + q.
    sections = [{"vision": float(i), "denoise": 2.0 * i} for i in range(1, 102)]
    table = summarise(sections, [4.0 * i for i in range(1, 102)])
    assert list(table) == ["vision", "denoise", "total"]
    expected = {"mean_ms": 51.0, "p50_ms": 51.0, "p90_ms": 91.0, "p99_ms": 100.0, "share": 0.25}
    assert table["vision"] == pytest.approx(expected)
    expected = {"mean_ms": 102.0, "p50_ms": 102.0, "p90_ms": 182.0, "p99_ms": 200.0, "share": 0.5}
    assert table["denoise"] == pytest.approx(expected)
    assert table["total"]["mean_ms"] == pytest.approx(204.0) and table["total"]["share"] == 1.0


def test_a_section_missing_from_a_call_counts_as_zero() -> None:
    table = summarise([{"a": 2.0}, {"a": 4.0, "b": 6.0}], [10.0, 10.0])
    assert (table["a"]["mean_ms"], table["b"]["mean_ms"], table["b"]["share"]) == (3.0, 3.0, 0.3)


def test_no_samples_and_no_time() -> None:
    assert summarise([], []) == {} == LatencyLog().components()
    assert summarise([{"a": 0.0}], [0.0])["a"]["share"] == 0.0
    report = breakdown(model={}, engines=[], steps=1, device=CPU, components={}, samples=0)
    assert (report["hz"], report["components"]) == (0.0, {})


def test_the_log_keeps_the_newest() -> None:
    log = LatencyLog(limit=3)
    for i in range(5):
        log.add(Sample({"a": float(i)}, float(i)))
    assert [s.total_ms for s in log.samples] == [2.0, 3.0, 4.0]
    assert log.components()["a"]["mean_ms"] == 3.0
    log.clear()
    assert log.components() == {}


def test_breakdown_schema() -> None:
    components = summarise([{"vision": 10.0, "denoise": 30.0}], [40.0])
    engines: list[dict[str, object]] = [{"component": "vision", "used": "eager"}]
    report = breakdown(model={"name": "m"}, engines=engines, steps=3, device=CPU, components=components, samples=1)
    names = ["schema", "hardware", "software", "model", "engines", "steps", "samples", "components", "hz"]
    assert list(report) == names
    assert report["schema"] == "vla_accel.breakdown/1"
    assert (report["steps"], report["samples"], report["hz"]) == (3, 1, 25.0)
    assert report["engines"] == engines and report["components"] == components
    assert report["hardware"].keys() == {"device", "cpu", "threads"} and report["hardware"]["device"] == "cpu"
    assert hardware(CPU)["cpu"] and hardware(CPU)["threads"] == torch.get_num_threads()
    assert report["software"]["torch"] == torch.__version__ and software()["vla_accel"] == vla_accel.__version__
    assert json.loads(json.dumps(report)) == report


def test_the_commit_is_the_repositorys_or_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLA_ACCEL_COMMIT", "0123456789abcdef+")
    assert commit() == {"commit": "0123456789abcdef", "modified": True}
    assert software()["commit"] == "0123456789ab+"
    monkeypatch.delenv("VLA_ACCEL_COMMIT")
    here = commit()
    assert here is None or len(here["commit"]) == 40


def test_an_installed_package_has_not_the_commit_of_an_outer_repository(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words]
        subprocess.run(command, check=True, capture_output=True)

    (tmp_path / "robot.py").write_text("")
    installed = tmp_path / ".venv" / "vla_accel"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    git("init")
    git("add", "robot.py")
    git("commit", "-m", "a robot")
    assert machine._in_repository(installed) is None
    git("add", ".venv")
    git("commit", "-m", "with all it needs")
    machine._in_repository.cache_clear()
    found = machine._in_repository(installed)
    assert found is not None and found["modified"] is False


def test_the_stopwatch_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def pass_by(ms: float) -> None:
        nonlocal now
        now += ms / 1e3

    monkeypatch.setattr(latency, "time", types.SimpleNamespace(perf_counter=lambda: now))
    watch = Stopwatch(CPU)
    with watch.section("a"):
        pass_by(20)
    with watch.section("b", host=True):
        pass_by(10)
    with watch.section("a"):
        pass_by(25)
    pass_by(5)  # outside of every section, inside the total
    sample = watch.finish()
    assert list(sample.sections) == ["a", "b"]
    assert sample.sections == pytest.approx({"a": 45, "b": 10}) and sample.total_ms == pytest.approx(60)


def test_systems_take_turns_and_the_order_turns() -> None:
    given = iter(range(100))
    seen: list[tuple[str, int]] = []

    def system(name: str) -> Callable[[int], int]:
        return lambda value: seen.append((name, value)) or -value

    settled: list[int] = []
    settle = lambda: settled.append(len(seen))  # noqa: E731
    rows = list(in_turns({n: system(n) for n in "ab"}, lambda: next(given), calls=5, turn=2, settle=settle))
    assert [name for name, _, _ in rows] == [*"aabb", *"bbaa", *"ab"]
    assert [value for _, value in seen] == list(range(10)), "each call has an argument of its own"
    assert [result for _, _, result in rows] == [-value for _, value in seen] and all(ms >= 0 for _, ms, _ in rows)
    assert settled == [n for i in range(10) for n in (i, i + 1)], "before and after every call"
    assert list(in_turns({}, lambda: 0, calls=3)) == []
