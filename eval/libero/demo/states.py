"""Samples start states for training the demo policy, kept apart from the states that evaluation uses.

`python -m eval.libero.demo.states --per-task 240 --seed 100000 --output DIR` writes one archive for each task and
`manifest.json` (seeds, counts, checksums, how far the nearest evaluation state is). A finished task is kept when
the command runs again, so an interrupted run is continued.

Needs the simulator but no renderer. Knows nothing of experts or policies.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import time
from pathlib import Path

import numpy as np

from eval.libero.simulator import LiberoEnv
from eval.libero.suites import LiberoTask, load_suite
from vla_accel.errors import ConfigError
from vla_accel.files import replacing

TOLERANCE = 1e-3
"""Metres. A sample whose movable objects all lie this close to a shipped state's is refused."""
SEEDS_PER_TASK = 1_000_000
WRITE_EVERY = 24

STATEMENT = (
    "Training start states. Each was drawn from the task's own placement distribution after a hard reset, with "
    "np.random.seed(seed). Evaluation uses the benchmark's shipped states instead. The distance between two states "
    "is the largest xy distance that any one movable object has between them; min_distance_m is the smallest such "
    "distance between a state of this file and a shipped state, and no state below tolerance_m is kept."
)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Sample training start states by hard resets."""

    output: Path
    """Folder for task_NN.npz and manifest.json."""
    per_task: int = 240
    seed: int = 100_000
    """First seed; task t uses seed + 1,000,000 t and the following ones. Evaluation uses 7."""
    suite: str = "libero_spatial"
    tasks: tuple[int, ...] | None = None
    """Task numbers; all by default."""


def sample_task(task: LiberoTask, count: int, first_seed: int, path: Path) -> dict:
    """Sample `count` states into `path` (float64 `states` (count, D), int64 `seeds`); returns the manifest's entry.

    The file is replaced every few states, so that a partial result can be used.
    """
    env = LiberoEnv(task, render=False, hard_reset=True)
    shipped = _object_xy(env, task.start_states)
    states: list[np.ndarray] = []
    seeds: list[int] = []
    refused: list[int] = []
    nearest = np.inf
    seed = first_seed
    while len(states) < count:
        # robosuite and LIBERO draw from NumPy's global generator: there is no other handle.
        np.random.seed(seed)
        state = env.sample_placement()
        gap = float(np.linalg.norm(_object_xy(env, state[None]) - shipped, axis=-1).max(-1).min())
        if gap < TOLERANCE:
            refused.append(seed)
        else:
            states.append(state)
            seeds.append(seed)
            nearest = min(nearest, gap)
            if len(states) % WRITE_EVERY == 0 or len(states) == count:
                _write_archive(path, states, seeds)
        seed += 1
    entry = {
        "task": task.name,
        "file": path.name,
        "count": count,
        "first_seed": seeds[0],
        "last_seed": seeds[-1],
        "refused_seeds": refused,
        "objects": sorted(env.object_qpos),
        "shipped_states_compared": len(task.start_states),
        "min_distance_m": nearest,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    env.close()
    return entry


def main(arguments: Arguments) -> None:
    """Sample every task that the manifest does not list yet."""
    if arguments.per_task < 1:
        raise ConfigError(f"--per-task: expected at least 1, got {arguments.per_task}")
    if arguments.seed < 1000:
        raise ConfigError(f"--seed: expected 1000 or more, far from evaluation's seed, got {arguments.seed}")
    arguments.output.mkdir(parents=True, exist_ok=True)
    manifest_path = arguments.output / "manifest.json"
    manifest = {
        "schema": "vla_accel.libero_start_states/1",
        "suite": arguments.suite,
        "seed": arguments.seed,
        "per_task": arguments.per_task,
        "tolerance_m": TOLERANCE,
        "statement": STATEMENT,
        "tasks": {},
    }
    if manifest_path.is_file():
        found = json.loads(manifest_path.read_text())
        for key in ("schema", "suite", "seed", "per_task"):
            if found.get(key) != manifest[key]:
                raise ConfigError(
                    f"{manifest_path}: {key} is {found.get(key)!r}, this run wants {manifest[key]!r}; "
                    "use another folder"
                )
        manifest = found
    suite = load_suite(arguments.suite)
    wanted = range(len(suite.tasks)) if arguments.tasks is None else arguments.tasks
    for task in (suite.tasks[i] for i in wanted):
        if str(task.id) in manifest["tasks"]:
            continue
        start = time.perf_counter()
        entry = sample_task(
            task,
            arguments.per_task,
            arguments.seed + SEEDS_PER_TASK * task.id,
            arguments.output / f"task_{task.id:02d}.npz",
        )
        manifest["tasks"][str(task.id)] = entry
        with replacing(manifest_path) as temporary:
            temporary.write_text(json.dumps(manifest, indent=1))
        print(
            f"task {task.id}: {entry['count']} states, nearest shipped state {entry['min_distance_m'] * 1e3:.1f} mm, "
            f"{time.perf_counter() - start:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    print(json.dumps({"output": str(arguments.output), "tasks": len(manifest["tasks"])}))


def _object_xy(env: LiberoEnv, states: np.ndarray) -> np.ndarray:
    """xy of every movable object, (N, objects, 2), from flattened states (N, D)."""
    starts = [1 + address for _, address in sorted(env.object_qpos.items())]
    return np.stack([states[:, s : s + 2] for s in starts], axis=1)


def _write_archive(path: Path, states: list[np.ndarray], seeds: list[int]) -> None:
    with replacing(path) as temporary:
        np.savez_compressed(temporary, states=np.stack(states), seeds=np.asarray(seeds, dtype=np.int64))


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Arguments))
