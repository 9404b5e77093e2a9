"""The four types that carry a request through the server, and the parser of a client's frame.

`Call` (one message of a client) -> `Batch` (the calls that a replica runs together) -> `Request` (one observation, as
the policy takes it) -> `Answer`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vla_accel.errors import ObservationError
from vla_accel.remote import wire
from vla_accel.transforms.observations import real_numbers

OPTIONS = {"prev_chunk": wire.PREV_CHUNK, "inference_delay": wire.INFERENCE_DELAY}
"""Keyword arguments of `infer` that may travel with an observation, and their keys in it."""


class ClientGone(Exception):
    """The client has left, so nobody reads the answer."""


@dataclass(frozen=True)
class Answer:
    """The reply to a call; `policy_timing` has the policy's own times in ms."""

    message: bytes | str  # the frame to send; text is an error message
    outcome: str = "ok"  # label of the metric `vla_accel_requests_total`
    error: str = ""  # type of the error
    trace: str = ""  # traceback of an error that no client can cause; only logged
    batch: int = 0  # observations that ran together
    policy: str = ""
    policy_timing: dict[str, Any] = field(default_factory=dict)
    # Of a call with several observations: the packed results of this turn, and how many are left for further turns.
    results: tuple[bytes, ...] = ()
    remaining: int = 0


Answers = list[tuple[int, Answer]]
"""Answers with the index of their call in the batch."""


@dataclass(eq=False)
class Call:
    """One message of a client, from its arrival to its answer. Times are in seconds of `time.monotonic`."""

    frame: Any
    policy: str = ""  # from the connection's path
    timing: dict[str, float] = field(default_factory=dict)  # the answer's `server_timing` so far, in ms
    client: Hashable = ""  # takes turns in the queue
    outcome: asyncio.Future[Answer] | None = None  # may fail with `ClientGone`; None in a replica's process
    arrived_s: float = 0.0
    queued_s: float = 0.0  # start of the current wait in the queue
    waited_s: float = 0.0  # waits of all turns so far
    sent_s: float = 0.0  # when the call was sent to a replica
    started_s: float = 0.0  # when the replica began its batch; 0 while the call waits, in the queue or at the replica
    total: int = 0  # observations in the message if it holds a list; 0 for a single observation
    done: int = 0  # observations that earlier turns have answered
    results: list[bytes] = field(default_factory=list)
    deaths: int = 0  # replicas that died while they worked on this call

    @property
    def dropped(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self.outcome is not None and self.outcome.done()

    def portable(self, frame: Any) -> Call:
        """A copy for another process, with this frame."""
        return replace(self, frame=frame, client="", outcome=None, results=[])


class Batch:
    """Calls that a replica runs together; `pending` has those without an answer, by index."""

    def __init__(self, calls: Sequence[Call], on_answers: Callable[[Batch, list[tuple[Call, Answer]]], object]) -> None:
        self.calls, self._on_answers = calls, on_answers
        self.pending = dict(enumerate(calls))

    def deliver(self, answers: Answers) -> None:
        """Hand over some answers; call this on the event loop."""
        self._on_answers(self, [(self.pending.pop(index), answer) for index, answer in answers])


@dataclass(eq=False)
class Request:
    """One observation with the keyword arguments of `infer`; `result` may be the exception that the policy raised."""

    observation: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    policy: Any = None  # a `LoadedPolicy`
    call: int = 0  # index of its call in the batch
    index: int = 0  # its index in the call's list of observations
    result: Any = None
    infer_ms: float = 0.0
    batch: int = 0  # size of the policy call; 0 before it


def parse(frame: Any, *, named: bool, max_observations: int) -> tuple[str, list[dict[str, Any]], bool]:
    """Return the policy's name ("" without one), the observations, and whether the frame holds a list of them.

    `named`: whether the server has several policies, so that the key `policy` names one. Raises WireError and
    ObservationError.
    """
    content = wire.unpack_map(frame)
    policy = content.pop(wire.POLICY, "") if named else ""
    if not isinstance(policy, str):
        raise ObservationError(f"{wire.POLICY}: expected a name, got {policy!r:.60}")
    if content.keys() != {wire.BATCH}:
        return policy, [content], False
    observations = content[wire.BATCH]
    if not isinstance(observations, list) or not observations:
        raise ObservationError(f"{wire.BATCH}: expected a list of observations, got {observations!r:.60}")
    if len(observations) > max_observations:
        raise ObservationError(
            f"{wire.BATCH}: expected at most {max_observations} observations in one request, got {len(observations)}; "
            "send several requests, or raise the server's --max-observations"
        )
    for index, one in enumerate(observations):
        if not isinstance(one, dict) or not all(isinstance(key, str) for key in one):
            raise ObservationError(f"{wire.BATCH}[{index}]: expected a map with text keys, got {one!r:.60}")
    return policy, observations, True


def split_options(observation: dict[str, Any], *, real_time_chunking: bool, warm_start: bool = False) -> dict[str, Any]:
    """Remove the keyword arguments of `infer` from an observation and return them. The policy checks the rest.

    Raises ObservationError for invalid values, if the policy does not support real-time chunking, or, unless it has
    `warm_start`, for a previous chunk without a delay.
    """
    present = [key for key in OPTIONS.values() if key in observation]
    if not present:
        return {}
    if not real_time_chunking and (wire.INFERENCE_DELAY in present or not warm_start):
        raise ObservationError(f"{present[0]}: this policy does not support real-time chunking")
    if present == [wire.INFERENCE_DELAY] or (present == [wire.PREV_CHUNK] and not warm_start):
        raise ObservationError(f"expected {' and '.join(OPTIONS.values())} together, got only {present[0]}")
    chunk = real_numbers(observation.pop(wire.PREV_CHUNK), wire.PREV_CHUNK)
    if chunk.ndim != 2 or not chunk.size:
        raise ObservationError(f"{wire.PREV_CHUNK}: expected (k, action_dim) numbers, got shape {chunk.shape}")
    if wire.INFERENCE_DELAY not in observation:
        return {"prev_chunk": chunk}
    delay = observation.pop(wire.INFERENCE_DELAY)
    if isinstance(delay, (bool, np.bool_)) or not isinstance(delay, (int, np.integer)) or delay < 0:
        raise ObservationError(f"{wire.INFERENCE_DELAY}: expected ticks as an integer >= 0, got {delay!r:.60}")
    return {"prev_chunk": chunk, "inference_delay": int(delay)}
