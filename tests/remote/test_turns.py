"""Whose turn it is: fair queues, batches, requests with several observations, rate limits, time limits, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import types
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.openpi_wire import openpi_pack, openpi_unpack
from tests.support.server_support import (
    EchoPolicy,
    GuidedPolicy,
    MixingPolicy,
    ProcessPolicy,
    actions_of,
    expected_actions,
    local,
    metric,
    observation,
    send_in_order,
    served,
)
from tests.support.waiting import PATIENCE_S, eventually
from vla_accel.client import PolicyClient
from vla_accel.errors import ConfigError, ServerError
from vla_accel.remote import wire
from vla_accel.server import PolicyRegistry, PolicyServer, Replicas, background, fairness, runner
from vla_accel.server.dispatch import Dispatcher
from vla_accel.server.fairness import FairQueue, RateLimit
from vla_accel.server.limits import BatchLimits
from vla_accel.server.metrics import GAUGES, Metrics
from vla_accel.server.requests import Answer, Batch, Call
from vla_accel.server.runner import Runner

BATCHED: dict[str, Any] = {"max_batch": 4, "max_wait_s": 0.0}
"""Limits with which a batch does not wait to become full."""


def connection(stack: ExitStack, server: PolicyServer, host: str, key: str = "") -> Any:
    """A connection from another loopback address: another client, for the server."""
    from websockets.sync.client import connect

    headers = {"Authorization": f"Api-Key {key}"} if key else None
    client = connect(server.address, compression=None, proxy=None, source_address=(host, 0), additional_headers=headers)
    stack.enter_context(client)
    client.recv()
    return client


def test_the_queue_takes_clients_in_turn() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "a3", "b1", "c1", "c2"):
        queue.put(item[0], item)
    assert len(queue) == 6
    for client in "ccx":
        queue.remove(client, "c1")
    assert [queue.pop() for _ in range(2)] == ["a1", "b1"]
    queue.put("b", "b2")  # b had its turn, so it follows the others
    assert [queue.pop() for _ in range(3)] == ["c2", "a2", "b2"]
    queue.put("d", "d1")
    queue.put_first("e", "e1")
    assert [queue.pop() for _ in range(3)] == ["e1", "a3", "d1"] and not len(queue)


@pytest.mark.parametrize(
    ("keys", "hosts", "order"),
    [
        ("", [1, 1, 1, 1, 1, 2], [0, 1, 2, 5, 3, 4]),
        ("one: k1\ntwo: k2\n", [1] * 6, [0, 1, 2, 5, 3, 4]),
        ("k1\n", [1] * 6, [0, 1, 2, 3, 4, 5]),
    ],
    ids=["by address", "by the name of the key", "one key for all"],
)
def test_many_connections_do_not_delay_another_client(
    keys: str, hosts: list[int], order: list[int], tmp_path: Path
) -> None:
    policy, file = EchoPolicy(held=True), tmp_path / "keys"
    file.write_text(keys)
    last_key = "k2" if "k2" in keys else "k1" if keys else ""
    with background(policy, local(api_key_file=file if keys else None)) as server, ExitStack() as stack:
        clients = [connection(stack, server, f"127.0.0.{host}", "k1" if keys else "") for host in hosts[:-1]]
        clients.append(connection(stack, server, f"127.0.0.{hosts[-1]}", last_key))
        for index, client in enumerate(clients):
            client.send(openpi_pack(observation(index)))
            eventually(lambda index=index: (server.dispatcher.running, server.dispatcher.waiting) == (1, index))
        policy.gate.set()
        for client in clients:
            client.recv()
    # The first of the waiting calls was already at the policy's thread.
    assert [batch[0] for batch in policy.batches] == order


@pytest.mark.parametrize(
    ("limits", "order"),
    [
        ({}, [[0], [100], [200], [1], [2], [3], [4], [5]]),
        ({"max_batch": 2, "max_wait_s": 0.0}, [[0, 1], [100, 200], [2, 3], [4, 5]]),
    ],
)
def test_a_long_request_lets_other_clients_run_after_each_batch(limits: Any, order: list[list[float]]) -> None:
    policy = EchoPolicy(held=True)
    with background(policy, local(**limits)) as server, ExitStack() as stack:
        greedy, one, two = (connection(stack, server, f"127.0.0.{i}") for i in (1, 2, 3))
        greedy.send(openpi_pack({"batch": [observation(i) for i in range(6)]}))
        assert policy.entered.acquire(timeout=PATIENCE_S)
        for waiting, client in ((1, one), (2, two)):
            client.send(openpi_pack(observation(100 * waiting)))
            eventually(lambda waiting=waiting: server.dispatcher.waiting == waiting)
        policy.gate.set()
        assert [openpi_unpack(client.recv())["actions"][0, 0] for client in (one, two)] == [100, 200]
        assert [one["actions"][0, 0] for one in openpi_unpack(greedy.recv())] == list(range(6))
    assert policy.batches == order


def test_waiting_requests_run_together_and_only_a_bad_one_fails() -> None:
    policy, batches = EchoPolicy(held=True), []
    with background(policy, local(**BATCHED)) as server, ThreadPoolExecutor(8) as pool:

        def ask(index: int) -> np.ndarray:
            with PolicyClient(server.address) as client:
                result = client.infer({"prompt": "no state"} if index == 3 else observation(index, index**2))
            batches.append(result["server_timing"]["batch"])
            return result["actions"]

        futures = send_in_order(pool, server, [lambda index=index: ask(index) for index in range(8)])
        policy.gate.set()
        for index, future in enumerate(futures):
            if index == 3:
                with pytest.raises(ServerError, match="missing observation/state"):
                    future.result(PATIENCE_S)
            else:
                want = expected_actions(np.r_[index, index**2, np.zeros(6)])
                np.testing.assert_array_equal(future.result(PATIENCE_S), want)
    # Powers of two, because engines have fixed shapes; those of the batch that failed run one by one.
    assert policy.sizes == [1, 4, 1, 1, 1, 1, 2, 1]
    assert sorted(batches) == [1, 1, 2, 2, 4, 4, 4]


def test_a_batch_waits_for_more_requests_only_within_its_limit() -> None:
    policy = EchoPolicy()
    # With an hour as the limit this ends only if a full batch does not wait.
    with background(policy, local(max_batch=2, max_wait_s=3600.0)) as server, ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda number: actions_of(server, observation(number)), (1, 2)))
    with served(policy, max_batch=2, max_wait_s=0.01) as (_, one):
        one.infer(observation(1))
    assert policy.sizes == [2, 1]
    single = types.SimpleNamespace(infer=None)
    with pytest.raises(ConfigError, match=r"max_batch: expected 1 .*, got 2"), background(single, local(max_batch=2)):
        pass


@pytest.mark.parametrize(("kind", "sizes"), [(GuidedPolicy, [1, 2, 1, 1]), (MixingPolicy, [1, 4])])
def test_guided_requests_share_a_batch_only_if_the_policy_declares_it(kind: Any, sizes: list[int]) -> None:
    policy = kind(held=True)

    def ask(index: int) -> float:
        options = {"prev_chunk": np.full((2, 7), index), "inference_delay": index} if index == 2 else {}
        return actions_of(server, observation(index), **options)

    with background(policy, local(**BATCHED)) as server, ThreadPoolExecutor(5) as pool:
        futures = send_in_order(pool, server, [lambda index=index: ask(index) for index in range(5)])
        policy.gate.set()
        assert [future.result(PATIENCE_S) for future in futures] == list(range(5))
    assert policy.sizes == sizes
    assert [(chunk[0, 0], delay) for chunk, delay in policy.options if chunk is not None] == [(2, 2)]


# -- several observations in one request --------------------------------------------------------------------------


def test_a_list_of_observations_gets_a_list_of_results_with_their_options() -> None:
    policy = MixingPolicy()
    requests = [observation(i) for i in range(7)]
    requests[5] |= {wire.PREV_CHUNK: np.full((2, 7), 5.0), wire.INFERENCE_DELAY: 3}
    with served(policy, max_batch=4) as (server, client):
        answers = client.infer_batch(requests)
        assert [a["actions"][0, 0] for a in answers] == list(range(7))
        assert [a["server_timing"]["batch"] for a in answers] == [4, 4, 4, 4, 2, 2, 1]
        assert client.infer({**observation(9), "batch": [1]})["actions"][0, 0] == 9, "this is one observation"
        assert metric(server.address, 'vla_accel_requests_total{outcome="ok"}') == 2
    assert policy.sizes == [4, 2, 1, 1]
    assert [(chunk[0, 0], delay) for chunk, delay in policy.options if chunk is not None] == [(5, 3)]


def test_a_list_over_several_processes_is_one_request() -> None:
    with served(Replicas(ProcessPolicy, ("cpu", "cpu")), max_batch=2) as (server, client):
        answers = client.infer_batch([observation(i) for i in range(7)])
        assert [one["actions"][0, 0] for one in answers] == list(range(7))
        assert metric(server.address, 'vla_accel_requests_total{outcome="ok"}') == 1
        counts = [metric(server.address, f'vla_accel_replica_requests_total{{replica="{i} cpu"}}') for i in (0, 1)]
        assert sum(counts) == 1


def test_an_error_in_a_list_names_the_observation() -> None:
    policy, good = GuidedPolicy(), observation(1)
    with served(policy, max_observations=5) as (_, client):
        for batch, error, calls in (
            ([], r"batch: expected a list of observations, got \[\]", 0),
            ("x", "batch: expected a list of observations, got 'x'", 0),
            ([good, 3], r"batch\[1\]: expected a map with text keys, got 3", 0),
            ([good] * 6, r"batch: expected at most 5 observations in one request, got 6; .*--max-observations", 0),
            ([{**good, wire.INFERENCE_DELAY: 1}], r"batch\[0\]: expected rtc/prev_chunk and rtc/inference_delay", 0),
            ([good, {"prompt": "x"}], r"batch\[1\]: observation: missing observation/state", 2),
            ([good] * 4 + [{"prompt": "x"}], r"batch\[4\]: observation: missing observation/state", 5),
        ):
            policy.batches.clear()
            with pytest.raises(ServerError, match=f"ObservationError: {error}"):
                client.infer({"batch": batch})
            assert len(policy.batches) == calls
        assert client.infer(observation(2))["actions"][0, 0] == 2


# -- the dispatcher and its replicas ------------------------------------------------------------------------------


class Manual:
    """A replica that answers when the test calls `answer`."""

    def __init__(self, name: str = "0", *, capacity: int = 2, batches: bool = False) -> None:
        self.metadata_frames: dict[str, bytes] = {}
        self.name, self.capacity, self.batches = name, capacity, batches
        self.queue: list[Batch] = []
        self.starts = 0
        self.on_death: Any = None
        self.on_close: Callable[[], None] = lambda: None

    async def start(self, on_death: Any) -> None:
        self.starts, self.on_death = self.starts + 1, on_death

    async def close(self) -> None:
        self.on_close()
        await asyncio.sleep(0)

    def run(self, batch: Batch) -> None:
        self.queue.append(batch)

    @property
    def frames(self) -> list[list[str]]:
        return [[call.frame for call in batch.calls] for batch in self.queue]

    def answer(self) -> None:
        batch = self.queue.pop(0)
        batch.deliver([(index, Answer(call.frame)) for index, call in enumerate(batch.calls)])


@contextlib.asynccontextmanager
async def dispatching(*replicas: Manual, max_batch: int = 1) -> AsyncIterator[tuple[Dispatcher, Any]]:
    """A dispatcher, and a function that submits a call for each letter."""
    limits = {"max_batch": max_batch, "max_wait_s": 0.0} if max_batch > 1 else {}
    dispatcher = Dispatcher(replicas, local(**limits), Metrics(dict.fromkeys(GAUGES, int)))
    await dispatcher.start()
    yield dispatcher, lambda letters: [dispatcher.submit(Call(letter, client="a client")) for letter in letters]
    await dispatcher.close()


def messages(calls: list[Call]) -> list[Any]:
    return [call.outcome.result().message for call in calls]  # type: ignore[union-attr]


def test_a_single_replica_holds_the_next_batch_while_it_runs_one() -> None:
    async def main() -> None:
        single = Manual()
        async with dispatching(single) as (dispatcher, submit):
            calls = submit("abc")
            assert single.frames == [["a"], ["b"]]
            assert (dispatcher.running, dispatcher.waiting, len(dispatcher.loaded)) == (1, 2, 1)
            assert [call.started_s > 0 for call in calls] == [True, False, False]
            single.answer()
            assert single.frames == [["b"], ["c"]] and calls[1].started_s > 0 and not calls[2].started_s
            single.answer()
            single.answer()
            assert (dispatcher.running, dispatcher.waiting) == (0, 0) and messages(calls) == list("abc")
        for replicas, held in (((Manual(), Manual("1")), 1), ((Manual(capacity=1),), 1), ((Manual(),), 2)):
            async with dispatching(*replicas) as (_, submit):
                submit("abcde")
                assert [len(one.queue) for one in replicas] == [held] * len(replicas)
        single = Manual(batches=True)
        async with dispatching(single, max_batch=2) as (_, submit):
            submit("ab")
            assert single.frames == [["a"]], "b may still share a batch"
            submit("c")
            assert single.frames == [["a"], ["b", "c"]]

    asyncio.run(main())


def test_a_call_that_waits_at_a_dead_replica_does_not_count_as_its_cause() -> None:
    async def main() -> None:
        single = Manual()
        async with dispatching(single) as (dispatcher, submit):
            calls = submit("abc")
            for deaths in (1, 2):
                single.queue.clear()
                single.on_death()
                assert [call.deaths for call in calls] == [deaths, 0, 0]
                end = asyncio.get_running_loop().time() + PATIENCE_S
                while not dispatcher.loaded and asyncio.get_running_loop().time() < end:
                    await asyncio.sleep(0)
            assert "died twice" in str(messages(calls[:1])) and single.frames == [["b"], ["c"]]
            single.answer()
            single.answer()
            assert messages(calls[1:]) == ["b", "c"]

    asyncio.run(main())


def test_a_replica_that_dies_during_shutdown_is_not_restarted() -> None:
    async def main() -> None:
        pair = Manual("0"), Manual("1")
        async with dispatching(*pair):
            pair[0].on_close = lambda: pair[1].on_death()
        for _ in range(10):
            await asyncio.sleep(0)
        assert [one.starts for one in pair] == [1, 1]

    asyncio.run(main())


def test_waiting_behind_a_batch_counts_as_queue_time(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = EchoPolicy()
    registry = PolicyRegistry.containing(policy)
    registry.start()
    worker, frame, answers = Runner(registry, BatchLimits()), wire.pack(observation(1)), []
    with monkeypatch.context() as patch:
        patch.setattr(runner.time, "monotonic", lambda: 10.0)
        worker.run([Call(frame, sent_s=9.9)], answers.append)
        behind = Call(frame, timing={"queue_ms": 3.0}, sent_s=9.5)
        patch.setattr(runner.time, "monotonic", lambda: 10.25)
        worker.run([behind], answers.append)
    assert behind.timing["queue_ms"] == pytest.approx(503) and behind.timing["handover_ms"] == pytest.approx(250)
    gone = Call(frame, outcome=types.SimpleNamespace(done=lambda: True))  # type: ignore[arg-type]
    worker.run([gone], answers.append)
    assert policy.sizes == [1, 1] and answers[-1][0][0] == 0, "an abandoned call is answered but not computed"


# -- rate limits --------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    fake = types.SimpleNamespace(now=1000.0, monotonic=lambda: fake.now)
    monkeypatch.setattr(fairness, "time", fake)
    return fake


def test_the_rates_of_many_clients_take_bounded_memory(clock: types.SimpleNamespace) -> None:
    rate, slow = RateLimit(1.0), RateLimit(0.5)
    for client in range(10_000):
        assert rate.spend(client, 1) == 0
        clock.now += 1
    assert len(rate._buckets) <= 1024
    assert [slow.spend("a", 1) for _ in range(2)] == [0, 2.0]


@pytest.mark.slow
def test_a_fast_client_waits_and_its_answers_report_it(clock: types.SimpleNamespace, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("fast: k1\nslow: k2\n")
    with background(EchoPolicy(), local(rate_limit=4.0, api_key_file=file)) as server:
        with PolicyClient(server.address, api_key="k1") as client:
            waits = [client.infer(observation(i))["server_timing"].get("rate_ms", 0.0) for i in range(6)]
            assert waits == [0, 0, 0, 0, 250, 500], "the clock of this test stands still"
            clock.now += 100
            assert "rate_ms" not in client.infer(observation(1))["server_timing"]
        with PolicyClient(server.address, api_key="k2") as client:
            assert "rate_ms" not in client.infer(observation(1))["server_timing"]
            client.infer_batch([observation(i) for i in range(4)])  # one more than its rate allows
            assert client.infer(observation(1))["server_timing"]["rate_ms"] == 500
        assert server.metrics.counters["delayed"] == {"fast": 2, "slow": 1}


def test_a_client_that_leaves_while_its_rate_delays_it_costs_no_call(clock: types.SimpleNamespace) -> None:
    policy = EchoPolicy()
    with background(policy, local(rate_limit=0.001)) as server:
        with PolicyClient(server.address, timeout_s=0.2) as client:
            client.infer(observation(1))
            with pytest.raises(ServerError, match="no answer"):
                client.infer(observation(2))
        eventually(lambda: metric(server.address, 'vla_accel_requests_total{outcome="client gone"}') == 1)
        eventually(lambda: metric(server.address, "vla_accel_clients") == 0)
    assert policy.sizes == [1]


# -- time limits and shutdown -------------------------------------------------------------------------------------


def test_a_request_that_takes_too_long_gets_an_error_and_the_next_one_works() -> None:
    policy = EchoPolicy(held=True)
    with background(policy, local(request_timeout_s=0.3)) as server, ThreadPoolExecutor(2) as pool:
        running = pool.submit(actions_of, server, observation(1))
        assert policy.entered.acquire(timeout=PATIENCE_S)
        waiting = pool.submit(actions_of, server, observation(1))
        for future, stage in ((running, "while the policy computed"), (waiting, "while it waited for its turn")):
            with pytest.raises(ServerError, match=f"no result within 0.3 s, {stage}"):
                future.result(PATIENCE_S)
        assert metric(server.address, "vla_accel_queue_depth") == 0
        assert metric(server.address, 'vla_accel_requests_total{outcome="timeout"}') == 2
        policy.gate.set()
        server.dispatcher.config = replace(server.config, request_timeout_s=PATIENCE_S)
        assert actions_of(server, observation(3)) == 3
    assert policy.batches == [[1], [3]], "the waiting request never ran"


def test_shutdown_answers_running_and_waiting_requests_and_leaves_no_thread() -> None:
    policy, before = EchoPolicy(held=True), set(threading.enumerate())
    with background(policy, local()) as server, ThreadPoolExecutor(4) as pool, ExitStack() as stack:
        idle = connection(stack, server, "127.0.0.1")
        clients = [stack.enter_context(PolicyClient(server.address)) for _ in range(3)]
        calls = [lambda i=i, client=client: client.infer(observation(i)) for i, client in enumerate(clients)]
        futures = send_in_order(pool, server, calls)
        server.stop_soon()
        with pytest.raises(Exception, match="1001"):
            idle.recv(timeout=PATIENCE_S)
        with pytest.raises(ServerError, match="cannot connect"):
            PolicyClient(server.address)
        assert not any(f.done() for f in futures)
        policy.gate.set()
        assert [future.result(PATIENCE_S)["actions"][0, 0] for future in futures] == [0, 1, 2]
        with pytest.raises(ServerError, match=r"no answer|cannot connect"):
            clients[0].infer(observation(1))
    eventually(lambda: not set(threading.enumerate()) - before)


@pytest.mark.parametrize(("grace_s", "signals"), [(0.2, 1), (60, 2)], ids=["the grace period ends", "a second signal"])
def test_shutdown_waits_no_longer_than_it_should(grace_s: float, signals: int) -> None:
    policy = EchoPolicy(held=True)
    try:
        with background(policy, local(grace_s=grace_s)) as server, ThreadPoolExecutor(1) as pool:
            future = pool.submit(actions_of, server, observation(1))
            assert policy.entered.acquire(timeout=PATIENCE_S)
            for _ in range(signals):
                server.stop_soon()
            with pytest.raises(ServerError, match="no answer"):
                future.result(PATIENCE_S)
    finally:
        policy.gate.set()
