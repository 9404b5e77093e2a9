"""What a server allows: one typed place for every limit. Knows nothing about how they are kept."""

from __future__ import annotations

import errno
import ipaddress
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from vla_accel.config.mapping import Checked
from vla_accel.errors import ConfigError


@dataclass(frozen=True)
class BatchLimits:
    """How many observations run together.

    Attributes:
        max_batch: observations of one turn, at most.
        max_observations: observations of one request, at most.
    """

    max_batch: int = 1
    max_observations: int = 64


@dataclass(frozen=True)
class ServerConfig(Checked):
    """Address, limits and batching of a policy server.

    Memory is bounded by `max_clients` times about three times `max_payload`: a frame being received, its message and
    its arrays; and 16 MiB for each replica that has a process of its own. One client has one request at a time under
    way; further frames wait in its own socket.
    """

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every network of this machine."""
    port: int = 8000
    """0 takes a free port."""
    api_key: str | None = None
    """Clients must send `Authorization: Api-Key …`; without a key and a file everyone is let in."""
    api_key_file: Path | None = None
    """Several keys, in lines `NAME: KEY`; the file is read again when it changes."""
    tls_cert: Path | None = None
    """Certificate chain in PEM; with it the server speaks wss and https."""
    tls_key: Path | None = None
    """Private key of the certificate, if it is not in the same file."""
    page: bool = True
    """Whether GET / is a live page."""
    max_payload: int = 16 * 2**20
    """Bytes of one message, at most."""
    max_clients: int = 64
    """Connections at once; a further one is answered 503."""
    request_timeout_s: float = 60.0
    """From a request's arrival to its result."""
    message_timeout_s: float = 30.0
    """From the first to the last byte of one message."""
    handshake_timeout_s: float = 2.0
    """From a connection's begin to the end of its handshake."""
    send_timeout_s: float = 10.0
    """For a client to take its answer."""
    grace_s: float = 30.0
    """At shutdown, for the requests under way to finish."""
    max_batch: int = 1
    """Observations run together, at most: 1, 2, 4, 8, …, because engines have fixed shapes; more than 1 needs a policy
    with `infer_batch`. A request with more of them gives way to other clients after each so many."""
    max_observations: int = BatchLimits.max_observations
    """Observations of one request (`{"batch": [...]}`), at most; more are an error."""
    rate_limit: float | None = None
    """Observations a second of each client, at most, on average over a second; a client that sends faster waits. None
    for no limit."""
    max_wait_s: float = 0.005
    """How long a batch waits to become full, where `max_batch` is above 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port: expected 0 to 65535, got {self.port}")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            raise ConfigError("api_key: expected printable ASCII characters, at least one")
        if self.api_key is not None and self.api_key_file is not None:
            raise ConfigError("api_key: expected api_key or api_key_file, got both")
        if self.tls_key is not None and self.tls_cert is None:
            raise ConfigError("tls_key: expected tls_cert, too, got none")
        if self.rate_limit is not None and not 0 < self.rate_limit < float("inf"):
            raise ConfigError(f"rate_limit: expected observations a second above 0, got {self.rate_limit}")
        for name in ("max_payload", "max_clients", "max_batch", "max_observations"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.max_batch & (self.max_batch - 1):
            lower = 1 << (self.max_batch.bit_length() - 1)
            raise ConfigError(
                f"max_batch: expected a power of two, such as {lower} or {2 * lower}, got {self.max_batch}"
            )
        if self.max_batch == 1 and self.max_wait_s != type(self).max_wait_s:
            raise ConfigError(f"max_wait_s: expected max_batch above 1 with it, got {self.max_wait_s} alone")
        for name in ("request", "message", "handshake", "send"):
            if not getattr(self, f"{name}_timeout_s") > 0:
                raise ConfigError(
                    f"{name}_timeout_s: expected seconds above 0, got {getattr(self, f'{name}_timeout_s')}"
                )
        for name in ("grace_s", "max_wait_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}: expected 0 or more seconds, got {getattr(self, name)}")

    @property
    def batches(self) -> BatchLimits:
        """The limits that replicas keep."""
        return BatchLimits(self.max_batch, self.max_observations)

    @property
    def beyond(self) -> bool:
        """Whether more than this machine reaches the address to listen on."""
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host != "localhost"

    def require_free(self) -> None:
        """Raise ConfigError if the address cannot be listened on: for before a policy is loaded."""
        try:
            found = socket.getaddrinfo(self.host or None, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, kind, protocol, _, address in found:
                with socket.socket(family, kind, protocol) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as asyncio's servers do
                    probe.bind(address)
        except OSError as error:
            free = "; --port 0 takes a free one" if error.errno == errno.EADDRINUSE else ""
            told = f"cannot listen on {self.host}:{self.port}: {error.strerror or error}{free}"
            raise ConfigError(told) from error

    def tls(self) -> ssl.SSLContext | None:
        """What encrypts connections; None where they travel in the clear. Raises ConfigError for files of no use."""
        if self.tls_cert is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.tls_cert, self.tls_key)
        except (OSError, ssl.SSLError) as error:
            named = f"{self.tls_cert}" + (f" and {self.tls_key}" if self.tls_key else "")
            own = "" if self.tls_key else "; a key in a file of its own: --tls-key"
            raise ConfigError(f"tls_cert: expected a certificate and its key in {named}, got: {error}{own}") from error
        return context
