"""A synchronous client of openpi's websocket protocol.

The server sends its metadata on connect. Each request is then one observation and each answer one result, in binary
frames. A text frame is the server's error, after which it closes the connection.
Source: openpi, `packages/openpi-client` (`websocket_client_policy.py`).
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

from vla_accel.client.connection import Proxy, connection_class, websockets_client
from vla_accel.errors import ConfigError, ServerError, WireError
from vla_accel.files import user_path
from vla_accel.remote import wire
from vla_accel.remote.metadata import difference, starts_warm
from vla_accel.remote.numbers import above_zero, at_least, zero_or_more
from vla_accel.transforms.history import History

logger = logging.getLogger("vla_accel.client")
T = TypeVar("T")

_CLOSE_TIMEOUT_S = 1.0
"""For the closing handshake, which a server that hangs never answers."""


@dataclass(frozen=True)
class Reconnect:
    """What to do without a connection.

    Args:
        attempts: attempts to connect, when the client is made and when a request finds the connection lost.
        wait_s: seconds between two attempts.
        resend: send a request once more if its connection broke before the answer; the server may then have computed it
            twice. Timeouts and reported errors are never retried.
    """

    attempts: int = 1
    wait_s: float = 1.0
    resend: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "attempts", at_least(1, self.attempts, "reconnect: attempts"))
        object.__setattr__(self, "wait_s", zero_or_more(self.wait_s, "reconnect: wait_s"))


class PolicyChangedError(ServerError):
    """Another policy answers at the address than at the first connection."""


class _LostConnection(Exception):
    """The connection broke before the answer arrived."""


class PolicyClient:
    """`infer`, `reset` and `metadata` of a policy server. Several threads may share a client; their calls take turns.

    If another policy answers after a reconnect (another name, action size, horizon or robot in its metadata), every
    request raises `PolicyChangedError`. Make a new client for another policy.

    Args:
        address: `ws://host:port` or `wss://host:port`.
        policy: the policy's name, if the server has several; the address's path may name it instead.
        api_key: sent as `Authorization: Api-Key …`.
        tls_ca: file with the certificates to trust for `wss`; None for the system's.
        timeout_s: longest wait for an answer in seconds; also for a server that stops reading the request.
        connect_timeout_s: longest wait for a connection and for its metadata in seconds.
        reconnect: what to do without a connection.
        proxy: None connects directly and ignores `http_proxy`, so that no observation passes through a proxy by
            accident. True uses the environment's proxy for this address; a string is a proxy's address.

    Raises:
        ConfigError: an invalid argument, or a policy that the server does not have.
        ServerError: no server of openpi's protocol answers.
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
        self._timeout_s = above_zero(timeout_s, "timeout_s")
        self._connect_timeout_s = above_zero(connect_timeout_s, "connect_timeout_s")
        if api_key is not None:
            api_key = api_key.strip() if isinstance(api_key, str) else ""  # a file's last line ends in a newline
            if not (api_key and api_key.isascii() and api_key.isprintable()):
                raise ConfigError("api_key: expected printable ASCII characters, at least one")
        self.address = address
        self.metadata: dict[str, Any] = {}
        self._first: dict[str, Any] | None = None
        self._policy = policy
        self._proxy = Proxy(address, proxy)
        try:
            self._tls = None if tls_ca is None else ssl.create_default_context(cafile=user_path(tls_ca))
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"tls_ca {tls_ca}: expected certificates in PEM, got: {error}") from error
        self._headers = {"Authorization": f"Api-Key {api_key}"} if api_key else None
        self._reconnect = reconnect or Reconnect()
        self._lock = threading.RLock()
        self._interrupted = threading.Event()
        self._packer = wire.Packer()
        self._connection: Any = None
        self._stack = ExitStack()
        self._connect()
        self._history = History.of(self.metadata)

    def __enter__(self) -> PolicyClient:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # An error of the closing handshake must not replace the exception that ended the block.
        with contextlib.suppress(*(() if kind is None else (Exception,))):
            self.close()

    @property
    def supports_prev_chunk(self) -> bool:
        """Whether the server's policy takes `prev_chunk` and `inference_delay`."""
        return self.metadata.get(wire.REAL_TIME_CHUNKING) is True

    def infer(
        self,
        observation: Mapping[str, Any],
        *,
        prev_chunk: np.ndarray | None = None,
        inference_delay: int | None = None,
    ) -> dict[str, Any]:
        """Send one observation and return the server's result.

        Args:
            observation: openpi's keys.
            prev_chunk: remaining actions (k, action_dim) of the previous chunk, for real-time chunking and for a policy
                with `warm_start` in its metadata.
            inference_delay: control ticks until the answer is used, with `prev_chunk`; may be absent with `warm_start`.

        Returns:
            The result; its `actions` are (n, action_dim).

        Raises:
            ServerError: the server reported an error, closed the connection or did not answer in time.
            WireError: the observation cannot be sent.
            ConfigError: the server does not support real-time chunking.
        """
        request = _as_map(observation if self._history is None else self._history.add(observation), "observation")
        if prev_chunk is not None or inference_delay is not None:
            if prev_chunk is None or (inference_delay is None and not starts_warm(self)):
                raise ConfigError("real-time chunking: expected prev_chunk and inference_delay together, got only one")
            if not self.supports_prev_chunk and (inference_delay is not None or not starts_warm(self)):
                raise ConfigError(f"{self} does not support real-time chunking")
            request[wire.PREV_CHUNK] = np.asarray(prev_chunk)
            if inference_delay is not None:
                request[wire.INFERENCE_DELAY] = inference_delay
        try:
            result = self._ask(request, wire.unpack_map)
        except ServerError:
            if self._history is not None:
                self._history.undo()
            raise
        if "actions" not in result:
            raise ServerError(f"{self}: expected actions in its answer, got {sorted(result)}")
        return result

    def observe(self, observation: Mapping[str, Any]) -> None:
        """Keep the observation of a control step without a request, for a policy that reads several of them (`history`
        in its metadata)."""
        if self._history is not None:
            self._history.add(observation)

    def infer_batch(self, observations: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Send several observations as one request and return their results in order.

        This requires a server of this package, or an openpi server with its pull request 941. Raises as `infer`.
        """
        if not isinstance(observations, (list, tuple)):
            raise WireError(f"observations: expected a list of observations, got a {type(observations).__name__}")
        batch = [_as_map(one, f"observations[{index}]") for index, one in enumerate(observations)]
        results = self._ask({wire.BATCH: batch}, wire.unpack)
        if not isinstance(results, list) or len(results) != len(observations):
            raise ServerError(f"{self}: expected a list of {len(observations)} results")
        return results

    def reset(self) -> None:
        """Begin an episode: forget earlier observations; reconnects if the connection was lost."""
        with self._lock:
            self._interrupted.clear()
            if self._history is not None:
                self._history.clear()
            if self._connection is None:
                self._connect()

    def close(self) -> None:
        """Close the connection; the next request opens a new one.

        Does not wait for a request of another thread: its connection is shut, and the request raises ServerError.
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

    def __str__(self) -> str:
        return f"policy server {self.address}"

    def _ask(self, content: Mapping[str, Any], read: Callable[[bytes], T]) -> T:
        if self._policy is not None:
            content = {**content, wire.POLICY: self._policy}
        with self._lock, self._packer.packed(content) as request:
            self._interrupted.clear()
            try:
                answer = self._exchange(request)
            except _LostConnection as lost:
                if self._interrupted.is_set():
                    raise ServerError(f"{self}: closed while the request was under way") from None
                if not self._reconnect.resend:
                    raise ServerError(str(lost)) from lost.__cause__
                try:
                    answer = self._exchange(request)
                except _LostConnection as again:
                    raise ServerError(f"{again}, twice") from again.__cause__
            if isinstance(answer, str):
                self.close()
                last = answer.strip().splitlines()[-1] if answer.strip() else "an empty text frame"
                raise ServerError(f"{self} reported: {last}")
            return self._read(answer, read)

    def _exchange(self, request: memoryview) -> bytes | str:
        connection = self._connection or self._connect()
        try:
            if self._interrupted.is_set():  # closed while it connected
                raise ConnectionError("closed")
            end = time.monotonic() + self._timeout_s
            connection.send_binary(request)
            return connection.recv(timeout=max(end - time.monotonic(), 0.0))
        except BaseException as error:
            self.close()  # a late answer must not become the next request's
            if isinstance(error, TimeoutError):
                raise ServerError(f"{self}: no answer within {self._timeout_s:g} s") from error
            if not isinstance(error, Exception):  # interrupted
                raise
            reason, closed = f"{type(error).__name__}: {error}", getattr(error, "rcvd", None)
            if closed is not None and closed.code == 1009:
                reason = f"{closed.reason}; send smaller images, or raise the server's --max-payload-mib"
            raise _LostConnection(f"{self}: no answer ({reason})") from error

    def _connect(self) -> Any:
        for left in reversed(range(self._reconnect.attempts)):
            try:
                return self._connect_once()
            except ServerError as error:
                if isinstance(error, PolicyChangedError) or not left:
                    raise
            if self._interrupted.wait(self._reconnect.wait_s):
                raise ServerError(f"{self}: closed while waiting to reconnect")
        raise AssertionError("at least one attempt")

    def _connect_once(self) -> Any:
        client = websockets_client()
        # websockets logs every header at level DEBUG, including the key.
        quiet = logging.getLogger("vla_accel.client.websockets")
        quiet.setLevel(logging.INFO)
        with ExitStack() as stack:
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
                        # An openpi server answers no pings while it computes; each request has its own timeout.
                        ping_interval=None,
                        additional_headers=self._headers,
                        logger=quiet,
                        **({"ssl": self._tls} if self._tls else {}),
                    )
                )
            except Exception as error:
                raise self._connection_error(error) from error
            try:
                frame = connection.recv(timeout=self._connect_timeout_s)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                raise ServerError(f"{self}: connected, but it sent no metadata ({reason})") from error
            if isinstance(frame, str):
                raise ServerError(f"{self}: expected metadata, got text: {frame.strip()!r:.200}")
            self.metadata = self._read(frame, wire.unpack_map)
            self._check_policy()
            connection.limit_sends(self._timeout_s)
            self._stack, self._connection = stack.pop_all(), connection
        return connection

    def _connection_error(self, error: Exception) -> Exception:
        """The error of an attempt to connect, with a hint at its cause."""
        from websockets.exceptions import InvalidMessage

        response = getattr(error, "response", None)
        status = getattr(response, "status_code", 0)
        body = bytes(getattr(response, "body", None) or b"")[:500].decode(errors="replace").strip()
        if self._policy is not None and status == 404:
            own = urlsplit(self.address).path.strip("/")
            below = f", below the path {own!r:.60} of the address" if own else ""
            expected = body.removesuffix(" as the path")
            return ConfigError(f"{expected}, of the server {self.address}, got {self._policy!r:.60}{below}")
        hint = {401: "its key is missing or wrong: api_key", 404: body, 503: "it accepts no more clients"}.get(status)
        if isinstance(error, ssl.SSLCertVerificationError):
            hint = "for a certificate of your own pass tls_ca"
        elif isinstance(error, (ssl.SSLError, InvalidMessage)):
            hint = "connect to a server with --tls-cert by wss://, to one without by ws://"
        reason = f"{type(error).__name__}: {error}"
        hint = f"; {hint}" if hint else ""
        return ServerError(f"{self}: cannot connect{self._proxy.through} ({reason}){hint}{self._proxy.hint}")

    def _url(self) -> str:
        """The address with the policy at the end of its path, so that the server sends this policy's metadata. The rest
        of the path belongs to a reverse proxy."""
        parts = urlsplit(self.address)
        last = unquote(parts.path.rstrip("/").rpartition("/")[2])
        if not isinstance(self._policy, str) or parts.query or last == self._policy:
            return self.address
        return f"{self.address.rstrip('/')}/{quote(self._policy, safe='')}"

    def _check_policy(self) -> None:
        """Raise ConfigError if the server does not have the requested policy, and PolicyChangedError if another policy
        answers than at the first connection."""
        value = self.metadata.get(wire.POLICIES)
        names = value if isinstance(value, list) else []
        if self._policy is not None and self._policy not in names:
            known = f"one of {', '.join(map(str, names))}" if names else "none, as it serves only one"
            raise ConfigError(f"policy: expected {known}, of the server {self.address}, got {self._policy!r:.60}")
        if self._first is None:
            self._first = self.metadata
            if urlsplit(self.address).path.strip("/") and not names:  # no error: it may be a reverse proxy's path
                logger.warning("%s: it has one policy, which answers whatever the path", self)
        if differs := difference(self._first, self.metadata):
            self.metadata = self._first
            raise PolicyChangedError(f"{self}: {differs}; make a new client for another policy")

    def _read(self, data: bytes, read: Callable[[bytes], T]) -> T:
        try:
            return read(data)
        except WireError as error:
            self.close()
            raise ServerError(f"{self}: {error}") from error


def _as_map(observation: Any, name: str) -> dict[str, Any]:
    if not isinstance(observation, Mapping):
        raise WireError(f"{name}: expected a mapping, got a {type(observation).__name__}")
    return dict(observation)


def read_key(path: str | Path) -> str:
    """Return the key in a file, for `PolicyClient(api_key=…)`. Raises ConfigError if the file cannot be read."""
    try:
        return user_path(path).read_text()
    except (OSError, TypeError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file {path}: expected a readable file, got: {error}") from error


def check_address(address: str) -> None:
    """Raise ConfigError unless `address` is `ws://host[:port]` or `wss://host[:port]`."""
    try:
        parts = urlsplit(address)
        valid = isinstance(address, str) and parts.scheme in ("ws", "wss") and bool(parts.hostname) and parts.port != 0
    except (AttributeError, TypeError, ValueError):  # not text, or an invalid port
        valid = False
    if not valid:
        raise ConfigError(f"policy: expected ws://host:port, got {address!r}")
