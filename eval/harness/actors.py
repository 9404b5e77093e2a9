"""What drives the arm: a policy that predicts chunks of actions, or the scripted expert of a benchmark."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from eval.harness.benchmark import Benchmark, Expert
from eval.harness.protocol import EpisodeKey, Protocol
from eval.harness.stress import disturb
from vla_accel.errors import ConfigError, EngineError
from vla_accel.remote.metadata import max_delay

WARM_UP_CALLS = 2


class PolicyActor:
    """Drives the arm with `policy.infer`.

    Args:
        policies: returns the policy for a step count.
        protocol: its seed, with task, trial and call index, determines the noise of every call, and its disturbances of
            the observation, so that they are equal for all step counts, engines and numbers of workers.
        send_noise: False for a server, which draws its own.
        guided: real-time chunking: pass the rest of the last chunk to the policy, and how many of its actions will be
            executed before the answer arrives.
    """

    looks = True

    def __init__(
        self,
        policies: Callable[[int | None], Any],
        benchmark: Benchmark,
        protocol: Protocol,
        *,
        send_noise: bool = True,
        guided: bool = False,
    ) -> None:
        self._policies = policies
        self._benchmark = benchmark
        self._protocol = protocol
        self._send_noise, self._guided = send_noise, guided
        self.timings: dict[str, list[float]] = {}

    def warm_up(self, instruction: str) -> None:
        """Run every step count on an example, so that no episode pays for the first calls of a task."""
        obs = {**self._benchmark.example_observation(), "prompt": instruction}
        for steps in self._protocol.steps:
            for _ in range(WARM_UP_CALLS):
                self._policies(steps).infer(obs)

    def begin(self, key: EpisodeKey, instruction: str) -> None:
        self.timings = {}
        self._key, self._instruction, self._call = key, instruction, 0
        self._policy = self._policies(key.steps)
        self._policy.reset()

    def actions(self, env: Any, left: np.ndarray | None) -> Sequence[np.ndarray]:
        protocol = self._protocol
        episode = (protocol.seed, self._key.task_id, self._key.trial)
        seen = disturb(
            env.observation(), self._benchmark.cameras, protocol.stress, episode=episode, call=self._call
        )  # fmt: skip
        obs = {**seen, "prompt": self._instruction}
        options: dict[str, Any] = {"noise": self._noise(self._call)} if self._send_noise else {}
        if self._guided and left is not None:
            most = max_delay(self._policy)
            delay = min(protocol.latency, len(left))
            options |= {"prev_chunk": left, "inference_delay": delay if most is None else min(delay, most)}
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
        chunk, size = np.asarray(actions, dtype=np.float64), self._benchmark.action_dim
        replan, latency = self._protocol.replan_steps, self._protocol.latency
        count = max(replan, latency + 1)
        if chunk.ndim != 2 or len(chunk) < count or chunk.shape[1] != size:
            late = f", {latency} ticks late" if latency else ""
            raise EngineError(
                f"actions: expected at least {count} of {size} numbers, to replan every {replan} steps{late}, "
                f"got {chunk.shape}"
            )
        if not np.isfinite(chunk).all():
            raise EngineError("actions: expected finite numbers, got NaN or infinity")
        return list(chunk)


class ExpertActor:
    """Drives the arm with the scripted expert, which reads the simulator instead of cameras."""

    looks = False

    def __init__(self, expert: Expert) -> None:
        self._expert = expert
        self.timings: dict[str, list[float]] = {}

    def warm_up(self, instruction: str) -> None:
        pass

    def begin(self, key: EpisodeKey, instruction: str) -> None:
        self.timings = {}

    def actions(self, env: Any, left: np.ndarray | None) -> Sequence[np.ndarray]:
        return [self._expert.act(env)]


def noise_shape(metadata: Mapping[str, Any]) -> tuple[int, int]:
    """(horizon, action_dim) of the noise that a policy expects, from its metadata."""
    try:
        return int(metadata["action_horizon"]), int(metadata["action_dim"])
    except KeyError as key:
        raise ConfigError(f"policy metadata: expected action_horizon and action_dim, missing {key}") from None
