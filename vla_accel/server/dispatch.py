"""Hands requests to whichever replica is idle, in turn, in batches; brings dead replicas back. Knows no sockets.

Work waits in one queue, so nobody waits behind a slow request while a replica is idle. A replica that is alone is given
its next turn while it works on one: between two it need not wait for the event loop, which is busy with the answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from vla_accel.errors import ConfigError, EngineError, ServerError
from vla_accel.remote import wire
from vla_accel.server.limits import ServerConfig
from vla_accel.server.metrics import Metrics
from vla_accel.server.queue import FairQueue
from vla_accel.server.replica import Replica
from vla_accel.server.runner import Answer, Call, failure, largest_power_of_two

logger = logging.getLogger("vla_accel.server")

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0
"""Between attempts to start a replica again that does not come up."""


@dataclass(eq=False)
class Job:
    """A request under way; times are `time.monotonic`'s seconds. `outcome` may also be cancelled or `ClientGone`."""

    call: Call
    client: Hashable
    arrived_s: float
    outcome: asyncio.Future[Answer]
    queued_s: float
    """Since when it waits for its next turn."""
    waited_s: float = 0.0
    """For its turns so far, in all."""
    started_s: float = 0.0
    """0 while it waits, be it at a replica."""
    items: list[bytes] = field(default_factory=list)
    """Of a request with several observations: the packed results of earlier turns."""
    deaths: int = 0
    """Replicas that died while they worked on it."""


Turn = dict[int, Job]
"""The jobs that a replica was given together, by index, until they are answered."""


class Dispatcher:
    """Answers what is submitted. Methods are for the event loop; `start` comes first, `close` ends it."""

    def __init__(self, replicas: Sequence[Replica], config: ServerConfig, metrics: Metrics) -> None:
        self.replicas, self.config, self._metrics = replicas, config, metrics
        self._queue: FairQueue[Job] = FairQueue()
        self._idle: deque[Replica] = deque()  # the one that is idle the longest first
        self._turns: dict[Replica, list[Turn]] = {}  # of those that work: the turn it is at, and the one behind
        self._pump_at: asyncio.TimerHandle | None = None
        self._reviving: set[asyncio.Task[None]] = set()
        self._max_batch = 1
        self._closing = False

    async def start(self) -> None:
        """Load every replica at once. Raises what the first of them to fail raised, and ends the others then."""
        self._loop = asyncio.get_running_loop()
        starts = [asyncio.ensure_future(r.start(lambda r=r: self._died(r))) for r in self.replicas]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.wait(starts)
            await self.close()
            raise
        if self.config.max_batch > 1 and not self.replicas[0].batches:
            await self.close()
            raise ConfigError(f"max_batch: expected a policy with infer_batch, got {self.config.max_batch} for another")
        self._max_batch = self.config.max_batch
        self._idle.extend(self.replicas)

    @property
    def hellos(self) -> dict[str, bytes]:
        """What clients are greeted with, by the policy that they ask; "" is the default's."""
        return self.replicas[0].hellos

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        behind = (job for turns in self._turns.values() for turn in turns[1:] for job in turn.values())
        return len(self._queue) + sum(not job.call.dropped for job in behind)

    @property
    def running(self) -> int:
        """Requests that a replica works on."""
        return sum(len(turns[0]) for turns in self._turns.values())

    @property
    def serving(self) -> list[Replica]:
        """Replicas that are loaded."""
        return [*self._idle, *self._turns]

    @property
    def ready(self) -> int:
        """How many replicas are loaded."""
        return len(self._idle) + len(self._turns)

    def submit(self, call: Call, client: Hashable) -> Job:
        """Queue a call; its outcome is an answer, after `request_timeout_s` at the latest."""
        now = time.monotonic()
        job = Job(call, client, now, self._loop.create_future(), queued_s=now)
        limit = self._loop.call_later(self.config.request_timeout_s, self._too_late, job)
        job.outcome.add_done_callback(lambda _: limit.cancel())
        self._queue.put(client, job)
        self._pump()
        return job

    def give_up(self, job: Job) -> None:
        """Its client has left. One that has not begun is taken out of the queue, or is left out by a replica of this
        process; another runs to its end, unheard."""
        if not job.outcome.done():
            job.outcome.set_exception(ClientGone())
            self._drop(job)

    async def close(self) -> None:
        """End the replicas; what is under way may be lost."""
        self._closing = True
        for task in self._reviving:
            task.cancel()
        if self._pump_at is not None:
            self._pump_at.cancel()
        await asyncio.gather(*self._reviving, return_exceptions=True)
        await asyncio.gather(*(r.close() for r in self.replicas))

    # -- inside ----------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Give replicas what waits; a batch that may still become full is looked at again when its time is up."""
        if self._pump_at is not None:
            self._pump_at.cancel()
            self._pump_at = None
        while (waiting := len(self._queue)) and (replica := self._next(waiting)) is not None:
            if waiting < self._max_batch:
                until = min(job.arrived_s for job in self._queue) + self.config.max_wait_s
                left = until - time.monotonic()
                if left > 0:
                    self._pump_at = self._loop.call_later(left, self._pump)
                    return
            jobs = [self._queue.pop() for _ in range(largest_power_of_two(min(waiting, self._max_batch)))]
            self._begin(replica, jobs)

    def _next(self, waiting: int) -> Replica | None:
        """Whom to give a turn: who is idle; or who works, if there is no other to become idle first, and the turn is
        as large as one may be."""
        if self._idle:
            return self._idle[0]
        if len(self.replicas) > 1 or waiting < self._max_batch:
            return None
        alone = self.replicas[0]
        return alone if alone.takes_ahead and len(self._turns.get(alone, ())) == 1 else None

    def _begin(self, replica: Replica, jobs: list[Job]) -> None:
        now = time.monotonic()
        for job in jobs:
            job.call.timing["queue_ms"] = (job.waited_s + now - job.queued_s) * 1e3
            job.call.sent_s = now
        turn: Turn = dict(enumerate(jobs))
        turns = self._turns.setdefault(replica, [])
        turns.append(turn)
        if turns[0] is turn:
            self._idle.remove(replica)
            _started(turn, now)

        def deliver(answers: list[tuple[int, Answer]]) -> None:
            ended = sum(self._delivered(turn.pop(index), answer) for index, answer in answers)
            self._metrics.replica_requests.add(replica.name, ended)
            if turn:
                return
            turns.remove(turn)
            if turns:
                _started(turns[0], time.monotonic())
            else:
                del self._turns[replica]
                self._idle.append(replica)
            self._pump()

        replica.run([job.call for job in jobs], deliver)

    def _delivered(self, job: Job, answer: Answer) -> bool:
        """Take an answer; False if observations of the request are left, for which it waits again, after the requests
        of other clients."""
        if job.outcome.done():  # its client has given up
            return True
        job.items += answer.items
        if not answer.left:
            job.outcome.set_result(replace(answer, message=wire.pack_list(job.items)) if answer.items else answer)
            return True
        job.call.done = len(job.items)
        job.started_s, job.queued_s = 0.0, time.monotonic()
        self._queue.put(job.client, job)
        return False

    def _too_late(self, job: Job) -> None:
        if not job.outcome.done():
            where = "while it waited for its turn" if not job.started_s else "while the policy computed"
            error = ServerError(f"request: no result within {self.config.request_timeout_s:g} s, {where}")
            job.outcome.set_result(failure(error, "timeout"))
            self._drop(job)

    def _drop(self, job: Job) -> None:
        """Nobody waits for it any more."""
        job.call.dropped = True
        self._queue.remove(job.client, job)

    def _died(self, replica: Replica) -> None:
        """Try again, once, what the replica was working on, and bring the replica back."""
        if self._closing:
            return
        jobs = [job for turn in self._turns.pop(replica, []) for job in turn.values()]
        if replica in self._idle:
            self._idle.remove(replica)
        logger.error("replica %s died with %d requests under way; it is started again", replica.name, len(jobs))
        self._metrics.replica_deaths.add(replica.name)
        for job in reversed(jobs):
            job.deaths += job.started_s > 0
            if job.outcome.done():
                continue
            if job.deaths > 1:
                error = EngineError("policy: its process died twice while it computed this request")
                job.outcome.set_result(failure(error, "policy error"))
            else:
                job.started_s, job.queued_s = 0.0, time.monotonic()
                self._metrics.retried.add()
                self._queue.put_first(job.client, job)
        task = asyncio.ensure_future(self._revive(replica))
        self._reviving.add(task)
        task.add_done_callback(self._reviving.discard)
        self._pump()

    async def _revive(self, replica: Replica) -> None:
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                await replica.close()
                await replica.start(lambda: self._died(replica))
            except Exception as error:
                logger.error("replica %s does not start, next attempt in %g s: %s", replica.name, wait_s, error)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
                continue
            logger.warning("replica %s is back", replica.name)
            self._idle.append(replica)
            self._pump()
            return


def _started(turn: Turn, now: float) -> None:
    for job in turn.values():
        job.started_s = now
        job.waited_s += now - job.queued_s


class ClientGone(Exception):
    """The client has left; there is nobody to answer."""
