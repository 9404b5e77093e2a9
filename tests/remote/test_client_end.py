"""A program with a client ends soon, whatever its server does. Bounds are generous: they tell a wait for the server
(ten minutes here) from none."""

from __future__ import annotations

import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("websockets", reason="needs websockets")
pytest.importorskip("msgpack", reason="the wire format needs msgpack")

from tests.remote.test_security import make_certificate
from tests.support.openpi_wire import openpi_pack, serving
from tests.support.server_support import EchoPolicy, local, observation
from tests.support.waiting import PATIENCE_S, eventually, silent_port
from vla_accel.client import PolicyClient, Reconnect
from vla_accel.errors import ServerError
from vla_accel.server import background

__all__ = ["make_certificate"]

SOON_S = 30.0
"""Far more than an end takes, and far less than the time limits of the clients here."""
ROOT = Path(__file__).parents[2]

ROBOT = """
import sys, time
import numpy as np
from vla_accel.client import PolicyClient
from vla_accel.remote.async_runner import AsyncRunner

try:
    with PolicyClient(sys.argv[1], timeout_s=600) as client, AsyncRunner(client, hz=20, underrun=np.zeros(7)) as runner:
        runner.start({"tick": 0})
        while True:
            runner.step({"tick": 1})
            print(runner.report().underruns, flush=True)
            time.sleep(0.05)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    raise
"""
ALONE = """
import sys
from vla_accel.client import PolicyClient

with PolicyClient(sys.argv[1], timeout_s=600) as client:
    client.infer({"tick": 0})
    client.infer({"tick": 0})
    print("asking", flush=True)
    client.infer({"tick": 0})
"""


@pytest.fixture
def hung() -> Iterator[tuple[str, threading.Event]]:
    """The address of a server that answers twice and then never; an event that says that it hangs."""
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


@pytest.mark.parametrize("program", [ROBOT, ALONE], ids=["runner", "client"])
def test_ctrl_c_ends_a_program_whose_server_hangs(program: str, hung: tuple[str, threading.Event]) -> None:
    address, hangs = hung
    words = [sys.executable, "-c", program, address]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert hangs.wait(PATIENCE_S)
            assert process.stdout is not None and process.stdout.readline()
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=SOON_S)
        finally:
            process.kill()
    assert process.returncode in (-signal.SIGINT, 130), err
    assert err.rstrip().endswith("KeyboardInterrupt"), "no other exception takes its place"
    assert program is ALONE or "interrupted" in out


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
        raise OSError("broken")

    with background(EchoPolicy(), local()) as server:
        with pytest.raises(KeyboardInterrupt), PolicyClient(server.address) as client:
            monkeypatch.setattr(client, "close", broken)
            raise KeyboardInterrupt
        monkeypatch.undo()
        client.close()
        with pytest.raises(OSError, match="broken"), PolicyClient(server.address) as client:
            monkeypatch.setattr(client, "close", broken)
        monkeypatch.undo()
        client.close()


def test_a_server_that_never_reads_keeps_nobody(hung: tuple[str, threading.Event]) -> None:
    """Its socket's buffers are full, so that the client waits inside `send`."""
    listening = socket.create_server(("127.0.0.1", 0))
    with listening, ThreadPoolExecutor(3) as pool:
        accepted = pool.submit(_shake_hands, listening)
        client = PolicyClient(f"ws://127.0.0.1:{listening.getsockname()[1]}", timeout_s=600)
        with accepted.result(PATIENCE_S):
            huge = {"image": np.zeros((4000, 4000, 3), np.uint8)}
            asked = pool.submit(client.infer, huge)
            eventually(lambda: not client._lock.acquire(blocking=False) or client._lock.release() is not None)
            pool.submit(client.close).result(SOON_S)
            with pytest.raises(ServerError):
                asked.result(SOON_S)


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_server_that_stops_reading_is_given_up(
    encrypted: bool, make_certificate: Callable[[str], tuple[Path, Path]]
) -> None:
    """The request is larger than the socket's buffers, so that the client waits inside `send`."""
    cert, key = make_certificate("server")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    listening = socket.create_server(("127.0.0.1", 0))
    listening = context.wrap_socket(listening, server_side=True) if encrypted else listening
    address = f"{'wss' if encrypted else 'ws'}://127.0.0.1:{listening.getsockname()[1]}"
    huge = {"image": np.zeros((4000, 4000, 3), np.uint8)}
    with listening, ThreadPoolExecutor(2) as pool:
        accepted = pool.submit(_shake_hands, listening)
        trusted = cert if encrypted else None
        client = PolicyClient(address, timeout_s=0.5, reconnect=Reconnect(resend=True), tls_ca=trusted)
        with accepted.result(PATIENCE_S):
            asked = pool.submit(client.infer, huge)
            try:
                with pytest.raises(ServerError, match=r"no answer within 0\.5 s"):
                    asked.result(SOON_S)
            finally:
                client.close()  # also ends a request that is never given up


def _shake_hands(listening: socket.socket) -> socket.socket:
    from websockets.http11 import Request
    from websockets.server import ServerProtocol

    connection, _ = listening.accept()
    protocol = ServerProtocol()
    while True:
        protocol.receive_data(connection.recv(65536))
        if events := protocol.events_received():
            assert isinstance(events[0], Request)
            break
    protocol.send_response(protocol.accept(events[0]))
    protocol.send_binary(openpi_pack({}))
    for data in protocol.data_to_send():
        connection.sendall(data)
    return connection
