"""A robot loop fed at its control rate, while the next chunk of actions is computed in another thread.

Ticks are counted by calls of `step`. A chunk inferred from the observation of tick o holds the actions of ticks o,
o + 1, …: when it is ready at tick m, the robot goes on with its action m − o. With a policy that supports real-time
chunking the new chunk is guided to agree with what the robot executed meanwhile; without, it just replaces it.
Knows nothing about models, sockets or robots, and needs NumPy only.
Source of the method: Black, Galliker, Levine, "Real-Time Execution of Action Chunking Flow Policies" (2025).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vla_accel.errors import ConfigError, EngineError
from vla_accel.remote.copying import copied
from vla_accel.remote.delay import DelayEstimate
from vla_accel.remote.inference import Done, Inference, Job
from vla_accel.remote.metadata import max_delay, motion_dims, supports_prev_chunk
from vla_accel.remote.numbers import above_zero, at_least, zero_or_more
from vla_accel.remote.underrun import Choice, Underrun

logger = logging.getLogger("vla_accel.realtime")

_LONGEST_PAUSE_S = 1.0
"""Between two attempts after inferences that failed."""
_EXIT_TIMEOUT_S = 1.0
"""How long the end of a block waits that an exception ended: Ctrl-C must not wait for a server."""


@dataclass(frozen=True)
class RunnerReport:
    """What happened since the runner was made.

    Attributes:
        ticks: calls of `step`.
        chunks: inferences used.
        underruns: ticks for which no computed action was there.
        late: chunks that took more ticks than was announced to the policy, so that the guidance did not cover them.
        stale: chunks that took longer than they last, and were dropped.
        failures: inferences that raised.
        delay_ticks, latency_ms: the longest of the newest inferences.
        longest_step_ms: the longest time that `step` took.
    """

    ticks: int
    chunks: int
    underruns: int
    late: int
    stale: int
    failures: int
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


class AsyncRunner:
    """Runs `policy.infer` in a background thread, early enough that `step` always has an action.

        with AsyncRunner(policy, hz=50) as runner:
            runner.start(robot.observe())
            while ...:
                robot.act(runner.step(robot.observe()))   # once per control period

    The delay that is announced to a guided policy is an estimate of the runner's own (`remote.delay.DelayEstimate`):

        announced = max(0, min(expected, k - 1, max_delay))

    with k the actions that are left and `max_delay` of the policy's metadata. A longer inference is counted as `late`.
    It is never an error.

    If an inference fails while actions are left, `step` returns those. The error is logged at once and raised when
    nothing is left, whatever `underrun` says. The next attempt comes after 1, 2, 4, … ticks, at most a second.

    Args:
        policy: anything with `infer(observation) -> {"actions": (n, action_dim), …}`: an `OptimizedPolicy`, a
            `PolicyClient` or your own. Nothing else may use it meanwhile. Your own policy sets `supports_prev_chunk =
            True` if its `infer` takes `prev_chunk` and `inference_delay`; without the attribute it gets neither.
        hz: control rate; one `step` each period.
        replan_ticks: start the next inference once so many actions of a chunk were executed (earlier if the measured
            delay requires it); None: half a chunk.
        margin_ticks: spare ticks, beyond the expected delay, that an inference may take.
        max_wait_s: how long `step` may wait where no action is left; None: half a control period.
        underrun: what `step` returns when that was not enough: "hold" or a `remote.underrun.Hold` repeats the last
            action with its motion (velocities, steps) set to 0; an array (action_dim,) is returned as it is; "raise"
            raises.
        real_time_chunking: None: if the policy supports it; True requires it; False never.

    Raises:
        ConfigError: an argument that is out of its range, or `real_time_chunking=True` for a policy without it.
    """

    def __init__(
        self,
        policy: Any,
        hz: float,
        *,
        replan_ticks: int | None = None,
        margin_ticks: int = 1,
        max_wait_s: float | None = None,
        underrun: Choice = "hold",
        real_time_chunking: bool | None = None,
    ) -> None:
        if not callable(getattr(policy, "infer", None)):
            raise ConfigError(f"policy: expected one with `infer(observation)`, got a {type(policy).__name__}")
        self._policy, self._hz = policy, above_zero(hz, "hz", "a control rate")
        self._replan = None if replan_ticks is None else at_least(1, replan_ticks, "replan_ticks")
        self._margin = at_least(0, margin_ticks, "margin_ticks")
        self._max_wait_s = 0.5 / self._hz if max_wait_s is None else zero_or_more(max_wait_s, "max_wait_s")
        self._underrun = Underrun(underrun, motion_dims(policy), self._hz)
        supported = supports_prev_chunk(policy)
        if real_time_chunking and not supported:
            raise ConfigError(
                "real_time_chunking: expected a policy that takes prev_chunk and inference_delay and says so by "
                f"supports_prev_chunk = True, got a {type(policy).__name__} without"
            )
        self.real_time_chunking = supported if real_time_chunking is None else real_time_chunking
        self._delay = DelayEstimate(self._hz, max_delay(policy))
        self._inference = Inference(policy)
        self._tick, self._launched, self._started, self._closed = 0, 0, False, False
        self._chunk: _Chunk | None = None
        self._last: np.ndarray | None = None
        self._width: int | None = None
        self._error: BaseException | None = None
        self._trace: Any = None
        self._failed, self._attempt_at = 0, 0  # failures in a row; no attempt before this tick
        self._missed = 0  # underruns in a row
        self._counts = {"chunks": 0, "underruns": 0, "late": 0, "stale": 0, "failures": 0}
        self._longest_step_s = 0.0

    def __enter__(self) -> AsyncRunner:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
            return
        try:
            self.close(_EXIT_TIMEOUT_S)
        except EngineError as error:  # must not replace the exception that ended the block
            logger.warning("%s", error)

    # -- the robot's side -----------------------------------------------------------------------------------------

    def start(self, observation: Mapping[str, Any], timeout_s: float = 120.0) -> None:
        """Begin an episode: forget old actions and wait for the first chunk while the robot stands still.

        If it fails, `step` raises until another `start` succeeds.

        The first `start` of a runner infers twice: the first call of a policy may compile or load, so the second one is
        measured and used.

        Raises:
            ConfigError: `underrun` does not fit the robot's actions.
            EngineError: no chunk within `timeout_s`, or a chunk of another width than before.
            Exception: whatever `infer` raised.
        """
        self._check_open()
        end = time.monotonic() + above_zero(timeout_s, "timeout_s")
        self._forget()  # the old plan must not go on if this start fails
        if self._inference.busy and not self._inference.wait_until(end):
            raise EngineError(f"async runner: the last inference did not end within {timeout_s:g} s")
        for measured in (True,) if self._delay.measured else (False, True):
            self._forget()
            reset = getattr(self._policy, "reset", None)
            if reset is not None:
                reset()
            self._launch(observation)
            if not self._inference.wait_until(end):
                raise EngineError(f"async runner: no first chunk within {timeout_s:g} s")
            done = self._taken()
            assert done is not None
            if done.error is not None:
                self._counts["failures"] += 1
                raise done.error
            if measured:
                self._delay.add_standing(done.seconds)
                self._use(done, 0)
        action = self._at()
        assert action is not None
        self._underrun.check(action)
        self._started = True

    def step(self, observation: Mapping[str, Any]) -> np.ndarray:
        """The action (action_dim,) float64 of this tick. Call it once per control period, with what is seen now.

        Waits at most `max_wait_s`, and only where no action is left.

        Raises:
            EngineError: no action is left, and `underrun` says so or its limit is reached.
            Exception: no action is left, and the newest inference raised this. The next call goes on.
        """
        began = time.monotonic()
        self._check_open()
        if not self._started:
            raise ConfigError("async runner: call start(observation) before step(observation)")
        try:
            self._advance(observation)
            if self._at() is None and self._inference.busy and self._inference.wait_until(began + self._max_wait_s):
                self._advance(observation)
            action = self._at()
            if action is None:
                return self._without().copy()
            if self._missed:
                self._missed = 0
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
            delay_ticks=self._delay.longest_ticks,
            latency_ms=self._delay.longest_s * 1e3,
            longest_step_ms=self._longest_step_s * 1e3,
            **self._counts,
        )

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop: no new inference, the one under way ends. Raises EngineError if it does not within `timeout_s`.

        The end of a `with` block calls this. If an exception (also KeyboardInterrupt) ended the block, it waits at most
        a second and then only logs a warning.
        """
        timeout_s = zero_or_more(timeout_s, "timeout_s")
        first, self._closed = not self._closed, True
        ended = self._inference.close(timeout_s)
        if first and self._counts["underruns"]:
            logger.warning("async runner: %d underruns in %d ticks", self._counts["underruns"], self._tick)
        if not ended:
            raise EngineError(f"async runner: the inference under way did not end within {timeout_s:g} s")

    # -- inside, the robot's thread -------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("async runner: it is closed")

    def _forget(self) -> None:
        """No action, error or underrun of the past counts any more."""
        self._inference.taken()
        self._started, self._missed = False, 0
        self._chunk, self._last, self._error = None, None, None
        self._failed, self._attempt_at = 0, self._tick

    def _at(self) -> np.ndarray | None:
        """The action of this tick, if there is one."""
        if self._chunk is None:
            return None
        remaining = self._chunk.remaining(self._tick)
        return remaining[0] if len(remaining) else None

    def _due(self) -> bool:
        """Whether the next inference should begin now."""
        if self._tick < self._attempt_at:
            return False
        if self._chunk is None or self._error is not None:
            return True
        horizon, used = len(self._chunk.actions), self._tick - self._chunk.first
        replan = self._replan or max(horizon // 2, 1)
        return used >= replan or horizon - used <= self._delay.expected() + self._margin

    def _advance(self, observation: Mapping[str, Any]) -> None:
        """Take over a finished inference, its chunk or its error, and begin the next one if it is due."""
        done = self._taken()
        if done is not None and done.error is None:
            delay = self._tick - done.job.tick
            self._delay.add(delay, done.seconds)
            self._use(done, delay)
        elif done is not None and done.error is not None:
            self._fail(done.error)
        if not self._inference.busy and self._due():
            self._launch(observation)

    def _launch(self, observation: Mapping[str, Any]) -> None:
        remaining = None if self._chunk is None else self._chunk.remaining(self._tick)
        previous = None
        if self.real_time_chunking and remaining is not None and len(remaining) > 0:
            previous = remaining.copy()
        delay = 0 if previous is None else self._delay.announced(len(previous))
        self._launched = self._tick
        self._inference.begin(Job(copied(observation), self._tick, previous, delay))

    def _taken(self) -> Done | None:
        """The inference that has ended since the last call; one with a chunk of another width counts as failed."""
        done = self._inference.taken()
        if done is None or done.actions is None:
            return done
        width = done.actions.shape[1]
        if self._width is None:
            self._width = width
        if width == self._width:
            return done
        error = EngineError(
            f"actions: expected chunks of {self._width} numbers an action, as at first, got {width}: is this another "
            "robot's policy?"
        )
        return replace(done, actions=None, error=error)

    def _use(self, done: Done, delay: int) -> None:
        """Go on with a chunk that is there `delay` ticks after its observation."""
        assert done.actions is not None
        self._error, self._failed = None, 0
        if delay >= len(done.actions):
            self._counts["stale"] += 1
            logger.warning("async runner: a chunk of %d actions took %d ticks, dropped", len(done.actions), delay)
            return
        if done.job.prev_chunk is not None and delay > done.job.delay:
            self._counts["late"] += 1
            logger.warning(
                "async runner: an inference took %d ticks, %d were announced: the chunks may not join smoothly",
                delay,
                done.job.delay,
            )
        self._counts["chunks"] += 1
        self._chunk = _Chunk(done.actions, done.job.tick)

    def _fail(self, error: BaseException) -> None:
        """Keep the error until no action is left, and pause before the next attempt."""
        self._counts["failures"] += 1
        self._error, self._trace = error, error.__traceback__
        pause = min(2 ** min(self._failed, 30), math.ceil(_LONGEST_PAUSE_S * self._hz))
        self._failed += 1
        self._attempt_at = self._tick + pause
        left = 0 if self._chunk is None else len(self._chunk.remaining(self._tick))
        logger.warning(
            "async runner: an inference failed at tick %d, %d actions are left, next attempt in %d ticks: %s: %s",
            self._tick, left, pause, type(error).__name__, error,
        )  # fmt: skip

    def _without(self) -> np.ndarray:
        """What this tick without an action gets: the error of the inference, or what `underrun` says."""
        self._counts["underruns"] += 1
        self._missed += 1
        if self._error is not None:
            raise self._error.with_traceback(self._trace)  # not longer with every tick
        if self._missed == 1:
            logger.warning(
                "async runner: UNDERRUN at tick %d: %s; %s", self._tick, self._slow(), self._underrun.described
            )
        instead = self._underrun.action(self._last, self._missed)
        if instead is None:
            raise EngineError(f"async runner: no action for tick {self._tick}: {self._slow()}")
        return instead

    def _slow(self) -> str:
        """Why there is no action, in numbers."""
        n = 0 if self._chunk is None else len(self._chunk.actions)
        under_way = self._tick - self._launched if self._inference.busy else 0
        ticks, period_ms = max(self._delay.longest_ticks, under_way), 1e3 / self._hz
        return (
            f"the newest inferences took up to {ticks} ticks of {period_ms:g} ms. A chunk must last at least twice the "
            f"delay, once until it is there and once for the next one: {n} actions allow {n // 2} ticks "
            f"({n // 2 * period_ms:g} ms)"
        )
