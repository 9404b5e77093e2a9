"""websockets' server connection, with two things it lacks: a clock on unfinished messages, a limit on open sockets.

Knows nothing about requests or policies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vla_accel.errors import DependencyError

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
    `unfinished_since`: the event loop's time of the first byte of a message that is not complete, or None.
    At most `max_sockets` TCP connections are open at once; one more is dropped, and `on_refused` told.
    """
    base = websockets_server().ServerConnection

    class Connection(base):  # type: ignore[misc,valid-type]
        busy = False
        unfinished_since: float | None = None
        _fragmented = False
        _open = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            Connection._open += 1
            if Connection._open > max_sockets:
                on_refused("sockets")
                transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            Connection._open -= 1
            self.unfinished_since = None
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if not self.protocol.reader.buffer and not self._fragmented:
                self.unfinished_since = None
            elif self.unfinished_since is None:
                self.unfinished_since = self.loop.time()

        def process_event(self, event: Any) -> None:
            opcode = getattr(event, "opcode", None)  # the handshake has none
            if opcode is not None and opcode < 8:  # control frames may come between fragments
                self._fragmented = not event.fin
                if event.fin:
                    self.unfinished_since = None  # what follows has a clock of its own
            super().process_event(event)

    return Connection
