"""Runs batches: parses frames, groups requests, calls the policy and packs the results.

All of it happens in the one thread that calls the policy, in the server's process or in a replica's, so that frames
travel between processes unparsed.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vla_accel.errors import ActionError, EngineError, ObservationError, VlaAccelError, WireError
from vla_accel.remote import wire
from vla_accel.server.limits import BatchLimits
from vla_accel.server.policies import PolicyRegistry
from vla_accel.server.requests import OPTIONS, Answer, Answers, Call, Request, parse, split_options

logger = logging.getLogger("vla_accel.server")

_MAX_ERROR_LENGTH = 4000


class Runner:
    """Answers calls with the policies of a registry.

    A turn answers at least one observation of each call. It answers more of them only while the turn has fewer than
    `max_batch` observations and the policy has `infer_batch`; the rest of the call needs another turn.
    """

    def __init__(self, registry: PolicyRegistry, limits: BatchLimits) -> None:
        self._registry, self._limits = registry, limits
        self._idle_since = 0.0

    def run(self, calls: Sequence[Call], deliver: Callable[[Answers], object]) -> None:
        """Answer every call exactly once, whatever the policy raises. `deliver` gets answers as soon as they exist.

        When a batch fails, its requests run one by one, so that only the call with the bad observation fails.
        """
        requests: dict[int, list[Request]] = {}
        refused: Answers = []
        spare = max(0, self._limits.max_batch - len(calls))
        for index, call in enumerate(calls):
            if call.dropped:
                refused.append((index, Answer("", "dropped")))
                continue
            began = time.monotonic()
            ready = max(call.sent_s, self._idle_since)  # the call may have waited here behind the batch before
            call.timing["queue_ms"] = call.timing.get("queue_ms", 0.0) + (ready - call.sent_s) * 1e3
            call.timing["handover_ms"] = (began - ready) * 1e3
            try:
                requests[index] = self._requests(index, call, spare)
                spare -= len(requests[index]) - 1
            except Exception as error:
                refused.append((index, failure(error)))
            call.timing["decode_ms"] = (time.monotonic() - began) * 1e3
        if refused:
            deliver(refused)
        waiting = [request for own in requests.values() for request in own]
        while waiting:
            group = next_group(waiting, self._limits.max_batch)
            waiting = [request for request in waiting if request not in group]
            began = time.monotonic()
            results = run_requests(group[0].policy.policy, group)  # type: ignore[union-attr]
            infer_ms = (time.monotonic() - began) * 1e3
            for request, result in zip(group, results, strict=True):
                request.result, request.infer_ms, request.batch = result, infer_ms, len(group)
            complete = [i for i in dict.fromkeys(r.call for r in group) if all(r.batch for r in requests[i])]
            deliver([(index, _answer(calls[index], requests[index])) for index in complete])
        self._idle_since = time.monotonic()

    def _requests(self, index: int, call: Call, spare: int) -> list[Request]:
        """The call's next request, and up to `spare` more."""
        name, observations, several = parse(
            call.frame, named=bool(self._registry.names), max_observations=self._limits.max_observations
        )
        call.total = len(observations) if several else 0
        policy = self._registry.get(name or call.policy)
        end = call.done + 1 + (spare if policy.batches else 0)
        requests = []
        for place, observation in enumerate(observations[call.done : end], call.done):
            try:
                options = split_options(observation, real_time_chunking=policy.real_time_chunking)
            except ObservationError as error:
                raise _with_index(error, call, place) from None
            requests.append(Request(observation, options, policy, index, place))
        return requests


def _answer(call: Call, requests: list[Request]) -> Answer:
    results, policy_timing = [], None
    try:  # a result is the policy's own object: reading it may raise anything
        for request in requests:
            result = request.result
            if isinstance(result, Exception):
                raise _with_index(result, call, request.index)
            if not isinstance(result, Mapping):
                raise EngineError(f"policy: expected a mapping as its result, got {type(result).__name__}")
            policy_timing = result.get("policy_timing")
            timing = {"infer_ms": request.infer_ms, **call.timing, "batch": request.batch}
            try:
                results.append(wire.pack({**result, "server_timing": timing}))
            except WireError as error:
                raise EngineError(f"policy: its result cannot be sent: {error}") from error
    except Exception as error:
        return failure(error)
    last = requests[-1]
    answer = Answer(
        results[0],
        batch=last.batch,
        policy=last.policy.name if last.policy else "",
        policy_timing=dict(policy_timing) if isinstance(policy_timing, Mapping) else {},
    )
    if not call.total:
        return answer
    return replace(answer, message=b"", results=tuple(results), remaining=call.total - call.done - len(requests))


def _with_index(error: Exception, call: Call, index: int) -> Exception:
    """The error, with the observation's index if the call has several."""
    if not call.total or not isinstance(error, VlaAccelError):
        return error
    return type(error)(f"{wire.BATCH}[{index}]: {error}")


def failure(error: Exception, outcome: str = "") -> Answer:
    """The answer that reports an error; `outcome` defaults to the one for its type."""
    expected = isinstance(error, (WireError, ObservationError))
    known = expected or outcome or isinstance(error, ActionError)
    return Answer(
        f"{type(error).__name__}: {error}"[:_MAX_ERROR_LENGTH],
        outcome or ("bad request" if expected else "policy error"),
        type(error).__name__,
        "" if known else "".join(traceback.format_exception(error)),
    )


def next_group(waiting: Sequence[Request], max_batch: int) -> list[Request]:
    """The requests to run next: of one policy, a power of two of them, because engines have fixed shapes.

    Unless the policy mixes guided and plain requests, a batch holds only plain ones, and guided ones run alone after
    them.
    """
    policy = waiting[0].policy
    if policy is None or not policy.batches:
        return [waiting[0]]
    able = [one for one in waiting if one.policy is policy and (policy.mixed or not one.options)]
    return able[: largest_power_of_two(min(len(able), max_batch))] if able else [waiting[0]]


def largest_power_of_two(count: int) -> int:
    """The largest power of two up to `count`, which is at least 1."""
    return 1 << (count.bit_length() - 1)


def run_requests(policy: Any, requests: Sequence[Request]) -> list[Any]:
    """Run requests, several of them as one batch. Returns each one's result or its exception."""
    if len(requests) > 1:
        options = {}
        if any(r.options for r in requests):  # only if the policy declares `batches_prev_chunks`
            options = {f"{name}s": [r.options.get(name) for r in requests] for name in OPTIONS}
        try:
            results = policy.infer_batch([r.observation for r in requests], **options)
            if len(results) != len(requests):
                raise EngineError(f"policy: expected {len(requests)} results of a batch, got {len(results)}")
            return list(results)
        except BaseException as error:  # a policy's SystemExit must not end the thread that answers
            logger.warning("a batch of %d failed; running its requests one by one: %s", len(requests), error)
    return [_run_one(policy, request) for request in requests]


def _run_one(policy: Any, request: Request) -> Any:
    try:
        return policy.infer(request.observation, **request.options)
    except Exception as error:
        return error
    except BaseException as error:
        return EngineError(f"policy: {type(error).__name__}: {error}")
