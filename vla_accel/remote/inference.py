"""One inference at a time in a background thread, and what counts as an answer of a policy.

Knows nothing about control ticks beyond carrying them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_accel.errors import ConfigError, EngineError


@dataclass(frozen=True)
class Job:
    """What to infer from: an observation that nobody writes to, its tick, and for a guided policy the actions left
    (k, action_dim) with the announced delay."""

    observation: dict[str, Any]
    tick: int
    prev_chunk: np.ndarray | None
    delay: int


@dataclass(frozen=True)
class Done:
    """An inference that has ended, with its actions or its error."""

    job: Job
    actions: np.ndarray | None
    error: BaseException | None
    seconds: float


class Inference:
    """Calls `policy.infer` in a thread of its own. All methods are for one other thread, `close` for any."""

    def __init__(self, policy: Any) -> None:
        self.busy = False
        """Whether an inference is under way, or ended and not taken."""
        self._policy = policy
        # Guarded by the condition.
        self._condition = threading.Condition()
        self._job: Job | None = None
        self._done: Done | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="inference", daemon=True)
        self._thread.start()

    def begin(self, job: Job) -> None:
        """Begin an inference; none is under way. After `close` it fails at once."""
        self.busy = True
        with self._condition:
            self._done, self._job = (_refused(job), None) if self._closed else (None, job)
            self._condition.notify_all()

    def wait_until(self, end: float) -> bool:
        """Wait for the inference under way; False if it has not ended by `end` (`time.monotonic`)."""
        with self._condition:
            return self._condition.wait_for(lambda: self._done is not None, max(end - time.monotonic(), 0.0))

    def taken(self) -> Done | None:
        """The inference that has ended since the last call, if one has."""
        with self._condition:
            done, self._done = self._done, None
        if done is not None:
            self.busy = False
        return done

    def close(self, timeout_s: float) -> bool:
        """Begin no further inference and wait for the one under way; False if it has not ended by then."""
        with self._condition:
            self._closed = True
            if self._job is not None:  # the thread has not begun it, and another one may wait for it
                self._done, self._job = _refused(self._job), None
            self._condition.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

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
                options = {} if job.prev_chunk is None else {"prev_chunk": job.prev_chunk, "inference_delay": job.delay}
                actions = actions_of(self._policy.infer(job.observation, **options))
            except BaseException as caught:  # carried to the other thread
                error = caught
            done = Done(job, actions, error, time.perf_counter() - began)
            with self._condition:
                self._done = done
                self._condition.notify_all()


def _refused(job: Job) -> Done:
    return Done(job, None, ConfigError("async runner: it is closed"), 0.0)


def actions_of(result: Any) -> np.ndarray:
    """The actions (n, action_dim) float64 of a policy's answer. Raises EngineError for any other answer."""
    if not isinstance(result, Mapping) or "actions" not in result:
        got = f"the keys {sorted(map(str, result))}" if isinstance(result, Mapping) else f"a {type(result).__name__}"
        raise EngineError(f"policy: expected an answer with `actions` (n, action_dim), got {got}")
    given = result["actions"]
    if isinstance(given, Mapping):
        raise EngineError(
            f"actions: expected one array (n, action_dim), got a mapping of {', '.join(map(str, given))}: join its "
            "arrays in the order of the robot's action"
        )
    try:
        found = np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as error:  # torch raises RuntimeError for one with a gradient
        raise EngineError(
            f"actions: expected numbers (n, action_dim), got a {type(given).__name__} ({error})"
        ) from error
    if found.dtype.kind not in "iuf":  # NumPy would convert text, booleans and complex values without an error
        raise EngineError(f"actions: expected numbers (n, action_dim), got dtype {found.dtype}")
    actions = np.array(found, np.float64)
    if actions.ndim != 2 or not actions.size:
        raise EngineError(f"actions: expected (n, action_dim), got shape {actions.shape}")
    if not np.isfinite(actions).all():
        raise EngineError("actions: expected finite numbers, got NaN or infinity")
    return actions
