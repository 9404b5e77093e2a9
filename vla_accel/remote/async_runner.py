"""A robot loop at its control rate, while another thread computes the next chunk of actions.

Each call of `step` is one tick. A chunk inferred from the observation of tick o holds the actions of ticks o, o + 1, …:
if it is ready at tick m, the robot continues with its action m - o. A policy with real-time chunking is guided, so that
the new chunk agrees with the actions executed meanwhile; otherwise the new chunk replaces the old one.
Source of the method: Black, Galliker, Levine, "Real-Time Execution of Action Chunking Flow Policies" (2025).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from vla_accel.errors import ConfigError, EngineError
from vla_accel.remote.delay import DelayEstimate
from vla_accel.remote.ensemble import TemporalEnsemble
from vla_accel.remote.inference import Inference, Job, copied
from vla_accel.remote.metadata import ensemble_of, history_of, max_delay, motion_dims, starts_warm, supports_prev_chunk
from vla_accel.remote.numbers import above_zero, at_least, zero_or_more
from vla_accel.remote.underrun import Choice, Underrun
from vla_accel.view import View, open_view

logger = logging.getLogger("vla_accel.realtime")

_LONGEST_PAUSE_S = 1.0
"""Between two attempts after failed inferences."""
_EXIT_TIMEOUT_S = 1.0
"""How long the end of a block that an exception ended waits: Ctrl-C must not wait for a server."""


@dataclass(frozen=True)
class RunnerReport:
    """Counts since the runner was made."""

    ticks: int
    """Calls of `step`."""
    chunks: int
    """Inferences used."""
    underruns: int
    """Ticks without a computed action."""
    late: int
    """Chunks that took more ticks than announced to the policy, so that the guidance did not cover them."""
    stale: int
    """Chunks that took longer than they last, and were dropped."""
    failures: int
    """Inferences that raised."""
    delay_ticks: int
    latency_ms: float
    """The longest of the newest inferences."""
    longest_step_ms: float


class AsyncRunner:
    """Runs `policy.infer` in a background thread, early enough that `step` always has an action.

        with AsyncRunner(policy, hz=50) as runner:
            runner.start(robot.observe())
            while ...:
                robot.act(runner.step(robot.observe()))   # once per control period

    The runner estimates the delay that it announces to a guided policy (`remote.delay.DelayEstimate`). An inference
    that takes longer is counted as `late`; it is no error.

    If an inference fails while actions are left, `step` returns those. The error is logged at once, and raised when no
    action is left, whatever `underrun` says. The next attempt follows after 1, 2, 4, … ticks, at most a second.

    Args:
        policy: an object with `infer(observation) -> {"actions": (n, action_dim), …}`: an `OptimizedPolicy`, a
            `PolicyClient` or your own. Nothing else may use it meanwhile. Set `supports_prev_chunk = True` on your own
            policy if its `infer` takes `prev_chunk` and `inference_delay`.
        hz: control rate, one `step` per period.
        replan_ticks: executed actions of a chunk after which the next inference starts (earlier if the measured delay
            requires it). None: half a chunk, or 1 with temporal ensembling.
        margin_ticks: ticks beyond the expected delay that an inference may take.
        max_wait_s: how long `step` may wait if no action is left. None: half a control period.
        underrun: what `step` returns if there is still no action. "hold" or a `remote.underrun.Hold` repeats the last
            action with its motion (velocities, steps) set to 0; an array (action_dim,) is returned unchanged; "raise"
            raises.
        real_time_chunking: None uses it if the policy supports it; True requires it; False disables it. A policy with
            `warm_start` gets the rest of the chunk in any case.
        temporal_ensemble: c of ACT's ensembling (`remote.ensemble.TemporalEnsemble`); a new chunk then does not replace
            earlier predictions of its moments, but is averaged with them. None: as the policy's checkpoint says;
            False: off.
        view: where to show observations, chunks, executed actions and delays: "rerun", "rerun://HOST:PORT",
            "rerun:FILE.rrd", or a `View`, which stays open. None: nowhere.

    Raises:
        ConfigError: an argument out of its range, `real_time_chunking=True` for a policy that does not support it, or
            both kinds of joining chunks.
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
        temporal_ensemble: float | Literal[False] | None = None,
        view: View | str | None = None,
    ) -> None:
        kind = type(policy).__name__
        if not callable(getattr(policy, "infer", None)):
            raise ConfigError(f"policy: expected one with `infer(observation)`, got a {kind}")
        self._policy, self._hz = policy, above_zero(hz, "hz", "a control rate")
        self._replan = None if replan_ticks is None else at_least(1, replan_ticks, "replan_ticks")
        self._margin = at_least(0, margin_ticks, "margin_ticks")
        self._max_wait_s = 0.5 / self._hz if max_wait_s is None else zero_or_more(max_wait_s, "max_wait_s")
        self._underrun = Underrun(underrun, motion_dims(policy), self._hz)
        supported = supports_prev_chunk(policy)
        if real_time_chunking and not supported:
            raise ConfigError(f"real_time_chunking: expected a policy with supports_prev_chunk = True, got a {kind}")
        self.real_time_chunking = supported if real_time_chunking is None else real_time_chunking
        self._ensemble = ensemble_of(policy) if temporal_ensemble is None else None
        if temporal_ensemble is not None and temporal_ensemble is not False:
            self._ensemble = TemporalEnsemble(temporal_ensemble)
        if self._ensemble is not None:
            self._replan = self._replan or 1
            if self.real_time_chunking:
                raise ConfigError("temporal_ensemble: expected real_time_chunking=False with it, got both")
        self._warm = starts_warm(policy)
        self._view, self._own_view = open_view(view), isinstance(view, str)
        self._delay = DelayEstimate(self._hz, max_delay(policy))
        self._inference = Inference(policy)
        self._history = history_of(policy)
        self._tick, self._launched, self._started, self._closed = 0, 0, False, False
        self._width: int | None = None
        self._counts = {"chunks": 0, "underruns": 0, "late": 0, "stale": 0, "failures": 0}
        self._longest_step_s = 0.0
        self._reset()

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

    def start(self, observation: Mapping[str, Any], timeout_s: float = 120.0) -> None:
        """Begin an episode: drop old actions, and wait for the first chunk while the robot stands still.

        If it fails, `step` raises until another `start` succeeds. The first `start` of a runner infers twice, because
        the first call of a policy may compile or load: the second one is measured and used.

        Raises:
            ConfigError: `underrun` does not fit the robot's actions.
            EngineError: no chunk within `timeout_s`, or a chunk of another width than before.
            Exception: whatever `infer` raised.
        """
        self._check_open()
        end = time.monotonic() + above_zero(timeout_s, "timeout_s")
        self._reset()  # the old chunk must not continue if this start fails
        if self._inference.busy and not self._inference.wait_until(end):
            raise EngineError(f"async runner: the last inference did not end within {timeout_s:g} s")
        if self._history is not None:
            self._history.clear()
            observation = self._history.add(observation)
        for measured in (True,) if self._delay.measured else (False, True):
            self._reset()
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
                self._delay.add(done.seconds)
                self._use(done, 0)
        self._underrun.check(self._remaining()[0])
        self._started = True

    def step(self, observation: Mapping[str, Any]) -> np.ndarray:
        """Return the action (action_dim,) float64 of this tick. Call it once per control period, with the current
        observation. Waits at most `max_wait_s`, and only if no action is left.

        Raises:
            EngineError: no action is left, and `underrun` requires an error or its limit is reached.
            Exception: no action is left, and the newest inference raised this. The next call continues.
        """
        began = time.monotonic()
        self._check_open()
        if not self._started:
            raise ConfigError("async runner: call start(observation) before step(observation)")
        if self._history is not None:
            observation = self._history.add(observation)
        try:
            self._advance(observation)
            waits = self._inference.busy and not len(self._remaining())
            if waits and self._inference.wait_until(began + self._max_wait_s):
                self._advance(observation)
            if len(self._remaining()):
                if self._missed:
                    self._missed = 0
                    logger.warning("async runner: actions are available again at tick %d", self._tick)
                self._last = action = self._remaining()[0]
            else:
                action = self._without()
            if self._view.on:
                self._show(action)
            return action.copy()
        finally:
            self._tick += 1
            self._longest_step_s = max(self._longest_step_s, time.monotonic() - began)

    def report(self) -> RunnerReport:
        """Counts since the runner was made."""
        return RunnerReport(
            ticks=self._tick,
            delay_ticks=self._delay.longest_ticks,
            latency_ms=self._delay.longest_s * 1e3,
            longest_step_ms=self._longest_step_s * 1e3,
            **self._counts,
        )

    def close(self, timeout_s: float = 10.0) -> None:
        """Start no further inference, wait for the current one, and close a view that the runner opened.

        The end of a `with` block calls this. If an exception (also KeyboardInterrupt) ended the block, it waits at most
        a second and only logs a warning.

        Raises:
            EngineError: the inference did not end within `timeout_s`.
        """
        timeout_s = zero_or_more(timeout_s, "timeout_s")
        end = time.monotonic() + timeout_s
        first, self._closed = not self._closed, True
        ended = self._inference.close(timeout_s)
        if first and self._own_view:
            self._view.close(max(end - time.monotonic(), 0.0))
        if first and self._counts["underruns"]:
            logger.warning("async runner: %d underruns in %d ticks", self._counts["underruns"], self._tick)
        if not ended:
            raise EngineError(f"async runner: the current inference did not end within {timeout_s:g} s")

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("async runner: it is closed")

    def _reset(self) -> None:
        """Drop the actions, error and underruns of the past."""
        self._inference.taken()
        self._started, self._missed = False, 0  # consecutive underruns
        self._actions, self._first = np.empty((0, 0)), 0  # the chunk; row 0 belongs to tick `first`
        if self._ensemble is not None:
            self._ensemble.clear()
        self._last: np.ndarray | None = None
        self._error: BaseException | None = None
        self._trace: Any = None
        self._failed, self._attempt_at = 0, self._tick  # consecutive failures; no attempt before this tick

    def _remaining(self) -> np.ndarray:
        """The actions (k, action_dim) of this tick and the next ones."""
        return self._actions[max(self._tick - self._first, 0) :]

    def _due(self) -> bool:
        """Whether the next inference should start now."""
        if self._tick < self._attempt_at:
            return False
        horizon, used = len(self._actions), self._tick - self._first
        if not horizon or self._error is not None:
            return True
        replan = self._replan or max(horizon // 2, 1)
        return used >= replan or horizon - used <= self._delay.expected() + self._margin

    def _advance(self, observation: Mapping[str, Any]) -> None:
        """Take the chunk or the error of a finished inference, and start the next one if it is due."""
        done = self._taken()
        if done is not None and done.error is None:
            delay = self._tick - done.tick
            self._delay.add(done.seconds, delay)
            self._use(done, delay)
        elif done is not None:
            self._fail(done.error)
        if not self._inference.busy and self._due():
            self._launch(observation)

    def _launch(self, observation: Mapping[str, Any]) -> None:
        left, self._launched = self._remaining(), self._tick
        job = Job(copied(observation), self._tick)
        if len(left) and (self.real_time_chunking or self._warm):
            job.prev_chunk = left.copy()
            job.delay = self._delay.announced(len(left)) if self.real_time_chunking else None
        self._inference.begin(job)

    def _taken(self) -> Job | None:
        """The finished inference, if any; a chunk of another width than the first counts as a failure."""
        done = self._inference.taken()
        if done is not None and done.actions is not None:
            width = done.actions.shape[1]
            self._width = self._width or width
            if width != self._width:
                done.error = EngineError(
                    f"actions: expected chunks of {self._width} numbers per action, as at first, got {width}: is this "
                    "the policy of another robot?"
                )
        return done

    def _use(self, done: Job, delay: int) -> None:
        """Continue with a chunk that is ready `delay` ticks after its observation."""
        assert done.actions is not None
        self._error, self._failed = None, 0
        if self._view.on:
            latency_ms = {**done.timing, "inference": done.seconds * 1e3}
            self._view.inferred(done.tick, done.observation, done.actions, latency_ms)
            self._view.measured(done.tick, {"delay/ticks": delay})
        if delay >= len(done.actions):
            self._counts["stale"] += 1
            logger.warning("async runner: dropped a chunk of %d actions that took %d ticks", len(done.actions), delay)
            return
        if done.delay is not None and delay > done.delay:
            self._counts["late"] += 1
            text = "async runner: an inference took %d ticks, %d were announced: the chunks may not join smoothly"
            logger.warning(text, delay, done.delay)
        self._counts["chunks"] += 1
        self._first = done.tick
        self._actions = done.actions if self._ensemble is None else self._ensemble.add(done.tick, done.actions)

    def _show(self, action: np.ndarray) -> None:
        """Show the action of this tick, the age of the observation that it comes from, and the counts."""
        self._view.executed(self._tick, action)
        age_ms = 1e3 * (self._tick - self._first) / self._hz
        counts = {f"count/{name}": value for name, value in self._counts.items() if name != "chunks"}
        self._view.measured(self._tick, {"age/ms": age_ms, **counts})

    def _fail(self, error: BaseException | None) -> None:
        """Keep the error until no action is left, and pause before the next attempt."""
        assert error is not None
        self._counts["failures"] += 1
        self._error, self._trace = error, error.__traceback__
        pause = min(2 ** min(self._failed, 30), math.ceil(_LONGEST_PAUSE_S * self._hz))
        self._failed += 1
        self._attempt_at = self._tick + pause
        what = f"tick {self._tick}, {len(self._remaining())} actions are left, next attempt in {pause} ticks"
        logger.warning("async runner: an inference failed at %s: %s: %s", what, type(error).__name__, error)

    def _without(self) -> np.ndarray:
        """The action of a tick without a computed one, or an error."""
        self._counts["underruns"] += 1
        self._missed += 1
        if self._error is not None:
            raise self._error.with_traceback(self._trace)  # else the traceback grows with every tick
        if self._missed == 1:
            reason = self._slow()
            logger.warning("async runner: UNDERRUN at tick %d: %s; %s", self._tick, reason, self._underrun.described)
        action = self._underrun.action(self._last, self._missed)
        if action is None:
            raise EngineError(f"async runner: no action for tick {self._tick}: {self._slow()}")
        return action

    def _slow(self) -> str:
        """Why there is no action, in numbers."""
        n, period_ms = len(self._actions), 1e3 / self._hz
        current = self._tick - self._launched if self._inference.busy else 0
        ticks = max(self._delay.longest_ticks, current)
        return (
            f"the newest inferences took up to {ticks} ticks of {period_ms:g} ms. A chunk must last at least twice the "
            f"delay, once until it is ready and once for the next one: {n} actions allow {n // 2} ticks "
            f"({n // 2 * period_ms:g} ms)"
        )
