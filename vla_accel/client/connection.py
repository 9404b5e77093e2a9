"""websockets' client connection, which sends large messages from memory that it keeps, and whose two threads never use
OpenSSL at the same time (`tls`); and the proxy of a connection.

New memory for each message costs a page fault for every 4 KiB, far more than the copies.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import secrets
import socket
import ssl
import struct
import sys
import urllib.request
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from vla_accel.client.tls import TlsSocket
from vla_accel.errors import ConfigError, DependencyError

_HEADER = 16
"""Bytes for the header: it has at most 14, and the payload stays aligned."""
_BINARY, _MASKED = 0x82, 0x80


def websockets_client() -> Any:
    """The module `websockets.sync.client`, or DependencyError."""
    try:
        import websockets.sync.client
    except ImportError as error:
        raise DependencyError(f"a remote policy needs websockets: pip install 'vla_accel[serve]' ({error})") from error
    return websockets.sync.client


def connection_class() -> type:
    """A subclass of websockets' `ClientConnection` with `limit_sends`, `send_binary` and `abort`."""
    client = websockets_client()
    from websockets.exceptions import ConnectionClosed

    class Connection(client.ClientConnection):  # type: ignore[misc]
        def __init__(self, sock: Any, *arguments: Any, **options: Any) -> None:
            super().__init__(TlsSocket(sock) if isinstance(sock, ssl.SSLSocket) else sock, *arguments, **options)
            self._frame = Frame()

        def limit_sends(self, seconds: float) -> None:
            """Let sending fail once the server has read nothing for so many seconds."""
            seconds = min(seconds, 1e6)  # fits every platform's SO_SNDTIMEO
            if isinstance(self.socket, TlsSocket):
                self.socket.settimeout(seconds)
                return
            # Not `settimeout`, which would also limit the receiving thread.
            if sys.platform == "win32":
                limit = struct.pack("@L", math.ceil(seconds * 1e3))
            else:
                whole = int(seconds)
                limit = struct.pack("@ll", whole, max(int((seconds - whole) * 1e6), 1))
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

        def send_binary(self, message: memoryview) -> None:
            """Send one binary message. Raises what `send` raises, and TimeoutError after the limit of `limit_sends`."""
            try:
                with self.send_context():
                    self.protocol.writes.append(self._frame.of(message))
            except ConnectionClosed as error:
                if isinstance(error.__cause__, (TimeoutError, BlockingIOError)):
                    raise TimeoutError("the server does not read the message") from error
                raise

        def abort(self) -> None:
            """Shut the socket without a closing handshake, from any thread."""
            with contextlib.suppress(OSError):  # already closed
                self.socket.shutdown(socket.SHUT_RDWR)

    return Connection


class Frame:
    """A client's frames, all in the same memory."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.uint8)

    def of(self, message: bytes | memoryview) -> memoryview:
        """`message` as one masked binary frame (RFC 6455, 5.2), valid until the next call."""
        payload = np.frombuffer(message, np.uint8)
        size = len(payload)
        if len(self._buffer) < _HEADER + size:
            self._buffer = np.empty(_HEADER + size, np.uint8)
        key = secrets.token_bytes(4)
        short = size if size < 126 else 126 if size < 2**16 else 127
        length = b"" if size < 126 else size.to_bytes(2 if short == 126 else 8, "big")
        header = bytes((_BINARY, _MASKED | short)) + length + key
        begin, end, even = _HEADER - len(header), _HEADER + size, size // 8 * 8
        self._buffer[begin:_HEADER] = np.frombuffer(header, np.uint8)
        words = self._buffer[_HEADER : _HEADER + even].view(np.uint64)
        np.bitwise_xor(payload[:even].view(np.uint64), np.uint64(int.from_bytes(2 * key, sys.byteorder)), out=words)
        rest = np.frombuffer(2 * key, np.uint8)[: size - even]
        np.bitwise_xor(payload[even:], rest, out=self._buffer[_HEADER + even : end])
        return self._buffer.data[begin:end]


class Proxy:
    """The proxy `url` of a connection to `address`; None connects directly. `choice`: None or False for none, True for
    the environment's proxy, or a proxy's address. `through` and `hint` are parts of error messages.

    Raises ConfigError for an invalid choice.
    """

    def __init__(self, address: str, choice: Any) -> None:
        self.url: str | None = None
        self.through = self.hint = ""
        if isinstance(choice, str):
            parts = urlsplit(choice)
            schemes = ("http", "https", "socks4", "socks4a", "socks5", "socks5h")
            if parts.scheme not in schemes or not parts.hostname:
                raise ConfigError(f"proxy: expected http://host:port or socks5h://host:port, got {_public(choice)!r}")
            self.url = choice
        elif choice is True:
            self.url = _from_environment(address)
        elif choice not in (None, False):
            raise ConfigError(f"proxy: expected None, True or a proxy's address, got {choice!r}")
        if self.url is not None:
            self.through = f" through the proxy {_public(self.url)}"
        elif _is_public(address) and (unused := _from_environment(address)) is not None:
            self.hint = f"; the environment's proxy {_public(unused)} is not used: proxy=True"


def _from_environment(address: str) -> str | None:
    """The proxy for a websocket address from http_proxy, https_proxy, all_proxy and no_proxy."""
    parts = urlsplit(address)
    port = parts.port or (443 if parts.scheme == "wss" else 80)
    if urllib.request.proxy_bypass(f"{parts.hostname}:{port}"):
        return None
    known = urllib.request.getproxies()
    names = ("wss", "socks", "https", "all") if parts.scheme == "wss" else ("ws", "socks", "https", "http", "all")
    name = next((name for name in names if known.get(name)), None)
    if name == "socks":  # the operating system's setting may be http://host:port
        return known[name].replace("http://", "socks5h://", 1)
    return None if name is None else known[name]


def _is_public(address: str) -> bool:
    """Whether a server is outside this machine and its own network, as far as its address shows."""
    host = urlsplit(address).hostname or ""
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return "." in host and not host.endswith((".local", ".internal", ".lan"))


def _public(url: str) -> str:
    """A proxy's address without user and password."""
    return url.rpartition("@")[2]
