"""Two threads of a client share one TLS connection."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("websockets", reason="needs websockets")

from tests.support.waiting import PATIENCE_S
from vla_accel.client.tls import TlsSocket

Pair = tuple[TlsSocket, TlsSocket]


@pytest.fixture
def pair(make_certificate: Callable[[str], tuple[Path, Path]]) -> Iterator[Pair]:
    """A connected server's and client's socket."""
    cert, key = make_certificate("server")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    near, far = socket.socketpair()
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(context.wrap_socket, far, server_side=True)
        client = ssl.create_default_context(cafile=cert).wrap_socket(near, server_hostname="127.0.0.1")
    with accepted.result(PATIENCE_S) as server, client:
        yield TlsSocket(server), TlsSocket(client)


@pytest.mark.parametrize(("count", "size"), [(5000, 40), (60, 300_000)])
def test_one_thread_reads_while_another_writes(pair: Pair, count: int, size: int) -> None:
    """Without the lock both cases fail within a second, with a bad record or a deadlock."""

    def write(end: TlsSocket, message: bytes) -> None:
        for _ in range(count):
            end.sendall(message)

    def read(end: TlsSocket) -> bytes:
        found = bytearray()
        while len(found) < count * size and (data := end.recv(2**16)):
            found += data
        return bytes(found)

    messages = [bytes([number]) * size for number in (1, 2)]
    with ThreadPoolExecutor(4) as pool:
        writes = [pool.submit(write, end, message) for end, message in zip(pair, messages, strict=True)]
        reads = [pool.submit(read, end) for end in reversed(pair)]
        assert [one.result(PATIENCE_S) for one in reads] == [message * count for message in messages]
        assert [one.result(PATIENCE_S) for one in writes] == [None, None]


@pytest.mark.parametrize("_again", range(50))
def test_closing_wakes_waiting_threads(pair: Pair, _again: int) -> None:
    """At any moment: if `close` did not wait for the threads, some would wait forever on a closed descriptor."""
    client = pair[1]
    with ThreadPoolExecutor(2) as pool:
        ends = pool.submit(client.recv, 10), pool.submit(client.sendall, bytes(100_000_000))
        client.close()
        for end in ends:
            error = end.exception(PATIENCE_S)
            assert isinstance(error, OSError) if error else end.result() == b""
    client.close()


def test_data_after_a_shutdown_can_be_read(pair: Pair) -> None:
    server, client = pair
    client.shutdown(socket.SHUT_WR)
    server.sendall(b"still")
    assert client.recv(10) == b"still"


def test_sending_to_a_full_socket_times_out(pair: Pair) -> None:
    pair[1].settimeout(0.01)
    with pytest.raises(TimeoutError, match=r"the other side read nothing for 0\.01 s"):
        pair[1].sendall(bytes(100_000_000))
