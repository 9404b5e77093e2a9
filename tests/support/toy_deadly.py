"""The toy benchmark, with one environment that kills the run which plays it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from eval.harness.benchmark import Environment, Task
from tests.support import toy_benchmark as toy


class DeadlyPoint(toy.Point):
    """Kills the run, from its worker process, once an episode is on record."""

    def __init__(self, log: Path) -> None:
        super().__init__(toy.GOALS[1], toy.STEP)
        self.log = log

    def step(self, action: np.ndarray, *, look: bool) -> bool:
        while '"kind":"episode"' not in self.log.read_text():
            time.sleep(0.01)
        run = multiprocessing.parent_process()
        assert run is not None and run.pid is not None
        with suppress(ProcessLookupError):  # the other worker was faster
            os.kill(run.pid, signal.SIGKILL)
        os._exit(1)


def make_deadly(task: Task, settings: Mapping[str, Any], render: bool) -> Environment:
    return DeadlyPoint(Path(os.environ["TOY_LOG"])) if task.id == 1 else toy.make_environment(task, settings, render)


DEADLY = replace(toy.TOY, make_environment=make_deadly)
