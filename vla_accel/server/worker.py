"""The one thread that runs the policy, and what runs in it. Knows nothing about clients."""

from __future__ import annotations

import asyncio
import inspect
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from vla_accel.errors import EngineError
from vla_accel.server.requests import Request

logger = logging.getLogger("vla_accel.server")

_OPTIONS = ("prev_chunk", "inference_delay")


class Worker:
    """A daemon thread that runs one call at a time: a policy that hangs cannot keep the process from ending."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name="policy", daemon=True)
        self._thread.start()

    def run(self, call: Callable[[], Any]) -> asyncio.Future[Any]:
        """A future of what `call` returns or raises."""
        future = self._loop.create_future()
        self._calls.put((call, future))
        return future

    def close(self) -> None:
        """Let the thread end after the calls it was given; does not wait."""
        self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            call, future = item
            try:
                outcome, error = call(), None
            except BaseException as caught:  # SystemExit from a policy must not end the only worker
                outcome, error = None, caught
            try:
                self._loop.call_soon_threadsafe(_settle, future, outcome, error)
            except RuntimeError:  # the loop has ended: nobody waits any more
                return


def _settle(future: asyncio.Future[Any], outcome: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(outcome)
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        future.set_exception(error)
    else:  # one that would end the event loop, or that a future cannot carry
        future.set_exception(EngineError(f"policy: {type(error).__name__}: {error}"))


def run_requests(policy: Any, requests: Sequence[Request]) -> list[dict[str, Any] | Exception]:
    """Run requests, several of them as one batch; for each one its result or its own error.

    Requests of a batch have no options, unless the policy `batches_prev_chunks`. When a batch fails its requests run
    one by one, so that one bad observation fails alone.
    """
    if len(requests) > 1:
        observations, options = [r.observation for r in requests], {}
        if any(r.options for r in requests):
            options = {f"{name}s": [r.options.get(name) for r in requests] for name in _OPTIONS}
        try:
            results = policy.infer_batch(observations, **options)
            if len(results) != len(requests):
                raise EngineError(f"policy: expected {len(requests)} results of a batch, got {len(results)}")
            return list(results)
        except Exception as error:
            logger.warning("a batch of %d failed, running one by one: %s", len(requests), error)
    return [run_one(policy, r) for r in requests]


def batches_prev_chunks(policy: Any) -> bool:
    """Whether `policy.infer_batch` takes a previous chunk and a delay, or None, for each observation."""
    infer_batch = getattr(policy, "infer_batch", None)
    return infer_batch is not None and {f"{n}s" for n in _OPTIONS} <= inspect.signature(infer_batch).parameters.keys()


def run_one(policy: Any, request: Request) -> dict[str, Any] | Exception:
    """The policy's result, or the exception it raised."""
    try:
        return policy.infer(request.observation, **request.options)
    except Exception as error:
        return error
