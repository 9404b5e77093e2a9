"""The client's side of openpi's websocket protocol, synchronous.

On connect the server sends its metadata; then each request is one observation and each answer one result, in binary
frames. A text frame is the server's error, after which the connection is closed. Knows nothing about what the
observations mean. Source: openpi, `packages/openpi-client` (`websocket_client_policy.py`).
"""

from __future__ import annotations

import contextlib
import logging
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlsplit

import numpy as np

from vla_accel.client.connection import connection_class, websockets_client
from vla_accel.client.proxies import Proxy
from vla_accel.errors import ConfigError, ServerError, WireError
from vla_accel.remote import wire
from vla_accel.remote.metadata import difference
from vla_accel.remote.numbers import above_zero, at_least, zero_or_more

logger = logging.getLogger("vla_accel.client")
T = TypeVar("T")

_CLOSE_TIMEOUT_S = 1.0
"""For the server to answer the closing handshake; one that hangs never does."""


@dataclass(frozen=True)
class Reconnect:
    """What happens when there is no connection.

    `attempts`: how often connecting is tried, when the client is made and when a request finds the connection lost.
    `wait_s`: seconds between two attempts. `resend`: send a request again, once, when its connection broke before the
    answer came; the server may then have computed it twice. A late answer or a reported error is never retried.
    """

    attempts: int = 1
    wait_s: float = 1.0
    resend: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "attempts", at_least(1, self.attempts, "reconnect: attempts"))
        object.__setattr__(self, "wait_s", zero_or_more(self.wait_s, "reconnect: wait_s"))


class PolicyChangedError(ServerError):
    """Another policy answers at the address than when the client was made."""


class PolicyClient:
    """`infer`, `reset` and `metadata` of a policy server. Calls from several threads are taken in turn.

    A client stays with the policy that it first met: if another one answers after a reconnect (another name, action
    size, horizon or robot in its metadata), every request is refused. Make a new client for another policy.

    Args:
        address: `ws://host:port` or `wss://host:port`.
        policy: its name, if the server has several; the address's path may name it instead.
        api_key: sent as `Authorization: Api-Key …`.
        tls_ca: file with the certificates to trust for `wss`; None for the system's.
        timeout_s: longest wait for an answer, in seconds; also for a server that stops reading the request.
        connect_timeout_s: longest wait for a connection and for its metadata, in seconds.
        reconnect: what happens when there is no connection.
        proxy: None connects directly, whatever `http_proxy` says, so that no observation passes through a proxy
            unasked. True takes the proxy that the environment names for this address; text is a proxy's address.

    Raises:
        ConfigError: no websocket address, a policy that the server does not have, or an argument out of its range.
        ServerError: nobody answers in openpi's format.
        DependencyError: `websockets` or `msgpack` is not installed.
    """

    def __init__(
        self,
        address: str,
        *,
        policy: str | None = None,
        api_key: str | None = None,
        tls_ca: str | Path | None = None,
        timeout_s: float = 60.0,
        connect_timeout_s: float = 10.0,
        reconnect: Reconnect | None = None,
        proxy: bool | str | None = None,
    ) -> None:
        check_address(address)
        timeout_s, connect_timeout_s = (
            above_zero(seconds, name)
            for name, seconds in (("timeout_s", timeout_s), ("connect_timeout_s", connect_timeout_s))
        )
        if api_key is not None:
            api_key = api_key.strip() if isinstance(api_key, str) else ""  # a file's last line ends in a newline
            if not (api_key and api_key.isascii() and api_key.isprintable()):
                raise ConfigError("api_key: expected printable ASCII characters, at least one")
        self.address = address
        self.metadata: dict[str, Any] = {}
        self._first: dict[str, Any] | None = None
        self._policy = policy
        self._proxy = Proxy(address, proxy)
        self._tls = None if tls_ca is None else _trusting(tls_ca)
        self._headers = {"Authorization": f"Api-Key {api_key}"} if api_key else None
        self._timeout_s, self._connect_timeout_s = timeout_s, connect_timeout_s
        self._reconnect = reconnect or Reconnect()
        self._lock = threading.RLock()
        self._interrupted = threading.Event()
        self._packer = wire.Packer()
        self._connection: Any = None
        self._stack = ExitStack()
        self._connect()

    def __enter__(self) -> PolicyClient:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # An exception that ended the block must not be replaced by one of the closing handshake.
        with contextlib.suppress(*(() if kind is None else (Exception,))):
            self.close()

    @property
    def supports_prev_chunk(self) -> bool:
        """Whether the server says that its policy takes `prev_chunk` and `inference_delay`."""
        return self.metadata.get(wire.REAL_TIME_CHUNKING) is True

    def infer(
        self,
        observation: Mapping[str, Any],
        *,
        prev_chunk: np.ndarray | None = None,
        inference_delay: int | None = None,
    ) -> dict[str, Any]:
        """Send one observation (openpi's keys), return the server's result; it holds `actions`.

        Args: `prev_chunk` (k, action_dim): the actions not yet executed; `inference_delay`: control ticks that will
        pass before the answer is used. They need a server that supports real-time chunking.
        Raises ServerError when the server reported an error, closed the connection or did not answer in time, and
        WireError for an observation that cannot be sent.
        """
        result = self._ask(self._request(observation, prev_chunk, inference_delay), wire.unpack_map)
        if "actions" not in result:
            raise ServerError(f"policy server {self.address}: expected actions in its answer, got {sorted(result)}")
        return result

    def infer_batch(self, observations: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Send several observations as one request, return their results in order. Needs a server of this package, or
        an openpi server with its pull request 941; raises as `infer`."""
        if not isinstance(observations, (list, tuple)):
            raise WireError(f"observations: expected a list of observations, got a {type(observations).__name__}")
        batch = [_as_map(one, f"observations[{index}]") for index, one in enumerate(observations)]
        results = self._ask({wire.BATCH: batch}, wire.unpack)
        if not isinstance(results, list) or len(results) != len(observations):
            raise ServerError(f"policy server {self.address}: expected a list of {len(observations)} results")
        return results

    def _ask(self, content: Mapping[str, Any], read: Callable[[bytes], T]) -> T:
        """Send a request; its answer, read."""
        if self._policy is not None:
            content = {**content, wire.POLICY: self._policy}
        with self._lock, self._packer.packed(content) as request:
            self._interrupted.clear()
            try:
                answer = self._exchange(request)
            except _LostConnection as lost:
                if self._interrupted.is_set():
                    raise ServerError(f"policy server {self.address}: closed while the request was under way") from None
                if not self._reconnect.resend:
                    raise ServerError(str(lost)) from lost.__cause__
                try:
                    answer = self._exchange(request)
                except _LostConnection as again:
                    raise ServerError(f"{again}, twice") from again.__cause__
            if isinstance(answer, str):
                self.close()
                last = answer.strip().splitlines()[-1] if answer.strip() else "an empty text frame"
                raise ServerError(f"policy server {self.address} reported: {last}")
            return self._read(answer, read)

    def reset(self) -> None:
        """Start an episode: a policy server keeps no state of it. Connects again if the connection was lost."""
        with self._lock:
            self._interrupted.clear()
            if self._connection is None:
                self._connect()

    def close(self) -> None:
        """Close the connection; the next request opens a new one.

        Does not wait for a request under way in another thread: its connection is shut, and it raises ServerError.
        """
        if not self._lock.acquire(blocking=False):
            self._interrupted.set()
            connection = self._connection
            if connection is not None:
                connection.abort()
            return
        try:
            self._connection = None
            self._stack.close()
        finally:
            self._lock.release()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _request(self, observation: Mapping[str, Any], prev_chunk: Any, inference_delay: int | None) -> dict[str, Any]:
        request = _as_map(observation, "observation")
        if prev_chunk is None and inference_delay is None:
            return request
        if prev_chunk is None or inference_delay is None:
            raise ConfigError("real-time chunking: expected prev_chunk and inference_delay together, got only one")
        if not self.supports_prev_chunk:
            raise ConfigError(f"policy server {self.address} does not support real-time chunking")
        return {**request, wire.PREV_CHUNK: np.asarray(prev_chunk), wire.INFERENCE_DELAY: inference_delay}

    def _exchange(self, request: memoryview) -> bytes | str:
        connection = self._connection or self._connect()
        try:
            if self._interrupted.is_set():  # closed while it connected
                raise ConnectionError("closed")
            end = time.monotonic() + self._timeout_s
            connection.send_binary(request)
            return connection.recv(timeout=max(end - time.monotonic(), 0.0))
        except TimeoutError as error:
            self.close()  # a late answer must not meet the next request
            raise ServerError(f"policy server {self.address}: no answer within {self._timeout_s:g} s") from error
        except Exception as error:  # closed, reset: neither leaves a usable connection
            self.close()
            why, closed = f"{type(error).__name__}: {error}", getattr(error, "rcvd", None)
            if closed is not None and closed.code == 1009:
                why = f"{closed.reason}; send smaller images, or let the server take more: --max-payload-mib"
            raise _LostConnection(f"policy server {self.address}: no answer ({why})") from error
        except BaseException:  # interrupted
            self.close()
            raise

    def _connect(self) -> Any:
        left = self._reconnect.attempts
        while True:
            left -= 1
            try:
                return self._connect_once()
            except PolicyChangedError:
                raise
            except ServerError:
                if not left:
                    raise
            if self._interrupted.wait(self._reconnect.wait_s):
                raise ServerError(f"policy server {self.address}: closed while it was waited for")

    def _connect_once(self) -> Any:
        client = websockets_client()
        from websockets.exceptions import InvalidMessage

        stack = ExitStack()  # holds the connection open beyond this call
        try:
            connection = stack.enter_context(
                client.connect(
                    self._url(),
                    create_connection=connection_class(),
                    compression=None,
                    max_size=None,
                    open_timeout=self._connect_timeout_s,
                    close_timeout=_CLOSE_TIMEOUT_S,
                    proxy=self._proxy.url,
                    # An openpi server answers no pings while it computes; each request has its own time limit.
                    ping_interval=None,
                    additional_headers=self._headers,
                    logger=_quiet(),
                    **({"ssl": self._tls} if self._tls else {}),
                )
            )
        except Exception as error:
            answer = getattr(error, "response", None)
            said = bytes(getattr(answer, "body", None) or b"")[:500].decode(errors="replace").strip()
            if self._policy is not None and getattr(answer, "status_code", 0) == 404:
                known = said.removesuffix(" as the path")
                own = urlsplit(self.address).path.strip("/")
                below = f", below the path {own!r:.60} of the address" if own else ""
                raise ConfigError(f"{known}, of the server {self.address}, got {self._policy!r:.60}{below}") from error
            hints = {401: "its key is missing or wrong: api_key", 404: said, 503: "it has no room for another client"}
            hint = hints.get(getattr(answer, "status_code", 0))
            if isinstance(error, ssl.SSLCertVerificationError):
                hint = "where its certificate is your own: tls_ca"
            elif isinstance(error, (ssl.SSLError, InvalidMessage)):
                hint = "a server with --tls-cert is asked by wss://, one without by ws://"
            raise ServerError(
                f"policy server {self.address}: cannot connect{self._proxy.through} ({type(error).__name__}: {error})"
                + (f"; {hint}" if hint else "")
                + self._proxy.hint
            ) from error
        try:
            self.metadata = self._hello(connection)
            self._check_policy()
            self._check_same()
        except BaseException:
            stack.close()
            raise
        connection.limit_sends(self._timeout_s)
        self._stack, self._connection = stack, connection
        return connection

    def _url(self) -> str:
        """The address with the policy at the end of its path, so that the metadata are this policy's. What is before it
        is a reverse proxy's; a server has no such path."""
        parts = urlsplit(self.address)
        if not isinstance(self._policy, str) or parts.query:
            return self.address
        if unquote(parts.path.rstrip("/").rpartition("/")[2]) == self._policy:
            return self.address
        return f"{self.address.rstrip('/')}/{quote(self._policy, safe='')}"

    def _hello(self, connection: Any) -> dict[str, Any]:
        """The metadata that a server sends first."""
        try:
            hello = connection.recv(timeout=self._connect_timeout_s)
        except Exception as error:
            raise ServerError(
                f"policy server {self.address}: connected, but it sent no metadata ({type(error).__name__}: {error})"
            ) from error
        if isinstance(hello, str):
            raise ServerError(f"policy server {self.address}: expected metadata, got text: {hello.strip()!r:.200}")
        return self._read(hello, wire.unpack_map)

    def _check_policy(self) -> None:
        """Raise ConfigError where the server would answer with another policy than the one asked for."""
        told = self.metadata.get(wire.POLICIES)
        names = told if isinstance(told, list) else []
        if self._policy is not None and self._policy not in names:
            known = f"one of {', '.join(map(str, names))}" if names else "none, as it serves only one"
            raise ConfigError(f"policy: expected {known}, of the server {self.address}, got {self._policy!r:.60}")
        path = urlsplit(self.address).path.strip("/")
        if path and not names and self._first is None:  # not an error: the path may be a reverse proxy's
            logger.warning("policy server %s: it has one policy, which answers whatever the path", self.address)

    def _check_same(self) -> None:
        """Raise PolicyChangedError if another policy answers than at the first connection."""
        if self._first is None:
            self._first = self.metadata
        if differs := difference(self._first, self.metadata):
            self.metadata = self._first
            raise PolicyChangedError(f"policy server {self.address}: {differs}; make a new client for another policy")

    def _read(self, data: bytes, read: Callable[[bytes], T]) -> T:
        try:
            return read(data)
        except WireError as error:
            self.close()
            raise ServerError(f"policy server {self.address}: {error}") from error


def _as_map(observation: Any, name: str) -> dict[str, Any]:
    if not isinstance(observation, Mapping):
        raise WireError(f"{name}: expected a mapping, got a {type(observation).__name__}")
    return dict(observation)


class _LostConnection(Exception):
    """The connection broke before the answer came."""


def _quiet() -> logging.Logger:
    """A logger for websockets, which writes every header at level DEBUG, the key among them."""
    logger = logging.getLogger("vla_accel.client.websockets")
    logger.setLevel(logging.INFO)
    return logger


def _trusting(file: str | Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"tls_ca {file}: expected certificates in PEM, got: {error}") from error


def check_address(address: str) -> None:
    """Raise ConfigError unless `address` reads `ws://host[:port]` or `wss://host[:port]`."""
    try:
        parts = urlsplit(address)
        good = isinstance(address, str) and parts.scheme in ("ws", "wss") and bool(parts.hostname) and parts.port != 0
    except (AttributeError, TypeError, ValueError):  # no text; a port that is no number, or out of range
        good = False
    if not good:
        raise ConfigError(f"policy: expected ws://host:port, got {address!r}")
