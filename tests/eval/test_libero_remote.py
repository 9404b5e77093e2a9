"""The websocket client against a small server that speaks openpi's wire format."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from eval.libero.policies import PolicyBySteps
from eval.libero.protocol import EpisodeKey, Protocol
from eval.libero.remote import RemotePolicy, check_address
from eval.libero.rollout import PolicyActor, run_episode
from tests.support.libero_support import FRAME, FakeEnv
from vla_accel.errors import ConfigError, ServerError

msgpack = pytest.importorskip("msgpack", reason="the wire format needs msgpack")
server_module = pytest.importorskip("websockets.sync.server", reason="needs websockets")
OBS = {**FRAME, "prompt": "do it"}


def openpi_pack(value: Any) -> bytes:
    """openpi's packer, written out here so that the client is not tested against itself."""

    def encode(v: Any) -> Any:
        if isinstance(v, np.ndarray):
            return {
                b"__ndarray__": True,
                b"data": v.tobytes(),
                b"dtype": v.dtype.str,
                b"shape": v.shape,
            }
        if isinstance(v, np.generic):
            return {b"__npgeneric__": True, b"data": v.item(), b"dtype": v.dtype.str}
        return v

    return msgpack.packb(value, default=encode)


def openpi_unpack(data: bytes) -> Any:
    def decode(v: Any) -> Any:
        if b"__ndarray__" in v:
            return np.ndarray(buffer=v[b"data"], dtype=np.dtype(v[b"dtype"]), shape=v[b"shape"])
        return v

    return msgpack.unpackb(data, object_hook=decode)


@contextmanager
def serving(answer: Callable[[dict[str, Any]], bytes | str | None], hello: bytes | str | None = None) -> Iterator[str]:
    """Serve `answer` to every request; None closes the connection instead."""

    def handle(connection: Any) -> None:
        connection.send(openpi_pack({"model": "fake"}) if hello is None else hello)
        for request in connection:
            reply = answer(openpi_unpack(request))
            if reply is None:
                return
            connection.send(reply)
            if isinstance(reply, str):  # openpi sends its traceback, then closes
                return

    with server_module.serve(handle, "127.0.0.1", 0, compression=None, max_size=None) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_an_observation_goes_out_and_actions_come_back() -> None:
    seen: list[dict[str, Any]] = []

    def answer(obs: dict[str, Any]) -> bytes:
        seen.append(obs)
        actions = np.arange(70, dtype=np.float32).reshape(10, 7)
        return openpi_pack({"actions": actions, "policy_timing": {"infer_ms": np.float64(3.5)}})

    image = np.arange(224 * 224 * 3, dtype=np.uint32).astype(np.uint8).reshape(224, 224, 3)
    state = np.linspace(0, 1, 8)
    with serving(answer) as address:
        policy = RemotePolicy(address)
        assert policy.metadata == {"model": "fake"}
        obs = {**OBS, "observation/image": image, "observation/state": state}
        result = policy.infer(obs)
        policy.close()
    np.testing.assert_array_equal(result["actions"], np.arange(70).reshape(10, 7))
    assert result["policy_timing"]["infer_ms"] == 3.5
    (got,) = seen
    assert set(got) == set(obs) and got["prompt"] == "do it"
    np.testing.assert_array_equal(got["observation/image"], image)
    np.testing.assert_array_equal(got["observation/state"], state)
    assert got["observation/state"].dtype == np.float64


def test_a_servers_traceback_becomes_an_error_and_the_next_episode_connects_again() -> None:
    calls: list[int] = []

    def answer(obs: dict[str, Any]) -> bytes | str:
        calls.append(1)
        if len(calls) == 1:
            return "Traceback (most recent call last):\n  File x\nValueError: bad state\n"
        return openpi_pack({"actions": np.zeros((10, 7))})

    with serving(answer) as address:
        policy = RemotePolicy(address)
        with pytest.raises(ServerError, match=f"{address} reported: ValueError: bad state$"):
            policy.infer(OBS)
        policy.reset()
        assert policy.infer(OBS)["actions"].shape == (10, 7)
        policy.close()


def test_a_dropped_connection_is_an_error_of_the_episode() -> None:
    protocol = Protocol("libero_spatial", tasks=(0,), trials=1, steps=(None,), max_steps=5)
    key = EpisodeKey(None, 0, 0)
    with serving(lambda obs: None) as address:
        policies = PolicyBySteps(RemotePolicy(address))
        actor = PolicyActor(policies, protocol, send_noise=False)
        result = run_episode(FakeEnv(), np.zeros(1), actor, key, protocol, prompt="x")
    assert result.outcome == "error"
    assert result.error is not None and "no answer" in result.error


@pytest.mark.parametrize(
    ("hello", "message"),
    [
        ("a web page", "expected metadata, got text: 'a web page'"),
        (b"\xc1", "expected a plain value"),
        (b"\x01", "expected a map"),
    ],
)
def test_a_server_of_another_kind_is_refused(hello: bytes | str, message: str) -> None:
    with serving(lambda obs: None, hello) as address, pytest.raises(ServerError, match=message):
        RemotePolicy(address)


def test_an_answer_without_actions_is_refused() -> None:
    with serving(lambda obs: openpi_pack({"state": 1})) as address:
        policy = RemotePolicy(address)
        with pytest.raises(ServerError, match=r"expected actions in its answer, got \['state'\]"):
            policy.infer(OBS)
        policy.close()


def test_a_late_answer_is_an_error_and_not_the_next_requests_answer() -> None:
    release = threading.Event()
    calls: list[int] = []

    def answer(obs: dict[str, Any]) -> bytes:
        calls.append(1)
        if len(calls) == 1:
            release.wait(5)
        return openpi_pack({"actions": np.full((10, 7), float(len(calls)))})

    with serving(answer) as address:
        policy = RemotePolicy(address, timeout_s=0.3)
        with pytest.raises(ServerError, match="no answer"):
            policy.infer(OBS)
        release.set()
        policy.reset()
        assert policy.infer(OBS)["actions"][0, 0] == 2.0
        policy.close()


def test_an_interrupt_leaves_no_answer_behind_for_the_next_request() -> None:
    calls: list[int] = []

    def answer(obs: dict[str, Any]) -> bytes:
        calls.append(1)
        return openpi_pack({"actions": np.full((10, 7), float(len(calls)))})

    def interrupt(timeout: float) -> bytes:
        raise KeyboardInterrupt

    with serving(answer) as address:
        policy = RemotePolicy(address)
        policy._connection.recv = interrupt
        with pytest.raises(KeyboardInterrupt):
            policy.infer(OBS)
        assert policy.infer(OBS)["actions"][0, 0] == len(calls) == 2
        policy.close()


def test_nobody_there_is_one_clear_error() -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ServerError, match=f"ws://127.0.0.1:{port}: cannot connect"):
        RemotePolicy(f"ws://127.0.0.1:{port}")


@pytest.mark.parametrize("address", ["http://host:80", "ws://", "ws://host:99999", "ws://host:x"])
def test_malformed_addresses_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="policy: expected ws://host:port, got"):
        check_address(address)
