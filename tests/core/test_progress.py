"""Progress on standard error: a bar on a terminal, lines every few seconds elsewhere."""

from __future__ import annotations

import io
import sys
import threading
import time

import pytest

from vla_accel import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter([0.0, 4.0, 6.0, 7.0, 10.0, 11.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    now = [next(clock)]
    with progress.shown("loading") as advance:
        for now[0] in clock:
            advance(1, 5)
    printed = capsys.readouterr()
    assert not printed.out
    assert printed.err.splitlines() == ["loading: 40 %", "loading: 100 %"], "five seconds after the start, and the last"


@pytest.mark.parametrize(("size", "found"), [(False, "100%"), (True, "3.0/3.0 KiB")])
def test_a_terminal_gets_a_bar_that_disappears(
    size: bool, found: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with progress.shown("loading", size=size) as advance:
        for _ in range(3):
            advance(1024, 3072)
    said = terminal.getvalue()
    assert "loading" in said and found in said
    assert said.endswith("\x1b[2K"), "the bar's line is wiped when it is done"
    assert not capsys.readouterr().out


def test_a_running_block_is_reported_until_it_ends_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "INTERVAL_S", 0.01)
    lines: list[str] = []
    several = threading.Event()

    def say(text: str) -> None:
        lines.append(text)
        if len(lines) > 2:
            several.set()

    with pytest.raises(ZeroDivisionError), progress.going_on("compiling", say):
        assert several.wait(60)
        raise ZeroDivisionError
    count = len(lines)
    time.sleep(0.1)
    assert lines[0] == "compiling" and all(t.endswith(" s so far") for t in lines[1:]) and len(lines) == count
