"""`PolicyClient`: requests, reconnecting, proxies, and how it ends."""

from __future__ import annotations

import multiprocessing
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import pytest

from tests.support.openpi_wire import openpi_pack, serving
from tests.support.server_support import ROOT, EchoPolicy, actions_of, local, observation, served
from tests.support.waiting import PATIENCE_S, eventually, silent_port
from vla_accel.client import PolicyChangedError, PolicyClient, Reconnect
from vla_accel.client import load as load_module
from vla_accel.client.connection import Frame, Proxy
from vla_accel.errors import ConfigError, EngineError, ServerError, WireError
from vla_accel.remote.processes import start
from vla_accel.server import background


def dropping(count: int) -> tuple[Any, list[int]]:
    """An answer that closes the connection the first `count` times; and the list of its calls."""
    calls: list[int] = []

    def answer(obs: dict[str, Any]) -> bytes | None:
        calls.append(1)
        return None if len(calls) <= count else openpi_pack({"actions": np.full((2, 7), float(len(calls)))})

    return answer, calls


@pytest.mark.parametrize(("resend", "drops", "sent"), [(False, 1, 1), (True, 1, 2), (True, 5, 2)])
def test_a_lost_request_is_resent_once_and_only_if_configured(resend: bool, drops: int, sent: int) -> None:
    answer, calls = dropping(drops)
    with serving(answer) as address, PolicyClient(address, reconnect=Reconnect(resend=resend)) as client:
        if sent > drops:
            assert client.infer(observation(1))["actions"][0, 0] == 2
            return
        with pytest.raises(ServerError, match=r"no answer.*twice" if resend else "no answer"):
            client.infer(observation(1))
        assert len(calls) == sent
        if drops == 1:
            assert client.infer(observation(1))["actions"][0, 0] == 2, "the next request reconnects"


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
        # The timeout begins once the server has the request.
        client._connection.recv = lambda timeout: begun.wait(PATIENCE_S) and recv(timeout=timeout)
        with pytest.raises(ServerError, match=r"no answer within 0.2 s"):
            client.infer(observation(1))
        given_up.set()
        client._timeout_s = PATIENCE_S
        with pytest.raises(ServerError, match="reported: ValueError: bad state"):
            client.infer(observation(1))
    assert len(calls) == 2


def test_it_waits_for_a_server_that_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts, connect = [], PolicyClient._connect_once
    monkeypatch.setattr(PolicyClient, "_connect_once", lambda self: attempts.append(1) or connect(self))
    with silent_port() as port, ThreadPoolExecutor(1) as pool:
        future = pool.submit(PolicyClient, f"ws://127.0.0.1:{port}", reconnect=Reconnect(10**6, wait_s=0.01))
        eventually(lambda: len(attempts) > 1)
        with background(EchoPolicy(), local(port=port)), future.result(PATIENCE_S) as client:
            assert client.infer(observation(2))["actions"][0, 0] == 2
    attempts.clear()
    with silent_port() as port, pytest.raises(ServerError, match="cannot connect"):
        PolicyClient(f"ws://127.0.0.1:{port}", reconnect=Reconnect(attempts=3, wait_s=0.01))
    assert len(attempts) == 3
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(ServerError, match="cannot connect"):
        PolicyClient(f"ws://127.0.0.1:{silent.getsockname()[1]}", connect_timeout_s=0.3)


def test_threads_share_a_client_and_each_gets_its_own_answer() -> None:
    with served(EchoPolicy()) as (_, client), ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda i: client.infer(observation(i))["actions"][0, 0], range(100))) == list(range(100))


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda c: c.infer({"state": np.array([object()])}), "expected numbers or text, got dtype object"),
        (lambda c: c.infer(None), "observation: expected a mapping, got a NoneType"),
        (lambda c: c.infer_batch(None), "observations: expected a list of observations, got a NoneType"),
        (lambda c: c.infer_batch([observation(1), None]), r"observations\[1\]: expected a mapping, got a NoneType"),
    ],
)
def test_an_invalid_observation_is_refused_and_the_connection_stays(call: Any, error: str) -> None:
    with served(EchoPolicy()) as (_, client):
        connection = client._connection
        with pytest.raises(WireError, match=error):
            call(client)
        client.infer(observation(1))
        assert client._connection is connection


def test_a_request_that_is_too_large_names_the_servers_option() -> None:
    with served(EchoPolicy(), max_payload=10_000) as (_, client):
        with pytest.raises(ServerError, match=r"no answer .*exceeds limit of 10000 bytes.*--max-payload-mib"):
            client.infer(observation(1, image=True))
        assert client.infer(observation(1))["actions"].shape == (10, 7)


@pytest.mark.parametrize("size", [0, 7, 8, 125, 126, 65_535, 65_536, 301_394])
def test_a_frame_is_what_websockets_reads(size: int) -> None:
    from websockets import frames
    from websockets.streams import StreamReader

    frame, reader = Frame(), StreamReader()
    messages = [np.random.default_rng(seed).bytes(length) for seed, length in enumerate((size, size // 2, size))]
    keys = set()
    for message in messages:
        sent = bytes(frame.of(message))
        keys.add(sent[len(sent) - len(message) - 4 :][:4])
        reader.feed_data(sent)
        with pytest.raises(StopIteration) as done:
            next(frames.Frame.parse(reader.read_exact, mask=True))
        read = done.value.value
        assert (bytes(read.data), read.opcode, read.fin, len(reader.buffer)) == (message, 2, True, 0)
    assert len(keys) > 1, "the masking key must be random"


@pytest.mark.parametrize(
    ("options", "got"),
    [
        ({"timeout_s": 0.0}, "timeout_s: expected .*got 0"),
        ({"timeout_s": float("nan")}, "timeout_s: expected .*got nan"),
        ({"timeout_s": "5"}, "timeout_s: expected .*got '5'"),
        ({"connect_timeout_s": -1.0}, "connect_timeout_s: expected .*got -1"),
        ({"proxy": "proxy:3128"}, "proxy: expected .*http://host:port"),
        ({"proxy": 3128}, "proxy: expected .*got 3128"),
        ({"api_key": "a\nb"}, "api_key: expected .*printable"),
        ({"api_key": 5}, "api_key: expected .*printable"),
        *(
            ({"address": one}, "policy: expected ws://host:port, got ")
            for one in (None, 8000, "http://x", "ws://x:99999")
        ),
    ],
)
def test_invalid_options_are_refused_before_connecting(options: dict[str, Any], got: str) -> None:
    with pytest.raises(ConfigError, match=got):
        PolicyClient(**{"address": "ws://127.0.0.1:9", **options})


@pytest.mark.parametrize("changes", [{"attempts": 0}, {"attempts": 1.5}, {"wait_s": -1.0}, {"wait_s": "1"}])
def test_an_invalid_reconnect_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"reconnect: {next(iter(changes))}: expected"):
        Reconnect(**changes)
    assert Reconnect(np.int64(2), np.float32(0.5)) == Reconnect(2, 0.5)  # type: ignore[arg-type]


ARM = {"images": ["front"], "state": ["joints"], "action_dim": 7, "motion_dims": []}


@pytest.mark.parametrize(
    ("changed", "expected", "got"),
    [
        ({"policy": "other"}, "policy 'echo'", "policy 'other'"),
        ({"action_horizon": 50}, "action_horizon 10", "action_horizon 50"),
        ({"max_delay": 3}, "max_delay None", "max_delay 3"),
        ({"robot": {**ARM, "state": ["pose"]}}, r"robot.state \['joints'\]", r"robot.state \['pose'\]"),
        ({"robot": None}, "robot.action_dim 7", "robot.action_dim None"),
    ],
)
def test_another_policy_at_the_same_address_is_refused_after_a_reconnect(
    changed: dict[str, Any], expected: str, got: str
) -> None:
    with silent_port() as port:
        with background(EchoPolicy(robot=ARM), local(port=port)) as server:
            client = PolicyClient(server.address)
        with background(EchoPolicy(**{"robot": ARM, **changed}), local(port=port)):
            with pytest.raises(ServerError):  # the connection is lost
                client.infer(observation(1))
            for _ in range(2):
                with pytest.raises(PolicyChangedError, match=f"expected .*{expected}.* got .*{got}.*make a new client"):
                    client.infer(observation(1))
            assert actions_of(server, observation(1)) == 1
        with background(EchoPolicy(robot=ARM, device="cuda:1"), local(port=port)):
            assert client.infer(observation(1))["actions"].shape == (10, 7), "the same policy on another device"
            client.close()


# -- how a client ends ---------------------------------------------------------------------------------------------

SOON_S = 30.0
"""Far more than ending takes, and far less than the timeouts of these clients."""

PROGRAM = """
import signal, sys, numpy as np
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
from vla_accel.client import PolicyClient
from vla_accel.remote.async_runner import AsyncRunner

with PolicyClient(sys.argv[1], timeout_s=600) as client:
    if sys.argv[2] == "alone":
        while True:
            client.infer({"tick": 0})
    with AsyncRunner(client, hz=20, underrun=np.zeros(7)) as runner:
        runner.start({"tick": 0})
        while True:
            runner.step({"tick": 1})
"""


@pytest.fixture
def hung() -> Iterator[tuple[str, threading.Event]]:
    """The address of a server that answers only twice, and an event that is set when it hangs."""
    calls: list[int] = []
    hangs, end = threading.Event(), threading.Event()

    def answer(obs: dict[str, Any]) -> bytes | None:
        calls.append(1)
        if len(calls) > 2:
            hangs.set()
            end.wait(PATIENCE_S)
            return None
        return openpi_pack({"actions": np.zeros((4, 7))})

    with serving(answer) as address:
        yield address, hangs
        end.set()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["runner", "alone"])
def test_ctrl_c_ends_a_program_whose_server_hangs(kind: str, hung: tuple[str, threading.Event]) -> None:
    address, hangs = hung
    words = [sys.executable, "-c", PROGRAM, address, kind]
    with subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert hangs.wait(PATIENCE_S)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=SOON_S)
        finally:
            process.kill()
    assert process.returncode in (-signal.SIGINT, 130), err
    assert err.rstrip().endswith("KeyboardInterrupt"), "no other exception replaces it"


def test_closing_ends_a_request_of_another_thread(hung: tuple[str, threading.Event]) -> None:
    address, hangs = hung
    reconnect = Reconnect(attempts=5, resend=True)
    with ThreadPoolExecutor(2) as pool, PolicyClient(address, timeout_s=600, reconnect=reconnect) as client:
        for _ in range(2):
            client.infer(observation(1))
        asked = pool.submit(client.infer, observation(1))
        assert hangs.wait(PATIENCE_S)
        pool.submit(client.close).result(SOON_S)
        with pytest.raises(ServerError, match="closed while the request was under way"):
            asked.result(SOON_S)


def test_closing_ends_the_attempts_to_connect_again() -> None:
    with silent_port() as port:
        with background(EchoPolicy(), local(port=port)) as server:
            client = PolicyClient(server.address, reconnect=Reconnect(attempts=1000, wait_s=600))
        with pytest.raises(ServerError):
            client.infer(observation(1))
        with ThreadPoolExecutor(2) as pool:
            asked = pool.submit(client.infer, observation(1))
            eventually(lambda: not client._lock.acquire(blocking=False) or client._lock.release() is not None)
            pool.submit(client.close).result(SOON_S)
            with pytest.raises(ServerError, match="closed while"):
                asked.result(SOON_S)
        with background(EchoPolicy(), local(port=port)):
            assert client.infer(observation(1))["actions"].shape == (10, 7), "the next request connects again"
            client.close()


def test_the_end_of_a_block_does_not_replace_its_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        close()
        raise OSError("broken")

    for inside, raised in ((KeyboardInterrupt, KeyboardInterrupt), (None, OSError)):
        with background(EchoPolicy(), local()) as server, pytest.raises(raised), PolicyClient(server.address) as client:
            close = client.close
            monkeypatch.setattr(client, "close", broken)
            if inside is not None:
                raise inside


@pytest.mark.slow
@pytest.mark.parametrize(("encrypted", "closes"), [(False, False), (True, False), (False, True)])
def test_a_server_that_stops_reading_cannot_block_a_client(
    encrypted: bool, closes: bool, make_certificate: Any
) -> None:
    """The request is larger than the socket's buffers, so the client waits inside `send`."""
    cert, key = make_certificate("server") if encrypted else (None, None)
    listening = socket.create_server(("127.0.0.1", 0))
    if encrypted:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(str(cert), str(key))
        listening = context.wrap_socket(listening, server_side=True)
    address = f"{'wss' if encrypted else 'ws'}://127.0.0.1:{listening.getsockname()[1]}"
    with listening, ThreadPoolExecutor(3) as pool:
        accepted = pool.submit(_shake_hands, listening)
        reconnect = None if closes else Reconnect(resend=True)
        client = PolicyClient(address, timeout_s=600 if closes else 0.5, reconnect=reconnect, tls_ca=cert)
        with accepted.result(PATIENCE_S):
            future = pool.submit(client.infer, {"image": np.zeros((4000, 4000, 3), np.uint8)})
            try:
                if closes:
                    eventually(lambda: not client._lock.acquire(blocking=False) or client._lock.release() is not None)
                    pool.submit(client.close).result(SOON_S)
                with pytest.raises(ServerError, match="" if closes else r"no answer within 0\.5 s"):
                    future.result(SOON_S)
            finally:
                client.close()


def _shake_hands(listening: socket.socket) -> socket.socket:
    from websockets.server import ServerProtocol

    connection, _ = listening.accept()
    protocol = ServerProtocol()
    while not (events := protocol.events_received()):
        protocol.receive_data(connection.recv(65536))
    protocol.send_response(protocol.accept(events[0]))  # pyright: ignore[reportArgumentType]
    protocol.send_binary(openpi_pack({}))
    for data in protocol.data_to_send():
        connection.sendall(data)
    return connection


def _blocked(pipe: Any) -> None:
    pipe.send(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def test_ctrl_c_does_not_reach_child_processes() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_blocked, args=(theirs,))
    start(process)
    theirs.close()
    assert ours.recv()
    process.join()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_no_client_of_a_load_test_survives_an_interrupt_or_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[BaseProcess] = []

    def interrupted(process: BaseProcess) -> None:
        process.start()
        begun.append(process)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(load_module, "start", interrupted)
        load_module.load("ws://127.0.0.1:9", 2, 3600.0, {})
    assert [process.is_alive() for process in begun] == [False]
    monkeypatch.setattr(load_module, "_process", print)
    with pytest.raises(EngineError, match="clients: one of their processes ended"):
        load_module.load("ws://127.0.0.1:9", 1, 1.0, {})


# -- proxies -------------------------------------------------------------------------------------------------------

NAMES = ("http_proxy", "https_proxy", "all_proxy", "ws_proxy", "wss_proxy", "socks_proxy", "no_proxy")


@pytest.fixture
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def dead_proxy(no_proxies: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with silent_port() as port:
        for name in NAMES[:4]:
            monkeypatch.setenv(name, f"http://user:secret@127.0.0.1:{port}")
        yield f"127.0.0.1:{port}"


def test_a_proxy_of_the_environment_is_used_only_by_choice_and_named_without_its_password(dead_proxy: str) -> None:
    with background(EchoPolicy(), local()) as server:
        assert actions_of(server, observation(3)) == 3
        for chosen in (True, f"http://user:secret@{dead_proxy}"):
            with pytest.raises(ServerError, match=f"cannot connect through the proxy {dead_proxy}") as error:
                PolicyClient(server.address, proxy=chosen)
            assert "secret" not in str(error.value).split("(")[0]


def test_an_explicit_proxy_is_used(no_proxies: None) -> None:
    def relay(listening: socket.socket) -> bytes:
        """Answers one CONNECT with a tunnel and returns its first line."""
        ours, head = listening.accept()[0], b""
        while b"\r\n\r\n" not in head:
            head += ours.recv(65536)
        host, _, port = head.split()[1].decode().rpartition(":")
        theirs = socket.create_connection((host, int(port)))
        ours.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        pool.submit(pump, ours, theirs)
        pool.submit(pump, theirs, ours)
        return head

    def pump(source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)

    with (
        background(EchoPolicy(), local()) as server,
        socket.create_server(("127.0.0.1", 0)) as listening,
        ThreadPoolExecutor(3) as pool,
    ):
        request = pool.submit(relay, listening)
        with PolicyClient(server.address, proxy=f"http://127.0.0.1:{listening.getsockname()[1]}") as client:
            assert client.infer(observation(3))["actions"][0, 0] == 3
        assert request.result(PATIENCE_S).startswith(b"CONNECT 127.0.0.1:")


@pytest.mark.parametrize(
    ("hosts", "public"),
    [
        ("8.8.8.8 [2606:4700::1111] gpu.example.com", True),
        ("127.0.0.1 [::1] 192.168.1.5 10.0.0.7 169.254.0.9 localhost gpu-box gpu-box.local", False),
    ],
)
def test_an_error_mentions_an_unused_proxy_for_public_addresses(hosts: str, public: bool, dead_proxy: str) -> None:
    for host in hosts.split():
        proxy = Proxy(f"ws://{host}:8000", None)
        assert proxy.url is None and proxy.through == ""
        assert (f"the environment's proxy {dead_proxy} is not used: proxy=True" in proxy.hint) == public, host


def test_proxy_true_uses_the_environment(no_proxies: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def url(address: str, choice: bool = True) -> str | None:
        return Proxy(address, choice).url

    assert url("ws://gpu.example.com") is None
    for name, value in (("http_proxy", "http://a:1"), ("https_proxy", "http://b:2"), ("no_proxy", "in.example.com")):
        monkeypatch.setenv(name, value)
    assert (url("wss://gpu.example.com"), url("ws://in.example.com")) == ("http://b:2", None)
    monkeypatch.setenv("ws_proxy", "socks5h://c:3")
    assert (url("ws://gpu.example.com"), url("ws://gpu.example.com", False)) == ("socks5h://c:3", None)
