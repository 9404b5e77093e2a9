"""One episode: openpi's loop, step for step, and an honest account of how it ended.

The loop asks the actor for actions whenever it is time to (`eval.harness.chunks`), and stops at success or after
`max_steps` actions; a tick in which the robot waits for an answer counts as one.
Success while the environment begins the episode counts for nothing, as in openpi. Cameras are rendered only for the
steps after which the actor or the video looks.

An exception on the way makes the episode an *error*, with its type and message; only an episode that ran to its end can
be a failure. This module knows neither where policies come from nor how episodes are distributed over processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from eval.harness.benchmark import Environment, Task
from eval.harness.chunks import Chunks
from eval.harness.protocol import EpisodeKey
from eval.harness.protocol import Protocol as EvaluationProtocol


class Actor(Protocol):
    """Whoever drives the arm: a policy, or the scripted expert.

    Attributes:
        looks: whether `actions` reads `env.observation()`, so that the step before it must render.
        timings: milliseconds of every call in this episode, by component.
    """

    looks: bool
    timings: dict[str, list[float]]

    def warm_up(self, instruction: str) -> None:
        """Do what the first episodes of this task would otherwise wait for."""
        ...

    def begin(self, key: EpisodeKey, instruction: str) -> None:
        """Forget the last episode, and its timings."""
        ...

    def actions(self, env: Any, left: np.ndarray | None) -> Sequence[np.ndarray]:
        """The next actions, each (action_dim,): the first belongs to what `env` shows now. `left` (k, action_dim): what
        is still to come of those in use."""
        ...


class Recorder(Protocol):
    """Collects observations of one episode for a video, one every `every` actions."""

    every: int

    def add(self, observation: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class EpisodeResult:
    """How one episode ended.

    Attributes:
        key: which episode.
        success: the goal was reached; always False with an error.
        env_steps: actions executed by the actor.
        error: `"Type: message"` of the exception that ended it, or None.
        wall_s: seconds from reset to end, rendering and inference included.
        infer_count: calls of the policy.
        timings: milliseconds of every call, by component, plus `wall`, the whole call as the
            harness sees it. Empty for the expert.
        video: file name of the rollout video, if one was written.
    """

    key: EpisodeKey
    success: bool
    env_steps: int
    error: str | None
    wall_s: float
    infer_count: int
    timings: dict[str, list[float]] = field(default_factory=dict)
    video: str | None = None

    @property
    def outcome(self) -> str:
        """`"success"`, `"failure"` or `"error"`."""
        return "error" if self.error else "success" if self.success else "failure"

    def to_json(self) -> dict[str, Any]:
        """JSON types; `from_json` reads them back."""
        return {
            "steps": self.key.steps,
            "task_id": self.key.task_id,
            "trial": self.key.trial,
            **({"suite": self.key.suite} if self.key.suite else {}),
            "success": self.success,
            "env_steps": self.env_steps,
            "error": self.error,
            "wall_s": round(self.wall_s, 3),
            "infer_count": self.infer_count,
            "timings_ms": {k: [round(v, 4) for v in ms] for k, ms in self.timings.items()},
            "video": self.video,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> EpisodeResult:
        """The inverse of `to_json`; a missing field raises `KeyError`."""
        return cls(
            key=EpisodeKey.from_json(data),
            success=data["success"],
            env_steps=data["env_steps"],
            error=data["error"],
            wall_s=data["wall_s"],
            infer_count=data["infer_count"],
            timings={k: list(ms) for k, ms in data["timings_ms"].items()},
            video=data["video"],
        )


def run_episode(
    env: Environment,
    task: Task,
    actor: Actor,
    key: EpisodeKey,
    protocol: EvaluationProtocol,
    *,
    recorder: Recorder | None = None,
    idle: Callable[[np.ndarray | None], np.ndarray] | None = None,
) -> EpisodeResult:
    """Play one episode to its end, or to the exception that becomes its error.

    Args:
        recorder: gets the first observation and then one every `recorder.every` actions.
        idle: what the robot does while it waits (`Benchmark.idle`); a protocol with latency needs it.
    """
    start = time.perf_counter()
    env_steps, success, error = 0, False, None
    try:
        actor.begin(key, task.instruction)
        env.reset_to(task.start_states[key.trial], seed=(protocol.seed, key.task_id, key.trial))
        if recorder is not None:
            recorder.add(env.observation())
        chunks, action, limit = Chunks(protocol.latency, protocol.replan_steps), None, protocol.limit(key)
        while env_steps < limit and not success:
            if chunks.due(env_steps):
                chunks.put(actor.actions(env, chunks.left(env_steps)), env_steps)
            arrived = chunks.at(env_steps)
            if arrived is None:
                assert idle is not None, "a protocol with latency needs a benchmark with `idle`"
                arrived = idle(action)
            action = arrived
            after = env_steps + 1
            films = recorder is not None and after % recorder.every == 0
            needed = actor.looks and chunks.due(after) and after < limit
            success = bool(env.step(action, look=films or needed))
            env_steps = after
            if recorder is not None and films:
                recorder.add(env.observation())
    except Exception as exception:
        # An exception says nothing about the skill of the policy.
        success, error = False, describe(exception)
    return EpisodeResult(
        key=key,
        success=success,
        env_steps=env_steps,
        error=error,
        wall_s=time.perf_counter() - start,
        infer_count=len(actor.timings.get("wall", ())),
        timings=actor.timings,
    )


def describe(exception: BaseException) -> str:
    """`"Type: message"` on one line."""
    return f"{type(exception).__name__}: {' '.join(str(exception).split())}"
