"""The policy server: openpi's protocol, errors of policies, several policies, real-time chunking, limits."""

from __future__ import annotations

import asyncio
import threading
from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.openpi_wire import openpi_pack, openpi_unpack
from tests.support.server_support import (
    EchoPolicy,
    GuidedPolicy,
    actions_of,
    expected_actions,
    get,
    local,
    metric,
    observation,
    port_of,
    served,
)
from tests.support.waiting import eventually
from vla_accel.cli.options import StepOptions
from vla_accel.cli.serve import Load, Serve, loader
from vla_accel.client import PolicyClient
from vla_accel.errors import ActionError, ConfigError, ObservationError, ServerError
from vla_accel.remote import wire
from vla_accel.server import PolicyRegistry, PolicyServer, ServerConfig, background


def test_it_speaks_openpis_protocol() -> None:
    from websockets.sync.client import connect

    with background(EchoPolicy(), local()) as server, connect(server.address, compression=None) as client:
        metadata = openpi_unpack(client.recv())  # pyright: ignore[reportArgumentType]
        assert metadata == {"policy": "echo", "action_horizon": 10, "action_dim": 7, "real_time_chunking": False}
        for index in range(2):
            obs = observation(1, 2, 3, image=True)
            client.send(openpi_pack(obs))
            answer = openpi_unpack(client.recv())  # pyright: ignore[reportArgumentType]
            np.testing.assert_array_equal(answer["actions"], expected_actions(obs["observation/state"]))
            timing = answer["server_timing"]
            assert timing["infer_ms"] > 0 and ("prev_total_ms" in timing) == (index == 1)
        client.send(openpi_pack({"prompt": "x"}))
        assert str(client.recv()).startswith("ObservationError: observation: missing observation/state")
        with pytest.raises(Exception, match="1011"):
            client.recv()


class Torn(UserDict[str, Any]):
    """A result that raises when it is read."""

    def __getitem__(self, name: str) -> Any:
        raise ValueError("torn")


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (RuntimeError("a bug"), "RuntimeError: a bug$"),
        (ActionError("expected tokens"), "ActionError: expected tokens$"),
        (SystemExit(3), "EngineError: policy: SystemExit: 3$"),
        (StopIteration(), "StopIteration"),
        (None, "EngineError: policy: expected a mapping as its result, got NoneType"),
        ({"actions": object()}, "EngineError: policy: its result cannot be sent: "),
        (Torn(actions=1), "ValueError: torn"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_whatever_a_policy_does_the_client_gets_an_error_and_the_server_goes_on(
    outcome: Any, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(EchoPolicy):
        def infer(self, observation: Any) -> Any:
            if observation["prompt"] != "fail":
                return super().infer(observation)
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

    with served(Failing()) as (server, client):
        with pytest.raises(ServerError, match=f"reported: {error}"):
            client.infer({**observation(1), "prompt": "fail"})
        assert client.infer(observation(2))["actions"][0, 0] == 2
        assert metric(server.address, 'vla_accel_requests_total{outcome="policy error"}') == 1
    (message,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    if isinstance(outcome, (RuntimeError, ActionError)):  # no client can read a traceback, or cause the first error
        assert ("infer" in message and "Traceback" in message) == isinstance(outcome, RuntimeError)


def test_a_policy_is_loaded_in_the_thread_that_runs_it() -> None:
    """torch keeps CPU threads for every thread that computes: with two sets of them each small operation waits."""
    threads = []

    class Noting(EchoPolicy):
        def __init__(self) -> None:
            super().__init__()
            threads.append(threading.get_ident())

        def infer(self, observation: Any) -> Any:
            threads.append(threading.get_ident())
            return super().infer(observation)

    with served(PolicyRegistry.single(Noting)) as (_, client):
        client.infer(observation(1))
    assert len(threads) == 2 and threads[0] == threads[1] != threading.get_ident()


def test_a_server_that_cannot_start_is_one_clear_error() -> None:
    def wrong() -> EchoPolicy:
        raise ConfigError("no such checkpoint")

    with pytest.raises(ConfigError, match=r"^no such checkpoint$"), background(PolicyRegistry.single(wrong), local()):
        pytest.fail("it began to serve")
    with pytest.raises(ValueError, match="got object"), background(EchoPolicy(policy=object()), local()):
        pytest.fail("it began to serve")
    with background(EchoPolicy(), local()) as server:
        port = port_of(server.address)
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            asyncio.run(PolicyServer(EchoPolicy(), local(port=port)).run())


def test_a_client_beyond_the_limit_is_refused_until_another_leaves() -> None:
    with served(EchoPolicy(), max_clients=2) as (server, _):
        second = PolicyClient(server.address)
        with pytest.raises(ServerError, match="HTTP 503"):
            PolicyClient(server.address)
        assert get(server.address, "/healthz")[::2] == (200, "OK\n")
        second.close()
        eventually(lambda: metric(server.address, "vla_accel_clients") == 1)
        assert actions_of(server, observation(1)) == 1


@pytest.mark.parametrize(
    ("changes", "got"),
    [
        ({"port": 70000}, "got 70000"),
        ({"port": "8000"}, "int, got '8000'"),
        ({"api_key": "a\nb"}, "printable"),
        ({"page": "no"}, "bool, got 'no'"),
        ({"api_key_file": 3}, "Path, got 3"),
        ({"max_batch": 3}, "power of two .*got 3"),
        ({"max_wait_s": 0.1}, "max_batch above 1 with it"),
        ({"rate_limit": float("nan")}, "above 0, got nan"),
        ({"request_timeout_s": 0}, "above 0, got 0"),
        ({"grace_s": -1}, "0 or more seconds, got -1"),
        *(({name: 0}, "at least 1, got 0") for name in ("max_clients", "max_batch", "max_payload", "max_observations")),
    ],
)
def test_invalid_settings_are_refused(changes: dict[str, Any], got: str) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(changes))}: expected.*{got}"):
        ServerConfig(**changes)


def test_settings_are_converted_as_those_of_a_file() -> None:
    config = ServerConfig(grace_s=3, api_key_file="keys")  # pyright: ignore[reportArgumentType]
    assert type(config.grace_s) is float and config.api_key_file == Path("keys")


# -- real-time chunking -------------------------------------------------------------------------------------------


CHUNK = np.arange(21.0).reshape(3, 7)


def test_the_previous_chunk_reaches_only_a_guided_policy() -> None:
    policy = GuidedPolicy()
    with served(policy) as (_, client):
        assert client.metadata["real_time_chunking"] is True and client.supports_prev_chunk
        client.infer(observation(1), prev_chunk=CHUNK, inference_delay=2)
        client.infer(observation(1))
        with pytest.raises(ConfigError, match="together"):
            client.infer(observation(1), prev_chunk=CHUNK)
        (chunk, delay), second = policy.options
        np.testing.assert_array_equal(chunk, CHUNK)
        assert delay == 2 and second == (None, None)
    with served(EchoPolicy()) as (_, client):
        assert not client.supports_prev_chunk
        with pytest.raises(ConfigError, match="does not support real-time chunking"):
            client.infer(observation(1), prev_chunk=CHUNK, inference_delay=1)
        with pytest.raises(ServerError, match="rtc/prev_chunk: this policy does not support"):
            client.infer({**observation(1), wire.PREV_CHUNK: CHUNK, wire.INFERENCE_DELAY: 1})


def test_invalid_chunks_and_delays_are_refused() -> None:
    policy = GuidedPolicy()
    with served(policy) as (_, client):
        for chunk, delay, error in (
            (CHUNK, None, "together, got only rtc/prev_chunk"),
            (None, 2, "together, got only rtc/inference_delay"),
            (CHUNK[0], 2, r"rtc/prev_chunk: .*got shape \(7,\)"),
            (CHUNK[:0], 2, r"got shape \(0, 7\)"),
            (CHUNK * np.nan, 2, "finite"),
            ("chunk", 2, "rtc/prev_chunk: expected numbers, got dtype <U5"),
            ([[1.0], [1.0, 2.0]], 2, "expected numbers, got a list"),
            *((CHUNK, delay, "rtc/inference_delay: .*got ") for delay in (-1, 1.5, True, float("nan"), np.array(2))),
        ):
            keys = {wire.PREV_CHUNK: chunk, wire.INFERENCE_DELAY: delay}
            with pytest.raises(ServerError, match=f"ObservationError: .*{error}"):
                client.infer({**observation(1), **{name: value for name, value in keys.items() if value is not None}})
    assert not policy.options


# -- several policies ---------------------------------------------------------------------------------------------


class Scaled(EchoPolicy):
    """An echo policy whose actions are multiplied by a factor, which its metadata have."""

    def infer_batch(self, observations: Any) -> Any:
        results = super().infer_batch(observations)
        return [{**r, "actions": self.metadata["factor"] * r["actions"]} for r in results]


def registry(loads: list[str], budget: int | None = None) -> PolicyRegistry:
    """Policies `one`, `two` and `three` of 10 bytes each; `loads` gets the name of each load."""

    def load(name: str, factor: float) -> tuple[Any, int]:
        loads.append(name)
        return Scaled(factor=factor), 10

    factors = {"one": 1.0, "two": 2.0, "three": 3.0}
    return PolicyRegistry({n: (lambda n=n, f=f: load(n, f)) for n, f in factors.items()}, budget)


def test_clients_choose_a_policy_by_key_or_by_path() -> None:
    loads: list[str] = []
    with background(registry(loads), local()) as server:
        for path, policy, factor in (("", None, 1), ("", "two", 2), ("/three", None, 3), ("/two/", "two", 2)):
            with PolicyClient(server.address + path, policy=policy) as client:
                assert client.metadata["policies"] == ["one", "two", "three"] and client.metadata["factor"] == factor
                assert client.infer(observation(5))["actions"][0, 0] == 5 * factor
                assert client.infer_batch([observation(6)] * 2)[1]["actions"][0, 0] == 6 * factor
        with pytest.raises(ServerError, match=r"HTTP 404.*expected one of three, two, one as the path$"):
            PolicyClient(server.address + "/four")
        # Otherwise the metadata would belong to one policy and the actions to another.
        with pytest.raises(ConfigError, match=r"policy: expected one of .*, got 'two', below the path 'three'"):
            PolicyClient(server.address + "/three", policy="two")
        with pytest.raises(ConfigError, match=r"policy: expected one of .*two.*, got 'four'"):
            PolicyClient(server.address, policy="four")
        with (
            PolicyClient(server.address) as client,
            pytest.raises(ServerError, match="ObservationError: policy: expected one of one, two, three, got 'four'"),
        ):
            client.infer({**observation(1), "policy": "four"})
        assert metric(server.address, 'vla_accel_policy_requests_total{policy="two"}') == 4
    assert loads == ["three", "two", "one"], "each once"


@pytest.mark.slow
def test_the_least_recently_used_policy_is_unloaded(caplog: pytest.LogCaptureFixture) -> None:
    loads: list[str] = []
    some = registry(loads, budget=29)
    some.start()
    assert some.loaded == ["two", "one"] and loads == ["three", "two", "one"]
    assert some.get("two").policy.metadata["factor"] == 2
    assert some.get("three").policy.metadata["factor"] == 3
    assert some.loaded == ["two", "three"] and loads[3:] == ["three"]
    assert some.get("").name == "one" and some.loaded == ["three", "one"]
    with pytest.raises(ObservationError, match="expected one of one, two, three, got 'x'"):
        some.get("x")
    small = registry([], budget=5)
    small.start()
    assert small.loaded == ["one"] and "policy one alone exceeds" in caplog.text


def test_a_single_policy_answers_on_every_path_and_takes_the_key_as_part_of_the_observation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Strict(EchoPolicy):
        def infer(self, observation: Any) -> Any:
            assert observation.get("policy") == "x"
            return super().infer(observation)

    with background(Strict(), local()) as server:
        for path, warnings in (("", 0), ("/anything", 1)):  # it may be another policy than the robot's
            caplog.clear()
            with PolicyClient(server.address + path) as client:
                assert client.infer({**observation(1), "policy": "x"})["actions"].shape == (10, 7)
            assert sum("whatever the path" in record.message for record in caplog.records) == warnings
        with pytest.raises(ConfigError, match=r"policy: expected none, .*, got 'x'"):
            PolicyClient(server.address, policy="x")


def test_several_policies_on_the_command_line() -> None:
    several = loader(Serve(policy=("a=auto:demo", "b=native_fp8:org/name"), memory_budget_gib=1.5, num_steps=3))
    steps = StepOptions(3)
    assert several.loads == {"a": Load("demo", "auto", steps), "b": Load("org/name", "native_fp8", steps)}  # type: ignore
    assert several.budget == 3 * 2**29  # type: ignore[union-attr]
    for wrong in (("demo",), ("a=auto",), ("a=auto:demo", "a=auto:demo"), ("metrics=auto:demo",), ("a/b=auto:demo",)):
        with pytest.raises(ConfigError, match="policy: expected NAME=CONFIG:CHECKPOINT, each name once, got '"):
            loader(Serve(policy=wrong))
    with pytest.raises(ConfigError, match="got both"):
        loader(Serve(checkpoint="demo", policy=("a=auto:demo",)))
