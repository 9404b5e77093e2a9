"""LIBERO's suites and LIBERO-PRO's variants of them: tasks, instructions, shipped start states. Starts no simulator."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from eval.harness.benchmark import Suite, Task
from eval.harness.protocol import parse_tasks
from eval.libero.install import libero
from vla_accel.errors import ConfigError, SimulatorError, unknown
from vla_accel.files import content_hash

MAX_STEPS = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}
"""Actions allowed after the wait steps, by suite (openpi's limits)."""
VARIED = ("libero_spatial", "libero_object", "libero_goal", "libero_10")
"""Suites that LIBERO-PRO varies."""
VARIANTS = {
    "lan": "reworded instructions",
    "object": "other objects",
    "swap": "places exchanged",
    "task": "other tasks",
}
"""What LIBERO-PRO varies, by the ending of a suite's name. A variant has its suite's limit."""
SUITES = (*MAX_STEPS, *(f"{suite}_{variant}" for suite in VARIED for variant in VARIANTS))
_LANGUAGE = re.compile(r"\(:language\s+([^()]+?)\s*\)")


@dataclass(frozen=True)
class LiberoTask(Task):
    """One task. `start_states`: float64 (N, D), the shipped MuJoCo states (time, qpos, qvel) that evaluation starts
    from; `bddl_path`: the file that describes the scene and the goal."""

    start_states: np.ndarray
    bddl_path: Path


@dataclass(frozen=True)
class LiberoSuite(Suite):
    """A LIBERO suite; tasks in benchmark order."""

    tasks: tuple[LiberoTask, ...]


def load_suite(name: str) -> LiberoSuite:
    """All tasks of a suite with their shipped start states.

    Raises ConfigError for an unknown suite, DependencyError without libero.
    """
    if name not in SUITES:
        raise ConfigError(unknown("LIBERO suite", name, SUITES))
    names = libero().task_map[name]
    base = name if name in MAX_STEPS else name.rpartition("_")[0]
    return LiberoSuite(name, tuple(_load_task(name, i, task) for i, task in enumerate(names)), MAX_STEPS[base])


def load_sampled(name: str, folder: Path, tasks: str | None = None) -> LiberoSuite:
    """A suite whose tasks, or only `tasks` (as in `parse_tasks`), begin from start states that `eval.demo.states`
    sampled, below `folder` in one of the suite's name, instead of the shipped ones. Raises ConfigError where they are
    missing or another suite's."""
    suite, place = load_suite(name), folder / name
    sampled_of(name, folder)
    count = len(suite.tasks)
    paths = {i: place / f"task_{i:02d}.npz" for i in (range(count) if tasks is None else parse_tasks(tasks, count))}
    if missing := [path.name for path in paths.values() if not path.is_file()]:
        raise ConfigError(
            f"starts: expected {', '.join(missing)} in {place}, found none; create them: {sampling(place)}"
        )
    starts = {i: np.load(path)["states"] for i, path in paths.items()}
    return replace(suite, tasks=tuple(replace(t, start_states=starts.get(t.id, ())) for t in suite.tasks))


def sampling(place: Path) -> str:
    """The command that makes the missing start states of a folder."""
    made = json.loads((place / "manifest.json").read_text()) if (place / "manifest.json").is_file() else {}
    options = "".join(f" --{key.replace('_', '-')} {made[key]}" for key in ("seed", "per_task") if key in made)
    return f"python -m eval.demo.states --suite {place.name}{options} --output {shlex.quote(str(place))}"


def sampled_of(name: str, folder: Path) -> dict[str, Any]:
    """The identity of start states: their seed and the hash of the manifest. Raises ConfigError."""
    path = folder / name / "manifest.json"
    if not path.is_file():
        raise ConfigError(f"starts: expected {path}, which eval.demo.states writes, found no such file")
    content = json.loads(path.read_text())
    if content.get("suite") != name:
        raise ConfigError(f"starts: {path}: expected start states of {name}, got {content.get('suite')!r}")
    return {"seed": content["seed"], "sha256": content_hash(path)}


def _load_task(suite: str, task_id: int, name: str) -> LiberoTask:
    package = libero()
    bddl = Path(package.get_path("bddl_files")) / suite / f"{name}.bddl"
    states = load_states(Path(package.get_path("init_states")) / suite / f"{name}.pruned_init")
    instruction = instruction_of(name) if suite in MAX_STEPS else stated_instruction(bddl)
    return LiberoTask(task_id, name, instruction, states, bddl.resolve())


def stated_instruction(bddl: Path) -> str:
    """The instruction in a task file. LIBERO-PRO's variants keep the names of the original tasks.

    Raises SimulatorError for a file that is missing or has no instruction.
    """
    try:
        found = _LANGUAGE.findall(bddl.read_text())
    except OSError as error:
        raise SimulatorError(f"task file {bddl}: cannot be read: {error}") from error
    if len(found) != 1:
        raise SimulatorError(f"task file {bddl}: expected one (:language …), got {len(found)}")
    return " ".join(found[0].split())


def instruction_of(name: str) -> str:
    """The instruction of a task of this name, in a suite of LIBERO itself."""
    # As the benchmark does: the instruction is the file's name, less a leading scene name in LIBERO-100.
    if name[:1].isupper():
        name = name[name.find("SCENE") + (8 if "SCENE10" in name else 7) :]
    return " ".join(name.split("_"))


def load_states(path: Path) -> np.ndarray:
    """Shipped start states, float64 (N, D): a NumPy archive, or the original Torch file read without its pickle.

    Raises SimulatorError if there is no such file.
    """
    archive = path.with_name(path.name + ".npz")
    if archive.is_file():
        with np.load(archive, allow_pickle=False) as content:
            return np.asarray(content["states"], dtype=np.float64)
    if not path.is_file():
        raise SimulatorError(f"initial states: expected {archive} or {path}, found neither")
    import torch

    # The files hold one NumPy array; only what rebuilds such an array may run.
    allowed = [np.ndarray, np.dtype, type(np.dtype(np.float64)), type(np.dtype(np.float32))]
    for module in ("numpy._core.multiarray", "numpy.core.multiarray"):
        with contextlib.suppress(ImportError):
            rebuild = importlib.import_module(module)._reconstruct
            allowed += [rebuild, (rebuild, "numpy.core.multiarray._reconstruct")]
    with torch.serialization.safe_globals(allowed):
        return np.asarray(torch.load(path, weights_only=True, map_location="cpu"), dtype=np.float64)
