"""A policy behind a websocket: the client's side of openpi's wire format.

On connect the server sends its metadata; then each request is one observation and each answer one
result, both msgpack maps in binary frames. Arrays travel as `{b"__ndarray__": True, b"data",
b"dtype", b"shape"}`, numpy scalars as `{b"__npgeneric__": True, b"data", b"dtype"}`. A text frame
is the server's traceback, after which the connection is closed.

Needs the packages `websockets` and `msgpack`, and no torch. It does not retry a request: a lost
answer is that episode's error, and the next `reset` connects again.
Source: openpi `packages/openpi-client` (`websocket_client_policy.py`, `msgpack_numpy.py`).
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from vla_accel.errors import ConfigError, DependencyError, EngineError

CONNECT_TIMEOUT_S = 10.0


class RemotePolicy:
    """`infer`, `reset` and `metadata` of a policy server.

    Args:
        address: `ws://host:port` or `wss://host:port`.
        timeout_s: seconds to wait for a connection and for each answer.

    Raises:
        ConfigError: the address is not a websocket address.
        EngineError: nobody answers there, or not in openpi's format.
        DependencyError: `websockets` or `msgpack` is not installed.
    """

    def __init__(self, address: str, *, timeout_s: float = 300.0) -> None:
        check_address(address)
        _import("msgpack")
        self.address = address
        self._timeout_s = timeout_s
        self._connection: Any = None
        self._stack = ExitStack()
        self.metadata: dict[str, Any] = {}
        self._connect()

    def infer(self, obs: dict[str, Any]) -> dict[str, Any]:
        """Send one observation (openpi's keys), return the server's result.

        Raises:
            EngineError: the server sent a traceback, closed the connection or did not answer.
        """
        connection = self._connection or self._connect()
        request = pack(obs)
        try:
            connection.send(request)
            answer = connection.recv(timeout=self._timeout_s)
        except Exception as error:  # closed, reset, timed out: none leaves a usable connection
            self.close()
            raise EngineError(f"policy server {self.address}: no answer ({type(error).__name__}: {error})") from error
        except BaseException:  # interrupted: a late answer must not meet the next request
            self.close()
            raise
        if isinstance(answer, str):
            self.close()
            last = answer.strip().splitlines()[-1] if answer.strip() else "an empty text frame"
            raise EngineError(f"policy server {self.address} reported: {last}")
        result = _unpack_map(answer, self.address)
        if "actions" not in result:
            raise EngineError(
                f"policy server {self.address}: expected actions in its answer, got {sorted(map(str, result))}"
            )
        return result

    def reset(self) -> None:
        """Nothing to forget; connects again if the last answer was lost."""
        if self._connection is None:
            self._connect()

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        self._connection = None
        self._stack.close()

    def _connect(self) -> Any:
        client = _import("websockets.sync.client")
        stack = ExitStack()  # holds the connection open beyond this call
        try:
            connection = stack.enter_context(
                client.connect(self.address, compression=None, max_size=None, open_timeout=CONNECT_TIMEOUT_S)
            )
        except Exception as error:
            raise EngineError(
                f"policy server {self.address}: cannot connect ({type(error).__name__}: {error})"
            ) from error
        try:
            self.metadata = self._hello(connection)
        except BaseException:
            stack.close()
            raise
        self._stack, self._connection = stack, connection
        return connection

    def _hello(self, connection: Any) -> dict[str, Any]:
        """The metadata that a server sends first."""
        try:
            hello = connection.recv(timeout=CONNECT_TIMEOUT_S)
        except Exception as error:
            raise EngineError(
                f"policy server {self.address}: connected, but it sent no metadata ({type(error).__name__}: {error})"
            ) from error
        if isinstance(hello, str):
            raise EngineError(f"policy server {self.address}: expected metadata, got text")
        return _unpack_map(hello, self.address)


def check_address(address: str) -> None:
    """Raise `ConfigError` unless `address` reads `ws://host[:port]` or `wss://host[:port]`."""
    try:
        parts = urlsplit(address)
        good = parts.scheme in ("ws", "wss") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or out of range
        good = False
    if not good:
        raise ConfigError(f"policy: expected ws://host:port, got {address!r}")


def pack(value: Any) -> bytes:
    """`value` (maps, lists, numbers, text, numpy arrays) as openpi's msgpack."""
    return _import("msgpack").packb(value, default=_encode)


def unpack(data: bytes) -> Any:
    """The inverse of `pack`; arrays come back read-only."""
    return _import("msgpack").unpackb(data, object_hook=_decode)


def _encode(value: Any) -> dict[bytes, Any]:
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in ("V", "O", "c"):
        raise EngineError(f"wire format: expected plain numbers, got dtype {value.dtype}")
    if isinstance(value, np.ndarray):
        return {
            b"__ndarray__": True,
            b"data": value.tobytes(),
            b"dtype": value.dtype.str,
            b"shape": value.shape,
        }
    if isinstance(value, np.generic):
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    raise EngineError(f"wire format: cannot send a {type(value).__name__}")


def _decode(value: dict[Any, Any]) -> Any:
    if b"__ndarray__" in value:
        return np.ndarray(buffer=value[b"data"], dtype=np.dtype(value[b"dtype"]), shape=value[b"shape"])
    if b"__npgeneric__" in value:
        return np.dtype(value[b"dtype"]).type(value[b"data"])
    return value


def _unpack_map(data: bytes, address: str) -> dict[str, Any]:
    try:
        value = unpack(data)
    except Exception as error:
        raise EngineError(
            f"policy server {address}: expected msgpack, got {len(data)} other bytes ({error})"
        ) from error
    if not isinstance(value, dict):
        raise EngineError(f"policy server {address}: expected a map, got a {type(value).__name__}")
    return value


def _import(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise DependencyError(
            f"a remote policy needs the package {name.partition('.')[0]}: "
            f"pip install {name.partition('.')[0]} ({error})"
        ) from error
