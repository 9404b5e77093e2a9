"""A TLS socket that one thread reads while another writes, as websockets' threaded client does.

OpenSSL allows one thread at a time in a connection, and `ssl.SSLSocket` lets two in (CPython issue 143756). They then
garble each other's records, or wait for one that never comes.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import threading
from typing import Any


class TlsSocket:
    """As much of the interface of `socket.socket` as websockets asks for, around a connected `ssl.SSLSocket`.

    OpenSSL is called under a lock and never waits there: waiting is for the socket, outside the lock. The socket is
    closed when nobody waits for it any more.
    """

    def __init__(self, tls: ssl.SSLSocket) -> None:
        tls.setblocking(False)
        self._tls, self._lock, self._timeout_s = tls, threading.Lock(), None
        self._reading, self._writing = threading.Lock(), threading.Lock()

    def __getattr__(self, name: str) -> Any:  # getsockname, getpeername, fileno
        return getattr(self._tls, name)

    def settimeout(self, value: float | None) -> None:
        """How long `sendall` may wait for room, in seconds."""
        self._timeout_s = value

    def recv(self, bufsize: int) -> bytes:
        """Wait for data; empty at its end."""
        with self._reading:
            while True:
                try:
                    with self._lock:
                        return self._tls.recv(bufsize)
                except ssl.SSLWantReadError:
                    self._wait(selectors.EVENT_READ)
                except ssl.SSLWantWriteError:  # the other side wants new keys
                    self._wait(selectors.EVENT_WRITE)

    def sendall(self, data: bytes | memoryview) -> None:
        """Raises TimeoutError if no more of it was taken for as long as `settimeout` said."""
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
        # Not SSLSocket's, after which what still comes is no longer decrypted.
        socket.socket.shutdown(self._tls, how)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # closed before, or by the other side
            self.shutdown(socket.SHUT_RDWR)  # wakes whoever waits
        with self._reading, self._writing:
            self._tls.close()

    def _wait(self, event: int, timeout_s: float | None = None) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._tls, event)
            if not selector.select(timeout_s):
                raise TimeoutError(f"the other side took nothing for {timeout_s:g} s")
