"""websockets' server connection, with three things it lacks: a clock on unfinished messages, a limit on open sockets,
and long payloads that are read where they are needed (`reader`).

A socket without a finished handshake costs a stranger nothing, so the oldest of those goes when all places are taken.

Knows nothing about requests or policies.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vla_accel.errors import DependencyError
from vla_accel.server.reader import Reader

SPARE_SOCKETS = 32
"""Beyond the clients: for handshakes under way, health checks and metrics."""


def websockets_server() -> Any:
    """The module `websockets.asyncio.server`, or DependencyError."""
    try:
        import websockets.asyncio.server
    except ImportError as error:
        raise DependencyError(f"the server needs websockets: pip install 'vla_accel[serve]' ({error})") from error
    return websockets.asyncio.server


def connection_class(max_sockets: int, on_refused: Callable[[str], None]) -> type:
    """A subclass of websockets' `ServerConnection`.

    Attributes of its instances: `busy`: set by the server while it works for this client, when a message may wait;
    `key`: the name of the key that it was let in with; `on_gone`: called when the connection is lost;
    `unfinished_since`: when the first byte of a message came that is not complete (`time.monotonic`), or None.
    At most `max_sockets` TCP connections are open at once. One more takes the place of the oldest whose handshake is
    not finished (its own, where all others are); that one is dropped, and `on_refused` told.
    """
    from websockets.protocol import CONNECTING

    base = websockets_server().ServerConnection
    places: dict[Any, None] = {}  # in the order in which they came

    class Connection(base):  # type: ignore[misc,valid-type]
        busy = False
        key: str | None = None
        on_gone: Callable[[], None] | None = None
        unfinished_since: float | None = None
        _fragmented = False

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._reader = Reader(self)
            transport.set_protocol(self._reader)
            places[self] = None
            if len(places) > max_sockets:
                oldest = next(c for c in places if c.protocol.state is CONNECTING)
                del places[oldest]
                on_refused("sockets")
                oldest.transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            places.pop(self, None)
            self.unfinished_since = None
            super().connection_lost(exc)
            if self.on_gone is not None:
                self.on_gone()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if not self._reader.begun and not self._fragmented:
                self.unfinished_since = None
            elif self.unfinished_since is None:
                self.unfinished_since = time.monotonic()

        def process_event(self, event: Any) -> None:
            opcode = getattr(event, "opcode", None)  # the handshake has none
            if opcode is not None and opcode < 8:  # control frames may come between fragments
                self._fragmented = not event.fin
                if event.fin:
                    self.unfinished_since = None  # what follows has a clock of its own
            super().process_event(event)

    return Connection
