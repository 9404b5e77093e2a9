"""Samples start states for training the demo policy, kept apart from the states that evaluation uses.

`python -m eval.demo.states --per-task 240 --seed 100000 --output DIR` writes one archive for each task and
`manifest.json` (seeds, counts, checksums, how far the nearest evaluation state is). A finished task is kept when
the command runs again, so an interrupted run is continued.

Needs the simulator but no renderer. Knows nothing of experts or policies.
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated

import numpy as np

from eval.libero.simulator import LiberoEnv
from eval.libero.suites import LiberoTask, load_suite
from eval.script import run_script
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


class Sample:
    """The states of one task, in the order of their seeds, in a file that is replaced as they come."""

    def __init__(self, task: LiberoTask, count: int, seed: int, folder: Path) -> None:
        self.task, self.count, self.next_seed = task, count, seed
        self.path = folder / f"task_{task.id:02d}.npz"
        self.objects: list[str] = []
        self.states: list[np.ndarray] = []
        self.seeds: list[int] = []
        self.refused: list[int] = []
        self.nearest = np.inf

    @property
    def done(self) -> bool:
        return len(self.states) == self.count

    def block(self, size: int) -> range:
        """The next seeds to try."""
        self.next_seed += size
        return range(self.next_seed - size, self.next_seed)

    def add(self, objects: list[str], found: Sequence[Sampled]) -> None:
        """Keep what is not too near a shipped state, until there are enough."""
        self.objects = objects
        for seed, state, gap in found:
            if self.done:
                break
            if gap < TOLERANCE:
                self.refused.append(seed)
                continue
            self.states.append(state)
            self.seeds.append(seed)
            self.nearest = min(self.nearest, gap)
        with replacing(self.path) as temporary:
            np.savez_compressed(temporary, states=np.stack(self.states), seeds=np.asarray(self.seeds, dtype=np.int64))

    def entry(self) -> dict:
        """Its entry in the manifest."""
        return {
            "task": self.task.name,
            "file": self.path.name,
            "count": self.count,
            "first_seed": self.seeds[0],
            "last_seed": self.seeds[-1],
            "refused_seeds": self.refused,
            "objects": self.objects,
            "shipped_states_compared": len(self.task.start_states),
            "min_distance_m": self.nearest,
            "sha256": hashlib.sha256(self.path.read_bytes()).hexdigest(),
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
                    f"{manifest_path}: {key} is {found.get(key)!r}, this run wants {manifest[key]!r}; "
                    "use another folder"
                )
        manifest = found
    suite = load_suite(arguments.suite)
    wanted = arguments.tasks or range(len(suite.tasks))
    for number in wanted:
        if not 0 <= number < len(suite.tasks):
            raise ConfigError(f"tasks: expected 0 to {len(suite.tasks) - 1}, got {number}")
    left = [
        Sample(suite.tasks[i], arguments.per_task, arguments.seed + SEEDS_PER_TASK * i, arguments.output)
        for i in wanted
        if str(i) not in manifest["tasks"]
    ]
    size = min(BLOCK, arguments.per_task)
    blocks = -(-arguments.per_task // size)
    with _processes(arguments.workers) as pool:
        while left:
            # One process plays one task after the other; several begin with all of them, so that all can soon be used.
            jobs = [sample for sample in left for _ in range(blocks)] if arguments.workers == 1 else left * blocks
            # More than one round only where states were refused.
            pending = [(s, pool.submit(sample_block, arguments.suite, s.task.id, s.block(size))) for s in jobs]
            for sample, answer in pending:
                if not sample.done:
                    sample.add(*answer.result())
                    if sample.done:
                        _finish(sample, manifest, manifest_path)
                    else:
                        _say(f"task {sample.task.id}: {len(sample.states)} of {sample.count} states")
            left, blocks = [sample for sample in left if not sample.done], 1
    print(json.dumps({"output": str(arguments.output), "tasks": len(manifest["tasks"])}))


@contextlib.contextmanager
def _processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """A pool that ends at once with an error or an interruption: what it has not done is of no use then."""
    # Ctrl-C is for all processes of a terminal, and would cost each worker only the block at hand.
    deaf = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_IGN)}
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"), **deaf) as pool:
        try:
            yield pool
        except BaseException:
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _finish(sample: Sample, manifest: dict, path: Path) -> None:
    manifest["tasks"][str(sample.task.id)] = sample.entry()
    write_json(path, manifest)
    gap = f"nearest shipped state {sample.nearest * 1e3:.1f} mm"
    _say(f"task {sample.task.id}: {sample.count} states, {gap}")


def _object_xy(env: LiberoEnv, states: np.ndarray) -> np.ndarray:
    """xy of every movable object, (N, objects, 2), from flattened states (N, D)."""
    starts = [1 + address for _, address in sorted(env.object_qpos.items())]
    return np.stack([states[:, s : s + 2] for s in starts], axis=1)


if __name__ == "__main__":
    later = "; the same command continues with the tasks that are left"
    sys.exit(run_script("eval.demo.states", Arguments, main, None, later))
