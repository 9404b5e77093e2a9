"""`uv.lock`: it fits pyproject.toml, and has the versions that the tests run with."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKED = {
    (name, version)
    for name, version in re.findall(r'^name = "(.+)"\nversion = "(.+)"$', (ROOT / "uv.lock").read_text(), re.MULTILINE)
}


def test_the_lock_file_fits_the_project() -> None:
    pytest.importorskip("uv", reason="NOT RUN: needs uv: pip install uv")
    words = ("lock", "--check", "--offline", "--no-cache", "--python", sys.executable)
    done = subprocess.run([sys.executable, "-m", "uv", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_lock_file_has_the_versions_of_the_constraints() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = [(canonicalize_name(one.name), str(one.specifier).removeprefix("==")) for one in map(Requirement, lines)]
    locked_names = {name for name, _ in LOCKED}
    assert [one for one in pinned if one[0] in locked_names and one not in LOCKED] == []
    assert len(pinned) > 50


def test_the_lock_file_names_public_indices_alone() -> None:
    hosts = set(re.findall(r"(?:https?|file)://[^/\"]*", (ROOT / "uv.lock").read_text()))
    assert hosts == {"https://pypi.org", "https://files.pythonhosted.org"}
