"""Turns are observations of a client: neither a large batch nor many connections hold other robots back."""

from __future__ import annotations

import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("websockets", reason="needs websockets")
pytest.importorskip("msgpack", reason="the wire format needs msgpack")

from websockets.sync.client import connect

from tests.support.openpi_wire import openpi_pack, openpi_unpack
from tests.support.server_support import EchoPolicy, MixingPolicy, ProcessPolicy, local, metric, observation
from tests.support.waiting import PATIENCE_S, eventually
from vla_accel.client import PolicyClient
from vla_accel.errors import ConfigError, ServerError
from vla_accel.remote import wire
from vla_accel.server import PolicyServer, Replicas, background, rates
from vla_accel.server.rates import Rates


class Noting(EchoPolicy):
    """Notes the first number of each observation, in the order in which they run; one list for each call."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[list[float]] = []
        self.gate.clear()

    def infer_batch(self, observations: list[Any]) -> list[dict[str, Any]]:
        self.order.append([float(one["observation/state"][0]) for one in observations])
        return super().infer_batch(observations)


class OneByOne:
    """A policy without batches."""

    def __init__(self, policy: Noting) -> None:
        self.metadata, self.infer = policy.metadata, policy.infer


def batch_of(numbers: Iterator[int] | range) -> list[dict[str, Any]]:
    return [observation(number) for number in numbers]


def connected(stack: ExitStack, server: PolicyServer, host: str, key: str | None = None) -> Any:
    headers = {"Authorization": f"Api-Key {key}"} if key else None
    client = connect(server.address, compression=None, proxy=None, source_address=(host, 0), additional_headers=headers)
    stack.enter_context(client)
    client.recv()
    return client


def order_beside_a_batch(policy: Any, noting: Noting, **limits: Any) -> list[list[float]]:
    """What runs in which order where one client sends six observations and two others, after it, one each."""
    if limits.get("max_batch", 1) > 1:
        limits["max_wait_s"] = 0.0
    with background(policy, local(**limits)) as server, ExitStack() as stack:
        greedy, one, two = (connected(stack, server, f"127.0.0.{i}") for i in (1, 2, 3))
        greedy.send(openpi_pack({"batch": batch_of(range(6))}))
        assert noting.entered.acquire(timeout=PATIENCE_S)
        for number, client in ((100, one), (200, two)):
            client.send(openpi_pack(observation(number)))
            waiting = number // 100
            eventually(lambda waiting=waiting: metric(server.address, "vla_accel_queue_depth") == waiting)
        noting.gate.set()
        for number, client in ((100, one), (200, two)):
            assert openpi_unpack(client.recv())["actions"][0, 0] == number
        answers = openpi_unpack(greedy.recv())
        assert [one["actions"][0, 0] for one in answers] == list(range(6)), "all of them, in order"
    return noting.order


def test_a_batch_gives_way_after_each_observation() -> None:
    policy = Noting()
    assert order_beside_a_batch(policy, policy) == [[0], [100], [200], [1], [2], [3], [4], [5]]


def test_a_batch_gives_way_after_max_batch_observations() -> None:
    policy = Noting()
    assert order_beside_a_batch(policy, policy, max_batch=2) == [[0, 1], [100, 200], [2, 3], [4, 5]]


def test_a_policy_without_batches_refuses_max_batch() -> None:
    with pytest.raises(ConfigError, match="max_batch: expected a policy with infer_batch, got 8"):
        order_beside_a_batch(OneByOne(Noting()), Noting(), max_batch=8)


def test_a_batch_over_several_processes_is_answered_whole() -> None:
    with (
        background(Replicas(ProcessPolicy, ("cpu", "cpu")), local(max_batch=2)) as server,
        PolicyClient(server.address) as client,
    ):
        answers = client.infer_batch([*batch_of(range(7))])
        assert [one["actions"][0, 0] for one in answers] == list(range(7))
        assert {one["server_timing"]["batch"] for one in answers} <= {1, 2}
        assert metric(server.address, 'vla_accel_requests_total{outcome="ok"}') == 1
        counts = [metric(server.address, f'vla_accel_replica_requests_total{{replica="{i} cpu"}}') for i in (0, 1)]
        assert sum(counts) == 1, "one request, however many turns"


def test_what_travels_with_each_observation_of_a_long_batch_stays_with_it() -> None:
    policy = MixingPolicy()
    chunks = [np.full((2, 7), float(i)) for i in range(5)]
    asked = [{**observation(i), wire.PREV_CHUNK: chunks[i], wire.INFERENCE_DELAY: i} for i in range(5)]
    with background(policy, local(max_batch=2)) as server, PolicyClient(server.address) as client:
        answers = client.infer_batch(asked)
    assert [one["actions"][0, 0] for one in answers] == list(range(5))
    assert [delay for _, delay in policy.got] == list(range(5))
    assert [chunk[0, 0] for chunk, _ in policy.got] == list(range(5))


def test_a_bad_observation_late_in_a_batch_is_named_by_its_place() -> None:
    with background(EchoPolicy(), local()) as server, PolicyClient(server.address) as client:
        with pytest.raises(ServerError, match=r"ObservationError: batch\[4\]: observation: missing observation/state"):
            client.infer_batch([*batch_of(range(4)), {"prompt": "x"}, observation(5)])
        assert client.infer(observation(2))["actions"][0, 0] == 2


@pytest.mark.parametrize("policy", [EchoPolicy(), Replicas(ProcessPolicy, ("cpu",))], ids=["thread", "process"])
def test_a_batch_beyond_the_limit_is_refused_before_anything_runs(policy: Any) -> None:
    with background(policy, local(max_observations=3)) as server, PolicyClient(server.address) as client:
        with pytest.raises(
            ServerError, match=r"batch: expected at most 3 observations in one request, got 4; .*--max-o"
        ):
            client.infer_batch(batch_of(range(4)))
        assert len(client.infer_batch(batch_of(range(3)))) == 3


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("one: k1\ntwo: k2\n", [[0], [1], [2], [100], [3]]),
        ("k1\n", [[0], [1], [2], [3], [100]]),
    ],
    ids=["a name each", "one key for all"],
)
def test_a_named_key_has_turns_of_its_own_behind_one_address(tmp_path: Path, keys: str, expected: Any) -> None:
    file = tmp_path / "keys"
    file.write_text(keys)
    policy = Noting()
    with background(policy, local(api_key_file=file)) as server, ExitStack() as stack:
        first = [connected(stack, server, "127.0.0.1", "k1") for _ in range(4)]
        last = connected(stack, server, "127.0.0.1", "k2" if "k2" in keys else "k1")
        for index, client in enumerate([*first, last]):
            client.send(openpi_pack(observation(100 if client is last else index)))
            if not index:
                assert policy.entered.acquire(timeout=PATIENCE_S)
            else:
                eventually(lambda index=index: server.dispatcher.waiting == index)
        policy.gate.set()
        for client in (*first, last):
            client.recv()
    assert policy.order == expected


# -- rates ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    made = types.SimpleNamespace(now=1000.0, monotonic=lambda: made.now)
    monkeypatch.setattr(rates, "time", made)
    return made


def test_a_client_may_spend_a_second_and_then_what_comes_in(clock: types.SimpleNamespace) -> None:
    rate = Rates(4.0)
    assert [rate.spend("a", 1) for _ in range(6)] == [0, 0, 0, 0, 0.25, 0.5]
    assert rate.spend("b", 4) == 0, "another client has its own"
    clock.now += 0.75
    assert rate.spend("a", 1) == 0
    assert rate.spend("a", 8) == 2.0, "a batch counts as its observations"
    clock.now += 100
    assert [rate.spend("a", 1) for _ in range(5)] == [0, 0, 0, 0, 0.25], "no more than a second is kept"


def test_a_slow_rate_lets_one_observation_through_at_once(clock: types.SimpleNamespace) -> None:
    rate = Rates(0.5)
    assert [rate.spend("a", 1) for _ in range(2)] == [0, 2.0]
    assert Rates(None).spend("a", 10**9) == 0


def test_strangers_take_bounded_memory(clock: types.SimpleNamespace) -> None:
    rate = Rates(1000.0)
    for client in range(10_000):
        rate.spend(client, 1)
        clock.now += 0.1
    assert len(rate._buckets) <= 1024


def test_a_client_that_asks_too_fast_waits_and_hears_of_it(clock: types.SimpleNamespace, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("fast: k1\nslow: k2\n")
    with background(EchoPolicy(), local(rate_limit=4.0, api_key_file=file)) as server:
        with PolicyClient(server.address, api_key="k1") as client:
            waits = [client.infer(observation(i))["server_timing"].get("rate_ms", 0.0) for i in range(6)]
        assert waits == [0, 0, 0, 0, 250, 500], "the clock of the test stands still"
        with PolicyClient(server.address, api_key="k2") as client:
            assert "rate_ms" not in client.infer(observation(1))["server_timing"]
            client.infer_batch(batch_of(range(4)))  # the clock stands still: one more than it has
            assert client.infer(observation(1))["server_timing"]["rate_ms"] == 500
        assert server.metrics.delayed.values == {"fast": 2, "slow": 1}


def test_a_client_that_leaves_while_it_waits_costs_no_call(clock: types.SimpleNamespace) -> None:
    policy = EchoPolicy()
    with background(policy, local(rate_limit=0.001)) as server:
        with PolicyClient(server.address, timeout_s=0.2) as client, ThreadPoolExecutor(1) as pool:
            client.infer(observation(1))
            asked = pool.submit(client.infer, observation(2))
            with pytest.raises(ServerError, match="no answer"):
                asked.result(PATIENCE_S)
        eventually(lambda: metric(server.address, 'vla_accel_requests_total{outcome="client gone"}') == 1)
        eventually(lambda: metric(server.address, "vla_accel_clients") == 0)
    assert policy.calls == [1]


@pytest.mark.parametrize("wrong", [{"rate_limit": 0.0}, {"rate_limit": float("nan")}, {"max_observations": 0}])
def test_limits_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}: expected"):
        local(**wrong)
