"""Reads a long payload from the socket to where it is unmasked. Knows nothing about frames: websockets' parser asks for
so many bytes.

websockets' own way takes such a payload through two more copies, each in memory of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

import numpy as np

_SHORT = 2**12
"""Bytes of a read, and of a payload, that go websockets' own way."""


class Reader(asyncio.BufferedProtocol):
    """The protocol of a transport whose bytes and events all go to a websockets `connection`."""

    def __init__(self, connection: Any) -> None:
        self._connection, self._stream = connection, connection.protocol.reader
        self._read_short, self._stream.read_exact = self._stream.read_exact, self._read_exact
        self._short = memoryview(bytearray(_SHORT))
        self._missing = memoryview(b"")
        """Where the rest of a long payload goes."""

    @property
    def begun(self) -> bool:
        """Whether something is there that is not complete."""
        return bool(self._missing or self._stream.buffer)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._missing or self._short

    def buffer_updated(self, nbytes: int) -> None:
        if not self._missing:
            self._connection.data_received(bytes(self._short[:nbytes]))
            return
        self._missing = self._missing[nbytes:]
        if not self._missing:
            self._connection.data_received(b"")  # the parser goes on

    def eof_received(self) -> bool | None:
        return self._connection.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

    def _read_exact(self, n: int) -> Generator[None, None, Any]:
        """As websockets' `StreamReader.read_exact`."""
        if n <= _SHORT:
            return (yield from self._read_short(n))
        # Not a bytearray, whose zeros would take as much memory as a stranger announces.
        payload = np.empty(n, np.uint8).data
        here = self._stream.buffer  # the rest of one read, so less than n
        payload[: len(here)] = here
        self._missing = payload[len(here) :]
        here.clear()
        while self._missing:
            if self._stream.eof:
                raise EOFError(f"stream ends {len(self._missing)} bytes before the end of a payload of {n} bytes")
            yield
        return payload
