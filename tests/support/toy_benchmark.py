"""A benchmark without a simulator: a point on a line that must reach a goal. Where it ends is known by arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from eval.harness.benchmark import Benchmark, Suite, Task

GOALS = (0.5, -0.7, 3.0)
"""The last is further than `MAX_STEPS` actions go."""
STEP = 0.1
MAX_STEPS = 12


class Point:
    """The environment: an action in [-1, 1] moves the point by that many `STEP`."""

    def __init__(self, goal: float, step: float) -> None:
        self.goal, self._step = goal, step

    def reset_to(self, start_state: float, *, seed: Sequence[int]) -> None:
        # What the start state leaves open: where exactly, within a hundredth.
        self.x = start_state + 0.01 * np.random.default_rng(list(seed)).uniform(-1, 1)

    def step(self, action: np.ndarray, *, look: bool) -> bool:
        self.x += self._step * float(np.clip(action[0], -1, 1))
        return abs(self.x - self.goal) < self._step

    def observation(self) -> dict[str, Any]:
        return {"to_go": np.array([self.goal - self.x])}

    def close(self) -> None:
        pass


class Expert:
    """Walks to the goal."""

    def act(self, env: Point) -> np.ndarray:
        return np.clip([(env.goal - env.x) / STEP], -1, 1)


def load_suite(name: str) -> Suite:
    tasks = [Task(i, f"goal_{i}", f"go to {goal}", (0.0, 0.1)) for i, goal in enumerate(GOALS)]
    return Suite(name, tasks, MAX_STEPS)


def make_environment(task: Task, settings: Mapping[str, Any], render: bool) -> Point:
    return Point(GOALS[task.id], settings["step"])


def example_observation(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"to_go": np.zeros(1)}


TOY = Benchmark(
    name="toy",
    suites=("line",),
    load_suite=load_suite,
    make_environment=make_environment,
    example_observation=example_observation,
    action_dim=1,
    control_hz=10,
    settings={"step": STEP},
    trials=2,
    make_expert=Expert,
    expert_suites=("line",),
)


class SeeingPoint(Point):
    """A point with an eye: an image whose brightness says how far it has to go."""

    def observation(self) -> dict[str, Any]:
        shade = int(np.clip(128 + 60 * (self.goal - self.x), 0, 255))
        return {**super().observation(), "eye": np.full((16, 24, 3), shade, np.uint8)}


def make_seeing(task: Task, settings: Mapping[str, Any], render: bool) -> SeeingPoint:
    return SeeingPoint(GOALS[task.id], settings["step"])


def seeing_example(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {**example_observation(settings), "eye": np.zeros((16, 24, 3), np.uint8)}


def stand_still(env: Any, last: np.ndarray | None) -> np.ndarray:
    return np.zeros(1)


SEEING = replace(
    TOY, cameras=("eye",), make_environment=make_seeing, example_observation=seeing_example, idle=stand_still
)
