"""A TLS socket that one thread reads while another writes, as websockets' threaded client does.

OpenSSL allows only one thread at a time in a connection, but `ssl.SSLSocket` lets two in (CPython issue 143756): they
then corrupt each other's records, or wait forever.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import threading
from typing import Any


class TlsSocket:
    """The part of `socket.socket` that websockets uses, around a connected `ssl.SSLSocket`.

    OpenSSL runs under a lock and never waits there; threads wait for the socket outside the lock. `close` closes the
    socket once no thread waits for it.
    """

    def __init__(self, tls: ssl.SSLSocket) -> None:
        tls.setblocking(False)
        self._tls, self._timeout_s = tls, None
        self._lock, self._reading, self._writing = threading.Lock(), threading.Lock(), threading.Lock()

    def __getattr__(self, name: str) -> Any:  # getsockname, getpeername, fileno
        return getattr(self._tls, name)

    def settimeout(self, value: float | None) -> None:
        """Set how many seconds `sendall` may wait for the other side."""
        self._timeout_s = value

    def recv(self, bufsize: int) -> bytes:
        """Wait for data; empty at the end."""
        with self._reading:
            while True:
                try:
                    with self._lock:
                        return self._tls.recv(bufsize)
                except ssl.SSLWantReadError:
                    self._wait(selectors.EVENT_READ)
                except ssl.SSLWantWriteError:  # the other side renegotiates keys
                    self._wait(selectors.EVENT_WRITE)

    def sendall(self, data: bytes | memoryview) -> None:
        """Send everything. Raises TimeoutError if the other side reads nothing for the time of `settimeout`."""
        left = memoryview(data)
        with self._writing:
            while left:
                try:
                    with self._lock:
                        sent = self._tls.send(left)
                except ssl.SSLWantWriteError:
                    self._wait(selectors.EVENT_WRITE, self._timeout_s)
                else:
                    left = left[sent:]

    def shutdown(self, how: int) -> None:
        # Not SSLSocket's: after it, data that still arrives is no longer decrypted.
        socket.socket.shutdown(self._tls, how)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # already closed
            self.shutdown(socket.SHUT_RDWR)  # wakes the threads that wait
        with self._reading, self._writing:
            self._tls.close()

    def _wait(self, event: int, timeout_s: float | None = None) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._tls, event)
            if not selector.select(timeout_s):
                raise TimeoutError(f"the other side read nothing for {timeout_s:g} s")
