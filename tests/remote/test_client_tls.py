"""Two threads of a client share one TLS connection."""

from __future__ import annotations

import queue
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("websockets", reason="needs websockets")

from tests.support.waiting import PATIENCE_S
from vla_accel.client.tls import TlsSocket

Pair = tuple[ssl.SSLSocket, ssl.SSLSocket]


@pytest.fixture
def pair(make_certificate: Callable[[str], tuple[Path, Path]]) -> Iterator[Pair]:
    """A connected server's and client's socket."""
    cert, key = make_certificate("server")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    near, far = socket.socketpair()
    accepted: list[ssl.SSLSocket] = []
    thread = threading.Thread(target=lambda: accepted.append(context.wrap_socket(far, server_side=True)))
    thread.start()
    client = ssl.create_default_context(cafile=cert).wrap_socket(near, server_hostname="127.0.0.1")
    thread.join(PATIENCE_S)
    with accepted[0] as server, client:
        yield server, client


def pump(end: TlsSocket, count: int, message: bytes) -> Callable[[], bytes]:
    """Send `count` messages in a thread; the returned function reads as many in the caller's."""
    thread = threading.Thread(target=lambda: [end.sendall(message) for _ in range(count)], daemon=True)
    thread.start()

    def read() -> bytes:
        found = bytearray()
        while len(found) < count * len(message) and (data := end.recv(2**16)):
            found += data
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        return bytes(found)

    return read


@pytest.mark.parametrize(("count", "size"), [(5000, 40), (60, 300_000)])
def test_one_thread_reads_while_another_writes(pair: Pair, count: int, size: int) -> None:
    """Without the lock both cases fail within a second, with a bad record or a deadlock."""
    ends = [TlsSocket(one) for one in pair]
    sent = [bytes([number]) * size for number in (1, 2)]
    reads = [pump(end, count, message) for end, message in zip(ends, sent, strict=True)]
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(reads[0]()), daemon=True)
    thread.start()
    assert reads[1]() == sent[0] * count
    thread.join(PATIENCE_S)
    assert found == [sent[1] * count]


@pytest.mark.parametrize("_again", range(50))
def test_closing_wakes_waiting_threads(pair: Pair, _again: int) -> None:
    """At any moment: if `close` did not wait for the threads, some would wait forever on a closed descriptor."""
    client, ends = TlsSocket(pair[1]), queue.Queue[Any]()

    def run(call: Callable[[], Any]) -> None:
        try:
            ends.put(call())
        except OSError as error:
            ends.put(error)

    for call in (lambda: client.recv(10), lambda: client.sendall(bytes(100_000_000))):
        threading.Thread(target=run, args=(call,), daemon=True).start()
    client.close()
    for _ in range(2):
        end = ends.get(timeout=PATIENCE_S)
        assert end == b"" or isinstance(end, OSError)
    client.close()


def test_data_after_a_shutdown_can_be_read(pair: Pair) -> None:
    server, client = TlsSocket(pair[0]), TlsSocket(pair[1])
    client.shutdown(socket.SHUT_WR)
    server.sendall(b"still")
    assert client.recv(10) == b"still"


def test_sending_to_a_full_socket_times_out(pair: Pair) -> None:
    client = TlsSocket(pair[1])
    client.settimeout(0.01)
    with pytest.raises(TimeoutError, match=r"the other side read nothing for 0\.01 s"):
        client.sendall(bytes(100_000_000))
