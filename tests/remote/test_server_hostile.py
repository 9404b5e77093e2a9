"""Clients that disconnect, stall, lie or send garbage: each gets its answer, and the next request works.

Also: websockets reads a client's bytes the same way with and without the server's `Reader`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from websockets.protocol import SERVER, Protocol

from tests.remote.fuzz_wire import CORPUS, outcome
from tests.remote.test_wire import HOSTILE, array, packed
from tests.support.openpi_wire import openpi_pack
from tests.support.server_support import (
    EchoPolicy,
    RawClient,
    actions_of,
    echo_process,
    frame_bytes,
    get,
    local,
    metric,
    observation,
    port_of,
)
from tests.support.waiting import PATIENCE_S, eventually
from vla_accel.client import PolicyClient
from vla_accel.remote.wire import unpack_map
from vla_accel.server import PolicyServer, app, background
from vla_accel.server.connection import Reader


@pytest.fixture(scope="module")
def server() -> Iterator[PolicyServer]:
    with background(EchoPolicy(), local(max_payload=300_000, max_clients=8)) as server:
        yield server


@pytest.fixture
def client(server: PolicyServer) -> Iterator[RawClient]:
    """A client of the server; after the test the next request works."""
    with contextlib.closing(RawClient(server.address)) as client:
        yield client
    assert actions_of(server, observation(5, image=True)) == 5
    eventually(lambda: metric(server.address, "vla_accel_clients") == 0)


def refused(server: PolicyServer, frame: bytes, opcode: int = 2) -> str:
    """Send one message and return the error that answers it; the connection must then close with 1011."""
    with contextlib.closing(RawClient(server.address)) as client:
        client.send(frame, opcode=opcode)
        opcode, payload = client.frame()
        assert opcode == 1 and client.close_code() == 1011, payload
    return payload.decode()


def test_every_malformed_message_gets_an_error(server: PolicyServer) -> None:
    corpus = [path.read_bytes() for path in CORPUS.glob("*.bin")]
    for data in [data for data, _ in HOSTILE.values()] + corpus:
        if outcome(data) != "a dict":
            said = refused(server, data)
            assert said.startswith("WireError: wire format: ") and len(said) < 300
    assert refused(server, b"hello", opcode=1) == "WireError: wire format: expected a binary frame, got text"
    assert actions_of(server, observation(2)) == 2


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (openpi_pack({"observation/stat": np.zeros(8)}), "ObservationError: observation: missing observation/state"),
        (openpi_pack(observation() | {"observation/state": np.zeros(7)}), r"expected 8 floats, got float64 (7,)"),
        (packed({"observation/state": array(dtype="|O"), "prompt": "x"}), "expected the dtype of plain numbers"),
        (openpi_pack([1, 2]), "WireError: wire format: expected a map, got a list"),
        (packed({1: 2}), "WireError: wire format: unreadable message"),
    ],
)
def test_a_wrong_observation_gets_an_error(server: PolicyServer, frame: bytes, said: str) -> None:
    assert said in refused(server, frame)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        *((frame_bytes(b"only the beginning", announced=size), 1009) for size in (300_001, 10**9, 2**62)),
        (frame_bytes(bytes(200_000), fin=False) + frame_bytes(bytes(200_000), opcode=0, fin=False), 1009),
        (b"\x82\x05hello", 1002),  # not masked
        (frame_bytes(b"x", opcode=3), 1002),
        (frame_bytes(b"x", opcode=0), 1002),  # the rest of nothing
        (b"\xf2\x81\0\0\0\0x", 1002),  # reserved bits
        (frame_bytes(bytes(126), opcode=9), 1002),  # a ping of more than 125 bytes
        (frame_bytes(b"\xff", opcode=1), 1007),
    ],
)
def test_broken_or_large_frames_end_the_connection(client: RawClient, data: bytes, code: int) -> None:
    client.socket.sendall(data)
    assert client.close_code() == code


def test_a_fragmented_message_with_pings_in_between_is_assembled(client: RawClient) -> None:
    data = openpi_pack(observation(1, 2))
    client.send(data[:10], fin=False)
    client.send(b"ping", opcode=9)
    client.send(data[10:50], opcode=0, fin=False)
    client.send(data[50:], opcode=0)
    assert client.frame() == (10, b"ping")
    opcode, answer = client.frame()
    assert opcode == 2 and unpack_map(answer)["actions"][0, 0] == 1


# -- clocks -------------------------------------------------------------------------------------------------------


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[PolicyServer, EchoPolicy]]:
    """A server that allows a message 1000 s and checks often; `pass_by` moves the clocks."""
    monkeypatch.setattr(app, "_CHECK_EVERY_S", 0.001)
    policy = EchoPolicy()
    with background(policy, local(message_timeout_s=1000)) as server:
        yield server, policy


def begun(server: PolicyServer) -> bool:
    """Whether the server has part of a message."""
    return any(client.unfinished_since is not None for client in list(server._clients))


def pass_by(server: PolicyServer, seconds: float) -> None:
    """Move the clocks of unfinished messages, and let the server's event loop check them."""

    async def move() -> None:
        for client in server._clients:
            if client.unfinished_since is not None:
                client.unfinished_since -= seconds
        await asyncio.sleep(0.01)  # longer than the server's interval

    assert server._loop is not None
    asyncio.run_coroutine_threadsafe(move(), server._loop).result(PATIENCE_S)


@pytest.mark.parametrize(
    "begin",
    [
        frame_bytes(b"x", fin=False),
        frame_bytes(bytes(100))[:3],
        frame_bytes(bytes(100_000))[:14],
        frame_bytes(bytes(100_000))[:50_000],
    ],
    ids=["fragments", "short", "long, none of it", "long"],
)
def test_a_stalled_message_ends_its_connection(patient: tuple[PolicyServer, EchoPolicy], begin: bytes) -> None:
    server, _ = patient
    client = RawClient(server.address)
    client.socket.sendall(begin)
    eventually(lambda: begun(server))
    pass_by(server, 600)
    # Progress, but no complete message.
    client.socket.sendall(b"x" if begin[0] & 128 else frame_bytes(b"x", opcode=0, fin=False))
    assert begun(server), "it has 400 s left"
    pass_by(server, 600)
    assert client.close_code() == 1008
    client.close()


@pytest.mark.parametrize("back_to_back", [False, True])
def test_each_message_has_a_clock_of_its_own(patient: tuple[PolicyServer, EchoPolicy], back_to_back: bool) -> None:
    """Together they take longer than one may; back to back, the server never sees the end of all that was sent."""
    server, data = patient[0], frame_bytes(openpi_pack(observation(3)))
    with contextlib.closing(RawClient(server.address)) as client:
        for index in range(6):
            if not (back_to_back and index):
                pass_by(server, 2000)
                assert not begun(server), "no clock runs between messages"
                client.socket.sendall(data[:20])
            eventually(lambda: begun(server))
            pass_by(server, 600)
            client.socket.sendall(data[20:] + data[:20] * back_to_back)
            assert unpack_map(client.frame()[1])["actions"][0, 0] == 3


@pytest.mark.slow
def test_a_client_that_sends_without_reading_is_slowed_down_and_answered_in_order(
    patient: tuple[PolicyServer, EchoPolicy],
) -> None:
    server, policy = patient
    policy.gate.clear()
    with contextlib.closing(RawClient(server.address)) as client:
        sent, data, big = 0, b"", np.zeros((300, 1000), np.uint8)
        with contextlib.suppress(TimeoutError):
            for index in range(200):
                data = frame_bytes(openpi_pack({**observation(index), "observation/image": big}))
                client.socket.settimeout(PATIENCE_S if index < 2 else 0.5)  # one is computed, and one waits
                client.socket.sendall(data)
                sent += 1
        assert 1 < sent < 100, "the server must stop reading while the policy is busy"
        for _ in range(2):
            pass_by(server, 900)  # the clock of its unfinished frame stops while the server is busy
        policy.gate.set()
        client.socket.settimeout(PATIENCE_S)
        for index in range(sent):
            assert unpack_map(client.frame()[1])["actions"][0, 0] == index


@pytest.mark.parametrize(
    "said",
    [b"", b"GET / HTTP/1.1\r\n", b"\x00" * 400, b"\x16\x03\x01\x02\x00\x01", b"POST / HTTP/1.1\r\n\r\n", b"A" * 99999],
)
def test_a_handshake_that_stalls_or_is_none_ends_the_connection(said: bytes) -> None:
    with background(EchoPolicy(), local(handshake_timeout_s=0.3)) as server:
        client = RawClient(server.address, handshake=False)
        with contextlib.suppress(ConnectionError):  # ends when the server closes; the socket's own patience is an error
            client.socket.sendall(said)
            while client.socket.recv(4096):
                pass
        client.close()
        assert get(server.address, "/elsewhere")[0] == 426


def test_idle_sockets_keep_no_client_out() -> None:
    """The server keeps 8 clients and 32 other sockets; of 200 idle ones it drops the oldest first."""
    limits = local(max_clients=8, handshake_timeout_s=3600)
    with background(EchoPolicy(), limits) as server, contextlib.ExitStack() as stack:
        early = stack.enter_context(PolicyClient(server.address))
        address = ("127.0.0.1", port_of(server.address))
        idle = []
        for _ in range(10):
            idle += [stack.enter_context(socket.create_connection(address, timeout=PATIENCE_S)) for _ in range(20)]
            pass_by(server, 0)  # beyond the system's backlog they would not arrive in order
        for index in range(7):
            client = stack.enter_context(PolicyClient(server.address, connect_timeout_s=PATIENCE_S))
            assert client.infer(observation(index))["actions"][0, 0] == index
        assert early.infer(observation(9))["actions"][0, 0] == 9, "a client is never dropped"
        dropped = 200 + 8 - 40
        for one in idle[:dropped]:
            with contextlib.suppress(ConnectionError):
                assert one.recv(1) == b""
        eventually(lambda: server.metrics.counters["refused"].get("sockets") == dropped)
        idle[-1].sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert idle[-1].recv(4096).startswith(b"HTTP/1.1 200"), "the newest is still open"


def test_a_client_that_does_not_read_its_answer_is_dropped() -> None:
    class Loud(EchoPolicy):
        def infer(self, observation: Any) -> Any:
            return {**super().infer(observation), "noise": np.zeros(20_000_000, np.uint8)}

    with background(Loud(), local(send_timeout_s=0.3)) as server:
        client = RawClient(server.address)
        client.send(openpi_pack(observation(1)))
        eventually(lambda: metric(server.address, 'vla_accel_refused_total{reason="slow reader"}') == 1)
        client.close()
        server.config = replace(server.config, send_timeout_s=PATIENCE_S)
        assert actions_of(server, observation(2)) == 2


def test_a_client_that_leaves_costs_nothing_more() -> None:
    """One leaves within a message, one while the policy computes, and two while they wait for their turns."""
    policy, data = EchoPolicy(held=True), openpi_pack(observation(1))
    gone = 'vla_accel_requests_total{outcome="client gone"}'
    with background(policy, local()) as server:
        sending, running, *waiting = (RawClient(server.address) for _ in range(4))
        sending.socket.sendall(frame_bytes(data)[:50])
        eventually(lambda: begun(server))
        sending.close()
        eventually(lambda: metric(server.address, "vla_accel_clients") == 3)
        assert metric(server.address, gone) == 0
        running.send(data)
        assert policy.entered.acquire(timeout=PATIENCE_S)
        for one in waiting:
            one.send(data)
        eventually(lambda: metric(server.address, "vla_accel_queue_depth") == 2)
        for one in (*waiting, running):
            one.close()
        eventually(lambda: metric(server.address, "vla_accel_clients") == 0)
        assert metric(server.address, "vla_accel_queue_depth") == 0
        policy.gate.set()
        assert actions_of(server, observation(2)) == 2 and policy.sizes == [1, 1]
        assert metric(server.address, gone) == 3
        assert "vla_accel_errors_total{" not in get(server.address, "/metrics")[2]


@pytest.mark.slow
def test_memory_stays_bounded_under_garbage_and_announced_payloads() -> None:
    frames = [data for data, _ in HOSTILE.values()] + [b"\xdd\x00\x0f\x42\x40" + b"\x80" * 1_000_000]
    with echo_process() as address, contextlib.ExitStack() as stack:

        def client() -> RawClient:
            return stack.enter_context(contextlib.closing(RawClient(address)))

        def round_of_garbage() -> None:
            for data in frames:
                one = client()
                one.send(data)
                assert one.frame()[0] == 1
                one.close()
            one = client()
            one.send(bytes(10), announced=10**9)
            assert one.close_code() == 1009

        client().send(bytes(16 * 10**6))  # its memory is freed, and used again
        for _ in range(2):
            round_of_garbage()
        before = metric(address, "process_resident_memory_bytes")
        for _ in range(6):
            round_of_garbage()
        for _ in range(15):
            client().send(b"x", announced=16 * 2**20)
        assert metric(address, "process_resident_memory_bytes") - before < 30e6


# -- the reader of long payloads --------------------------------------------------------------------------------------

LIMIT = 400_000
LARGE = np.random.default_rng(0).bytes(300_000)
LATER = np.random.default_rng(1).bytes(100_001)


def frame(payload: bytes, **options: Any) -> bytes:
    return frame_bytes(payload, key=b"\x12\x34\xab\xcd", **options)


CLOSE = frame(struct.pack(">H", 1000), opcode=8)
STREAMS: dict[str, bytes] = {
    **{f"{size} bytes": frame(LARGE[:size]) + CLOSE for size in (0, 125, 4095, 4096, 4097, 65_535, 65_536, 300_000)},
    "two at once": frame(LARGE) + frame(LATER) + frame(b"small") + CLOSE,
    "text": frame(b"a" * 10_000, opcode=1) + CLOSE,
    "in pieces": frame(LARGE[:9], fin=False)
    + frame(LARGE[9:99_999], opcode=0, fin=False)
    + frame(LARGE[99_999:], opcode=0),
    "pings between pieces": frame(LARGE[:5000], fin=False) + frame(b"hello", opcode=9) + frame(LARGE[5000:], opcode=0),
    "too large": frame(LARGE, announced=LIMIT + 1),
    "too large in pieces": frame(LARGE, fin=False) + frame(LATER, opcode=0),
    "not masked": bytes([0x82, 126]) + struct.pack(">H", 10_000) + LARGE[:10_000],
    "reserved bits": b"\xf2" + frame(LARGE)[1:],
    "a ping that is too long": frame(LARGE[:10_000], opcode=9),
    "a message within another": frame(LARGE[:5000], fin=False) + frame(LARGE),
    "truncated": frame(LARGE)[:-1],
    "truncated header": frame(LARGE)[:9],
}
CUTS: dict[str, Callable[[random.Random], int]] = {
    "whole": lambda _: 2**30,
    "byte by byte at first": lambda r: 1 if r.random() < 0.99 else 2**30,
    "at random": lambda r: r.choice((1, 2, 3, 13, 4095, 4096, 4097, 50_000, 200_000)),
}


class Connection:
    """The part of websockets' connection that `Reader` needs."""

    def __init__(self) -> None:
        self.protocol = Protocol(SERVER, max_size=LIMIT)
        self.events: list[Any] = []
        self.eof_received = self.protocol.receive_eof
        self.connection_lost = self.pause_writing = self.resume_writing = print

    def data_received(self, data: bytes) -> None:
        self.protocol.receive_data(data)
        self.events += [(int(e.opcode), bytes(e.data), e.fin) for e in self.protocol.events_received()]  # type: ignore[union-attr]

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


class Mirror:
    """Sends back what it was sent."""

    def infer(self, observation: dict[str, Any]) -> dict[str, Any]:
        return {"actions": np.zeros((1, 7)), **observation}


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_messages_of_every_size_arrive_unchanged(
    encrypted: bool, loop: str, make_certificate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if loop == "uvloop":
        pytest.importorskip("uvloop")
    else:
        monkeypatch.setitem(sys.modules, "uvloop", None)
    cert, key = make_certificate("server") if encrypted else (None, None)
    with background(Mirror(), local(tls_cert=cert, tls_key=key)) as server:
        if not encrypted:  # one leaves within a message
            lost = RawClient(server.address)
            lost.socket.sendall(frame(LARGE)[:200_000])
            eventually(lambda: begun(server))
            lost.close()
            eventually(lambda: not server._clients)
        with PolicyClient(server.address, tls_ca=cert) as client:
            for size in (1, 4000, 5000, 1_000_000, 300_000, 10, 150_000):
                image = np.random.default_rng(size).integers(0, 256, size, np.uint8)
                np.testing.assert_array_equal(client.infer({"image": image})["image"], image)
