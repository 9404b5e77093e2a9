"""The options of a training run, which its collector processes read too."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from vla_accel.cli.options import Count

TASKS = 10
"""Tasks of each suite."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One training run. Batch and collectors are per GPU; `samples` draws of noise and time per observation."""

    start: str
    """The checkpoint to start from."""
    states: str
    """Folder that has one of start states of each suite; its files may grow during the run."""
    out: str
    suites: tuple[str, ...] = ("libero_spatial",)
    held_out: str = ""
    """Start states of trials: a folder as `states`. None by default."""
    trial_share: float = 0.05
    """Share of episodes that are trials, which are not trained on, once the policy plays."""
    noise: float = 0.3
    """Largest standard deviation of the noise on the expert's xyz actions."""
    minutes: float = 20.0
    batch: Count = 384
    samples: Count = 6
    lr: float = 8e-4
    final_lr: float = 1e-5
    weight_decay: float = 0.01
    warmup: int = 300
    ema: float = 0.999
    collectors: Count = 15
    capacity: Count = 100_000
    first: Count = 1500
    dagger_after_s: float = 60.0
    """Seconds of training before the policy plays."""
    export_every_s: float = 60.0
    resume: str = ""
    """A run's folder: weights of its newest checkpoint instead of the start's."""
    seed: int = 20260
    compile: bool = True
    devices: tuple[int, ...] = ()
    """GPUs by number, all by default; they also render."""

    @property
    def tasks(self) -> int:
        """The number of tasks, which are counted through all suites."""
        return TASKS * len(self.suites)

    def start_states(self, task: int, *, held_out: bool = False) -> Path:
        """The file with the start states of a task."""
        folder = Path(self.held_out if held_out else self.states) / self.suites[task // TASKS]
        return folder / f"task_{task % TASKS:02d}.npz"
