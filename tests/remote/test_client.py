"""`PolicyClient`: how it connects again, and what it never does."""

from __future__ import annotations

import socket
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

pytest.importorskip("websockets", reason="needs websockets")
pytest.importorskip("msgpack", reason="the wire format needs msgpack")

import websockets.frames
from websockets.streams import StreamReader

from tests.support.openpi_wire import openpi_pack, serving
from tests.support.server_support import EchoPolicy, local, observation
from tests.support.waiting import PATIENCE_S, eventually, silent_port
from vla_accel.client import PolicyChangedError, PolicyClient, Reconnect
from vla_accel.client import client as client_module
from vla_accel.client.connection import Frame
from vla_accel.errors import ConfigError, ServerError, WireError
from vla_accel.server import background


def dropping(count: int) -> tuple[Any, list[int]]:
    """An answer that closes the connection the first `count` times; and the list of its calls."""
    calls: list[int] = []

    def answer(obs: dict[str, Any]) -> bytes | None:
        calls.append(1)
        return None if len(calls) <= count else openpi_pack({"actions": np.full((2, 7), float(len(calls)))})

    return answer, calls


def test_a_request_is_not_sent_again_unless_asked_for() -> None:
    answer, calls = dropping(1)
    with serving(answer) as address, PolicyClient(address) as client:
        with pytest.raises(ServerError, match="no answer"):
            client.infer(observation(1))
        assert len(calls) == 1
        assert client.infer(observation(1))["actions"][0, 0] == 2, "the next request connects again"


def test_resend_sends_once_more_and_only_once() -> None:
    answer, calls = dropping(1)
    with serving(answer) as address, PolicyClient(address, reconnect=Reconnect(resend=True)) as client:
        assert client.infer(observation(1))["actions"][0, 0] == 2
    answer, calls = dropping(5)
    with serving(answer) as address, PolicyClient(address, reconnect=Reconnect(resend=True)) as client:
        with pytest.raises(ServerError, match=r"no answer .*, twice"):
            client.infer(observation(1))
        assert len(calls) == 2


def test_a_late_answer_or_a_reported_error_is_never_sent_again() -> None:
    calls: list[int] = []
    begun, given_up = threading.Event(), threading.Event()

    def slow(obs: dict[str, Any]) -> bytes | str:
        calls.append(1)
        begun.set()
        given_up.wait(PATIENCE_S)
        return "ValueError: bad state"

    resend = Reconnect(resend=True)
    with serving(slow) as address, PolicyClient(address, timeout_s=0.2, reconnect=resend) as client:
        recv = client._connection.recv
        # The clock begins once the server has the request.
        client._connection.recv = lambda timeout: begun.wait(PATIENCE_S) and recv(timeout=timeout)
        with pytest.raises(ServerError, match=r"no answer within 0.2 s"):
            client.infer(observation(1))
        given_up.set()
        client._timeout_s = PATIENCE_S
        with pytest.raises(ServerError, match="reported: ValueError: bad state"):
            client.infer(observation(1))
    assert len(calls) == 2


def test_it_waits_for_a_server_that_comes_up(monkeypatch: pytest.MonkeyPatch) -> None:
    refused, up = threading.Event(), threading.Event()

    def wait(seconds: float) -> bool:
        assert seconds == 0.05
        refused.set()
        assert up.wait(PATIENCE_S)
        return False

    with silent_port() as port, ThreadPoolExecutor(1) as pool, monkeypatch.context() as patch:
        event = types.SimpleNamespace(wait=wait, clear=lambda: None, is_set=lambda: False)
        patch.setattr(client_module, "threading", types.SimpleNamespace(Event=lambda: event, RLock=threading.RLock))
        future = pool.submit(PolicyClient, f"ws://127.0.0.1:{port}", reconnect=Reconnect(attempts=2, wait_s=0.05))
        assert refused.wait(PATIENCE_S)
        with background(EchoPolicy(), local(port=port)):
            up.set()
            with future.result(PATIENCE_S) as client:
                assert client.infer(observation(2))["actions"][0, 0] == 2
    with silent_port() as port, pytest.raises(ServerError, match="cannot connect"):
        PolicyClient(f"ws://127.0.0.1:{port}", reconnect=Reconnect(attempts=3, wait_s=0.01))


def test_a_server_that_accepts_and_says_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(ServerError, match="cannot connect"):
        PolicyClient(f"ws://127.0.0.1:{silent.getsockname()[1]}", connect_timeout_s=0.3)


def test_threads_share_a_client_and_each_gets_its_own_answer() -> None:
    with (
        background(EchoPolicy(0.001), local()) as server,
        PolicyClient(server.address) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        got = list(pool.map(lambda i: client.infer(observation(i))["actions"][0, 0], range(100)))
    assert got == list(range(100))


def test_what_cannot_be_sent_leaves_the_connection_as_it_is() -> None:
    with background(EchoPolicy(), local()) as server, PolicyClient(server.address) as client:
        connection = client._connection
        with pytest.raises(WireError, match="expected numbers or text, got dtype object"):
            client.infer({"observation/state": np.array([object()])})
        client.infer(observation(1))
        assert client._connection is connection


def test_a_request_that_is_too_large_is_one_clear_error() -> None:
    small = local(max_payload=10_000)
    with background(EchoPolicy(), small) as server, PolicyClient(server.address) as client:
        with pytest.raises(
            ServerError, match=r"no answer \(frame .* exceeds limit of 10000 bytes; .*--max-payload-mib\)$"
        ):
            client.infer(observation(1, image=True))
        assert client.infer(observation(1))["actions"].shape == (10, 7)


@pytest.mark.parametrize(
    "changes", [{"attempts": 0}, {"attempts": "3"}, {"attempts": 1.5}, {"wait_s": -1.0}, {"wait_s": "1"}]
)
def test_a_reconnect_policy_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"reconnect: {next(iter(changes))}: expected"):
        Reconnect(**changes)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 125, 126, 65_535, 65_536, 301_394])
def test_a_frame_is_what_websockets_reads(size: int) -> None:
    frame, reader = Frame(), StreamReader()
    messages = [np.random.default_rng(seed).bytes(length) for seed, length in enumerate((size, size // 2, size))]
    keys = set()
    for message in messages:
        sent = bytes(frame.of(message))
        keys.add(sent[len(sent) - len(message) - 4 :][:4])
        reader.feed_data(sent)
        with pytest.raises(StopIteration) as done:
            next(websockets.frames.Frame.parse(reader.read_exact, mask=True))
        read = done.value.value
        assert (bytes(read.data), read.opcode, read.fin, len(reader.buffer)) == (message, 2, True, 0)
    assert len(keys) > 1, "a key that others can foretell"


def test_no_thread_is_left_behind() -> None:
    before = set(threading.enumerate())
    with background(EchoPolicy(), local()) as server:
        for _ in range(3):
            with PolicyClient(server.address) as client:
                client.infer(observation(1))
    eventually(lambda: not set(threading.enumerate()) - before)


def test_what_cannot_be_is_refused_before_anybody_is_called() -> None:
    address: Any = "ws://127.0.0.1:9"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"timeout_s": 0.0}, "timeout_s: expected seconds above 0, got 0"),
        ({"timeout_s": float("nan")}, "timeout_s: expected seconds above 0"),
        ({"timeout_s": None}, "timeout_s: expected seconds above 0, got None"),
        ({"timeout_s": "5"}, "timeout_s: expected seconds above 0, got '5'"),
        ({"connect_timeout_s": -1.0}, "connect_timeout_s: expected seconds above 0"),
        ({"proxy": "proxy:3128"}, "proxy: expected http://host:port"),
        ({"proxy": 3128}, "proxy: expected None, True or a proxy's address, got 3128"),
        ({"api_key": "a\nb"}, "api_key: expected printable ASCII characters"),
        ({"api_key": 5}, "api_key: expected printable ASCII characters"),
        ({"api_key": "schlüssel"}, "api_key: expected printable ASCII characters"),
    ]
    for options, message in cases:
        with pytest.raises(ConfigError, match=message):
            PolicyClient(address, **options)
    for wrong in (None, 8000, object()):
        with pytest.raises(ConfigError, match="policy: expected ws://host:port, got "):
            PolicyClient(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="reconnect: wait_s: expected"):
        Reconnect(wait_s=float("nan"))


def test_numpy_numbers_are_seconds() -> None:
    with (
        background(EchoPolicy(), local()) as server,
        PolicyClient(
            server.address,
            timeout_s=np.float32(60),  # type: ignore[arg-type]
            connect_timeout_s=np.int64(60),  # type: ignore[arg-type]
            reconnect=Reconnect(np.int64(2), np.float32(0.5)),  # type: ignore[arg-type]
        ) as client,
    ):
        assert client.infer(observation(1))["actions"][0, 0] == 1


class Another(EchoPolicy):
    """An echo policy with other metadata."""

    def __init__(self, **metadata: Any) -> None:
        super().__init__()
        self.metadata |= metadata


ARM = {"images": ["front"], "state": ["joints"], "action_dim": 7, "motion_dims": []}


@pytest.mark.parametrize(
    ("changed", "expected", "got"),
    [
        ({"policy": "other"}, "policy 'echo'", "policy 'other'"),
        ({"action_dim": 14}, "action_dim 7", "action_dim 14"),
        ({"action_horizon": 50}, "action_horizon 10", "action_horizon 50"),
        ({"max_delay": 3}, "max_delay None", "max_delay 3"),
        ({"robot": {**ARM, "action_dim": 14}}, "robot.action_dim 7", "robot.action_dim 14"),
        ({"robot": {**ARM, "state": ["pose"]}}, r"robot.state \['joints'\]", r"robot.state \['pose'\]"),
        ({"robot": None}, "robot.action_dim 7", "robot.action_dim None"),
    ],
)
def test_another_policy_at_the_same_address_is_refused_after_a_reconnect(
    changed: dict[str, Any], expected: str, got: str
) -> None:
    with silent_port() as port:
        with background(Another(robot=ARM), local(port=port)) as server:
            client = PolicyClient(server.address)
            client.infer(observation(1))
        with background(Another(**{"robot": ARM, **changed}), local(port=port)):
            with pytest.raises(ServerError):  # the connection is lost
                client.infer(observation(1))
            for _ in range(2):
                with pytest.raises(PolicyChangedError, match=f"expected .*{expected}.* got .*{got}.*make a new client"):
                    client.infer(observation(1))
            with PolicyClient(server.address) as new:
                assert new.infer(observation(1))["actions"].shape == (10, 7)
        with background(Another(robot=ARM, device="cuda:1"), local(port=port)):
            assert client.infer(observation(1))["actions"].shape == (10, 7), "the same policy on another device"
            client.close()


def test_an_observation_that_is_none_is_named() -> None:
    nothing: Any = None
    with background(EchoPolicy(), local()) as server, PolicyClient(server.address) as client:
        with pytest.raises(WireError, match="observation: expected a mapping, got a NoneType"):
            client.infer(nothing)
        with pytest.raises(WireError, match="observations: expected a list of observations, got a NoneType"):
            client.infer_batch(nothing)
        with pytest.raises(WireError, match=r"observations\[1\]: expected a mapping, got a NoneType"):
            client.infer_batch([observation(1), nothing])
        assert "actions" in client.infer(observation(1)), "the connection is still there"


def test_a_wrong_key_says_so() -> None:
    with (
        background(EchoPolicy(), local(api_key="right")) as server,
        pytest.raises(ServerError, match=r"HTTP 401.*; its key is missing or wrong: api_key"),
    ):
        PolicyClient(server.address, api_key="wrong")
