"""What websockets makes of a client's bytes is the same whether it or `Reader` holds them, however they come."""

from __future__ import annotations

import contextlib
import random
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("websockets", reason="needs websockets")
pytest.importorskip("msgpack", reason="the wire format needs msgpack")

from websockets.protocol import SERVER, Protocol

from tests.remote.test_security import make_certificate
from tests.support.server_support import RawClient, frame_bytes, local, metric, server_process
from tests.support.waiting import eventually
from vla_accel.client import PolicyClient
from vla_accel.server import PolicyServer, background
from vla_accel.server.reader import Reader

__all__ = ["make_certificate"]

LIMIT = 400_000
LARGE = np.random.default_rng(0).bytes(300_000)
LATER = np.random.default_rng(1).bytes(100_001)


def frame(payload: bytes, **options: Any) -> bytes:
    return frame_bytes(payload, key=b"\x12\x34\xab\xcd", **options)


CLOSE = frame(struct.pack(">H", 1000), opcode=8)
STREAMS: dict[str, bytes] = {
    **{f"{size} bytes": frame(LARGE[:size]) + CLOSE for size in (0, 1, 125, 126, 4095, 4096, 4097, 65_535, 65_536)},
    "large": frame(LARGE) + CLOSE,
    "two at once": frame(LARGE) + frame(LATER) + frame(b"small") + CLOSE,
    "text": frame(b"a" * 10_000, opcode=1) + CLOSE,
    "in pieces": frame(LARGE[:9], fin=False)
    + frame(LARGE[9:99_999], opcode=0, fin=False)
    + frame(LARGE[99_999:], opcode=0),
    "pings between pieces": frame(LARGE[:5000], fin=False) + frame(b"hello", opcode=9) + frame(LARGE[5000:], opcode=0),
    "ping, then large": frame(b"hello", opcode=9) + frame(LARGE) + frame(b"", opcode=10),
    "too large": frame(LARGE, announced=LIMIT + 1),
    "too large in pieces": frame(LARGE, fin=False) + frame(LATER, opcode=0),
    "not masked": bytes([0x82, 126]) + struct.pack(">H", 10_000) + LARGE[:10_000],
    "reserved bits": b"\xf2" + frame(LARGE)[1:],
    "a ping that is too long": frame(LARGE[:10_000], opcode=9),
    "the rest of nothing": frame(LARGE, opcode=0),
    "a message within another": frame(LARGE[:5000], fin=False) + frame(LARGE),
    "no close": frame(LARGE),
    "cut off": frame(LARGE)[:-1],
    "cut off in the header": frame(LARGE)[:9],
    "cut off behind the header": frame(LARGE)[:14],
}
CUTS: dict[str, Callable[[random.Random], int]] = {
    "whole": lambda _: 2**30,
    "byte by byte at first": lambda r: 1 if r.random() < 0.99 else 2**30,
    "at random": lambda r: r.choice((1, 2, 3, 13, 4095, 4096, 4097, 50_000, 200_000)),
}


class Connection:
    """As much of websockets' connection as `Reader` needs, around the same parser."""

    def __init__(self) -> None:
        self.protocol = Protocol(SERVER, max_size=LIMIT)
        self.events: list[tuple[int, bytes, bool]] = []

    def data_received(self, data: bytes) -> None:
        self.protocol.receive_data(data)
        self.events += [(int(e.opcode), bytes(e.data), e.fin) for e in self.protocol.events_received()]  # type: ignore[union-attr]

    def eof_received(self) -> None:
        self.protocol.receive_eof()

    def outcome(self) -> list[Any]:
        """What it read, what it answered, how it ended."""
        state = self.protocol.close_code if self.protocol.state.name == "CLOSED" else self.protocol.state.name
        return [self.events, b"".join(self.protocol.data_to_send()), state, type(self.protocol.parser_exc)]


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("stream", STREAMS)
def test_websockets_reads_the_same(stream: str, cuts: str) -> None:
    own, ours, rng = Connection(), Connection(), random.Random(7)
    data = STREAMS[stream]
    own.data_received(data)
    reader, position = Reader(ours), 0
    while position < len(data):
        buffer = reader.get_buffer(-1)
        count = min(len(buffer), CUTS[cuts](rng), len(data) - position)
        buffer[:count] = data[position : position + count]
        position += count
        reader.buffer_updated(count)
    assert ours.outcome() == own.outcome()
    own.eof_received()
    reader.eof_received()
    assert ours.outcome() == own.outcome()


def test_it_knows_that_a_message_is_not_complete() -> None:
    connection = Connection()
    reader, data = Reader(connection), frame(LARGE)
    assert not reader.begun
    for begin, end in ((0, 14), (14, 100), (100, len(data) - 1)):
        while begin < end:
            buffer = reader.get_buffer(-1)
            count = min(len(buffer), end - begin)
            buffer[:count] = data[begin : begin + count]
            reader.buffer_updated(count)
            begin += count
        assert reader.begun and not connection.events
    reader.get_buffer(-1)[:1] = data[-1:]
    reader.buffer_updated(1)
    assert not reader.begun and connection.events == [(2, LARGE, True)]


class Mirror:
    """Sends back what it was sent."""

    def infer(self, observation: dict[str, Any]) -> dict[str, Any]:
        return {"actions": np.zeros((1, 7)), **observation}


@pytest.fixture(params=["uvloop", "asyncio"])
def _loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "uvloop":
        pytest.importorskip("uvloop")
    else:
        monkeypatch.setitem(sys.modules, "uvloop", None)


def mirrored(server: PolicyServer, **options: Any) -> None:
    """Messages of many sizes come back as they were."""
    with PolicyClient(server.address, **options) as client:
        for size in (1, 4000, 5000, 1_000_000, 300_000, 10, 150_000):
            image = np.random.default_rng(size).integers(0, 256, size, np.uint8)
            np.testing.assert_array_equal(client.infer({"image": image})["image"], image)


@pytest.mark.usefixtures("_loop")
def test_messages_come_back_as_they_were() -> None:
    with background(Mirror(), local()) as server:
        mirrored(server)
        for _ in range(2):  # lost within a message
            client = RawClient(server.address)
            client.socket.sendall(frame(LARGE)[:200_000])
            eventually(lambda: any(c.unfinished_since is not None for c in list(server._clients)))
            client.close()
            eventually(lambda: not server._clients)
        mirrored(server)


@pytest.mark.usefixtures("_loop")
def test_messages_come_back_as_they_were_over_tls(make_certificate: Callable[[str], tuple[Path, Path]]) -> None:
    cert, key = make_certificate("server")
    with background(Mirror(), local(tls_cert=cert, tls_key=key)) as server:
        mirrored(server, tls_ca=cert)


def test_what_is_only_announced_takes_no_memory() -> None:
    with server_process() as (address, _), contextlib.ExitStack() as stack:

        def client() -> RawClient:
            return stack.enter_context(contextlib.closing(RawClient(address)))

        refused = client()
        refused.send(bytes(16 * 10**6))  # memory that is given back, for others to take
        assert refused.frame()[0] == 1
        before = metric(address, "process_resident_memory_bytes")
        for _ in range(15):
            client().send(b"x", announced=16 * 2**20)
        assert metric(address, "process_resident_memory_bytes") - before < 30e6
