"""The configuration of a policy server: address, access, limits and batching."""

from __future__ import annotations

import errno
import ipaddress
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from vla_accel.config.mapping import Checked
from vla_accel.errors import ConfigError
from vla_accel.remote.numbers import above_zero, at_least, zero_or_more


@dataclass(frozen=True)
class BatchLimits:
    """The most observations of one turn, and of one request."""

    max_batch: int = 1
    max_observations: int = 64


@dataclass(frozen=True)
class ServerConfig(Checked):
    """Address, limits and batching of a policy server.

    Memory is bounded by about three times `max_clients * max_payload`, plus 16 MiB for each replica with a process of
    its own. Each client has at most one request under way; its further frames wait in its socket.
    """

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every network of this machine."""
    port: int = 8000
    """Port; 0 picks a free one."""
    api_key: str | None = None
    """Clients must send `Authorization: Api-Key …`. Without a key and a key file, every client is accepted."""
    api_key_file: Path | None = None
    """Several keys, in lines `NAME: KEY`. The file is read again when it changes."""
    tls_cert: Path | None = None
    """Certificate chain (PEM); with it the server speaks wss and https."""
    tls_key: Path | None = None
    """Private key of the certificate, if it is not in the same file."""
    page: bool = True
    """Whether GET / is a live page."""
    max_payload: int = 16 * 2**20
    """Largest message in bytes."""
    max_clients: int = 64
    """Most connections at once; further ones get status 503."""
    request_timeout_s: float = 60.0
    """From a request's arrival to its result."""
    message_timeout_s: float = 30.0
    """From the first to the last byte of one message."""
    handshake_timeout_s: float = 2.0
    """From the start of a connection to the end of its handshake."""
    send_timeout_s: float = 10.0
    """For a client to read its answer."""
    grace_s: float = 30.0
    """At shutdown, for requests under way to finish."""
    max_batch: int = 1
    """Most observations that run together: 1, 2, 4, 8, …, because engines have fixed shapes; more than 1 requires a
    policy with `infer_batch`. A larger request lets other clients run after each `max_batch` of them."""
    max_observations: int = BatchLimits.max_observations
    """Most observations of one request (`{"batch": [...]}`); more are an error."""
    rate_limit: float | None = None
    """Observations per second of each client, averaged over a second; a faster client waits. None for no limit."""
    max_wait_s: float = 0.005
    """How long a batch waits to become full, if `max_batch` is above 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port: expected 0 to 65535, got {self.port}")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            raise ConfigError("api_key: expected printable ASCII characters, at least one")
        if self.api_key is not None and self.api_key_file is not None:
            raise ConfigError("api_key: expected api_key or api_key_file, got both")
        if self.tls_key is not None and self.tls_cert is None:
            raise ConfigError("tls_key: expected tls_cert with it, got none")
        if self.rate_limit is not None:
            above_zero(self.rate_limit, "rate_limit", "observations per second")
        for name in ("max_payload", "max_clients", "max_batch", "max_observations"):
            at_least(1, getattr(self, name), name)
        if self.max_batch & (self.max_batch - 1):
            raise ConfigError(f"max_batch: expected a power of two (1, 2, 4, 8, …), got {self.max_batch}")
        if self.max_batch == 1 and self.max_wait_s != type(self).max_wait_s:
            raise ConfigError(f"max_wait_s: expected max_batch above 1 with it, got {self.max_wait_s} alone")
        for name in ("request_timeout_s", "message_timeout_s", "handshake_timeout_s", "send_timeout_s"):
            above_zero(getattr(self, name), name)
        for name in ("grace_s", "max_wait_s"):
            zero_or_more(getattr(self, name), name)

    @property
    def batches(self) -> BatchLimits:
        """The limits that replicas apply."""
        return BatchLimits(self.max_batch, self.max_observations)

    @property
    def public(self) -> bool:
        """Whether other machines can reach the address."""
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host != "localhost"

    def require_free(self) -> None:
        """Raise ConfigError if the address is in use or invalid: check this before loading a policy."""
        try:
            found = socket.getaddrinfo(self.host or None, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, kind, protocol, _, address in found:
                with socket.socket(family, kind, protocol) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as asyncio's servers do
                    probe.bind(address)
        except OSError as error:
            hint = "; --port 0 picks a free one" if error.errno == errno.EADDRINUSE else ""
            raise ConfigError(f"cannot listen on {self.host}:{self.port}: {error.strerror or error}{hint}") from error

    def tls(self) -> ssl.SSLContext | None:
        """The TLS context, or None without a certificate. Raises ConfigError for unusable files."""
        if self.tls_cert is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.tls_cert, self.tls_key)
        except (OSError, ssl.SSLError) as error:
            files = f"{self.tls_cert} and {self.tls_key}" if self.tls_key else f"{self.tls_cert} (or pass --tls-key)"
            raise ConfigError(f"tls_cert: expected a certificate and its key in {files}, got: {error}") from error
        return context
