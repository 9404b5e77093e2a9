"""From frames to answers: reads requests, forms batches, runs the policy, packs results. Knows nothing about clients.

All of it happens in the one thread that calls the policy, in the server's process or in a replica's, so that a frame
travels there as it came.
"""

from __future__ import annotations

import inspect
import logging
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vla_accel.errors import EngineError, ObservationError, WireError
from vla_accel.remote import wire
from vla_accel.remote.async_runner import takes_prev_chunk
from vla_accel.server.requests import Request, parse

logger = logging.getLogger("vla_accel.server")

_OPTIONS = ("prev_chunk", "inference_delay")
_LONGEST_ERROR = 4000


@dataclass
class Call:
    """A frame as a client sent it. `timing`: what is known so far of the answer's `server_timing`, milliseconds;
    `sent_s`: when it was given to a replica (`time.monotonic`, which a machine's processes share)."""

    frame: bytes | str
    timing: dict[str, float] = field(default_factory=dict)
    sent_s: float = 0.0


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
    policy_timing: dict[str, Any] = field(default_factory=dict)


Deliver = Callable[[list[tuple[int, Answer]]], object]
"""Takes answers as soon as there are some, each with the index of its call."""


class Runner:
    """Answers calls with `policy`, several as one batch where it has `infer_batch`."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self._real_time_chunking = takes_prev_chunk(policy)
        self._mixed = batches_prev_chunks(policy)
        self.batches = hasattr(policy, "infer_batch")

    @property
    def hello(self) -> bytes:
        """The first frame that a client gets: the policy's metadata. Raises WireError if it cannot be sent."""
        metadata = getattr(self._policy, "metadata", None) or {}
        return wire.pack({**metadata, wire.REAL_TIME_CHUNKING: self._real_time_chunking})

    def run(self, calls: Sequence[Call], deliver: Deliver) -> None:
        """Answer every call exactly once, whatever the policy raises; a batch's answers leave before the next begins.

        When a batch fails its requests run one by one, so that one bad observation fails alone.
        """
        waiting: list[tuple[int, Request]] = []
        refused: list[tuple[int, Answer]] = []
        for index, call in enumerate(calls):
            began = time.monotonic()
            call.timing["handover_ms"] = (began - call.sent_s) * 1e3
            try:
                waiting.append((index, parse(call.frame, real_time_chunking=self._real_time_chunking)))
            except Exception as error:
                refused.append((index, failure(error)))
            call.timing["decode_ms"] = (time.monotonic() - began) * 1e3
        if refused:
            deliver(refused)
        while waiting:
            group = next_group(waiting, self._mixed)
            taken = {index for index, _ in group}
            waiting = [one for one in waiting if one[0] not in taken]
            began = time.monotonic()
            outcomes = run_requests(self._policy, [request for _, request in group])
            infer_ms = (time.monotonic() - began) * 1e3
            answers = []
            for (index, _), outcome in zip(group, outcomes, strict=True):
                timing = {"infer_ms": infer_ms, **calls[index].timing, "batch": len(group)}
                answers.append((index, _answer(outcome, timing)))
            deliver(answers)


def _answer(outcome: Any, timing: dict[str, float]) -> Answer:
    """The answer to one request: what the policy returned, or the exception that it raised."""
    if isinstance(outcome, Exception):
        return failure(outcome)
    if not isinstance(outcome, Mapping):
        return failure(EngineError(f"policy: expected a mapping as its result, got {type(outcome).__name__}"))
    try:
        message = wire.pack({**outcome, "server_timing": timing})
    except WireError as error:
        return failure(EngineError(f"policy: its result cannot be sent: {error}"))
    told = outcome.get("policy_timing")
    return Answer(message, batch=int(timing["batch"]), policy_timing=dict(told) if isinstance(told, Mapping) else {})


def failure(error: Exception, outcome: str = "") -> Answer:
    """An error as an answer; `outcome` is told from the error where it is not given."""
    expected = isinstance(error, (WireError, ObservationError))
    kind = type(error).__name__
    return Answer(
        f"{kind}: {error}"[:_LONGEST_ERROR],
        outcome or ("bad request" if expected else "policy error"),
        kind,
        "" if expected or outcome else "".join(traceback.format_exception(error)),
    )


def next_group(waiting: Sequence[tuple[int, Request]], mixed: bool) -> list[tuple[int, Request]]:
    """The requests to run first: a power of two of them together, because engines have fixed shapes. Unless `mixed`,
    only plain ones make a batch, and a guided one runs alone when there is no plain one."""
    able = waiting if mixed else [one for one in waiting if not one[1].options]
    return list(able[: power_of_two(len(able))]) if able else [waiting[0]]


def power_of_two(count: int) -> int:
    """The largest one that is not above `count` (1 or more)."""
    return 1 << (count.bit_length() - 1)


def run_requests(policy: Any, requests: Sequence[Request]) -> list[Any]:
    """Run requests, several of them as one batch; for each one its result or its own error.

    Requests of a batch have no options, unless the policy `batches_prev_chunks`.
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
        except BaseException as error:  # SystemExit from a policy must not end the thread that answers
            logger.warning("a batch of %d failed, running one by one: %s", len(requests), error)
    return [run_one(policy, r) for r in requests]


def batches_prev_chunks(policy: Any) -> bool:
    """Whether `policy.infer_batch` takes a previous chunk and a delay, or None, for each observation."""
    infer_batch = getattr(policy, "infer_batch", None)
    return infer_batch is not None and {f"{n}s" for n in _OPTIONS} <= inspect.signature(infer_batch).parameters.keys()


def run_one(policy: Any, request: Request) -> Any:
    """The policy's result, or the exception it raised."""
    try:
        return policy.infer(request.observation, **request.options)
    except Exception as error:
        return error
    except BaseException as error:
        return EngineError(f"policy: {type(error).__name__}: {error}")
