"""Load on a policy server: many clients, in several processes, that time every request and check every answer.

Every request carries a state of its own, which comes back in its answer: one that is lost or crossed does not go
unnoticed. Knows nothing about servers but their address.
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
"""Milliseconds of a request: as the client saw it, and, as the server told it, from its arrival to its answer, sent;
its wait for a turn, its way to the policy, the reading of the frame, the policy."""
_NOTICE_S = 0.05
"""Time for every process to hear when to begin."""
_WARM_UP_S = 300.0
"""In which an answer must come while clients warm up; a policy may build engines before it answers."""


@dataclass
class Load:
    """What clients saw. `samples` (requests, len(COLUMNS)) float64, NaN where the server told nothing."""

    samples: np.ndarray
    counts: list[int] = field(default_factory=list)
    """Answers of each client."""
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


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
    """Ask as fast as answers come, from `clients` connections, all in the same `seconds`: they begin together once each
    has had its `warm_up`.

    Args: `observation`: what is sent, with other numbers as its first vector, the state or what it begins with;
    `warm_up`: requests of each client that are not counted; `advance`: told of each of their answers. A client that
    meets an error notes it and goes on with a new connection; one before its first request that counts ends.
    """
    processes = max(1, min(clients, os.cpu_count() or 1))
    shares = [clients // processes + (i < clients % processes) for i in range(processes)]
    state = next((name for name, value in observation.items() if np.ndim(value) == 1), "observation/state")
    options = {"state": state, "warm_up": warm_up, "api_key": api_key}
    context = multiprocessing.get_context("spawn")
    begun: list[tuple[Any, Any]] = []
    try:
        for i, share in enumerate(shares):
            ours, theirs = context.Pipe()
            words = theirs, address, share, sum(shares[:i]), seconds, dict(observation), options
            process = context.Process(target=_process, args=words)
            begun.append((process, ours))
            start(process)
            theirs.close()
        cold: list[Any] = [pipe for _, pipe in begun]
        while cold:
            told: list[Any] = connection.wait(cold, _WARM_UP_S)
            if not told:
                raise EngineError(f"clients: expected an answer within {_WARM_UP_S:g} s, got none")
            for pipe in told:
                if pipe.recv():
                    advance(1, clients * warm_up)
                else:
                    cold.remove(pipe)
        begin = time.monotonic() + _NOTICE_S
        for _, pipe in begun:
            pipe.send(begin)
        done: list[Load] = [pipe.recv() for _, pipe in begun]
    except (EOFError, ConnectionError):
        raise EngineError("clients: one of their processes ended unasked") from None
    finally:  # of an interrupted run, too: clients would go on asking to their end
        for process, pipe in begun:
            pipe.close()
            if process.pid is not None:
                process.kill()
                process.join()
    return Load(
        np.concatenate([one.samples for one in done]),
        [count for one in done for count in one.counts],
        [problem for one in done for problem in one.problems],
        max(one.seconds for one in done),
    )


def _process(pipe: Any, *words: Any) -> None:
    one_at_a_time = threading.Lock()

    def agreed() -> float:
        pipe.send(False)  # none is warming up any more
        return pipe.recv()

    def answered() -> None:
        with one_at_a_time:
            pipe.send(True)

    pipe.send(_clients(agreed, answered, *words))


def _clients(
    agreed: Callable[[], float],
    answered: Callable[[], None],
    address: str,
    clients: int,
    first: int,
    seconds: float,
    observation: dict[str, Any],
    options: dict[str, Any],
) -> Load:
    """The clients of one process, each in a thread. `agreed` is asked once all are warm when all processes begin,
    `answered` told of each answer until then."""
    samples: list[list[tuple[float, ...]]] = [[] for _ in range(clients)]
    problems: list[str] = []
    ended: list[float] = []
    warm, told = threading.Semaphore(0), threading.Event()
    begin = end = math.inf

    def one(index: int) -> None:
        rng = np.random.default_rng(first + index)
        policy = None
        count = -options["warm_up"]
        waited = False
        while time.monotonic() < end:
            try:
                if policy is None:
                    policy = PolicyClient(address, timeout_s=60, api_key=options["api_key"])
                if count == 0 and not waited:
                    waited = True
                    warm.release()
                    told.wait()
                    time.sleep(max(0.0, begin - time.monotonic()))
                numbers = np.asarray(rng.random(len(observation[options["state"]])))
                start = time.monotonic()
                answer = policy.infer({**observation, options["state"]: numbers})
                took = (time.monotonic() - start) * 1e3
                back = answer["state"]
            except Exception as error:
                what = str(error) if isinstance(error, ServerError) else f"{type(error).__name__}: {error}"
                problems.append(f"client {first + index}: {what}")
                if not waited:  # there is nothing to count: a server that is not there would be asked for ever
                    warm.release()
                    return
                policy = None
                continue
            if not np.array_equal(back[: len(numbers)], numbers):
                problems.append(f"client {first + index} got another's answer to request {count}")
            if count >= 0:
                samples[index].append(_sample(took, answer.get("server_timing", {})))
            else:
                answered()
            count += 1
        ended.append(time.monotonic())
        if policy is not None:
            policy.close()

    threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(clients)]
    for thread in threads:
        thread.start()
    for _ in threads:
        warm.acquire()
    begin = agreed()
    end = begin + seconds
    told.set()
    for thread in threads:
        thread.join()
    rows = [row for own in samples for row in _told_late(own)]
    counts = [len(own) for own in samples]
    took = max(ended, default=begin) - begin
    return Load(np.array(rows, np.float64).reshape(-1, len(COLUMNS)), counts, problems, took)


def _sample(round_trip: float, timing: Mapping[str, float]) -> tuple[float, ...]:
    told = ("prev_total_ms", "queue_ms", "handover_ms", "decode_ms", "infer_ms")
    return (round_trip, *(float(timing.get(name, np.nan)) for name in told))


def _told_late(own: list[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """The server tells its whole time for a request with the next answer."""
    following = [row[1] for row in own[1:]] + [np.nan] * bool(own)
    return [(row[0], late, *row[2:]) for row, late in zip(own, following, strict=True)]


def packing_ms(observation: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, float]:
    """What a client does itself, median milliseconds: encoding an observation and decoding an answer."""

    def median(work: Any) -> float:
        took = []
        for _ in range(200):
            start = time.monotonic()
            work()
            took.append((time.monotonic() - start) * 1e3)
        return float(np.median(took))

    data, packer = wire.pack(dict(answer)), wire.Packer()

    def encode() -> None:
        with packer.packed(dict(observation)):
            pass

    return {"encode": median(encode), "decode": median(lambda: wire.unpack_map(data))}
