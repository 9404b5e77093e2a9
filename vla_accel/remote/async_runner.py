"""A robot loop fed at its control rate, while the next chunk of actions is computed beside it.

Ticks are counted by calls of `step`. A chunk inferred from the observation of tick o holds the actions of ticks o,
o + 1, …: when it is ready at tick m, the robot goes on with its action m − o. With a policy that supports real-time
chunking the new chunk is guided to agree with what the robot executed meanwhile; without, it is merely cut there.
Knows nothing about models, sockets or robots, and needs NumPy only.
Source of the method: Black, Galliker, Levine, "Real-Time Execution of Action Chunking Flow Policies" (2025).
"""

from __future__ import annotations

import inspect
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from vla_accel.errors import ConfigError, EngineError

logger = logging.getLogger("vla_accel.realtime")

_KEPT_DELAYS = 10


@dataclass(frozen=True)
class RunnerReport:
    """What happened so far.

    `ticks`: calls of `step`. `chunks`: inferences used. `underruns`: ticks for which no computed action was there.
    `late`: chunks that took more ticks than was announced to the policy, so that the guidance did not cover them.
    `stale`: chunks that took longer than they last, and were dropped. `delay_ticks`, `latency_ms`: of the newest
    inferences, the largest. `longest_step_ms`: the longest that `step` held the robot up.
    """

    ticks: int
    chunks: int
    underruns: int
    late: int
    stale: int
    delay_ticks: int
    latency_ms: float
    longest_step_ms: float


@dataclass(frozen=True)
class _Chunk:
    """Actions (n, action_dim); row 0 belongs to tick `first`."""

    actions: np.ndarray
    first: int

    def remaining(self, tick: int) -> np.ndarray:
        return self.actions[max(tick - self.first, 0) :]


@dataclass(frozen=True)
class _Job:
    observation: dict[str, Any]
    tick: int
    prev_chunk: np.ndarray | None
    delay: int


@dataclass(frozen=True)
class _Done:
    job: _Job
    actions: np.ndarray | None
    error: BaseException | None
    seconds: float


class AsyncRunner:
    """Runs `policy.infer` in a background thread, early enough that `step` always has an action.

        with AsyncRunner(policy, hz=50) as runner:
            runner.start(robot.observe())
            while ...:
                robot.act(runner.step(robot.observe()))   # once per control period

    Args:
        policy: anything with `infer(observation) -> {"actions": (n, action_dim), …}`: an `OptimizedPolicy`, or a
            `PolicyClient`. It must be used by nobody else meanwhile.
        hz: control rate; one `step` each period.
        replan_ticks: start the next inference once so many actions of a chunk were executed (earlier if the measured
            delay asks for it); None: half a chunk.
        margin_ticks: spare ticks, beyond the measured delay, that an inference may take.
        max_wait_s: how long `step` may wait where no action is left; None: half a control period.
        underrun: what `step` returns when that was not enough: "hold" repeats the last action, which suits absolute
            targets and not velocities or deltas; an array (action_dim,) is returned as it is; "raise" raises.
        real_time_chunking: None: where the policy supports it; True demands it; False never.
    """

    def __init__(
        self,
        policy: Any,
        hz: float,
        *,
        replan_ticks: int | None = None,
        margin_ticks: int = 1,
        max_wait_s: float | None = None,
        underrun: Literal["hold", "raise"] | np.ndarray = "hold",
        real_time_chunking: bool | None = None,
    ) -> None:
        if not callable(getattr(policy, "infer", None)):
            raise ConfigError(f"policy: expected one with `infer(observation)`, got a {type(policy).__name__}")
        if not isinstance(hz, (int, float)) or not hz > 0 or not math.isfinite(hz):
            raise ConfigError(f"hz: expected a control rate above 0, got {hz!r}")
        if max_wait_s is not None and not 0 <= max_wait_s < math.inf:
            raise ConfigError(f"max_wait_s: expected 0 or more seconds, got {max_wait_s}")
        if (replan_ticks is not None and replan_ticks < 1) or margin_ticks < 0:
            raise ConfigError(
                f"expected replan_ticks >= 1 and margin_ticks >= 0, got {replan_ticks} and {margin_ticks}"
            )
        if isinstance(underrun, str) and underrun not in ("hold", "raise"):
            raise ConfigError(f"underrun: expected 'hold', 'raise' or an action, got {underrun!r}")
        supported = takes_prev_chunk(policy)
        if real_time_chunking and not supported:
            raise ConfigError("real_time_chunking: this policy's infer takes no prev_chunk and inference_delay")
        self.real_time_chunking = supported if real_time_chunking is None else real_time_chunking
        self._policy, self._hz = policy, hz
        self._replan, self._margin = replan_ticks, margin_ticks
        self._max_wait_s = 0.5 / hz if max_wait_s is None else max_wait_s
        self._underrun = underrun if isinstance(underrun, str) else np.array(underrun, np.float64)
        # Guarded by the condition.
        self._condition = threading.Condition()
        self._job: _Job | None = None
        self._done: _Done | None = None
        self._closed = False
        # Of the robot's thread only.
        self._tick, self._busy, self._started = 0, False, False
        self._chunk: _Chunk | None = None
        self._last: np.ndarray | None = None
        self._delays: deque[int] = deque(maxlen=_KEPT_DELAYS)
        self._latencies: deque[float] = deque(maxlen=_KEPT_DELAYS)
        self._counts = {"chunks": 0, "underruns": 0, "late": 0, "stale": 0}
        self._longest_step_s = 0.0
        self._in_underrun = False
        self._thread = threading.Thread(target=self._work, name="inference", daemon=True)
        self._thread.start()

    def __enter__(self) -> AsyncRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the robot's side -----------------------------------------------------------------------------------------

    def start(self, observation: Mapping[str, Any], timeout_s: float = 120.0) -> None:
        """Begin an episode: forget old actions and wait for the first chunk, the robot standing still. Also measures
        the delay. Raises what `infer` raised, EngineError after `timeout_s`."""
        self._check_open()
        end = time.monotonic() + timeout_s
        if self._busy and not self._wait_until(end):
            raise EngineError(f"async runner: the last inference did not end within {timeout_s:g} s")
        with self._condition:
            self._done = None
        self._busy, self._started, self._in_underrun = False, False, False
        self._chunk, self._last = None, None
        reset = getattr(self._policy, "reset", None)
        if reset is not None:
            reset()
        self._launch(observation)
        if not self._wait_until(end):
            raise EngineError(f"async runner: no first chunk within {timeout_s:g} s")
        self._collect()
        action, instead = self._at(), self._underrun
        if isinstance(instead, np.ndarray) and action is not None and instead.shape != action.shape:
            raise ConfigError(f"underrun: expected an action of shape {action.shape}, got {instead.shape}")
        self._started = True
        # The robot did not move: the delay is what the inference would have cost it.
        self._delays.clear()
        self._delays.append(math.ceil(self._latencies[-1] * self._hz))

    def step(self, observation: Mapping[str, Any]) -> np.ndarray:
        """The action (action_dim,) float64 of this tick. Call it once per control period, with what is seen now.

        Waits at most `max_wait_s`, and only where no action is left. Raises what `infer` raised (the next call goes
        on), EngineError for an underrun if so configured.
        """
        began = time.monotonic()
        self._check_open()
        if not self._started:
            raise ConfigError("async runner: call start(observation) before step(observation)")
        try:
            self._collect()
            if not self._busy and self._due():
                self._launch(observation)
            if self._at() is None and self._busy and self._wait_until(began + self._max_wait_s):
                self._collect()
                if not self._busy and self._due():
                    self._launch(observation)
            action = self._at()
            if action is None:
                action = self._missed()
            elif self._in_underrun:
                self._in_underrun = False
                logger.warning("async runner: actions again at tick %d", self._tick)
            self._last = action
            return action.copy()
        finally:
            self._tick += 1
            self._longest_step_s = max(self._longest_step_s, time.monotonic() - began)

    def report(self) -> RunnerReport:
        """What happened since the runner was made."""
        return RunnerReport(
            ticks=self._tick,
            delay_ticks=max(self._delays, default=0),
            latency_ms=max(self._latencies, default=0.0) * 1e3,
            longest_step_ms=self._longest_step_s * 1e3,
            **self._counts,
        )

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop: no new inference, the one under way ends. Raises EngineError if it does not within `timeout_s`."""
        with self._condition:
            first, self._closed = not self._closed, True
            self._job = None
            self._condition.notify_all()
        self._thread.join(timeout_s)
        if first and self._counts["underruns"]:
            logger.warning("async runner: %d underruns in %d ticks", self._counts["underruns"], self._tick)
        if self._thread.is_alive():
            raise EngineError(f"async runner: the inference under way did not end within {timeout_s:g} s")

    # -- inside, the robot's thread -------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("async runner: it is closed")

    def _expected_delay(self) -> int:
        """Ticks that the next inference will probably take: the slowest of the newest."""
        return max(self._delays, default=1)

    def _at(self) -> np.ndarray | None:
        """The action of this tick, if there is one."""
        if self._chunk is None:
            return None
        remaining = self._chunk.remaining(self._tick)
        return remaining[0] if len(remaining) else None

    def _due(self) -> bool:
        """Whether the next inference should begin now."""
        if self._chunk is None:
            return True
        horizon, used = len(self._chunk.actions), self._tick - self._chunk.first
        replan = self._replan or max(horizon // 2, 1)
        return used >= replan or horizon - used <= self._expected_delay() + self._margin

    def _launch(self, observation: Mapping[str, Any]) -> None:
        remaining = None if self._chunk is None else self._chunk.remaining(self._tick)
        guided = self.real_time_chunking and remaining is not None and len(remaining) > 0
        # The robot's loop may write its next frame into the same arrays.
        copied = _copied(observation)
        previous = remaining.copy() if guided and remaining is not None else None
        # What is not in the previous chunk cannot be kept.
        delay = min(self._expected_delay(), 0 if previous is None else len(previous))
        self._busy = True
        with self._condition:
            self._done = None
            self._job = _Job(copied, self._tick, previous, delay)
            self._condition.notify_all()

    def _wait_until(self, end: float) -> bool:
        """Wait for the inference under way; False if it has not ended by then."""
        with self._condition:
            return self._condition.wait_for(lambda: self._done is not None, max(end - time.monotonic(), 0.0))

    def _collect(self) -> None:
        """Take over a finished inference: its chunk from this tick on, or its error."""
        with self._condition:
            done, self._done = self._done, None
        if done is None:
            return
        self._busy = False
        if done.error is not None:
            raise done.error
        assert done.actions is not None
        delay = self._tick - done.job.tick
        self._delays.append(delay)
        self._latencies.append(done.seconds)
        if delay >= len(done.actions):
            self._counts["stale"] += 1
            logger.warning("async runner: a chunk of %d actions took %d ticks, dropped", len(done.actions), delay)
            return
        if done.job.prev_chunk is not None and delay > done.job.delay:
            self._counts["late"] += 1
            logger.warning(
                "async runner: an inference took %d ticks, %d were expected: the chunks may not join smoothly",
                delay,
                done.job.delay,
            )
        self._counts["chunks"] += 1
        self._chunk = _Chunk(done.actions, done.job.tick)

    def _missed(self) -> np.ndarray:
        """No action for this tick: say so and return what was configured."""
        self._counts["underruns"] += 1
        if not self._in_underrun:
            self._in_underrun = True
            logger.warning("async runner: UNDERRUN at tick %d: inference is slower than the robot", self._tick)
        if isinstance(self._underrun, np.ndarray):
            return self._underrun
        if self._underrun == "raise" or self._last is None:
            raise EngineError(f"async runner: no action for tick {self._tick}: inference is slower than the robot")
        return self._last

    # -- inside, the background thread ----------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._job is not None or self._closed)
                job, self._job = self._job, None
                if job is None:
                    return
            began = time.perf_counter()
            actions, error = None, None
            try:
                actions = self._infer(job)
            except BaseException as caught:  # carried to the robot's thread
                error = caught
            done = _Done(job, actions, error, time.perf_counter() - began)
            with self._condition:
                self._done = done
                self._condition.notify_all()

    def _infer(self, job: _Job) -> np.ndarray:
        options = {} if job.prev_chunk is None else {"prev_chunk": job.prev_chunk, "inference_delay": job.delay}
        result = self._policy.infer(job.observation, **options)
        actions = np.array(result["actions"], np.float64)
        if actions.ndim != 2 or not actions.size:
            raise EngineError(f"actions: expected (n, action_dim), got shape {actions.shape}")
        if not np.isfinite(actions).all():
            raise EngineError("actions: expected finite numbers, got NaN or infinity")
        return actions


def _copied(observation: Any) -> Any:
    """The observation with arrays of its own, those in nested mappings (of cameras) included."""
    if isinstance(observation, Mapping):
        return {k: _copied(v) for k, v in observation.items()}
    return observation.copy() if isinstance(observation, np.ndarray) else observation


def takes_prev_chunk(policy: Any) -> bool:
    """Whether `policy.infer` takes `prev_chunk` and `inference_delay`: as the policy says itself
    (`supports_prev_chunk`), else as the signature of its `infer` says."""
    said = getattr(policy, "supports_prev_chunk", None)
    if isinstance(said, bool):
        return said
    parameters = inspect.signature(policy.infer).parameters
    return "prev_chunk" in parameters and "inference_delay" in parameters
