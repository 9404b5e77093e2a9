"""One episode: openpi's loop, step for step, and how it ended.

Success while the environment begins the episode does not count, as in openpi. Cameras are rendered only for the steps
after which the actor or the video looks. An exception makes the episode an *error*; only an episode that ran to its end
can be a failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from eval.harness.benchmark import Environment, Task
from eval.harness.protocol import EpisodeKey
from eval.harness.protocol import Protocol as EvaluationProtocol
from vla_accel.remote.ensemble import TemporalEnsemble
from vla_accel.view import OFF, View


class Actor(Protocol):
    """A policy, or the scripted expert.

    Attributes:
        looks: whether `actions` reads `env.observation()`, so that the step before it must render.
        history: the observations that it reads, one a tick.
        ensemble: how the predictions of a tick are averaged; None: the newest one counts.
        timings: milliseconds of every call in this episode, by component.
        observation: the newest one that it read; empty for an actor that reads none.
    """

    looks: bool
    history: int
    ensemble: TemporalEnsemble | None
    timings: dict[str, list[float]]
    observation: Mapping[str, Any]

    def warm_up(self, instruction: str) -> None:
        """Run before the first episode of a task, which would otherwise pay for it."""
        ...

    def begin(self, key: EpisodeKey, instruction: str) -> None:
        """Forget the last episode, and its timings."""
        ...

    def observe(self, env: Any) -> None:
        """See the observation of a tick without a call, one of the last `history` - 1 before it."""
        ...

    def actions(self, env: Any, left: np.ndarray | None) -> Sequence[np.ndarray]:
        """The next actions, each (action_dim,), from the present observation on. `left` (k, action_dim): the rest of
        the actions in use."""
        ...


class Chunks:
    """The action of each control tick when answers take several ticks, in simulated time.

    Like `vla_accel.remote.async_runner` on a robot: row i of a chunk belongs to the tick of its observation plus i, so
    a late answer starts with the row of the tick at which it arrives. One request is pending at a time. Before the
    first answer the robot stands still and loses no rows. Methods must be called with increasing ticks.

    Args:
        latency: ticks from an observation to the arrival of its chunk, fewer than a chunk has actions.
        replan: actions of a chunk before the next is requested; fewer if it would arrive too late.
        ensemble: averages a chunk with earlier predictions of its ticks.
    """

    def __init__(self, latency: int, replan: int, ensemble: TemporalEnsemble | None = None) -> None:
        self._latency, self._replan, self._ensemble = latency, replan, ensemble
        self._used: np.ndarray | None = None
        self._first = self.observed = 0
        """Ticks of the first row in use, and of the observation that it comes from."""
        self._coming: tuple[np.ndarray, int, int] | None = None
        """The pending chunk, the tick of its first row, and that of its arrival."""

    def due(self, tick: int) -> bool:
        """Whether to call the policy with the observation of this tick."""
        return self.until_due(tick) == 0

    def until_due(self, tick: int) -> int:
        """The ticks from this one to the next that calls the policy."""
        self._arrive(tick)
        if self._coming is not None:
            rows, first, arrival = self._coming
        elif self._used is not None:
            rows, first, arrival = self._used, self._first, tick
        else:
            return 0
        return max(0, arrival - tick, first + max(1, min(self._replan, len(rows) - self._latency)) - tick)

    def put(self, actions: Sequence[np.ndarray], tick: int) -> None:
        """Add the policy's answer (n, action_dim) to the observation of this tick."""
        arrival, rows = tick + self._latency, np.stack(list(actions))
        first = arrival if self._used is None else tick
        self._coming = rows if self._ensemble is None else self._ensemble.add(first, rows), first, arrival
        self._arrive(tick)

    def left(self, tick: int) -> np.ndarray | None:
        """The actions (k, action_dim) of the chunk in use from this tick on; None before the first and after the last
        of them."""
        self._arrive(tick)
        rest = None if self._used is None else self._used[tick - self._first :]
        return None if rest is None or not len(rest) else rest

    def _arrive(self, tick: int) -> None:
        if self._coming is not None and self._coming[2] <= tick:
            (self._used, self._first, arrival), self._coming = self._coming, None
            self.observed = arrival - self._latency


@dataclass(frozen=True)
class EpisodeResult:
    """How one episode ended.

    Attributes:
        success: the goal was reached; always False with an error.
        env_steps: actions executed by the actor.
        error: `"Type: message"` of the exception that ended it, or None.
        wall_s: seconds from reset to end, rendering and inference included.
        timings: milliseconds of every call, by component, plus `wall`, the whole call. Empty for the expert.
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
    recorder: Any = None,
    view: View = OFF,
    idle: Callable[[Any, np.ndarray | None], np.ndarray] | None = None,
) -> EpisodeResult:
    """Play one episode to its end, or to the exception that becomes its error.

    Args:
        recorder: a `VideoRecorder`: gets the first observation and then one every `recorder.every` actions.
        view: shows the observations, chunks and actions.
        idle: what the robot does while it waits (`Benchmark.idle`); a protocol with latency needs it.
    """
    start = time.perf_counter()
    env_steps, success, error = 0, False, None
    try:
        actor.begin(key, task.instruction)
        env.reset_to(task.start_states[key.trial], seed=(protocol.seed, key.task_id, key.trial))
        if recorder is not None:
            recorder.add(env.observation())
        chunks = Chunks(protocol.latency, protocol.replan_steps, actor.ensemble)
        action, limit = None, protocol.limit(key)
        while env_steps < limit and not success:
            if chunks.due(env_steps):
                rows = actor.actions(env, chunks.left(env_steps))
                chunks.put(rows, env_steps)
                if view.on:
                    latency = {name: ms[-1] for name, ms in actor.timings.items()}
                    view.inferred(env_steps, actor.observation, rows, latency)
            rest = chunks.left(env_steps)
            if rest is None:
                assert idle is not None, "a protocol with latency needs a benchmark with `idle`"
                action = idle(env, action)
            else:
                action = rest[0]
            if view.on:
                view.executed(env_steps, action)
                view.measured(env_steps, {"age/ticks": env_steps - chunks.observed})
            after = env_steps + 1
            films = recorder is not None and after % recorder.every == 0
            wait = chunks.until_due(after)
            needed = actor.looks and wait < actor.history and after < limit
            success = bool(env.step(action, look=films or needed))
            if needed and wait:
                actor.observe(env)
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
