"""What a benchmark is to the harness: one object of plain values and functions.

Plan, workers, log, resume, statistics, report and pairs take what they need from it and know none by name. A benchmark
called X lies in `eval/X`; `python -m eval.X` hands its object to `eval.harness.command`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from eval.harness.stress import IMAGES, LATENCY, Kind
from vla_accel.errors import ConfigError, unknown

Observation = dict[str, Any]
"""What a policy sees: arrays by name, and `prompt`."""


@dataclass(frozen=True)
class Task:
    """One task of a suite.

    Attributes:
        id: index in its suite, from 0.
        name: the benchmark's own name.
        instruction: the task in words: the policy's prompt.
        start_states: where its episodes begin, one a trial; what a state is, only the benchmark knows.
    """

    id: int
    name: str
    instruction: str
    start_states: Sequence[Any]


@dataclass(frozen=True)
class Suite:
    """Tasks that are reported together.

    Attributes:
        name: as on the command line.
        tasks: in the benchmark's order; `tasks[i].id == i`.
        max_steps: actions after which an episode is lost, by the benchmark's own rules.
    """

    name: str
    tasks: Sequence[Task]
    max_steps: int


class Environment(Protocol):
    """One task's simulator, played one episode after the other."""

    def reset_to(self, start_state: Any, *, seed: Sequence[int]) -> Any:
        """Begin an episode. Whatever a start state leaves open is drawn from `seed`, so that an episode does not depend
        on those before it. The first observation can be asked for."""
        ...

    def step(self, action: np.ndarray, *, look: bool) -> bool:
        """Execute one action (action_dim,); returns whether the goal holds now. Without `look` nothing is rendered, and
        the observation of this step cannot be asked for."""
        ...

    def observation(self) -> Observation:
        """What the last step shows, but for `prompt`."""
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
    """The schema that a benchmark's files state; `kind`: `log`, `result` or `paired`."""
    return f"vla_accel.{benchmark}.{kind}/1"


@dataclass(frozen=True)
class Benchmark:
    """A benchmark. Its functions are found by name in worker processes (pickle), so they stand in a module.

    Attributes:
        name: its folder below `eval/`; also in the schemas and file names of its results.
        suites: names, in the order they are listed to users.
        load_suite: a suite by name. Called in every worker process: cheap, and without a simulator's start.
        make_environment: of one task, under these `settings`; the last argument says whether anybody will look. Raises
            SimulatorError or DependencyError if it cannot be built.
        example_observation: one like those of an environment, but for `prompt`, for warming a policy up.
        action_dim: numbers in an action.
        control_hz: actions in a second of simulated time.
        cameras: observation keys of the images (H, W, 3) that a video shows side by side; empty if it has none.
        settings: what else an episode depends on (JSON types): part of a run's protocol, and so of its fingerprint.
        trials: episodes of a task, unless asked otherwise.
        limits_by: who set the suites' `max_steps`.
        make_expert: the scripted expert, or None. Its source file is its identity, and those beside it whose names
            begin like it.
        expert_suites: the suites that the expert can play.
        packages: distributions whose versions a result states.
        stresses: what the simulator itself can disturb, by name. `make_environment` finds their values among its
            settings; an environment draws what they leave open from the seed of `reset_to`.
        settings_for: more settings, which a policy of this metadata asks for, such as the size of its images.
        idle: what the robot does in a tick for which no action has arrived, from its last action (action_dim,) or
            None: it stands still. Without it there is no latency.
    """

    name: str
    suites: tuple[str, ...]
    load_suite: Callable[[str], Suite]
    make_environment: Callable[[Task, Mapping[str, Any], bool], Environment]
    example_observation: Callable[[], Observation]
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
    idle: Callable[[np.ndarray | None], np.ndarray] | None = None

    def settings_of(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """All settings of a run of a policy."""
        return {**self.settings, **({} if self.settings_for is None else self.settings_for(metadata))}

    @property
    def disturbances(self) -> dict[str, Kind]:
        """Everything that `--stress` can ask for."""
        return {**self.stresses, **(IMAGES if self.cameras else {}), **(LATENCY if self.idle is not None else {})}

    def check_suite(self, name: str) -> None:
        """Raise `ConfigError` unless `name` is one of the suites."""
        if name not in self.suites:
            raise ConfigError(unknown("suite", name, self.suites))
