"""References made just now by another project's code, in the interpreters that a test run names."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "references"
TIMEOUT_S = 900
Make = Callable[..., Path]


@pytest.fixture(scope="session")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """`made(PROJECT, SCRIPT, *WORDS)` runs a script of tests/references once, with the interpreter of
    `--PROJECT-python`, and returns the folder it wrote. Without the option the test is skipped."""
    folders: dict[tuple[str, ...], Path] = {}

    def make(project: str, script: str, *words: str) -> Path:
        python = request.config.getoption(f"--{project}-python", None)
        if python is None:
            pytest.skip(f"NOT COMPARED: pass --{project}-python=PATH, an interpreter that has {project} (CONTRIBUTING)")
        key = (project, script, *words)
        if key not in folders:
            folder = tmp_path_factory.mktemp(script)
            command = [str(python), str(SCRIPTS / f"{script}.py"), "--out", str(folder), *words]
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
            if done.returncode != 0:
                pytest.fail(f"{' '.join(command)} exited {done.returncode}:\n{done.stderr[-4000:]}")
            folders[key] = folder
        return folders[key]

    return make
