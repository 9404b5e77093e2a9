"""Sends waiting calls to idle replicas in batches, in fair order, and restarts replicas that die.

All calls wait in one queue, so no call waits behind a slow one while a replica is idle. A single replica gets its next
batch while it works on one, so that it does not wait for the event loop in between.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from vla_accel.errors import ConfigError, EngineError, ServerError
from vla_accel.remote import wire
from vla_accel.server.fairness import FairQueue
from vla_accel.server.limits import ServerConfig
from vla_accel.server.metrics import Metrics
from vla_accel.server.replica import Replica
from vla_accel.server.requests import Answer, Batch, Call, ClientGone
from vla_accel.server.runner import failure, largest_power_of_two

logger = logging.getLogger("vla_accel.server")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
"""Between attempts to restart a replica."""


class Dispatcher:
    """Answers submitted calls. Use it on the event loop: `start` first, `close` last."""

    def __init__(self, replicas: Sequence[Replica], config: ServerConfig, metrics: Metrics) -> None:
        self.replicas, self.config, self._metrics = replicas, config, metrics
        self._queue: FairQueue[Call] = FairQueue()
        self._idle: deque[Replica] = deque()  # longest idle first
        self._batches: dict[Replica, list[Batch]] = {}  # of busy replicas: the running batch, and those behind it
        self._pump_at: asyncio.TimerHandle | None = None
        self._restarts: set[asyncio.Task[None]] = set()
        self._closing = False

    async def start(self) -> None:
        """Load all replicas at the same time. Raises what the first replica that failed has raised; the others are
        ended. Raises ConfigError for `max_batch` above 1 and a policy without `infer_batch`."""
        self._loop = asyncio.get_running_loop()
        starts = [asyncio.ensure_future(r.start(lambda r=r: self._died(r))) for r in self.replicas]
        try:
            await asyncio.gather(*starts)
            if self.config.max_batch > 1 and not self.replicas[0].batches:
                got = self.config.max_batch
                raise ConfigError(f"max_batch: expected 1 for a policy without infer_batch, got {got}")
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.wait(starts)
            await self.close()
            raise
        self._idle.extend(self.replicas)

    @property
    def metadata_frames(self) -> dict[str, bytes]:
        """The first frame of a connection by policy; "" is the default policy."""
        return self.replicas[0].metadata_frames

    @property
    def waiting(self) -> int:
        """Calls that wait for their turn."""
        behind = [batch for batches in self._batches.values() for batch in batches[1:]]
        return len(self._queue) + sum(not call.dropped for batch in behind for call in batch.pending.values())

    @property
    def running(self) -> int:
        """Calls that a replica works on."""
        return sum(len(batches[0].pending) for batches in self._batches.values())

    @property
    def loaded(self) -> list[Replica]:
        """Replicas that are loaded."""
        return [*self._idle, *self._batches]

    def submit(self, call: Call) -> Call:
        """Queue a call. Its `outcome` resolves after `request_timeout_s` at the latest."""
        call.arrived_s = call.queued_s = time.monotonic()
        call.outcome = self._loop.create_future()
        limit = self._loop.call_later(self.config.request_timeout_s, self._time_out, call)
        call.outcome.add_done_callback(lambda _: limit.cancel())
        self._queue.put(call.client, call)
        self._pump()
        return call

    def abandon(self, call: Call) -> None:
        """The client has left: remove the call from the queue. A replica of this process skips it, too; another one
        may still compute it."""
        if not call.dropped:
            call.outcome.set_exception(ClientGone())  # type: ignore[union-attr]
            self._queue.remove(call.client, call)

    async def close(self) -> None:
        """End the replicas; unanswered calls may be lost."""
        self._closing = True
        for task in self._restarts:
            task.cancel()
        if self._pump_at is not None:
            self._pump_at.cancel()
        await asyncio.gather(*self._restarts, return_exceptions=True)
        await asyncio.gather(*(r.close() for r in self.replicas))

    def _pump(self) -> None:
        """Send batches to replicas; a batch that is not full waits up to `max_wait_s` for more calls."""
        if self._pump_at is not None:
            self._pump_at.cancel()
            self._pump_at = None
        full = self.config.max_batch
        while (waiting := len(self._queue)) and (replica := self._free_replica(waiting)) is not None:
            if waiting < full:
                until = min(call.arrived_s for call in self._queue) + self.config.max_wait_s
                left = until - time.monotonic()
                if left > 0:
                    self._pump_at = self._loop.call_later(left, self._pump)
                    return
            self._send(replica, [self._queue.pop() for _ in range(largest_power_of_two(min(waiting, full)))])

    def _free_replica(self, waiting: int) -> Replica | None:
        """An idle replica; or a single replica that can hold one more batch, if that batch is full."""
        if self._idle:
            return self._idle[0]
        if len(self.replicas) > 1 or waiting < self.config.max_batch:
            return None
        single = self.replicas[0]
        return single if 0 < len(self._batches.get(single, ())) < single.capacity else None

    def _send(self, replica: Replica, calls: list[Call]) -> None:
        now = time.monotonic()
        for call in calls:
            call.timing["queue_ms"] = (call.waited_s + now - call.queued_s) * 1e3
            call.sent_s = now
        batch = Batch(calls, lambda batch, answers: self._answered(replica, batch, answers))
        batches = self._batches.setdefault(replica, [])
        batches.append(batch)
        if batches[0] is batch:
            self._idle.remove(replica)
            _started(batch, now)
        replica.run(batch)

    def _answered(self, replica: Replica, batch: Batch, answers: list[tuple[Call, Answer]]) -> None:
        ended = sum(self._take(call, answer) for call, answer in answers)
        self._metrics.count("replica_requests", replica.name, ended)
        if batch.pending:
            return
        batches = self._batches[replica]
        batches.remove(batch)
        if batches:
            _started(batches[0], time.monotonic())
        else:
            del self._batches[replica]
            self._idle.append(replica)
        self._pump()

    def _take(self, call: Call, answer: Answer) -> bool:
        """Take an answer. False if it leaves observations, for which the call waits again behind other clients."""
        if call.dropped:
            return True
        call.results += answer.results
        if not answer.remaining:
            whole = replace(answer, message=wire.pack_list(call.results)) if answer.results else answer
            call.outcome.set_result(whole)  # type: ignore[union-attr]
            return True
        call.done = len(call.results)
        call.started_s, call.queued_s = 0.0, time.monotonic()
        self._queue.put(call.client, call)
        return False

    def _time_out(self, call: Call) -> None:
        if not call.dropped:
            stage = "while the policy computed" if call.started_s else "while it waited for its turn"
            error = ServerError(f"request: no result within {self.config.request_timeout_s:g} s, {stage}")
            call.outcome.set_result(failure(error, "timeout"))  # type: ignore[union-attr]
            self._queue.remove(call.client, call)

    def _died(self, replica: Replica) -> None:
        """Run the replica's calls once more, and restart it."""
        if self._closing:
            return
        calls = [call for batch in self._batches.pop(replica, []) for call in batch.pending.values()]
        if replica in self._idle:
            self._idle.remove(replica)
        logger.error("replica %s died with %d running requests; restarting it", replica.name, len(calls))
        self._metrics.count("replica_deaths", replica.name)
        for call in reversed(calls):
            call.deaths += call.started_s > 0
            if call.dropped:
                continue
            if call.deaths > 1:
                error = EngineError("policy: its process died twice while it computed this request")
                call.outcome.set_result(failure(error, "policy error"))  # type: ignore[union-attr]
            else:
                call.started_s, call.queued_s = 0.0, time.monotonic()
                self._metrics.count("retried")
                self._queue.put_first(call.client, call)
        task = asyncio.ensure_future(self._restart(replica))
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)
        self._pump()

    async def _restart(self, replica: Replica) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                await replica.close()
                await replica.start(lambda: self._died(replica))
                break
            except Exception as error:
                logger.error("replica %s does not start, next attempt in %g s: %s", replica.name, pause_s, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        logger.warning("replica %s is back", replica.name)
        self._idle.append(replica)
        self._pump()


def _started(batch: Batch, now: float) -> None:
    for call in batch.pending.values():
        call.started_s = now
        call.waited_s += now - call.queued_s
