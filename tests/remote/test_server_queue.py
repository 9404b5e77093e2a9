"""Whose turn it is at the policy server: turns, batches, chunks that travel, time limits and the end."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("websockets", reason="needs websockets")
pytest.importorskip("msgpack", reason="the wire format needs msgpack")

from websockets.sync.client import connect

from tests.support.openpi_wire import openpi_pack
from tests.support.server_support import (
    EchoPolicy,
    GuidedPolicy,
    MixingPolicy,
    expected_actions,
    local,
    metric,
    observation,
)
from tests.support.waiting import PATIENCE_S, eventually
from vla_accel.client import PolicyClient
from vla_accel.errors import ConfigError, ServerError
from vla_accel.remote import wire
from vla_accel.server import PolicyServer, background
from vla_accel.server.queue import FairQueue

LOCAL = local()


# -- turns and batches --------------------------------------------------------------------------------------------


def test_the_queue_goes_round_the_clients() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "a3", "b1", "c1", "c2"):
        queue.put(item[0], item)
    assert len(queue) == 6
    assert queue.remove("c", "c1") and not queue.remove("c", "c1") and not queue.remove("x", "c1")
    assert [queue.pop() for _ in range(2)] == ["a1", "b1"]
    queue.put("b", "b2")  # b had its turn: it comes after those who wait
    assert [queue.pop() for _ in range(4)] == ["c2", "a2", "b2", "a3"]
    with pytest.raises(IndexError):
        queue.pop()
    assert queue.remove("a", "a3") is False and len(queue) == 0


def from_host(stack: ExitStack, server: PolicyServer, host: str) -> Any:
    """A connection from another loopback address: another machine, to the server."""
    client = stack.enter_context(connect(server.address, compression=None, source_address=(host, 0)))
    client.recv()
    return client


def test_a_machine_with_many_connections_does_not_delay_another() -> None:
    policy = EchoPolicy()
    policy.gate.clear()
    order: list[float] = []
    with background(policy, LOCAL) as server, ExitStack() as stack:
        greedy = [from_host(stack, server, "127.0.0.1") for _ in range(6)]
        modest = from_host(stack, server, "127.0.0.2")
        greedy[0].send(openpi_pack(observation(0)))
        assert policy.entered.acquire(timeout=PATIENCE_S)
        for index, client in enumerate(greedy[1:], 1):
            client.send(openpi_pack(observation(index)))
            eventually(lambda index=index: metric(server.address, "vla_accel_queue_depth") == index)
        modest.send(openpi_pack(observation(100)))
        eventually(lambda: metric(server.address, "vla_accel_queue_depth") == 6)
        assert metric(server.address, "vla_accel_running_requests") == 1

        original = policy.infer

        def noting(obs: Any) -> Any:
            order.append(float(obs["observation/state"][0]))
            return original(obs)

        policy.infer = noting  # type: ignore[method-assign]
        policy.gate.set()
        for client in (*greedy, modest):
            client.recv()
    # The first of those that waited was with the policy's thread already, and the next was the first in turn.
    assert order == [1, 2, 100, 3, 4, 5]


def test_batches_of_a_policy_that_takes_one_observation_are_refused() -> None:
    class One:
        def infer(self, observation: Any) -> Any:
            raise NotImplementedError

    with (
        pytest.raises(ConfigError, match="max_batch: expected a policy with infer_batch"),
        background(One(), local(max_batch=2)),
    ):
        pass


def test_requests_that_wait_together_run_together_and_each_gets_its_own() -> None:
    policy = EchoPolicy()
    policy.gate.clear()
    with background(policy, local(max_batch=4, max_wait_s=0.0)) as server, ThreadPoolExecutor(8) as pool:

        def ask(index: int) -> np.ndarray:
            with PolicyClient(server.address) as client:
                result = client.infer(observation(index, index**2))
                batches.append(result["server_timing"]["batch"])
                return result["actions"]

        batches: list[int] = []
        first = pool.submit(ask, 0)
        assert policy.entered.acquire(timeout=PATIENCE_S)
        rest = [pool.submit(ask, index) for index in range(1, 8)]
        eventually(lambda: metric(server.address, "vla_accel_queue_depth") == 7)
        policy.gate.set()
        for index, future in enumerate((first, *rest)):
            np.testing.assert_array_equal(
                future.result(PATIENCE_S), expected_actions(np.r_[index, index**2, np.zeros(6)])
            )
    assert policy.calls == [1, 4, 2, 1], "powers of two: engines have fixed shapes"
    assert sorted(batches) == [1, 1, 2, 2, 4, 4, 4, 4]


def test_who_comes_while_a_batch_runs_joins_the_next_one() -> None:
    class Gated(EchoPolicy):
        permits = threading.Semaphore(0)

        def infer_batch(self, observations: Any) -> Any:
            results = super().infer_batch(observations)
            assert self.permits.acquire(timeout=PATIENCE_S)
            return results

    policy = Gated()
    with background(policy, local(max_batch=4, max_wait_s=0.0)) as server, ThreadPoolExecutor(5) as pool:

        def ask(index: int) -> float:
            with PolicyClient(server.address) as client:
                return client.infer(observation(index))["actions"][0, 0]

        futures = [pool.submit(ask, 0)]
        assert policy.entered.acquire(timeout=PATIENCE_S)
        futures += [pool.submit(ask, index) for index in (1, 2, 3)]
        eventually(lambda: metric(server.address, "vla_accel_queue_depth") == 3)
        policy.permits.release()
        assert policy.entered.acquire(timeout=PATIENCE_S)  # two of the three
        futures.append(pool.submit(ask, 4))
        eventually(lambda: metric(server.address, "vla_accel_queue_depth") == 2)
        policy.permits.release(10)
        assert [f.result(PATIENCE_S) for f in futures] == [0, 1, 2, 3, 4]
    assert policy.calls == [1, 2, 2]


def test_a_batch_waits_for_company_only_so_long() -> None:
    policy = EchoPolicy()
    # An hour would not end: the first waits for the second, and a full batch waits for nobody.
    with (
        background(policy, local(max_batch=2, max_wait_s=3600.0)) as server,
        PolicyClient(server.address) as one,
        PolicyClient(server.address) as two,
        ThreadPoolExecutor(2) as pool,
    ):
        list(pool.map(lambda c: c.infer(observation(1)), (one, two)))
    assert policy.calls == [2]
    with background(policy, local(max_batch=2, max_wait_s=0.01)) as server, PolicyClient(server.address) as client:
        client.infer(observation(1))
    assert policy.calls == [2, 1]


def test_one_bad_observation_of_a_batch_fails_alone() -> None:
    policy = EchoPolicy()
    policy.gate.clear()
    with background(policy, local(max_batch=4, max_wait_s=0.0)) as server, ThreadPoolExecutor(5) as pool:

        def ask(obs: dict[str, Any]) -> Any:
            with PolicyClient(server.address) as client:
                try:
                    return client.infer(obs)["actions"][0, 0]
                except ServerError as error:
                    return str(error)

        blocker = pool.submit(ask, observation(9))
        assert policy.entered.acquire(timeout=PATIENCE_S)
        asked = [observation(1), observation(2), {"prompt": "no state"}, observation(4)]
        futures = []
        for number, obs in enumerate(asked, 1):
            futures.append(pool.submit(ask, obs))
            eventually(lambda number=number: metric(server.address, "vla_accel_queue_depth") == number)
        policy.gate.set()
        got = [f.result(PATIENCE_S) for f in futures]
        blocker.result(PATIENCE_S)
    assert (got[0], got[1], got[3]) == (1, 2, 4)
    assert "missing observation/state" in got[2]
    assert policy.calls == [1, 4, 1, 1, 1, 1]


# -- real-time chunking -------------------------------------------------------------------------------------------


def test_the_previous_chunk_travels_to_a_policy_that_takes_it() -> None:
    policy = GuidedPolicy()
    chunk = np.arange(21.0).reshape(3, 7)
    with background(policy, LOCAL) as server, PolicyClient(server.address) as client:
        assert client.metadata["real_time_chunking"] is True and client.supports_prev_chunk
        client.infer(observation(1), prev_chunk=chunk, inference_delay=2)
        client.infer(observation(1))
        with pytest.raises(ConfigError, match="together"):
            client.infer(observation(1), prev_chunk=chunk)
        (first, second) = policy.got
        np.testing.assert_array_equal(first[0], chunk)
        assert first[1] == 2 and second == (None, None)
        for keys, message in (
            ({wire.PREV_CHUNK: chunk}, "together, got only rtc/prev_chunk"),
            ({wire.INFERENCE_DELAY: 2}, "together, got only rtc/inference_delay"),
            ({wire.PREV_CHUNK: chunk[0], wire.INFERENCE_DELAY: 2}, r"got shape \(7,\)"),
            ({wire.PREV_CHUNK: chunk[:0], wire.INFERENCE_DELAY: 2}, r"got shape \(0, 7\)"),
            ({wire.PREV_CHUNK: chunk * np.nan, wire.INFERENCE_DELAY: 2}, "finite"),
            ({wire.PREV_CHUNK: "chunk", wire.INFERENCE_DELAY: 2}, "rtc/prev_chunk: expected numbers, got dtype <U5"),
            ({wire.PREV_CHUNK: np.full((2, 7), b"12"), wire.INFERENCE_DELAY: 2}, r"expected numbers, got dtype \|S2"),
            ({wire.PREV_CHUNK: [[1.0], [1.0, 2.0]], wire.INFERENCE_DELAY: 2}, "expected numbers, got a list"),
            ({wire.PREV_CHUNK: chunk, wire.INFERENCE_DELAY: -1}, "got -1"),
            ({wire.PREV_CHUNK: chunk, wire.INFERENCE_DELAY: 1.5}, "got 1.5"),
            ({wire.PREV_CHUNK: chunk, wire.INFERENCE_DELAY: True}, "got True"),
            ({wire.PREV_CHUNK: chunk, wire.INFERENCE_DELAY: float("nan")}, "got nan"),
            ({wire.PREV_CHUNK: chunk, wire.INFERENCE_DELAY: np.array(2)}, r"got array\(2\)"),
        ):
            with pytest.raises(ServerError, match=f"ObservationError: .*{message}"):
                client.infer({**observation(1), **keys})
        assert len(policy.got) == 2


def test_real_time_chunking_is_refused_where_the_policy_has_none() -> None:
    chunk = np.zeros((3, 7))
    with background(EchoPolicy(), LOCAL) as server, PolicyClient(server.address) as client:
        assert not client.supports_prev_chunk
        with pytest.raises(ConfigError, match="does not support real-time chunking"):
            client.infer(observation(1), prev_chunk=chunk, inference_delay=1)
        with pytest.raises(ServerError, match="rtc/prev_chunk: this policy does not support"):
            client.infer({**observation(1), wire.PREV_CHUNK: chunk, wire.INFERENCE_DELAY: 1})


def test_guided_requests_run_one_by_one_beside_a_batch() -> None:
    policy = GuidedPolicy()
    policy.gate.clear()
    with background(policy, local(max_batch=4, max_wait_s=0.0)) as server, ThreadPoolExecutor(5) as pool:

        def ask(index: int) -> float:
            options = {"prev_chunk": np.ones((2, 7)), "inference_delay": 1} if index == 2 else {}
            with PolicyClient(server.address) as client:
                return client.infer(observation(index), **options)["actions"][0, 0]

        blocker = pool.submit(ask, 0)
        assert policy.entered.acquire(timeout=PATIENCE_S)
        futures = [pool.submit(ask, index) for index in (1, 2, 3, 4)]
        eventually(lambda: metric(server.address, "vla_accel_queue_depth") == 4)
        policy.gate.set()
        assert [f.result(PATIENCE_S) for f in futures] == [1, 2, 3, 4]
        blocker.result(PATIENCE_S)
    assert policy.calls == [1, 2, 1, 1], "two and one of the plain ones, then the guided one"


def test_a_policy_that_can_gets_guided_and_plain_requests_in_one_batch() -> None:
    policy = MixingPolicy()
    policy.gate.clear()
    with background(policy, local(max_batch=4, max_wait_s=0.0)) as server, ThreadPoolExecutor(5) as pool:

        def ask(index: int) -> float:
            options = {"prev_chunk": np.full((2, 7), index), "inference_delay": index} if index % 2 == 0 else {}
            with PolicyClient(server.address) as client:
                return client.infer(observation(index), **options)["actions"][0, 0]

        blocker = pool.submit(ask, 1)
        assert policy.entered.acquire(timeout=PATIENCE_S)
        policy.got.clear()
        futures = []
        for number, index in enumerate((1, 2, 3, 4), 1):
            futures.append(pool.submit(ask, index))
            eventually(lambda number=number: metric(server.address, "vla_accel_queue_depth") == number)
        policy.gate.set()
        assert [f.result(PATIENCE_S) for f in futures] == [1, 2, 3, 4]
        blocker.result(PATIENCE_S)
    assert policy.calls == [1, 4]
    by_delay = {delay: chunk for chunk, delay in policy.got}
    assert len(policy.got) == 4 and by_delay.keys() == {None, 2, 4} and by_delay[None] is None
    assert all((by_delay[d] == d).all() for d in (2, 4))


# -- time limits and the end --------------------------------------------------------------------------------------


def test_a_request_that_takes_too_long_is_answered_and_the_next_one_works() -> None:
    policy = EchoPolicy()
    policy.gate.clear()
    with background(policy, local(request_timeout_s=0.3)) as server:
        clients = [PolicyClient(server.address) for _ in range(2)]
        with ThreadPoolExecutor(2) as pool:

            def ask(client: PolicyClient) -> str:
                with pytest.raises(ServerError) as caught:
                    client.infer(observation(1))
                return str(caught.value)

            running = pool.submit(ask, clients[0])
            assert policy.entered.acquire(timeout=PATIENCE_S)
            waiting = pool.submit(ask, clients[1])
            assert "no result within 0.3 s, while the policy computed" in running.result(PATIENCE_S)
            assert "no result within 0.3 s, while it waited for its turn" in waiting.result(PATIENCE_S)
        assert metric(server.address, "vla_accel_queue_depth") == 0
        assert metric(server.address, 'vla_accel_requests_total{outcome="timeout"}') == 2
        policy.gate.set()
        server.dispatcher.config = replace(server.config, request_timeout_s=PATIENCE_S)
        for client in clients:
            assert client.infer(observation(1))["actions"].shape == (10, 7)
            client.close()
    assert policy.calls == [1, 1, 1], "the one that had not begun was never run"


def test_shutdown_finishes_running_and_waiting_requests() -> None:
    policy = EchoPolicy()
    policy.gate.clear()
    with background(policy, LOCAL) as server, ThreadPoolExecutor(4) as pool, ExitStack() as stack:
        idle = from_host(stack, server, "127.0.0.1")
        clients = [PolicyClient(server.address) for _ in range(3)]
        futures = [pool.submit(c.infer, observation(i)) for i, c in enumerate(clients)]
        eventually(lambda: metric(server.address, "vla_accel_queue_depth") == 2)
        server.stop_soon()
        with pytest.raises(Exception, match="1001"):
            idle.recv(timeout=PATIENCE_S)
        with pytest.raises(ServerError, match="cannot connect"):
            PolicyClient(server.address)
        assert not any(f.done() for f in futures)
        policy.gate.set()
        for index, future in enumerate(futures):
            np.testing.assert_array_equal(
                future.result(PATIENCE_S)["actions"], expected_actions(np.r_[index, np.zeros(7)])
            )
        with pytest.raises(ServerError, match=r"no answer|cannot connect"):
            clients[0].infer(observation(1))


@pytest.mark.parametrize(("grace_s", "signals"), [(0.2, 1), (60, 2)], ids=["the period ends", "a second signal"])
def test_a_server_that_stops_waits_no_longer_than_it_should(grace_s: float, signals: int) -> None:
    policy = EchoPolicy()
    policy.gate.clear()
    try:
        with (
            background(policy, local(grace_s=grace_s)) as server,
            ThreadPoolExecutor(1) as pool,
            PolicyClient(server.address) as client,
        ):
            future = pool.submit(client.infer, observation(1))
            assert policy.entered.acquire(timeout=PATIENCE_S)
            for _ in range(signals):
                server.stop_soon()
            with pytest.raises(ServerError, match="no answer"):
                future.result(PATIENCE_S)
    finally:
        policy.gate.set()


def test_nothing_is_left_running() -> None:
    before = set(threading.enumerate())
    for _ in range(3):
        with background(EchoPolicy(), LOCAL) as server, PolicyClient(server.address) as client:
            client.infer(observation(1))
    eventually(lambda: {t.name for t in set(threading.enumerate()) - before} == set())
