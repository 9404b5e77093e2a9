"""A replica that is alone gets its next turn while it works on one: who gets it, what is told of it, and what becomes
of it when the replica dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("websockets", reason="needs websockets")
pytest.importorskip("msgpack", reason="the wire format needs msgpack")

from tests.support.server_support import EchoPolicy, ProcessPolicy, expected_actions, local, metric, observation
from tests.support.waiting import PATIENCE_S, eventually
from vla_accel.client import PolicyClient
from vla_accel.errors import ServerError
from vla_accel.remote import wire
from vla_accel.server import PolicyServer, Replicas, background, runner
from vla_accel.server.dispatch import Dispatcher, Job
from vla_accel.server.limits import BatchLimits
from vla_accel.server.metrics import Metrics
from vla_accel.server.runner import Answer, Call, Runner
from vla_accel.server.shelf import Shelf

LOCAL = local()


class Told:
    """A replica that keeps what it is given, and answers when it is told to."""

    def __init__(self, name: str, *, takes_ahead: bool = True, batches: bool = False) -> None:
        self.hellos: dict[str, bytes] = {}
        self.name, self.takes_ahead, self.batches = name, takes_ahead, batches
        self.given: list[tuple[list[Any], Any]] = []
        self.died: Any = None

    async def start(self, on_death: Any) -> None:
        self.died = on_death

    async def close(self) -> None: ...

    def run(self, calls: Any, deliver: Any) -> None:
        self.given.append(([call.frame for call in calls], deliver))

    def answer(self) -> None:
        frames, deliver = self.given.pop(0)
        deliver([(index, Answer(frame)) for index, frame in enumerate(frames)])


@contextlib.asynccontextmanager
async def dispatched(*replicas: Told, max_batch: int = 1) -> AsyncIterator[tuple[Dispatcher, Callable[[str], Job]]]:
    """A dispatcher that has started, and what submits a call to it by its name."""
    metrics = Metrics(clients=int, waiting=int, running=int, replicas=int)
    dispatcher = Dispatcher(
        replicas, replace(LOCAL, max_batch=max_batch, **({"max_wait_s": 0.0} if max_batch > 1 else {})), metrics
    )

    def submit(frame: str) -> Job:
        return dispatcher.submit(Call(frame), "a client")

    await dispatcher.start()
    yield dispatcher, submit
    await dispatcher.close()


def test_one_that_is_alone_has_two_turns_and_the_rest_waits_in_the_queue() -> None:
    async def main() -> None:
        alone = Told("0")
        async with dispatched(alone) as (dispatcher, submit):
            jobs = [submit(name) for name in "abc"]
            assert [frames for frames, _ in alone.given] == [["a"], ["b"]]
            assert (dispatcher.running, dispatcher.waiting, dispatcher.ready) == (1, 2, 1)
            assert [job.started_s > 0 for job in jobs] == [True, False, False]
            alone.answer()
            assert [frames for frames, _ in alone.given] == [["b"], ["c"]] and jobs[1].started_s > 0
            assert jobs[0].outcome.result().message == "a" and not jobs[2].started_s
            alone.answer()
            alone.answer()
            assert (dispatcher.running, dispatcher.waiting, dispatcher.ready) == (0, 0, 1)
            assert [job.outcome.result().message for job in jobs] == list("abc")

    asyncio.run(main())


def test_nobody_waits_at_a_replica_where_another_may_become_idle_first() -> None:
    async def main() -> None:
        pair = Told("0"), Told("1")
        for replicas, given in ((pair, 1), ((Told("ray", takes_ahead=False),), 1), ((Told("alone"),), 2)):
            async with dispatched(*replicas) as (_, submit):
                for name in "abcde":
                    submit(name)
                assert [len(one.given) for one in replicas] == [given] * len(replicas)

    asyncio.run(main())


def test_a_batch_is_given_ahead_only_when_it_is_full() -> None:
    async def main() -> None:
        alone = Told("0", batches=True)
        async with dispatched(alone, max_batch=2) as (_, submit):
            for name in "ab":
                submit(name)
            assert [frames for frames, _ in alone.given] == [["a"]], "b may yet get company"
            submit("c")
            assert [frames for frames, _ in alone.given] == [["a"], ["b", "c"]]

    asyncio.run(main())


def test_a_turn_that_waits_at_a_dead_replica_has_not_died() -> None:
    async def main() -> None:
        alone = Told("0")
        async with dispatched(alone) as (dispatcher, submit):
            jobs = [submit(name) for name in "abc"]
            for deaths in (1, 2):
                alone.given.clear()
                alone.died()
                assert [job.deaths for job in jobs] == [deaths, 0, 0]
                eventually_ready = asyncio.get_running_loop().time() + PATIENCE_S
                while not dispatcher.ready and asyncio.get_running_loop().time() < eventually_ready:
                    await asyncio.sleep(0)
            assert "died twice" in str(jobs[0].outcome.result().message)
            assert [frames for frames, _ in alone.given] == [["b"], ["c"]], "in the order in which they came"
            alone.answer()
            alone.answer()
            assert [job.outcome.result().message for job in jobs[1:]] == ["b", "c"]

    asyncio.run(main())


def test_waiting_behind_a_turn_counts_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = EchoPolicy()
    shelf = Shelf.of(policy)
    shelf.start()
    worker, frame = Runner(shelf, BatchLimits()), wire.pack(observation(1))
    answered: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(runner.time, "monotonic", lambda: 10.0)
        worker.run([Call(frame, sent_s=9.9)], answered.append)  # it ends at 10
        behind = Call(frame, timing={"queue_ms": 3.0}, sent_s=9.5)
        patch.setattr(runner.time, "monotonic", lambda: 10.25)
        worker.run([behind], answered.append)
    assert behind.timing["queue_ms"] == pytest.approx(503) and behind.timing["handover_ms"] == pytest.approx(250)
    gone = Call(frame, dropped=True)
    worker.run([gone], answered.append)
    assert policy.calls == [1, 1] and answered[-1][0][0] == 0, "it is answered, and not computed"


# -- in a process of its own -------------------------------------------------------------------------------------------


class Looking(ProcessPolicy):
    """Says the first pixel of the image, as it is when the answer is made."""

    def infer(self, observation: Any) -> dict[str, Any]:
        answer = super().infer(observation)
        image = observation.get("observation/image")
        return answer if image is None else {**answer, "pixel": int(image[0, 0, 0])}


@pytest.fixture(scope="module")
def server() -> Iterator[PolicyServer]:
    with background(Replicas(Looking, ("cpu",)), LOCAL) as server:
        yield server


@pytest.fixture()
def clients(server: PolicyServer) -> Iterator[list[PolicyClient]]:
    clients = [PolicyClient(server.address) for _ in range(3)]
    yield clients
    for client in clients:
        client.close()


def seen(number: int) -> dict[str, Any]:
    """An observation whose image has this value everywhere."""
    return {**observation(number), "observation/image": np.full((224, 224, 3), number, np.uint8)}


def ahead(server: PolicyServer, pool: ThreadPoolExecutor, clients: list[PolicyClient], first: dict[str, Any]) -> Any:
    """The answers to come of a first request, which the process works on, and of two more behind it."""
    asked = [pool.submit(clients[0].infer, first)]
    eventually(lambda: metric(server.address, "vla_accel_running_requests") == 1)
    for index, client in enumerate(clients[1:], 1):
        asked.append(pool.submit(client.infer, seen(index)))
        eventually(lambda index=index: metric(server.address, "vla_accel_queue_depth") == index)
    return asked


def test_a_frame_stays_until_its_turn_is_over(
    server: PolicyServer, clients: list[PolicyClient], tmp_path: Path
) -> None:
    """While the process reads it, the next comes to lie beside it."""
    with ThreadPoolExecutor(3) as pool:
        first = {**seen(7), "prompt": f"wait {tmp_path / 'go'}"}
        asked = ahead(server, pool, clients, first)
        (tmp_path / "go").touch()
        for number, future in zip((7, 1, 2), asked, strict=True):
            answer, want = future.result(PATIENCE_S), expected_actions(observation(number)["observation/state"])
            np.testing.assert_array_equal(answer["actions"], want)
            assert answer["pixel"] == number


def test_what_waits_at_a_process_that_dies_twice_is_answered(
    server: PolicyServer, clients: list[PolicyClient], tmp_path: Path
) -> None:
    retried = metric(server.address, "vla_accel_retried_total")
    with ThreadPoolExecutor(3) as pool:
        asked = ahead(server, pool, clients, {**observation(7), "prompt": f"wait {tmp_path / 'never'}"})
        name = 'vla_accel_replica_deaths_total{replica="0 cpu"}'
        for deaths in (1, 2):
            os.kill(server.dispatcher.replicas[0].pid, signal.SIGKILL)  # type: ignore[attr-defined]
            eventually(lambda deaths=deaths: metric(server.address, name) == deaths)
            if deaths == 1:
                eventually(lambda: metric(server.address, "vla_accel_running_requests") == 1)
        with pytest.raises(ServerError, match="its process died twice while it computed this request"):
            asked[0].result(PATIENCE_S)
        assert [future.result(PATIENCE_S)["actions"][0, 0] for future in asked[1:]] == [1, 2]
    assert metric(server.address, "vla_accel_retried_total") > retried
