"""One episode: openpi's loop, step for step, and an honest account of how it ended.

After the simulator's ten wait steps the loop asks the actor for actions whenever its queue is
empty, and stops at success or after `max_steps` actions (openpi counts the wait into its limit of
`max_steps + num_steps_wait`: the same number of actions). Success during the wait counts for
nothing, as in openpi. Cameras are rendered only for the steps after which the actor or the video
looks.

An exception on the way makes the episode an *error*, with its type and message; only an episode
that ran to its end can be a failure. This module knows neither where policies come from nor how
episodes are distributed over processes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from eval.libero.protocol import EpisodeKey
from eval.libero.protocol import Protocol as EvaluationProtocol
from vla_accel.errors import ConfigError, EngineError

ACTION_DIM = 7
WARM_UP_CALLS = 2


class StepResult(Protocol):
    """What an action led to."""

    @property
    def success(self) -> bool: ...


class Environment(Protocol):
    """The part of `eval.libero.simulator.LiberoEnv` that an episode uses."""

    def reset_to(self, initial_state: np.ndarray) -> Any: ...
    def step(self, action: np.ndarray, *, look: bool) -> StepResult: ...
    def frame(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


class Actor(Protocol):
    """Whoever drives the arm: a policy, or the scripted expert.

    Attributes:
        looks: whether `actions` reads `env.frame()`, so that the step before it must render.
        timings: milliseconds of every call in this episode, by component.
    """

    looks: bool
    timings: dict[str, list[float]]

    def warm_up(self, prompt: str) -> None:
        """Do what the first episodes of this task would otherwise wait for."""
        ...

    def begin(self, key: EpisodeKey, prompt: str) -> None:
        """Forget the last episode, and its timings."""
        ...

    def actions(self, env: Any) -> Sequence[np.ndarray]:
        """At least one action (7,), to be executed before the next call."""
        ...


class Recorder(Protocol):
    """Collects camera frames of one episode for a video, one every `every` actions."""

    every: int

    def add(self, frame: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class EpisodeResult:
    """How one episode ended.

    Attributes:
        key: which episode.
        success: the goal was reached; always False beside an error.
        env_steps: actions executed, without the wait.
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

    def with_video(self, name: str) -> EpisodeResult:
        """The same result, naming its video."""
        return replace(self, video=name)

    def to_json(self) -> dict[str, Any]:
        """JSON types; `from_json` reads them back."""
        return {
            "steps": self.key.steps,
            "task_id": self.key.task_id,
            "trial": self.key.trial,
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
            key=EpisodeKey(data["steps"], data["task_id"], data["trial"]),
            success=data["success"],
            env_steps=data["env_steps"],
            error=data["error"],
            wall_s=data["wall_s"],
            infer_count=data["infer_count"],
            timings={k: list(ms) for k, ms in data["timings_ms"].items()},
            video=data["video"],
        )


class PolicyActor:
    """Drives the arm with `policy.infer`.

    Args:
        policies: gives the policy for a step count.
        protocol: its seed, with task, trial and call index, determines the noise of every call, so
            that step counts, engines and numbers of workers meet the same noise.
        send_noise: False for a server, which draws its own.
    """

    looks = True

    def __init__(
        self,
        policies: Callable[[int | None], Any],
        protocol: EvaluationProtocol,
        *,
        send_noise: bool = True,
    ) -> None:
        self._policies = policies
        self._protocol = protocol
        self._send_noise = send_noise
        self.timings: dict[str, list[float]] = {}

    def warm_up(self, prompt: str) -> None:
        """Run every step count on a black observation: no episode pays for a task's first calls."""
        black = np.zeros((224, 224, 3), np.uint8)
        obs = {
            "observation/image": black,
            "observation/wrist_image": black,
            "observation/state": np.zeros(8),
            "prompt": prompt,
        }
        for steps in self._protocol.steps:
            for _ in range(WARM_UP_CALLS):
                self._policies(steps).infer(obs)

    def begin(self, key: EpisodeKey, prompt: str) -> None:
        self.timings = {}
        self._key, self._prompt, self._call = key, prompt, 0
        self._policy = self._policies(key.steps)
        self._policy.reset()

    def actions(self, env: Any) -> Sequence[np.ndarray]:
        obs = {**env.frame(), "prompt": self._prompt}
        options = {"noise": self._noise(self._call)} if self._send_noise else {}
        start = time.perf_counter()
        out = self._policy.infer(obs, **options)
        wall = (time.perf_counter() - start) * 1e3
        self._call += 1
        self._record(out.get("policy_timing", {}), wall)
        return self._checked(out["actions"])

    def _record(self, timing: Mapping[str, Any], wall: float) -> None:
        row = {name.removesuffix("_ms"): float(value) for name, value in timing.items()}
        row["wall"] = wall
        if self.timings and set(row) != set(self.timings):
            raise EngineError(
                f"policy_timing: expected {sorted(self.timings)}, as in the first call, got {sorted(row)}"
            )
        for name, value in row.items():
            self.timings.setdefault(name, []).append(value)

    def _noise(self, call: int) -> np.ndarray:
        """Standard normal noise (horizon, action_dim), float32."""
        shape = noise_shape(self._policy.metadata)
        rng = np.random.default_rng([self._protocol.seed, self._key.task_id, self._key.trial, call])
        return rng.standard_normal(shape).astype(np.float32)

    def _checked(self, actions: Any) -> list[np.ndarray]:
        chunk, count = np.asarray(actions, dtype=np.float64), self._protocol.replan_steps
        if chunk.ndim != 2 or len(chunk) < count or chunk.shape[1] != ACTION_DIM:
            raise EngineError(
                f"actions: expected at least {count} of {ACTION_DIM} numbers, to replan every "
                f"{count} steps, got {chunk.shape}"
            )
        chunk = chunk[:count]
        if not np.isfinite(chunk).all():
            raise EngineError("actions: expected finite numbers, got NaN or infinity")
        return list(chunk)


class ExpertActor:
    """Drives the arm with the scripted expert, which reads the simulator instead of cameras."""

    looks = False

    def __init__(self, expert: Any) -> None:
        self._expert = expert
        self.timings: dict[str, list[float]] = {}

    def warm_up(self, prompt: str) -> None:
        pass

    def begin(self, key: EpisodeKey, prompt: str) -> None:
        self.timings = {}

    def actions(self, env: Any) -> Sequence[np.ndarray]:
        return [self._expert.act(env)]


def noise_shape(metadata: Mapping[str, Any]) -> tuple[int, int]:
    """(horizon, action_dim) of the noise that a policy expects, from its metadata."""
    try:
        return int(metadata["action_horizon"]), int(metadata["action_dim"])
    except KeyError as key:
        raise ConfigError(f"policy metadata: expected action_horizon and action_dim, missing {key}") from None


def run_episode(
    env: Environment,
    initial_state: np.ndarray,
    actor: Actor,
    key: EpisodeKey,
    protocol: EvaluationProtocol,
    *,
    prompt: str,
    recorder: Recorder | None = None,
) -> EpisodeResult:
    """Play one episode to its end, or to the exception that becomes its error.

    Args:
        initial_state: the simulator's flattened state (D,), float64.
        prompt: the task in words.
        recorder: gets the first frame and then one every `recorder.every` actions.
    """
    start = time.perf_counter()
    env_steps, success, error = 0, False, None
    try:
        actor.begin(key, prompt)
        env.reset_to(initial_state)
        if recorder is not None:
            recorder.add(env.frame())
        queue: deque[np.ndarray] = deque()
        while env_steps < protocol.max_steps and not success:
            if not queue:
                queue.extend(actor.actions(env))
            action = queue.popleft()
            after = env_steps + 1
            films = recorder is not None and after % recorder.every == 0
            asks = actor.looks and not queue and after < protocol.max_steps
            outcome = env.step(action, look=films or asks)
            env_steps, success = after, bool(outcome.success)
            if recorder is not None and films:
                recorder.add(env.frame())
    except Exception as exception:
        # Whatever broke, the episode says nothing about the policy's skill.
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
