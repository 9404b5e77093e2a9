"""Other people's programs as a page shows them, each a process of its own."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.pages import ROOT

TIMEOUT_S = 600


def replaced(shown: Sequence[str], start: str, *instead: str) -> list[str]:
    """The command that begins so, with these options in place of its own of the same name, or besides."""
    (line,) = [line for line in shown if line.startswith(start)]
    names = {word.partition("=")[0] for word in instead}
    return [word for word in shlex.split(line) if word.partition("=")[0] not in names] + list(instead)


def run(words: list[str], cwd: Path, **more: str) -> str:
    """A program to its end; what it wrote. `more`: environment variables."""
    done = subprocess.run(
        _program(words), cwd=cwd, env=_environment(more), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout + done.stderr


@contextmanager
def process(words: list[str], cwd: Path, name: str = "process.log") -> Iterator[subprocess.Popen[str]]:
    """A program that runs until the block ends; what it wrote, in the file `name`, is shown if the block fails."""
    with (cwd / name).open("w+") as log:
        started = subprocess.Popen(_program(words), cwd=cwd, env=_environment({}), stdout=log, stderr=log, text=True)
        try:
            yield started
        except BaseException:
            log.seek(0)
            print(log.read()[-6000:])
            raise
        finally:
            started.send_signal(signal.SIGINT)
            try:
                started.wait(15)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()


def until(true: Callable[[], bool], alive: subprocess.Popen[str], within_s: float = 180.0) -> None:
    """Wait until a condition holds; fails when the process ends first, or the time."""
    end = time.monotonic() + within_s
    while not true():
        assert alive.poll() is None, f"ended with {alive.returncode}"
        assert time.monotonic() < end, f"nothing within {within_s:.0f} s"
        time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def reachable(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def _program(words: list[str]) -> list[str]:
    """Programs of this environment by their paths."""
    if words[0] == "python":
        return [sys.executable, *words[1:]]
    return [str(Path(sys.executable).with_name(words[0])), *words[1:]]


def _environment(more: dict[str, str]) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *sorted((ROOT / "plugins").iterdir())))),
        "HF_HUB_OFFLINE": "1",
        "SDL_VIDEODRIVER": "dummy",
        "MUJOCO_GL": os.environ.get("MUJOCO_GL", "osmesa"),
        "OMP_NUM_THREADS": "1",
        **more,
    }
