"""Record demonstrations of the scripted expert in one task, for `eval.lerobot.train`.

    python -m eval.lerobot.record --states runs/lerobot/states --task 0 --output runs/lerobot/episodes

An action with noise is executed, and the expert's own is recorded: the policy learns to correct what noise did. The
shipped evaluation states never enter. Only successful episodes are kept.
"""

from __future__ import annotations

import functools
import multiprocessing
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from eval.script import run_script
from vla_accel.cli.common import say
from vla_accel.cli.options import Count, Seed, Within, Written
from vla_accel.errors import ConfigError
from vla_accel.files import replacing

AFTER = 8
"""Actions that are recorded after the goal is reached, so that the release of the gripper is learnt."""


@dataclass(frozen=True)
class Arguments:
    """Play expert episodes of one task and write a file for each."""

    states: Path
    """Folder that has one of start states of each suite (eval.demo.states)."""
    output: Annotated[Path, Written(folder=True)]
    """Folder for the episodes."""
    suite: str = "libero_spatial"
    """Suite of the task."""
    task: Annotated[int, Within(0)] = 0
    """The task."""
    episodes: Count = 200
    """Start states that are played, the first ones."""
    noise: Annotated[float, Within(0)] = 0.3
    """Deviation of the noise on the motion; a third of the episodes each has all, half and none of it."""
    workers: Count = 1
    """Processes."""
    seed: Seed = 0
    """Of the noise."""


def play(indices: range, chosen: Arguments, starts: np.ndarray) -> int:
    """Play these start states in one environment; return the number of episodes written."""
    from eval.libero.expert import Expert
    from eval.libero.simulator import LiberoEnv
    from eval.libero.suites import load_suite

    suite = load_suite(chosen.suite)
    env, expert, written = LiberoEnv(suite.tasks[chosen.task], render=True), Expert(), 0
    for index in indices:
        rng = np.random.default_rng([chosen.seed, index])
        noise, left = chosen.noise * (0.0, 0.5, 1.0)[index % 3], AFTER
        images, states, actions = [], [], []
        env.reset_to(starts[index])
        for _ in range(suite.max_steps):
            seen, action = env.observation(), np.clip(np.asarray(expert.act(env), np.float64), -1, 1)
            images.append(np.stack((seen["observation/image"], seen["observation/wrist_image"])))
            states.append(seen["observation/state"])
            actions.append(action)
            executed = action + np.append(rng.normal(0, noise, 3) if noise else np.zeros(3), np.zeros(4))
            env.step(np.clip(executed, -1, 1), look=True)
            left -= env.success
            if not left:
                break
        if env.success:
            arrays = {"images": np.stack(images), "states": np.stack(states), "actions": np.stack(actions)}
            with replacing(chosen.output / f"episode_{index:05d}.npz") as temporary, temporary.open("wb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]
            written += 1
    env.close()
    return written


def run(chosen: Arguments) -> None:
    """Record and write. Raises ConfigError for a task without enough start states."""
    path = chosen.states / chosen.suite / f"task_{chosen.task:02d}.npz"
    if not path.is_file():
        raise ConfigError(
            f"states: expected start states of the task, found no {path}: make them with eval.demo.states"
        )
    with np.load(path) as content:
        starts = content["states"]
    if len(starts) < chosen.episodes:
        raise ConfigError(f"episodes: expected at most the {len(starts)} start states of {path}, got {chosen.episodes}")
    chosen.output.mkdir(parents=True, exist_ok=True)
    parts = [range(first, chosen.episodes, chosen.workers) for first in range(chosen.workers)]
    with multiprocessing.get_context("spawn").Pool(chosen.workers) as pool:
        written = sum(pool.imap_unordered(functools.partial(play, chosen=chosen, starts=starts), parts))
    say(f"{written} of {chosen.episodes} episodes reached the goal: {chosen.output}")


if __name__ == "__main__":
    sys.exit(run_script("eval.lerobot.record", Arguments, run, None))
