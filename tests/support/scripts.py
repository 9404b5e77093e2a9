"""Scripts of tests/support in processes of their own: Triton's interpreter is chosen when triton is first imported."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="NOT RUN: needs triton: pip install 'triton>=3.6' (Linux)"
)


def lines_of(script: str, *words: str, cache: Path | None = None) -> list[str]:
    """Run a script and return what it prints. `cache`: a folder for what Triton compiles."""
    # The same Triton as here, which may lie next to the installed one (`make test-triton`).
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]), "PATH": "",
                   "OMP_NUM_THREADS": "1"}  # fmt: skip
    if cache is not None:
        environment |= {"TRITON_CACHE_DIR": str(cache), "HOME": str(cache)}
    modules = ["tests.support.interpreter", script] if script.startswith("interpret_") else [f"tests.support.{script}"]
    command = [sys.executable, "-W", "ignore", "-m", *modules, *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()
