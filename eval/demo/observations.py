"""Record what the expert sees on training start states: for calibrating FP8 and for agreement reports.

    python -m eval.demo.observations --states runs/demo/held_out --output runs/demo/observations.npz

The shipped evaluation states never enter.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from eval.script import run_script
from vla_accel.cli.options import Count, Within, Written
from vla_accel.errors import ConfigError
from vla_accel.measure.recording import save_observations


@dataclass(frozen=True)
class Arguments:
    """Play expert episodes from stored start states and keep every n-th observation."""

    states: Path
    """Folder that has one of start states of each suite."""
    output: Annotated[Path, Written()]
    """The file (.npz)."""
    suites: tuple[str, ...] = ("libero_spatial", "libero_object")
    """Whose tasks are played, all of each."""
    per_task: Count = 12
    """Observations of each task."""
    every: Count = 8
    """Actions between two of them."""
    first: Annotated[int, Within(0)] = 0
    """Start state of each task to begin with."""


def run(chosen: Arguments) -> None:
    """Record and write one file. Raises ConfigError for a task without start states, before any is played."""
    print(f"playing {', '.join(chosen.suites)}", flush=True)
    from eval.libero.expert import Expert
    from eval.libero.simulator import LiberoEnv
    from eval.libero.suites import load_suite, sampling

    observations: list[dict[str, Any]] = []
    played = [
        (task, chosen.states / suite / f"task_{task.id:02d}.npz")
        for suite in chosen.suites
        for task in load_suite(suite).tasks
    ]
    for _, path in played:
        if not path.is_file():
            made = sampling(path.parent)
            raise ConfigError(f"states: expected start states of each task, found no {path}; make them: {made}")
    for task, path in played:
        with np.load(path) as content:
            starts = content["states"]
        env, expert = LiberoEnv(task, render=True), Expert()
        kept, start = 0, chosen.first
        while kept < chosen.per_task:
            env.reset_to(starts[start % len(starts)])
            start += 1
            for step in range(200):
                if step % chosen.every == 0 and kept < chosen.per_task:
                    observations.append({**env.observation(), "prompt": task.instruction})
                    kept += 1
                coming = (step + 1) % chosen.every == 0
                env.step(np.clip(np.array(expert.act(env), np.float64), -1, 1), look=coming)
                if env.success or kept == chosen.per_task:
                    break
        env.close()
        print(f"{task.instruction}: {kept} observations", flush=True)
    save_observations(observations, chosen.output)


if __name__ == "__main__":
    sys.exit(run_script("eval.demo.observations", Arguments, run, None))
