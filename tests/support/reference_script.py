"""References made just now by another project's code, in the interpreter that a test run names."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

TIMEOUT_S = 900


def python_of(request: pytest.FixtureRequest, project: str, missing: str) -> str:
    """The interpreter of `--PROJECT-python`. Skips where none was named: `missing` is what is then not compared."""
    python = request.config.getoption(f"--{project}-python", None)
    if python is None:
        pytest.skip(f"NOT COMPARED WITH {missing}: give --{project}-python=PATH, an interpreter that has {project}")
    return str(python)


def make_reference(python: str, script: Path, folder: Path, *words: str) -> Path:
    """Run `SCRIPT --out FOLDER WORDS`; returns the folder. An interpreter was named, so a script that cannot run is a
    failure, not a reason to skip."""
    command = [python, str(script), "--out", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        pytest.fail(f"{' '.join(command)} exited {done.returncode}:\n{done.stderr[-4000:]}")
    return folder
