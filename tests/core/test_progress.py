"""How far something is: a bar that goes on a terminal, lines now and then elsewhere; on standard error alone."""

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


def test_a_pipe_gets_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
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
def test_a_terminal_gets_a_bar_that_goes(
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


def test_what_has_no_end_says_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no more once it is over, also where it failed."""
    monkeypatch.setattr(progress, "INTERVAL_S", 0.01)
    said: list[str] = []
    heard = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        if len(said) > 2:
            heard.set()

    with pytest.raises(ZeroDivisionError), progress.going_on("compiling", say):
        assert heard.wait(60)
        raise ZeroDivisionError
    told = len(said)
    time.sleep(0.1)
    assert said[0] == "compiling" and all(t.endswith(" s so far") for t in said[1:]) and len(said) == told
