"""websockets' server connection, with three additions: a clock for unfinished messages, a limit on open sockets, and
long payloads that are read from the socket into their final memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from vla_accel.errors import DependencyError

SPARE_SOCKETS = 32
"""Sockets beyond `max_clients`, for handshakes, health checks and metrics."""
_SHORT = 2**12
"""Reads and payloads up to this many bytes use websockets' own buffer."""


def websockets_server() -> Any:
    """The module `websockets.asyncio.server`. Raises DependencyError if it is missing."""
    try:
        import websockets.asyncio.server
    except ImportError as error:
        raise DependencyError(f"the server needs websockets: pip install 'vla_accel[serve]' ({error})") from error
    return websockets.asyncio.server


def connection_class(max_sockets: int, on_refused: Callable[[str], None]) -> type:
    """A subclass of websockets' `ServerConnection`.

    At most `max_sockets` TCP connections are open at once. For one more, the oldest whose handshake is unfinished is
    dropped (the new one itself, if all others have finished), and `on_refused` is called. So connections that never
    shake hands keep no client out.
    """
    from websockets.protocol import CONNECTING

    base = websockets_server().ServerConnection
    connections: dict[Any, None] = {}  # oldest first

    class Connection(base):  # type: ignore[misc,valid-type]
        busy = False  # set by the server while it works for this client; unfinished messages may then wait
        key: str | None = None  # the name of the client's API key
        on_gone: Callable[[], None] | None = None  # called when the connection is lost
        unfinished_since: float | None = None  # arrival of the first byte of an incomplete message
        _fragmented = False

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._reader = Reader(self)
            transport.set_protocol(self._reader)
            connections[self] = None
            if len(connections) > max_sockets:
                oldest = next(c for c in connections if c.protocol.state is CONNECTING)
                del connections[oldest]
                on_refused("sockets")
                oldest.transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            connections.pop(self, None)
            self.unfinished_since = None
            super().connection_lost(exc)
            if self.on_gone is not None:
                self.on_gone()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if not self._reader.incomplete and not self._fragmented:
                self.unfinished_since = None
            elif self.unfinished_since is None:
                self.unfinished_since = time.monotonic()

        def process_event(self, event: Any) -> None:
            opcode = getattr(event, "opcode", None)  # the handshake has none
            if opcode is not None and opcode < 8:  # control frames may come between fragments
                self._fragmented = not event.fin
                if event.fin:
                    self.unfinished_since = None  # the next message has a clock of its own
            super().process_event(event)

    return Connection


class Reader(asyncio.BufferedProtocol):
    """Passes a transport's bytes and events to a websockets connection.

    It reads long payloads straight into the memory in which websockets unmasks them, which saves two copies.
    """

    def __init__(self, connection: Any) -> None:
        self._connection, self._stream = connection, connection.protocol.reader
        self._read_short, self._stream.read_exact = self._stream.read_exact, self._read_exact
        self._short = memoryview(bytearray(_SHORT))
        self._missing = memoryview(b"")  # destination of the rest of a long payload
        self.eof_received, self.connection_lost = connection.eof_received, connection.connection_lost
        self.pause_writing, self.resume_writing = connection.pause_writing, connection.resume_writing

    @property
    def incomplete(self) -> bool:
        """Whether part of a frame has arrived."""
        return bool(self._missing or self._stream.buffer)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._missing or self._short

    def buffer_updated(self, nbytes: int) -> None:
        if not self._missing:
            self._connection.data_received(bytes(self._short[:nbytes]))
            return
        self._missing = self._missing[nbytes:]
        if not self._missing:
            self._connection.data_received(b"")  # resume the parser

    def _read_exact(self, n: int) -> Generator[None, None, Any]:
        """Replaces websockets' `StreamReader.read_exact`."""
        if n <= _SHORT:
            return (yield from self._read_short(n))
        # Not a bytearray: filling it with zeros would commit as much memory as a client announces.
        payload = np.empty(n, np.uint8).data
        buffered = self._stream.buffer  # the rest of one read, so shorter than the payload
        payload[: len(buffered)] = buffered
        self._missing = payload[len(buffered) :]
        buffered.clear()
        while self._missing:
            if self._stream.eof:
                raise EOFError(f"stream ends {len(self._missing)} bytes before the end of a payload of {n} bytes")
            yield
        return payload
