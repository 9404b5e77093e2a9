"""A load test of a policy server: many clients, in several processes, that time every request and check every answer.

Each request has a state of its own, which its answer repeats, so a lost or mixed-up answer is noticed.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

import numpy as np

from vla_accel.client.client import PolicyClient
from vla_accel.errors import EngineError, ServerError
from vla_accel.remote import wire
from vla_accel.remote.processes import start

COLUMNS = ("round_trip", "server", "queue", "handover", "decode", "infer")
"""Milliseconds of a request: as the client measures it; and as the server reports it: from arrival until the answer is
sent, the wait for a turn, the way to the policy's thread, the decoding of the frame, the policy."""
_TIMING_KEYS = ("prev_total_ms", "queue_ms", "handover_ms", "decode_ms", "infer_ms")
_NOTICE_S = 0.05
"""Seconds between the message that all processes are warm and their common start."""
_WARM_UP_S = 300.0
"""Longest wait for an answer during the warm-up, in which a policy may build engines."""


@dataclass
class Load:
    """What the clients measured in `seconds`: samples (requests, len(COLUMNS)) float64 in ms, NaN where the server
    reported nothing; the answers of each client; errors and wrong answers."""

    samples: np.ndarray
    counts: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class _Plan:
    """The work of one process: `clients` clients, of which the first has the number `first`."""

    address: str
    clients: int
    first: int
    seconds: float
    observation: dict[str, Any]
    warm_up: int
    api_key: str | None


def load(
    address: str,
    clients: int,
    seconds: float,
    observation: Mapping[str, Any],
    *,
    warm_up: int = 0,
    api_key: str | None = None,
    advance: Callable[[int, int], object] = lambda count, total: None,
) -> Load:
    """Send requests from `clients` connections, each as soon as the answer before has arrived.

    The first vector of the observation gets other numbers in each request. All clients begin at the same time, after
    `warm_up` requests each that are not counted; `advance` is called with (1, number of all warm-up answers) for each.
    After an error, a client continues with a new connection; before its first counted request, it ends.
    """
    processes = max(1, min(clients, os.cpu_count() or 1))
    shares = [clients // processes + (i < clients % processes) for i in range(processes)]
    context = multiprocessing.get_context("spawn")
    started: list[tuple[Any, Any]] = []
    try:
        for i, share in enumerate(shares):
            ours, theirs = context.Pipe()
            plan = _Plan(address, share, sum(shares[:i]), seconds, dict(observation), warm_up, api_key)
            process = context.Process(target=_process, args=(theirs, plan))
            started.append((process, ours))
            start(process)
            theirs.close()
        cold: list[Any] = [pipe for _, pipe in started]
        while cold:
            ready: list[Any] = connection.wait(cold, _WARM_UP_S)
            if not ready:
                raise EngineError(f"clients: expected an answer within {_WARM_UP_S:g} s, got none")
            for pipe in ready:
                if pipe.recv():
                    advance(1, clients * warm_up)
                else:
                    cold.remove(pipe)
        begin = time.monotonic() + _NOTICE_S
        for _, pipe in started:
            pipe.send(begin)
        results: list[Load] = [pipe.recv() for _, pipe in started]
    except (EOFError, ConnectionError):
        raise EngineError("clients: one of their processes ended unexpectedly") from None
    finally:  # also after an interrupt, so that no client continues
        for process, pipe in started:
            pipe.close()
            if process.pid is not None:
                process.kill()
                process.join()
    return Load(
        np.concatenate([one.samples for one in results]),
        [count for one in results for count in one.counts],
        [problem for one in results for problem in one.problems],
        max(one.seconds for one in results),
    )


def _process(pipe: Any, plan: _Plan) -> None:
    """Run a process's clients, each in a thread. Sends True for each warm-up answer, False when all clients are warm,
    and finally a `Load`; receives the common start."""
    samples: list[list[tuple[float, ...]]] = [[] for _ in range(plan.clients)]
    problems: list[str] = []
    ends: list[float] = []
    sending, warm, started = threading.Lock(), threading.Semaphore(0), threading.Event()
    begin = end = math.inf
    state = next((name for name, value in plan.observation.items() if np.ndim(value) == 1), "observation/state")

    def client(index: int) -> None:
        rng = np.random.default_rng(plan.first + index)
        policy, count, waited = None, -plan.warm_up, False
        while time.monotonic() < end:
            try:
                if policy is None:
                    policy = PolicyClient(plan.address, timeout_s=60, api_key=plan.api_key)
                if count == 0 and not waited:
                    waited = True
                    warm.release()
                    started.wait()
                    time.sleep(max(0.0, begin - time.monotonic()))
                numbers = np.asarray(rng.random(len(plan.observation[state])))
                sent = time.monotonic()
                answer = policy.infer({**plan.observation, state: numbers})
                round_trip = (time.monotonic() - sent) * 1e3
                returned = answer["state"]
            except Exception as error:
                what = str(error) if isinstance(error, ServerError) else f"{type(error).__name__}: {error}"
                problems.append(f"client {plan.first + index}: {what}")
                if not waited:  # a server that does not answer would be called forever
                    warm.release()
                    return
                policy = None
                continue
            if not np.array_equal(returned[: len(numbers)], numbers):
                problems.append(f"client {plan.first + index} got the answer to another request than {count}")
            if count >= 0:
                timing = answer.get("server_timing", {})
                samples[index].append((round_trip, *(float(timing.get(key, np.nan)) for key in _TIMING_KEYS)))
            else:
                with sending:
                    pipe.send(True)
            count += 1
        ends.append(time.monotonic())
        if policy is not None:
            policy.close()

    threads = [threading.Thread(target=client, args=(i,), daemon=True) for i in range(plan.clients)]
    for thread in threads:
        thread.start()
    for _ in threads:
        warm.acquire()
    pipe.send(False)
    begin = pipe.recv()
    end = begin + plan.seconds
    started.set()
    for thread in threads:
        thread.join()
    rows = []
    for own in samples:  # the server reports the total time of a request with the next answer
        totals = [row[1] for row in own[1:]] + [np.nan]
        rows += [(row[0], total, *row[2:]) for row, total in zip(own, totals, strict=False)]
    array = np.array(rows, np.float64).reshape(-1, len(COLUMNS))
    pipe.send(Load(array, [len(own) for own in samples], problems, max(ends, default=begin) - begin))


def packing_ms(observation: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, float]:
    """Median milliseconds of a client's own work: encoding an observation and decoding an answer."""
    data, packer = wire.pack(dict(answer)), wire.Packer()

    def encode() -> None:
        with packer.packed(dict(observation)):
            pass

    def median(work: Callable[[], object]) -> float:
        times = []
        for _ in range(200):
            start = time.monotonic()
            work()
            times.append((time.monotonic() - start) * 1e3)
        return float(np.median(times))

    return {"encode": median(encode), "decode": median(lambda: wire.unpack_map(data))}
