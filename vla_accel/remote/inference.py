"""One inference at a time in a background thread: a copied observation in, checked actions out."""

from __future__ import annotations

import concurrent.futures
import copy
import queue
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vla_accel.errors import ConfigError, EngineError, ObservationError


@dataclass
class Job:
    """One inference and its outcome. Nobody else may write to its observation."""

    observation: dict[str, Any]
    tick: int  # control tick of the observation
    prev_chunk: np.ndarray | None = None  # remaining actions (k, action_dim) for a guided policy or a warm start
    delay: int | None = None  # announced delay in ticks, for a guided policy
    actions: np.ndarray | None = None  # the result (n, action_dim)
    timing: dict[str, Any] = field(default_factory=dict)  # milliseconds by component, as the policy and server say
    error: BaseException | None = None
    seconds: float = 0.0


class Inference:
    """Calls `policy.infer` in one daemon thread. Use it from one other thread; any thread may call `close`."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self._queue: queue.SimpleQueue[tuple[Job, Future[None]] | None] = queue.SimpleQueue()
        self._job: tuple[Job, Future[None]] | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._main, name="inference", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether an inference is running, or has ended without a call of `taken`."""
        return self._job is not None

    def begin(self, job: Job) -> None:
        """Begin an inference; none may be running. After `close` the inference fails."""
        self._job = job, Future()
        self._queue.put(self._job)
        if self._closed:
            self._job[1].cancel()

    def wait_until(self, end: float) -> bool:
        """Wait for the inference under way; False if it has not ended at `end` (`time.monotonic`)."""
        assert self._job is not None
        try:
            self._job[1].result(max(end - time.monotonic(), 0.0))
        except concurrent.futures.TimeoutError:
            return False
        except concurrent.futures.CancelledError:
            pass
        return True

    def taken(self) -> Job | None:
        """The inference that has ended since the last call, if any."""
        if self._job is None or not self._job[1].done():
            return None
        (job, future), self._job = self._job, None
        if future.cancelled():
            job.error = ConfigError("async runner: it is closed")
        return job

    def close(self, timeout_s: float) -> bool:
        """Start no further inference and wait for the current one; False if it has not ended in time."""
        self._closed = True
        if self._job is not None:
            self._job[1].cancel()  # an inference that has not begun: another thread may wait for it
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _main(self) -> None:
        while (item := self._queue.get()) is not None:
            job, future = item
            if not future.set_running_or_notify_cancel():
                continue
            began = time.perf_counter()
            try:
                options = {"prev_chunk": job.prev_chunk, "inference_delay": job.delay}
                options = {name: value for name, value in options.items() if value is not None}
                result = self._policy.infer(job.observation, **options)
                job.actions, job.timing = actions_of(result), timing_of(result)
            except BaseException as error:  # raised again in the other thread
                job.error = error
            job.seconds = time.perf_counter() - began
            future.set_result(None)


def actions_of(result: Any) -> np.ndarray:
    """The actions (n, action_dim) float64 of a policy's result. Raises EngineError for an invalid result."""
    if not isinstance(result, Mapping) or "actions" not in result:
        got = f"the keys {sorted(map(str, result))}" if isinstance(result, Mapping) else f"a {type(result).__name__}"
        raise EngineError(f"policy: expected a result with `actions` (n, action_dim), got {got}")
    value = result["actions"]
    if isinstance(value, Mapping):
        raise EngineError(
            f"actions: expected one array (n, action_dim), got a mapping of {', '.join(map(str, value))}: concatenate "
            "its arrays in the order of the robot's action"
        )
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # torch raises RuntimeError for a tensor with a gradient
        got = f"a {type(value).__name__} ({error})"
        raise EngineError(f"actions: expected numbers (n, action_dim), got {got}") from error
    if array.dtype.kind not in "iuf":  # NumPy would convert text, booleans and complex values silently
        raise EngineError(f"actions: expected numbers (n, action_dim), got dtype {array.dtype}")
    actions = np.array(array, np.float64)
    if actions.ndim != 2 or not actions.size:
        raise EngineError(f"actions: expected (n, action_dim), got shape {actions.shape}")
    if not np.isfinite(actions).all():
        raise EngineError("actions: expected finite numbers, got NaN or infinity")
    return actions


def timing_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the milliseconds by component in a policy's result, those of its server under `server/`."""
    found = {}
    for key, prefix in (("policy_timing", ""), ("server_timing", "server/")):
        if isinstance(timing := result.get(key), Mapping):
            found |= {f"{prefix}{name}": value for name, value in timing.items()}
    return found


def copied(value: Any, name: str = "observation") -> Any:
    """Copy an observation for a thread that reads it after the caller has written its next frame.

    Nested mappings become dictionaries; everything else keeps its type. A torch tensor keeps its device and dtype and
    loses its gradient. Raises ObservationError for an object that cannot be copied; `name` is the value's name there.
    """
    if isinstance(value, Mapping):
        return {key: copied(one, f"{name}[{key!r}]") for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        items = [copied(one, f"{name}[{index}]") for index, one in enumerate(value)]
        if isinstance(value, list):
            return items
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, memoryview):
        return np.array(value).data  # keeps shape and format, unlike `memoryview.tobytes`
    torch: Any = sys.modules.get("torch")  # imported if tensors exist; a robot without torch must not import it
    if torch is not None and isinstance(value, torch.Tensor):
        clone = value.detach().clone()  # deepcopy would copy the whole storage of a view
        if clone.is_cuda:  # the clone is only enqueued on this thread's stream; the other thread uses another one
            torch.cuda.current_stream(clone.device).synchronize()
        return clone
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise ObservationError(
            f"{name}: expected an array, a tensor, an image, numbers or text, which can be copied for another thread, "
            f"got a {type(value).__name__} ({type(error).__name__}: {error})"
        ) from error
