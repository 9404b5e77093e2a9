"""From frames to answers: reads requests, forms batches, runs the policy, packs results. Knows nothing about clients.

All of it happens in the one thread that calls the policy, in the server's process or in a replica's, so that a frame
travels there as it came.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vla_accel.errors import ActionError, EngineError, ObservationError, VlaAccelError, WireError
from vla_accel.remote import wire
from vla_accel.server.limits import BatchLimits
from vla_accel.server.requests import Asked, Request, read, request_of
from vla_accel.server.shelf import OPTIONS, Served, Shelf

logger = logging.getLogger("vla_accel.server")

_LONGEST_ERROR = 4000


@dataclass
class Call:
    """A frame as a client sent it. `policy`: the name that its connection asks, "" for the default; `timing`: what is
    known so far of the answer's `server_timing`, milliseconds; `sent_s`: when it was given to a replica
    (`time.monotonic`, which a machine's processes share); `dropped`: nobody waits for it any more; `done`: how many of
    its observations earlier turns have answered."""

    frame: bytes | memoryview | str
    policy: str = ""
    timing: dict[str, float] = field(default_factory=dict)
    sent_s: float = 0.0
    dropped: bool = False
    done: int = 0


@dataclass(frozen=True)
class Answer:
    """What a client is sent, and what is counted. A text `message` is an error; its traceback stays in `trace`."""

    message: bytes | str
    outcome: str = "ok"
    """As the metrics count it."""
    error: str = ""
    """The error's type."""
    trace: str = ""
    """For errors that no client can make."""
    batch: int = 0
    """Observations that ran together."""
    policy: str = ""
    policy_timing: dict[str, Any] = field(default_factory=dict)
    items: tuple[bytes, ...] = ()
    """Of a request with several observations: the packed results of this turn, in order. `message` is then empty."""
    left: int = 0
    """Observations of the request that no turn has answered."""


_DROPPED = Answer("", "dropped")

Deliver = Callable[[list[tuple[int, Answer]]], object]
"""Takes answers as soon as there are some, each with the index of its call."""


@dataclass
class _Work:
    """A call that was read: its policy, how many of its observations this turn answers, and the results, by place, as
    they come."""

    call: Call
    asked: Asked
    served: Served
    count: int
    results: dict[int, Any] = field(default_factory=dict)


class Runner:
    """Answers calls with the policies of a shelf, up to `max_batch` as one batch where a policy has `infer_batch`.

    A turn answers at least one observation of each call, and more only up to `max_batch` in all (one of each where the
    policy has no `infer_batch`): a call with more comes again, after those of other clients.
    """

    def __init__(self, shelf: Shelf, limits: BatchLimits) -> None:
        self.shelf, self._limits = shelf, limits
        self._free_s = 0.0
        """When the last turn ended."""

    def run(self, calls: Sequence[Call], deliver: Deliver) -> None:
        """Answer every call exactly once, all of it or as much as fits the turn, whatever the policy raises; a batch's
        answers leave before the next begins.

        When a batch fails its requests run one by one, so that one bad observation fails alone; with it fails the call
        that it came with.
        """
        works: dict[int, _Work] = {}
        waiting: list[Entry] = []
        refused: list[tuple[int, Answer]] = []
        spare = max(0, self._limits.max_batch - len(calls))
        for index, call in enumerate(calls):
            if call.dropped:
                refused.append((index, _DROPPED))
                continue
            began = time.monotonic()
            # It may have waited here, behind the turn before.
            ready = max(call.sent_s, self._free_s)
            call.timing["queue_ms"] = call.timing.get("queue_ms", 0.0) + (ready - call.sent_s) * 1e3
            call.timing["handover_ms"] = (began - ready) * 1e3
            try:
                works[index], requests = self._read(call, spare)
                spare -= len(requests) - 1
                waiting += [Entry(index, place, works[index].served, r) for place, r in enumerate(requests)]
            except Exception as error:
                refused.append((index, failure(error)))
            call.timing["decode_ms"] = (time.monotonic() - began) * 1e3
        if refused:
            deliver(refused)
        while waiting:
            group = next_group(waiting, self._limits.max_batch)
            taken = {(one.call, one.place) for one in group}
            waiting = [one for one in waiting if (one.call, one.place) not in taken]
            began = time.monotonic()
            outcomes = run_requests(group[0].served.policy, [one.request for one in group])
            infer_ms = (time.monotonic() - began) * 1e3
            answers = []
            for one, outcome in zip(group, outcomes, strict=True):
                work = works[one.call]
                work.results[one.place] = outcome, infer_ms, len(group)
                if len(work.results) == work.count:
                    answers.append((one.call, _answer(work)))
            deliver(answers)
        self._free_s = time.monotonic()

    def _read(self, call: Call, spare: int) -> tuple[_Work, list[Request]]:
        """A call, and the requests of this turn: its next observation, and up to `spare` more."""
        asked = read(call.frame, named=bool(self.shelf.names), most=self._limits.max_observations)
        served = self.shelf.get(asked.policy or call.policy)
        end = call.done + 1 + (spare if served.batches else 0)
        requests = []
        for index, observation in enumerate(asked.observations[call.done : end], call.done):
            try:
                requests.append(request_of(observation, real_time_chunking=served.real_time_chunking))
            except ObservationError as error:
                raise _placed(error, asked, index) from None
        return _Work(call, asked, served, len(requests)), requests


@dataclass(frozen=True, eq=False)
class Entry:
    """One observation that waits: the index of its call, its place in it, and what runs it."""

    call: int
    place: int
    served: Served
    request: Request


def _answer(work: _Work) -> Answer:
    """The answer to a call whose results, or the exceptions in their place, are all there."""
    try:
        return _packed(work)
    except Exception as error:  # a result is the policy's own object, and may raise whatever it likes when it is read
        return failure(error)


def _packed(work: _Work) -> Answer:
    packed, told, infer_ms, batch = [], {}, 0.0, 0
    for place in range(work.count):
        outcome, infer_ms, batch = work.results[place]
        if isinstance(outcome, Exception):
            return failure(_placed(outcome, work.asked, work.call.done + place))
        if not isinstance(outcome, Mapping):
            return failure(EngineError(f"policy: expected a mapping as its result, got {type(outcome).__name__}"))
        told = outcome.get("policy_timing")
        packed.append({**outcome, "server_timing": {"infer_ms": infer_ms, **work.call.timing, "batch": batch}})
    try:
        items = tuple(wire.pack(one) for one in packed)
    except WireError as error:
        return failure(EngineError(f"policy: its result cannot be sent: {error}"))
    timing = dict(told) if isinstance(told, Mapping) else {}
    answer = Answer(items[0], batch=batch, policy=work.served.name, policy_timing=timing)
    if not work.asked.several:
        return answer
    return replace(answer, message=b"", items=items, left=len(work.asked.observations) - work.call.done - work.count)


def _placed(error: Exception, asked: Asked, index: int) -> Exception:
    """The error, with the place of the observation where there are several."""
    if not asked.several or not isinstance(error, VlaAccelError):
        return error
    return type(error)(f"{wire.BATCH}[{index}]: {error}")


def failure(error: Exception, outcome: str = "") -> Answer:
    """An error as an answer; `outcome` is told from the error where it is not given."""
    expected = isinstance(error, (WireError, ObservationError))
    kind = type(error).__name__
    return Answer(
        f"{kind}: {error}"[:_LONGEST_ERROR],
        outcome or ("bad request" if expected else "policy error"),
        kind,
        "" if expected or outcome or isinstance(error, ActionError) else "".join(traceback.format_exception(error)),
    )


def next_group(waiting: Sequence[Entry], max_batch: int) -> list[Entry]:
    """What runs first: of one policy, a power of two together, because engines have fixed shapes. Unless the policy
    mixes them only plain requests make a batch, and a guided one runs alone when there is no plain one."""
    served = waiting[0].served
    if not served.batches:
        return [waiting[0]]
    able = [one for one in waiting if one.served is served and (served.mixed or not one.request.options)]
    return able[: largest_power_of_two(min(len(able), max_batch))] if able else [waiting[0]]


def largest_power_of_two(count: int) -> int:
    """The largest one that is not above `count` (1 or more)."""
    return 1 << (count.bit_length() - 1)


def run_requests(policy: Any, requests: Sequence[Request]) -> list[Any]:
    """Run requests, several of them as one batch; for each one its result or its own error.

    Requests of a batch have no options, unless the policy `batches_prev_chunks`.
    """
    if len(requests) > 1:
        observations, options = [r.observation for r in requests], {}
        if any(r.options for r in requests):
            options = {f"{name}s": [r.options.get(name) for r in requests] for name in OPTIONS}
        try:
            results = policy.infer_batch(observations, **options)
            if len(results) != len(requests):
                raise EngineError(f"policy: expected {len(requests)} results of a batch, got {len(results)}")
            return list(results)
        except BaseException as error:  # SystemExit from a policy must not end the thread that answers
            logger.warning("a batch of %d failed, running one by one: %s", len(requests), error)
    return [run_one(policy, r) for r in requests]


def run_one(policy: Any, request: Request) -> Any:
    """The policy's result, or the exception it raised."""
    try:
        return policy.infer(request.observation, **request.options)
    except Exception as error:
        return error
    except BaseException as error:
        return EngineError(f"policy: {type(error).__name__}: {error}")
