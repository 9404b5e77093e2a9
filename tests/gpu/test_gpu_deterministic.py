"""`deterministic: true` on a GPU: the same bits from call to call, and from start to start, whatever was measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repeated_calls import CALLS, CONFIGS

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]


def start(cache: Path, *words: str) -> dict[str, list[str]]:
    """Digests from a process of its own, whose caches begin empty."""
    caches = {"XDG_CACHE_HOME": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    command = [sys.executable, "-m", "tests.support.repeated_calls", *words]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **caches}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_bits_repeat_from_call_to_call_and_from_start_to_start(tmp_path: Path) -> None:
    first = start(tmp_path / "a")
    assert not (tmp_path / "a/vla_accel/tunings.json").exists(), "something was measured"
    for name in CONFIGS:
        assert len(first[name]) == CALLS and len(set(first[name])) == 1, f"{name}: calls differ"
    other = start(tmp_path / "b", "measured")
    assert (tmp_path / "b/vla_accel/tunings.json").exists(), "nothing was measured that could have been taken"
    assert other == first
