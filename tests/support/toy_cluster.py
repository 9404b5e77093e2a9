"""The toy benchmark for a cluster: the point shows pictures, a tiny π0.5 moves it, and what plays dies at set places.

Everything here is found by name on the cluster's nodes.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from eval.harness.benchmark import Benchmark, Environment, Suite, Task
from eval.harness.policies import PolicySource
from tests.support import toy_benchmark as toy

PROMPTS = ("pick up the bowl", "place it on the plate", "pick it up", "place the bowl")
TRIALS = 3
WAIT_S = 120.0


class SeeingPoint(toy.Point):
    """The point, seen by the cameras of LIBERO."""

    def observation(self) -> dict[str, Any]:
        shade = np.uint8(np.clip(128 + 60 * self.x, 0, 255))
        image = np.full((28, 28, 3), shade)
        return {
            "observation/image": image,
            "observation/wrist_image": 255 - image,
            "observation/state": np.full(8, self.x),
        }


def load_suite(name: str) -> Suite:
    tasks = [
        Task(i, f"task_{i}", prompt, tuple(0.1 * trial for trial in range(TRIALS))) for i, prompt in enumerate(PROMPTS)
    ]
    return Suite(name, tasks, toy.MAX_STEPS)


def example_observation(settings: Mapping[str, Any]) -> dict[str, Any]:
    point = SeeingPoint(0.5, settings["step"])
    point.x = 0.0
    return point.observation()


def make_environment(task: Task, settings: Mapping[str, Any], render: bool) -> Environment:
    return SeeingPoint(0.5, settings["step"])


SEEING = replace(
    toy.TOY,
    load_suite=load_suite,
    make_environment=make_environment,
    example_observation=example_observation,
    action_dim=7,
    trials=TRIALS,
)


class DoomedPoint(SeeingPoint):
    """In the middle of its task's first episode, once in a run, something dies: task 0's own process, task 1's replica,
    task 2's node. The last two are killed by the test, which is told of the moment by a file `waiting-TASK`."""

    def __init__(self, task: int, folder: Path) -> None:
        super().__init__(0.5, toy.STEP)
        self._task, self._folder = task, folder

    def reset_to(self, start_state: float, *, seed: Sequence[int]) -> None:
        super().reset_to(start_state, seed=seed)
        self._doomed = start_state == 0.0 and self._task < 3

    def step(self, action: np.ndarray, *, look: bool) -> bool:
        waiting, done = (self._folder / f"{word}-{self._task}" for word in ("waiting", "done"))
        if self._doomed and not waiting.exists():
            waiting.write_text(_node_id())
            if self._task == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            end = time.monotonic() + WAIT_S
            while not done.exists() and time.monotonic() < end:
                time.sleep(0.05)
        return super().step(action, look=look)


def make_doomed(task: Task, settings: Mapping[str, Any], render: bool) -> Environment:
    return DoomedPoint(task.id, Path(settings["folder"]))


def doomed(folder: Path) -> Benchmark:
    """The benchmark whose players die; `folder` holds the files that say when."""
    return replace(SEEING, make_environment=make_doomed, settings={"step": toy.STEP, "folder": str(folder)})


@dataclass(frozen=True)
class NotingSource(PolicySource):
    """A source that leaves a file `replica-PID-NODE` in `folder` for each replica."""

    folder: str = ""

    def load(self) -> Any:
        (Path(self.folder) / f"replica-{os.getpid()}-{_node_id()}").touch()
        return super().load()


def _node_id() -> str:
    import ray

    return ray.get_runtime_context().get_node_id()
