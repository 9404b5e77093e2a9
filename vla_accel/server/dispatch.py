"""Takes requests from the queue, forms batches and hands them to the worker. Knows nothing about sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vla_accel.errors import EngineError, ServerError
from vla_accel.server.limits import ServerConfig
from vla_accel.server.queue import FairQueue
from vla_accel.server.requests import Request
from vla_accel.server.worker import Worker, batches_prev_chunks, run_requests


@dataclass(eq=False)
class Job:
    """A request under way; times are the event loop's seconds."""

    request: Request
    client: Hashable
    arrived_s: float
    outcome: asyncio.Future[dict[str, Any] | Exception]
    started_s: float = 0.0
    ended_s: float = 0.0
    batch: int = 0


class Dispatcher:
    """Runs `policy` for whoever calls `infer`, in turn. Made inside a running event loop; `close` ends it."""

    def __init__(self, policy: Any, config: ServerConfig) -> None:
        self._policy, self._config = policy, config
        self._max_batch = config.max_batch if hasattr(policy, "infer_batch") else 1
        self._mixed = batches_prev_chunks(policy)
        self._queue: FairQueue[Job] = FairQueue()
        self._more = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._worker = Worker()
        self.running = 0
        self._task = self._loop.create_task(self._dispatch())

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._queue)

    async def infer(self, request: Request, client: Hashable, gone: asyncio.Future[Any]) -> tuple[Job, dict[str, Any]]:
        """Wait for the request's turn and run it; the job, for its times, and the policy's result.

        Raises what the policy raised, ServerError after `request_timeout_s`, and ClientGone when `gone` is done
        first. A request that has not begun is taken out of the queue; one that has runs to its end, unheard.
        """
        if self._task.done():
            raise EngineError("the server's dispatcher has ended") from _exception(self._task)
        job = Job(request, client, self._loop.time(), self._loop.create_future())
        self._queue.put(client, job)
        self._more.set()
        try:
            await asyncio.wait(
                {job.outcome, gone}, timeout=self._config.request_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if job.outcome.done():
                outcome = job.outcome.result()
                if isinstance(outcome, Exception):
                    raise outcome
                return job, outcome
            if gone.done():
                raise ClientGone
            where = "while it waited for its turn" if not job.started_s else "while the policy computed"
            raise ServerError(f"request: no result within {self._config.request_timeout_s:g} s, {where}")
        finally:
            if not job.outcome.done():
                job.outcome.cancel()
                self._queue.remove(client, job)

    async def close(self) -> None:
        """Stop taking requests and let the worker's thread end."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._worker.close()

    async def _dispatch(self) -> None:
        while True:
            jobs = await self._take()
            # Each group's answers leave before the next group begins; meanwhile clients may give up.
            while jobs := [job for job in jobs if not job.outcome.done()]:
                group = next_group(jobs, self._mixed)
                jobs = [job for job in jobs if job not in group]
                await self._run(group)

    async def _run(self, jobs: list[Job]) -> None:
        """Run jobs as one batch and give each its outcome."""
        self.running = len(jobs)
        now = self._loop.time()
        for job in jobs:
            job.started_s, job.batch = now, len(jobs)
        try:
            outcomes = await self._worker.run(partial(run_requests, self._policy, [j.request for j in jobs]))
        except Exception as error:  # SystemExit and the like, from within the policy
            outcomes = [error] * len(jobs)
        finally:
            self.running = 0
        now = self._loop.time()
        for job, outcome in zip(jobs, outcomes, strict=True):
            job.ended_s = now
            if not job.outcome.done():  # else its client has given up
                job.outcome.set_result(outcome)

    async def _take(self) -> list[Job]:
        """At least one job; more, up to `max_batch`, if they come within `max_wait_s`. A power of two of them."""
        deadline = None
        while True:
            waiting = len(self._queue)
            now = self._loop.time()
            if waiting and deadline is None:
                deadline = now + (self._config.max_wait_s if self._max_batch > 1 else 0.0)
            if waiting >= self._max_batch or (waiting and deadline is not None and now >= deadline):
                return [self._queue.pop() for _ in range(_power_of_two(min(waiting, self._max_batch)))]
            self._more.clear()
            if not waiting:
                deadline = None
            try:
                await asyncio.wait_for(self._more.wait(), None if deadline is None else deadline - now)
            except asyncio.TimeoutError:
                pass


def next_group(jobs: Sequence[Job], mixed: bool) -> list[Job]:
    """The jobs to run first: a power of two of them together. Unless `mixed`, only plain ones make a batch, and a
    guided one runs alone when there is no plain one."""
    able = jobs if mixed else [job for job in jobs if not job.request.options]
    return list(able[: _power_of_two(len(able))]) if able else [jobs[0]]


def _power_of_two(count: int) -> int:
    """The largest one that is not above `count` (1 or more)."""
    return 1 << (count.bit_length() - 1)


class ClientGone(Exception):
    """The client has left; there is nobody to answer."""


def _exception(task: asyncio.Task[Any]) -> BaseException | None:
    return None if task.cancelled() else task.exception()
