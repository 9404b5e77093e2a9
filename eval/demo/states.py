"""Sample start states for training the demo policy, kept apart from the states that evaluation uses.

`python -m eval.demo.states --per-task 240 --seed 100000 --output DIR` writes one archive for each task and
`manifest.json` (seeds, counts, checksums, how far the nearest evaluation state is). A finished task is kept when
the command runs again, so an interrupted run is continued. Needs the simulator but no renderer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import multiprocessing
import signal
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from eval.libero.simulator import LiberoEnv
from eval.libero.suites import LiberoTask, load_suite
from eval.script import run_script
from vla_accel.cli.common import say
from vla_accel.cli.options import Count, Within, Written
from vla_accel.errors import ConfigError
from vla_accel.files import replacing, write_json

TOLERANCE = 1e-3
"""Metres. A sample whose movable objects all lie this close to a shipped state's is refused."""
SEEDS_PER_TASK = 1_000_000
BLOCK = 12
"""States of a task that a process samples at a time; a line of progress follows each."""
Sampled = tuple[int, np.ndarray, float]
"""A seed, its state (D,), and the distance of the nearest shipped state in metres."""

STATEMENT = (
    "Training start states. Each was drawn from the task's own placement distribution after a hard reset, with "
    "np.random.seed(seed). Evaluation uses the benchmark's shipped states instead. The distance between two states "
    "is the largest xy distance that any one movable object has between them; min_distance_m is the smallest such "
    "distance between a state of this file and a shipped state, and no state below tolerance_m is kept."
)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Sample training start states by hard resets."""

    output: Annotated[Path, Written(folder=True)]
    """Folder for task_NN.npz and manifest.json."""
    per_task: Count = 240
    """Start states of each task."""
    seed: Annotated[int, Within(1000, 2**32 - 1)] = 100_000
    """First seed; task t uses seed + 1,000,000 t and the following ones. Evaluation uses 7."""
    suite: str = "libero_spatial"
    """Whose tasks."""
    tasks: Annotated[tuple[int, ...], Within(0)] = ()
    """Task numbers; all by default."""
    workers: Count = 1
    """Processes. The states do not depend on how many there are."""


def sample_block(suite: str, task_id: int, seeds: Sequence[int]) -> tuple[list[str], list[Sampled]]:
    """The names of a task's movable objects, and the sample of each seed."""
    env, task = _environment(suite, task_id)
    shipped = _object_xy(env, task.start_states)
    found = []
    for seed in seeds:
        # robosuite and LIBERO draw from NumPy's global generator: there is no other handle.
        np.random.seed(seed)
        state = env.sample_placement()
        gap = float(np.linalg.norm(_object_xy(env, state[None]) - shipped, axis=-1).max(-1).min())
        found.append((seed, state, gap))
    return sorted(env.object_qpos), found


@functools.lru_cache(maxsize=1)
def _environment(suite: str, task_id: int) -> tuple[LiberoEnv, LiberoTask]:
    task = load_suite(suite).tasks[task_id]
    return LiberoEnv(task, render=False, hard_reset=True), task


def _object_xy(env: LiberoEnv, states: np.ndarray) -> np.ndarray:
    """xy of every movable object, (N, objects, 2), from flattened states (N, D)."""
    starts = [1 + address for _, address in sorted(env.object_qpos.items())]
    return np.stack([states[:, s : s + 2] for s in starts], axis=1)


def keep(task: LiberoTask, count: int, path: Path, blocks: Iterator[tuple[list[str], list[Sampled]]]) -> dict[str, Any]:
    """Write the first `count` states that are not too near a shipped one; the file is replaced as they come. Returns
    the task's entry in the manifest."""
    kept: list[Sampled] = []
    refused: list[int] = []
    objects: list[str] = []
    for names, found in blocks:
        objects = names
        refused += [seed for seed, _, gap in found if gap < TOLERANCE]
        kept = [*kept, *(one for one in found if one[2] >= TOLERANCE)][:count]
        if kept:
            with replacing(path) as temporary:
                states = np.stack([state for _, state, _ in kept])
                np.savez_compressed(temporary, states=states, seeds=np.array([seed for seed, *_ in kept], np.int64))
        if len(kept) == count:
            break
        say(f"task {task.id}: {len(kept)} of {count} states")
    seeds, _, gaps = zip(*kept, strict=True)
    say(f"task {task.id}: {count} states, nearest shipped state {min(gaps) * 1e3:.1f} mm")
    return {
        "task": task.name,
        "file": path.name,
        "count": count,
        "first_seed": seeds[0],
        "last_seed": seeds[-1],
        "refused_seeds": [seed for seed in refused if seed < seeds[-1]],
        "objects": objects,
        "shipped_states_compared": len(task.start_states),
        "min_distance_m": min(gaps),
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }


def main(arguments: Arguments) -> None:
    """Sample every task that the manifest does not list yet."""
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
                    f"{manifest_path}: {key}: expected {manifest[key]!r}, got {found.get(key)!r}; use another folder"
                )
        manifest = found
    suite = load_suite(arguments.suite)
    if unknown := [number for number in arguments.tasks if number >= len(suite.tasks)]:
        raise ConfigError(f"tasks: expected 0 to {len(suite.tasks) - 1}, got {unknown[0]}")
    count, size = arguments.per_task, min(BLOCK, arguments.per_task)
    left = [t for t in suite.tasks if t.id in (arguments.tasks or range(1000)) and str(t.id) not in manifest["tasks"]]
    with _processes(arguments.workers) as pool:

        def sample(task: LiberoTask, first: int) -> Any:
            start = arguments.seed + SEEDS_PER_TASK * task.id + first
            return pool.submit(sample_block, arguments.suite, task.id, range(start, start + size))

        def results(task: LiberoTask, pending: deque[Any]) -> Iterator[Any]:
            """The blocks of a task, and more of them while states are refused."""
            first = size * len(pending)
            while True:
                if not pending:
                    pending.append(sample(task, first))
                    first += size
                yield pending.popleft().result()

        blocks = {task.id: deque(sample(task, first) for first in range(0, count, size)) for task in left}
        for task in left:
            path = arguments.output / f"task_{task.id:02d}.npz"
            manifest["tasks"][str(task.id)] = keep(task, count, path, results(task, blocks[task.id]))
            write_json(manifest_path, manifest)
    print(json.dumps({"output": str(arguments.output), "tasks": len(manifest["tasks"])}))


@contextlib.contextmanager
def _processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """A pool that ends at once with an error or an interruption, instead of finishing what is pending."""
    # Ctrl-C reaches all processes of a terminal, and would cost each worker only the block at hand.
    deaf = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_IGN)}
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"), **deaf) as pool:
        try:
            yield pool
        except BaseException:
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise


if __name__ == "__main__":
    later = "; the same command continues with the tasks that are left"
    sys.exit(run_script("eval.demo.states", Arguments, main, None, later))
