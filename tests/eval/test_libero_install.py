"""LIBERO is imported quietly: what robosuite says on every import goes, and nothing else does."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eval.libero import install
from vla_accel.errors import DependencyError

ROOT = Path(__file__).parents[2]


def python(code: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*folders, ROOT)))}
    words = [sys.executable, "-c", code]
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=300, check=True)


@pytest.mark.slow
def test_importing_libero_prints_nothing_and_later_warnings_are_seen() -> None:
    pytest.importorskip("libero", reason="needs LIBERO")
    done = python(
        "from eval.libero.install import libero; libero()\n"
        "from robosuite.utils.log_utils import ROBOSUITE_DEFAULT_LOGGER as logger\n"
        "logger.warning('the arm is on fire')"
    )
    (said,) = done.stderr.splitlines()
    assert "the arm is on fire" in said and done.stdout == ""


STAND_IN = """
try:
    from robosuite.macros_private import *
    from robosuite.macros_private import SPEED
except ImportError as error:
    print("warning:", error)
"""


@pytest.mark.parametrize("own", ["SPEED = 3", None])
def test_a_users_own_macro_file_is_still_read(tmp_path: Path, own: str | None) -> None:
    package = tmp_path / "robosuite"
    package.mkdir()
    (package / "__init__.py").write_text(STAND_IN)
    if own is not None:
        (package / "macros_private.py").write_text(own)
    code = (
        "from eval.libero import install\ninstall._give_robosuite_its_macros()\n"
        "import robosuite; print(getattr(robosuite, 'SPEED', None))"
    )
    lines = python(code, tmp_path).stdout.splitlines()
    assert lines[-1] == str(3 if own else None)
    # Without the file its names are missing, but the file itself is not.
    assert len(lines) == 1 if own else "SPEED" in lines[0] and "No module named" not in lines[0]


@pytest.mark.parametrize(
    ("visible", "gpus", "expected"),
    [
        (None, 2, ["0", "1", "0", "1"]),
        ("1,3", 4, ["1", "3", "1", "3"]),
        ("0,1", 1, ["0", "0", "0", "0"]),  # the driver draws on one of them only
        ("", 2, ["0", "1", "0", "1"]),
        (None, 0, [None] * 4),
        ("GPU-52f1", 2, [None] * 4),
    ],
)
def test_simulators_spread_over_the_gpus_they_see(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str | None, gpus: int, expected: list[str | None]
) -> None:
    monkeypatch.setattr(install.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(install.glob, "glob", lambda _: [f"/dev/nvidia{i}" for i in range(gpus)])
    monkeypatch.setattr(install, "_egl_devices", lambda: gpus)
    monkeypatch.setattr(install, "_PLACES", places := [])
    monkeypatch.setenv("MUJOCO_GL", "egl")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    def choose() -> str | None:
        monkeypatch.delenv("MUJOCO_EGL_DEVICE_ID", raising=False)
        install.choose_gpu()
        return os.environ.get("MUJOCO_EGL_DEVICE_ID")

    try:
        assert [choose() for _ in range(4)] == expected
        if expected[1] == "1":
            places[1].close()  # that simulator has ended: its place is the next one's
            assert choose() == "1"
        monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", "7")
        install.choose_gpu()
        assert os.environ["MUJOCO_EGL_DEVICE_ID"] == "7"
    finally:
        for place in places:
            place.close()


def test_triton_is_there_before_osmesa(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(install, "_loadable", lambda library: True)
    for name in ("egl", "osmesa"):
        monkeypatch.delitem(sys.modules, "triton", raising=False)
        monkeypatch.setenv("MUJOCO_GL", name)
        monkeypatch.setenv("PYOPENGL_PLATFORM", name)
        assert install.choose_gl() == name and ("triton" in sys.modules) == (name == "osmesa")
    monkeypatch.delitem(sys.modules, "triton")
    monkeypatch.setattr(install.importlib.util, "find_spec", lambda name: None)
    assert install.choose_gl() == "osmesa" and "triton" not in sys.modules


def test_where_libero_is_missing_the_extra_with_all_of_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DependencyError, match=r"LIBERO is not installed: pip install '\.\[libero\]'$"):
        install.libero.__wrapped__()
