"""Record demonstrations of the scripted expert in one task, for `eval.lerobot.train`.

    python -m eval.lerobot.record --states runs/lerobot/states --task 0 --output runs/lerobot/episodes

An action with noise is executed, and the expert's own is recorded: the policy learns to correct what noise did. Now and
then the arm is pushed away; that is not recorded, and what follows counts as another episode, because no chunk of
actions should contain a push that no observation shows. The shipped evaluation states never enter. Only episodes that
reach the goal are kept.
"""

from __future__ import annotations

import functools
import multiprocessing
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from eval.libero.simulator import RESOLUTION
from eval.script import run_script
from vla_accel.cli.common import say
from vla_accel.cli.options import Count, Seed, Within, Written
from vla_accel.errors import ConfigError
from vla_accel.files import replacing

AFTER = 8
"""Actions that are recorded after the goal is reached, so that the release of the gripper is learned."""
PUSH = range(3, 9)
"""Actions that a push takes."""
SHORTEST = 24
"""Actions from one push to the next, so that every recorded part has whole chunks."""

Step = dict[str, np.ndarray]
"""`images` (2, H, W, 3) uint8, `states` (8,) and `actions` (7,) float64 of a control step."""


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
    pushes: Annotated[float, Within(0, 1)] = 0.03
    """Probability that an action begins a push."""
    size: Count = RESOLUTION
    """Pixels along a side of an image."""
    workers: Count = 1
    """Processes."""
    seed: Seed = 0
    """Of the noise."""


def demonstrate(env: Any, expert: Any, chosen: Arguments, index: int, limit: int) -> list[list[Step]]:
    """Play the expert from the present state on; return what was recorded, a list for each part between pushes."""
    rng = np.random.default_rng([chosen.seed, index])
    noise, left = chosen.noise * (0.0, 0.5, 1.0)[index % 3], AFTER
    parts: list[list[Step]] = [[]]
    for _ in range(limit):
        action = np.clip(np.asarray(expert.act(env), np.float64), -1, 1)
        if not env.success and len(parts[-1]) >= SHORTEST and rng.random() < chosen.pushes:
            push = np.concatenate((rng.uniform(-1, 1, 3), np.zeros(3), action[-1:]))
            for _ in range(rng.choice(PUSH)):
                env.step(push, look=True)
            parts.append([])
            continue
        seen = env.observation()
        images = np.stack((seen["observation/image"], seen["observation/wrist_image"]))
        parts[-1].append({"images": images, "states": seen["observation/state"], "actions": action})
        executed = action + np.append(rng.normal(0, noise, 3) if noise else np.zeros(3), np.zeros(4))
        env.step(np.clip(executed, -1, 1), look=True)
        left -= env.success
        if not left:
            break
    return parts


def play(indices: range, chosen: Arguments, starts: np.ndarray) -> int:
    """Play these start states in one environment and write what was recorded; return how many reached the goal."""
    from eval.libero.expert import Expert
    from eval.libero.simulator import LiberoEnv
    from eval.libero.suites import load_suite

    suite = load_suite(chosen.suite)
    env, expert, won = LiberoEnv(suite.tasks[chosen.task], image_size=chosen.size, render=True), Expert(), 0
    for index in indices:
        env.reset_to(starts[index])
        parts = demonstrate(env, expert, chosen, index, suite.max_steps)
        if not env.success:
            continue
        won += 1
        for part, steps in enumerate(parts):
            if len(steps) < AFTER:  # a push, and at once the end
                continue
            path = chosen.output / f"episode_{index:05d}_{part}.npz"
            with replacing(path) as temporary, temporary.open("wb") as file:
                np.savez(file, **{name: np.stack([step[name] for step in steps]) for name in steps[0]})  # type: ignore[arg-type]
    env.close()
    return won


def run(chosen: Arguments) -> None:
    """Record and write. Raises ConfigError for a task without enough start states, or a folder that has episodes."""
    path = chosen.states / chosen.suite / f"task_{chosen.task:02d}.npz"
    if not path.is_file():
        raise ConfigError(
            f"states: expected start states of the task, found no {path}: make them with eval.demo.states"
        )
    with np.load(path) as content:
        starts = content["states"]
    if len(starts) < chosen.episodes:
        raise ConfigError(f"episodes: expected at most the {len(starts)} start states of {path}, got {chosen.episodes}")
    if there := len(list(chosen.output.glob("episode_*.npz"))):
        raise ConfigError(
            f"output: expected a folder without episodes, got {there} in {chosen.output}: pass another folder, or "
            "train on these (the files of an interrupted recording are whole)"
        )
    chosen.output.mkdir(parents=True, exist_ok=True)
    parts = [range(first, chosen.episodes, chosen.workers) for first in range(chosen.workers)]
    with multiprocessing.get_context("spawn").Pool(chosen.workers) as pool:
        won = sum(pool.imap_unordered(functools.partial(play, chosen=chosen, starts=starts), parts))
    say(f"{won} of {chosen.episodes} episodes reached the goal: {chosen.output}")


if __name__ == "__main__":
    sys.exit(run_script("eval.lerobot.record", Arguments, run, None))
