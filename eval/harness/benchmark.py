"""The interface of a benchmark: one object of plain values and functions. The harness knows no benchmark by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from eval.harness.stress import IMAGES, LATENCY, Kind
from vla_accel.errors import ConfigError, unknown

if TYPE_CHECKING:
    import torch

Observation = dict[str, Any]
"""The input of a policy: arrays by name, and `prompt`."""


@dataclass(frozen=True)
class Task:
    """One task of a suite. `id`: its index, from 0; `instruction`: the policy's prompt; `start_states`: one for each
    trial, in a form that only the benchmark knows."""

    id: int
    name: str
    instruction: str
    start_states: Sequence[Any]


@dataclass(frozen=True)
class Suite:
    """Tasks that are reported together: `tasks[i].id == i`; `max_steps`: an episode fails after so many
    actions."""

    name: str
    tasks: Sequence[Task]
    max_steps: int


class Environment(Protocol):
    """One task's simulator, played one episode after the other."""

    def reset_to(self, start_state: Any, *, seed: Sequence[int]) -> Any:
        """Begin an episode, whose first observation is then available. What the start state leaves open is drawn from
        `seed`, so that an episode does not depend on earlier ones."""
        ...

    def step(self, action: np.ndarray, *, look: bool) -> bool:
        """Execute one action (action_dim,); returns whether the goal is reached. Without `look` nothing is rendered,
        and this step has no observation."""
        ...

    def observation(self) -> Observation:
        """The observation after the last step, without `prompt`."""
        ...

    def close(self) -> None:
        """Free the simulator."""
        ...


class Expert(Protocol):
    """A scripted policy that reads the simulator instead of cameras."""

    def act(self, env: Any) -> np.ndarray:
        """The next action (action_dim,) in this environment."""
        ...


def schema(benchmark: str, kind: str) -> str:
    """The schema name of a benchmark's files; `kind`: `log`, `result`, `paired` or `late`."""
    return f"vla_accel.{benchmark}.{kind}/1"


@dataclass(frozen=True)
class Benchmark:
    """A benchmark. Worker processes import its functions by name (pickle), so they must be those of a module.

    Attributes:
        name: its folder in `eval/`; also in the schemas and file names of its results.
        load_suite: loads a suite by name. Called in every worker process: cheap, and starts no simulator.
        make_environment: builds the environment of a task with these `settings`; the last argument is whether anything
            will be rendered. Raises SimulatorError or DependencyError.
        example_observation: makes an observation without `prompt`, as an environment with these `settings` does, to
            warm a policy up.
        action_dim: numbers in an action.
        control_hz: actions in a second of simulated time.
        cameras: observation keys of the images (H, W, 3) that a video shows side by side.
        settings: what else an episode depends on (JSON types); part of the protocol, and so of the fingerprint.
        trials: default number of episodes of a task.
        limits_by: who set the suites' `max_steps`.
        make_expert: makes the scripted expert, or None. Its identity is its source file and the files in the same
            folder whose names begin like it.
        expert_suites: the suites that the expert can play.
        packages: distributions whose versions a result lists.
        stresses: disturbances that only the simulator can make, by name. `make_environment` finds their values among
            its settings; an environment draws the rest from the seed of `reset_to`.
        settings_for: returns the settings that a policy with this metadata requires, such as the size of its images.
        idle: returns the action that keeps the robot still in a tick for which no action has arrived, from the
            environment and its last action (action_dim,) or None. Without it there is no latency.
        load_lerobot: loads the policy in a folder with lerobot's own code onto a device, or None. It reads the
            observations of this benchmark, and has the interface of this package's policies.
    """

    name: str
    suites: tuple[str, ...]
    load_suite: Callable[[str], Suite]
    make_environment: Callable[[Task, Mapping[str, Any], bool], Environment]
    example_observation: Callable[[Mapping[str, Any]], Observation]
    action_dim: int
    control_hz: float
    cameras: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    trials: int = 50
    limits_by: str = "the benchmark"
    make_expert: Callable[[], Expert] | None = None
    expert_suites: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    stresses: Mapping[str, Kind] = field(default_factory=dict)
    settings_for: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    idle: Callable[[Any, np.ndarray | None], np.ndarray] | None = None
    load_lerobot: Callable[[Path, torch.device], Any] | None = None

    def settings_of(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """All settings of a run of a policy."""
        return {**self.settings, **({} if self.settings_for is None else self.settings_for(metadata))}

    @property
    def disturbances(self) -> dict[str, Kind]:
        """All disturbances that `--stress` accepts."""
        return {**self.stresses, **(IMAGES if self.cameras else {}), **(LATENCY if self.idle is not None else {})}

    def check_suite(self, name: str) -> None:
        """Raise `ConfigError` unless `name` is one of the suites."""
        if name not in self.suites:
            raise ConfigError(unknown("suite", name, self.suites))
