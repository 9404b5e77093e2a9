"""The policies of a server, and what runs batches: parses frames, groups requests, calls the policy, packs the results.

All of it happens in the one thread that calls the policy, in the server's process or in a replica's, so that frames
travel between processes unparsed.
"""

from __future__ import annotations

import gc
import logging
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vla_accel.errors import ActionError, ConfigError, EngineError, ObservationError, VlaAccelError, WireError
from vla_accel.remote import wire
from vla_accel.remote.inference import timing_of
from vla_accel.remote.metadata import batches_prev_chunks, history_of, starts_warm, supports_prev_chunk
from vla_accel.server.limits import BatchLimits
from vla_accel.server.requests import OPTIONS, Answer, Answers, Call, Request, parse, split_options
from vla_accel.view import OFF, View

logger = logging.getLogger("vla_accel.server")

_MAX_ERROR_LENGTH = 4000


class LoadedPolicy:
    """A policy with its capabilities, as the policy declares them."""

    def __init__(self, policy: Any, name: str = "", size: int = 0) -> None:
        self.policy, self.name, self.size = policy, name, size
        self.real_time_chunking = supports_prev_chunk(policy)
        self.batches = hasattr(policy, "infer_batch")
        self.mixed = batches_prev_chunks(policy)
        self.warm_start = starts_warm(policy)
        self._history, self._warned = history_of(policy), False

    def with_history(self, observation: dict[str, Any]) -> dict[str, Any]:
        """Return an observation with a history: without one of its own, as the first of an episode. The server cannot
        know which observation came before: clients call it between many control steps, and for several episodes."""
        if self._history is None or self._history.has(observation):
            return observation
        if not self._warned:
            logger.warning(
                "a client sends one observation to a policy that reads %d: it is repeated, as at the start of an "
                "episode; PolicyClient sends the last ones", self._history.count,
            )  # fmt: skip
        self._warned = True
        self._history.clear()
        return dict(self._history.add(observation))

    def metadata_frame(self, names: list[str]) -> bytes:
        """The first frame of a connection. Raises WireError for metadata that cannot be sent."""
        metadata = {**(getattr(self.policy, "metadata", None) or {}), wire.REAL_TIME_CHUNKING: self.real_time_chunking}
        return wire.pack(metadata | ({wire.POLICIES: names} if names else {}))


class PolicyRegistry:
    """Policies by name, of which the most recently used stay loaded within a budget in bytes; None for no limit.

    `loaders`: for each name, a function that returns the policy and its size in bytes. The first is the default.
    """

    def __init__(self, loaders: Mapping[str, Callable[[], tuple[Any, int]]], budget: int | None = None) -> None:
        if not loaders:
            raise ConfigError("policy: expected at least one, got none")
        self._loaders, self.budget = loaders, budget
        self._default = next(iter(loaders))
        self._sizes: dict[str, int] = {}
        self._loaded: dict[str, LoadedPolicy] = {}  # least recently used first
        self.metadata_frames: dict[str, bytes] = {}  # by name; "" is the default policy
        self.batches = False

    @classmethod
    def single(cls, load: Callable[[], Any]) -> PolicyRegistry:
        """A registry of one policy without a name, which `start` loads."""
        return cls({"": lambda: (load(), 0)})

    @classmethod
    def containing(cls, policy: Any) -> PolicyRegistry:
        """A registry of one policy without a name; a registry is returned unchanged."""
        return policy if isinstance(policy, cls) else cls.single(lambda: policy)

    @property
    def names(self) -> list[str]:
        """The names that clients can choose from; empty for a single policy without a name."""
        return [name for name in self._loaders if name]

    @property
    def loaded(self) -> list[str]:
        """Names of the loaded policies, least recently used first."""
        return list(self._loaded)

    def start(self) -> None:
        """Load each policy once, so that errors appear at the start: WireError, and whatever a loader raises."""
        for name in reversed(list(self._loaders)):  # the default last, so that it stays loaded
            loaded = self.get(name)
            self.metadata_frames[name] = loaded.metadata_frame(self.names)
            self.batches |= loaded.batches
        self.metadata_frames[""] = self.metadata_frames[self._default]

    def get(self, name: str) -> LoadedPolicy:
        """The policy of this name ("" for the default), loaded. Raises ObservationError for an unknown name."""
        name = name or self._default
        if name not in self._loaders:
            raise ObservationError(f"{wire.POLICY}: expected one of {', '.join(self.names)}, got {name!r:.60}")
        if name not in self._loaded:
            self._unload_until_free(self._sizes.get(name, 0))
            policy, self._sizes[name] = self._loaders[name]()
            self._loaded[name] = LoadedPolicy(policy, name, self._sizes[name])
            self._unload_until_free(0, keep=name)
        self._loaded[name] = self._loaded.pop(name)
        return self._loaded[name]

    def _unload_until_free(self, needed: int, keep: str = "") -> None:
        while self.budget is not None and sum(p.size for p in self._loaded.values()) + needed > self.budget:
            oldest = next((name for name in self._loaded if name != keep), None)
            if oldest is None:
                if keep:
                    logger.warning("policy %s alone exceeds the memory budget", keep)
                return
            del self._loaded[oldest]
            gc.collect()  # engines and CUDA graphs reference each other
            logger.warning("unloaded policy %s: the memory budget is %d MiB", oldest, self.budget >> 20)


class Runner:
    """Answers calls with the policies of a registry.

    A turn answers at least one observation of each call. It answers more of them only while the turn has fewer than
    `max_batch` observations and the policy has `infer_batch`; the rest of the call needs another turn.

    A view gets every answer after it was delivered. A server knows no control ticks, so there each chunk follows the
    one before.
    """

    def __init__(self, registry: PolicyRegistry, limits: BatchLimits, view: View = OFF) -> None:
        self._registry, self._limits, self._view = registry, limits, view
        self._idle_since, self._tick, self._warned = 0.0, 0, False

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
            results = run_requests(group[0].policy.policy, group)
            infer_ms = (time.monotonic() - began) * 1e3
            for request, result in zip(group, results, strict=True):
                request.result, request.infer_ms, request.batch = result, infer_ms, len(group)
            complete = [i for i in dict.fromkeys(r.call for r in group) if all(r.batch for r in requests[i])]
            deliver([(index, _answer(calls[index], requests[index])) for index in complete])
            if self._view.on:
                self._show(group, calls)
        self._idle_since = time.monotonic()

    def _show(self, group: Sequence[Request], calls: Sequence[Call]) -> None:
        """Show answers. Neither a result that cannot be read nor a view that raises may end the policy's thread."""
        for request in group:
            try:
                self._show_one(request, calls[request.call])
            except Exception as error:
                if not self._warned:
                    logger.warning("view: %s: %s; the policy continues", type(error).__name__, error)
                self._warned = True

    def _show_one(self, request: Request, call: Call) -> None:
        result = request.result
        if not isinstance(result, Mapping) or (actions := result.get("actions")) is None:
            return
        count = len(actions)
        server = {f"server/{name}": ms for name, ms in call.timing.items()}
        timing = {**timing_of(result), **server, "server/infer_ms": request.infer_ms}
        name = request.policy.name if request.policy else ""
        self._view.inferred(self._tick, request.observation, actions, timing, name)
        self._tick += count

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
                options = split_options(
                    observation, real_time_chunking=policy.real_time_chunking, warm_start=policy.warm_start
                )
            except ObservationError as error:
                raise _with_index(error, call, place) from None
            requests.append(Request(policy.with_history(observation), options, policy, index, place))
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
    them. With a warm start, which has other denoising steps, a batch holds only guided ones or only plain ones.
    """
    policy = waiting[0].policy
    if policy is None or not policy.batches:
        return [waiting[0]]
    able = [one for one in waiting if one.policy is policy and (policy.mixed or not one.options)]
    if able and policy.warm_start:
        able = [one for one in able if bool(one.options) == bool(able[0].options)]
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
