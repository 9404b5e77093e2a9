"""How tests wait for what another thread or process is about to do, and how they keep a port for it."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator

PATIENCE_S = 90.0
"""Ends a hang. Nothing takes so long, however busy the machine is."""


def eventually(condition: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    """Wait until it holds."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@contextlib.contextmanager
def silent_port() -> Iterator[int]:
    """A port at which nobody listens, kept from everybody but a server that is told to take it."""
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
        kept.bind(("127.0.0.1", 0))
        yield kept.getsockname()[1]
