"""The policy server: openpi's protocol, keys, limits, metrics."""

from __future__ import annotations

import asyncio
import threading
from collections import UserDict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

pytest.importorskip("websockets", reason="needs websockets")
pytest.importorskip("msgpack", reason="the wire format needs msgpack")

from websockets.sync.client import connect

from tests.support.openpi_wire import openpi_pack, openpi_unpack
from tests.support.server_support import EchoPolicy, RawClient, expected_actions, get, local, metric, observation
from tests.support.waiting import eventually
from vla_accel.client import PolicyClient
from vla_accel.errors import ActionError, ConfigError, ServerError
from vla_accel.server import PolicyServer, ServerConfig, Shelf, background

LOCAL = local()


# -- openpi's protocol --------------------------------------------------------------------------------------------


def test_it_speaks_openpis_protocol() -> None:
    with background(EchoPolicy(), LOCAL) as server, connect(server.address, compression=None) as client:
        metadata = openpi_unpack(client.recv())  # pyright: ignore[reportArgumentType]
        assert metadata == {
            "policy": "echo",
            "action_horizon": 10,
            "action_dim": 7,
            "real_time_chunking": False,
        }
        for index in range(2):
            obs = observation(1, 2, 3, image=True)
            client.send(openpi_pack(obs))
            answer = openpi_unpack(client.recv())  # pyright: ignore[reportArgumentType]
            np.testing.assert_array_equal(answer["actions"], expected_actions(obs["observation/state"]))
            timing = answer["server_timing"]
            assert timing["infer_ms"] > 0 and ("prev_total_ms" in timing) == (index == 1)
        client.send(openpi_pack({"prompt": "x"}))
        said = client.recv()
        assert said == "ObservationError: observation: missing observation/state; got prompt"
        with pytest.raises(Exception, match="1011"):
            client.recv()


def test_a_policys_own_mistake_is_answered_without_the_servers_paths(caplog: pytest.LogCaptureFixture) -> None:
    with background(EchoPolicy(), LOCAL) as server:
        with PolicyClient(server.address) as client:
            with pytest.raises(ServerError, match=r"reported: RuntimeError: a policy's own mistake$"):
                client.infer({**observation(1), "prompt": "crash"})
            assert client.infer(observation(1))["actions"].shape == (10, 7)
        assert metric(server.address, 'vla_accel_requests_total{outcome="policy error"}') == 1
    (record,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert "Traceback" in record.getMessage() and "infer_batch" in record.getMessage()


def test_a_policy_is_loaded_in_the_thread_that_runs_it() -> None:
    """torch keeps CPU threads for every thread that computes: with two sets of them each small operation waits."""
    policy, threads = EchoPolicy(), []
    answer = policy.infer_batch

    def load() -> EchoPolicy:
        threads.append(threading.get_ident())
        policy.infer_batch = lambda observations: threads.append(threading.get_ident()) or answer(observations)
        return policy

    with background(Shelf.later(load), LOCAL) as server, PolicyClient(server.address) as client:
        client.infer(observation(1))
    assert len(threads) == 2 and threads[0] == threads[1] != threading.get_ident()

    def wrong() -> EchoPolicy:
        raise ConfigError("no such checkpoint")

    with pytest.raises(ConfigError, match=r"^no such checkpoint$"), background(Shelf.later(wrong), LOCAL):
        pytest.fail("it began to serve")


def test_tokens_that_are_no_chunk_are_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    policy = EchoPolicy()
    policy.infer_batch = Mock(side_effect=ActionError("actions: expected tokens"))  # type: ignore[method-assign]
    with background(policy, LOCAL) as server, PolicyClient(server.address) as client:
        with pytest.raises(ServerError, match=r"reported: ActionError: actions: expected tokens$"):
            client.infer(observation(1))
        assert metric(server.address, 'vla_accel_requests_total{outcome="policy error"}') == 1
    (said,) = [r.getMessage() for r in caplog.records if "ActionError" in r.getMessage()]
    assert said.endswith(": ActionError: actions: expected tokens")


@pytest.mark.parametrize("answer", [None, {"actions": object()}, [1]])
def test_an_answer_that_cannot_be_sent_is_the_policys_error(answer: Any) -> None:
    class Strange(EchoPolicy):
        def infer(self, observation: Any) -> Any:
            return answer

    said = r"reported: EngineError: policy: (expected a mapping|its result cannot be sent: )"
    with background(Strange(), LOCAL) as server, PolicyClient(server.address) as client:  # noqa: SIM117
        with pytest.raises(ServerError, match=said):
            client.infer(observation(1))


@pytest.mark.parametrize("error", [RuntimeError("torn"), ValueError("torn")])
def test_an_answer_that_cannot_be_read_is_the_policys_error_and_the_next_one_works(error: Exception) -> None:
    class Torn(UserDict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            raise error

    class Strange(EchoPolicy):
        def infer(self, observation: Any) -> Any:
            return Torn(actions=1) if observation["prompt"] == "torn" else super().infer(observation)

    with background(Strange(), LOCAL) as server, PolicyClient(server.address) as client:
        with pytest.raises(ServerError, match=f"reported: {type(error).__name__}: torn"):
            client.infer({**observation(1), "prompt": "torn"})
        assert client.infer(observation(2))["actions"][0, 0] == 2


@pytest.mark.parametrize("error", [SystemExit(3), StopIteration(), KeyboardInterrupt(), MemoryError("all of it")])
def test_whatever_a_policy_raises_the_server_goes_on(error: BaseException) -> None:
    class Failing(EchoPolicy):
        def infer(self, observation: Any) -> Any:
            if observation["prompt"] == "fail":
                raise error
            return super().infer(observation)

    with background(Failing(), LOCAL) as server, PolicyClient(server.address) as client:
        with pytest.raises(ServerError, match="reported"):
            client.infer({**observation(1), "prompt": "fail"})
        assert client.infer(observation(1))["actions"].shape == (10, 7)


def test_metadata_that_cannot_be_sent_is_an_error_at_the_start() -> None:
    policy = EchoPolicy()
    policy.metadata["policy"] = object()
    with pytest.raises(ValueError, match="lists or mappings, got object"), background(policy, LOCAL):
        raise AssertionError("it must not serve")


def test_a_port_in_use_is_one_clear_error() -> None:
    with background(EchoPolicy(), LOCAL) as server:
        port = int(server.address.rsplit(":", 1)[1])
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            asyncio.run(PolicyServer(EchoPolicy(), local(port=port)).run())


# -- health, metrics, key, number of clients ----------------------------------------------------------------------


def test_health_and_metrics() -> None:
    with background(EchoPolicy(), LOCAL) as server:
        assert get(server.address, "/healthz")[::2] == (200, "OK\n")
        with PolicyClient(server.address) as client:
            for index in range(3):
                client.infer(observation(index))
            status, kind, page = get(server.address, "/metrics")
            assert status == 200 and kind.startswith("text/plain; version=0.0.4")
            assert metric(server.address, "vla_accel_clients") == 1
    for line in (
        'vla_accel_requests_total{outcome="ok"} 3',
        'vla_accel_component_seconds_bucket{component="vision",le="0.001"} 3',
        'vla_accel_component_seconds_bucket{component="denoise",le="0.001"} 0',
        'vla_accel_component_seconds_bucket{component="denoise",le="0.0025"} 3',
        'vla_accel_component_seconds_bucket{component="denoise",le="+Inf"} 3',
        'vla_accel_component_seconds_sum{component="denoise"} 0.006',
        'vla_accel_component_seconds_count{component="infer"} 3',
        "vla_accel_request_seconds_count 3",
        "vla_accel_queue_depth 0",
        "# TYPE vla_accel_errors_total counter",
    ):
        assert line in page.splitlines(), line


def test_prometheus_own_parser_reads_the_metrics() -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="needs prometheus_client")
    with background(EchoPolicy(), LOCAL) as server:
        with PolicyClient(server.address) as client, pytest.raises(ServerError):
            client.infer({"x": 1})
        families = {f.name: f for f in parser.text_string_to_metric_families(get(server.address, "/metrics")[2])}
    (sample,) = families["vla_accel_errors"].samples
    assert (sample.labels, sample.value) == ({"type": "ObservationError"}, 1.0)
    assert families["process_resident_memory_bytes"].samples[0].value > 1e6


def test_the_key_is_asked_for_before_anything_else() -> None:
    policy = EchoPolicy()
    with background(policy, local(api_key="secret")) as server:
        for key in (None, "wrong", "secret2", "Secret"):
            with pytest.raises(ServerError, match="HTTP 401"):
                PolicyClient(server.address, api_key=key)
        for headers in (
            "Authorization: secret\r\n",
            "Authorization: Bearer secret\r\n",
            "Authorization: Api-Key secret\r\nAuthorization: Api-Key secret\r\n",
            "Authorization: Api-Key \xff\xfe\r\n",
        ):
            # The frame is sent with the handshake; nothing reads it.
            client = RawClient(server.address, headers=headers)
            assert b" 401 " in client.head, headers
            client.close()
        assert not policy.calls
        assert get(server.address, "/healthz")[0] == 200, "health checks carry no key"
        assert get(server.address, "/metrics")[0] == 401
        with PolicyClient(server.address, api_key="secret") as client:
            assert client.infer(observation(1))["actions"].shape == (10, 7)
        page = get(server.address, "/metrics", {"Authorization": "Api-Key secret"})[2]
        assert 'vla_accel_refused_total{reason="api key"} 9' in page.splitlines()


def test_one_client_too_many_is_refused_and_welcome_when_another_leaves() -> None:
    with background(EchoPolicy(), local(max_clients=2)) as server:
        first, second = PolicyClient(server.address), PolicyClient(server.address)
        with pytest.raises(ServerError, match="HTTP 503"):
            PolicyClient(server.address)
        assert get(server.address, "/healthz")[0] == 200
        second.close()
        eventually(lambda: metric(server.address, "vla_accel_clients") == 1)
        with PolicyClient(server.address) as third:
            assert third.infer(observation(1))["actions"].shape == (10, 7)
        first.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"port": 70000}, "port: expected 0 to 65535, got 70000"),
        ({"api_key": ""}, "api_key: expected printable"),
        ({"api_key": "a\nb"}, "api_key: expected printable"),
        ({"port": "8000"}, "port: expected int, got '8000'"),
        ({"max_batch": 1.5}, "max_batch: expected int, got 1.5"),
        ({"page": "no"}, "page: expected bool, got 'no'"),
        ({"api_key_file": 3}, "api_key_file: expected Path, got 3"),
        ({"max_clients": 0}, "max_clients: expected at least 1"),
        ({"max_batch": 0}, "max_batch: expected at least 1"),
        ({"max_batch": 3}, "max_batch: expected a power of two, such as 2 or 4, got 3"),
        ({"max_wait_s": 0.1}, "max_wait_s: expected max_batch above 1 with it, got 0.1 alone"),
        ({"max_payload": 0}, "max_payload: expected at least 1"),
        ({"request_timeout_s": 0}, "request_timeout_s: expected seconds above 0"),
        ({"message_timeout_s": float("nan")}, "message_timeout_s: expected seconds above 0"),
        ({"grace_s": -1}, "grace_s: expected 0 or more"),
    ],
)
def test_limits_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**changes)


def test_limits_are_taken_as_those_of_a_file() -> None:
    given = ServerConfig(grace_s=3, api_key_file="keys")  # pyright: ignore[reportArgumentType]
    assert type(given.grace_s) is float and given.api_key_file == Path("keys")
