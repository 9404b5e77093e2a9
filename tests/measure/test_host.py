"""What other processes did while something was timed: heard from the system's clock of all cores and this process's."""

from __future__ import annotations

from pathlib import Path

import pytest

from vla_accel.measure import host
from vla_accel.measure.host import Others, busy_host, busy_s


def test_the_clock_of_all_cores_counts_what_was_not_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf", {"SC_CLK_TCK": 100}.__getitem__)
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 20 30 9999 777 4 6 55 0 0\ncpu0 1 1 1 1 1 1 1 0 0 0\n")
    assert busy_s(stat) == 1.6
    assert busy_s(tmp_path / "elsewhere") is None


@pytest.mark.parametrize(("busy", "own", "want"), [((100.0, 130.0), 10.0, 2.0), ((100.0, 109.0), 10.0, 0.0)])
def test_what_this_process_does_is_not_counted(
    busy: tuple[float, float], own: float, want: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In ten seconds; the system's clock ticks more coarsely, and may lag."""
    clocks = {"perf_counter": iter((0.0, 10.0)), "process_time": iter((5.0, 5.0 + own))}
    for name, times in clocks.items():
        monkeypatch.setattr(host.time, name, times.__next__)
    monkeypatch.setattr(host, "busy_s", iter(busy).__next__)
    others = Others()
    found = others.cores()
    monkeypatch.undo()
    assert found == want


def test_where_no_one_tells_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "busy_s", lambda: None)
    assert Others().cores() is None
    for quiet in ({}, {"cores": 16, "others_busy": None}, {"cores": 16, "others_busy": 1.6}):
        assert busy_host(quiet) == ""


def test_a_busy_machine_is_named() -> None:
    assert busy_host({"cores": 32, "others_busy": 21.44}).startswith(
        "other processes kept 21.4 of 32 cores busy during the run"
    )
