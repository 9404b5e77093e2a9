"""rerun's recordings hold what a view shows, as rerun's own reader says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.waiting import silent_port
from vla_accel.errors import ConfigError
from vla_accel.view import open_view

pytest.importorskip("rerun", reason="NOT RUN: needs rerun: pip install rerun-sdk")


def test_a_recording_has_every_path_and_both_time_axes(tmp_path: Path) -> None:
    file = tmp_path / "a folder" / "run.rrd"
    view = open_view(f"rerun:{file}")
    view.began("pick the cube")
    for tick in range(6):
        if tick % 3 == 0:
            observation = {
                "observation/image": np.full((8, 8, 3), 40 * tick, np.uint8),
                "state": [0.5],
                "prompt": "pick",
            }
            view.inferred(tick, observation, np.ones((5, 2)), {"vision_ms": 1.5})
        view.executed(tick, np.zeros(2))
    view.measured(5, {"age/ms": 40.0})
    view.close()
    printed = dumped("print", "-vvv", str(file))
    for path in (
        *("/camera/observation/image", "/state/state/0", "/prompt", "/log", "/latency_ms/vision", "/age/ms"),
        *(f"/action/{dim}/{name}" for dim in range(2) for name in ("chunk", "executed")),
    ):
        assert path in printed, path
    assert "tick" in printed and "time" in printed and "image/jpeg" in printed
    assert "without error" in dumped("verify", str(file))


def test_an_address_without_a_viewer_is_an_error_at_once() -> None:
    with silent_port() as port, pytest.raises(ConfigError, match="expected a viewer at"):
        open_view(f"rerun://127.0.0.1:{port}")


def dumped(*words: str) -> str:
    """What `rerun rrd` says."""
    done = subprocess.run(
        [sys.executable, "-m", "rerun_cli", "rrd", *words], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr
