"""What a server allows: one typed place for every limit. Knows nothing about how they are kept."""

from __future__ import annotations

from dataclasses import dataclass

from vla_accel.errors import ConfigError


@dataclass(frozen=True)
class ServerConfig:
    """Address, limits and batching of a policy server.

    Memory is bounded by `max_clients` times about three times `max_payload`: a frame being received, its message and
    its arrays. One client has one request at a time under way; further frames wait in its own socket.
    """

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every network of this machine."""
    port: int = 8000
    """0 takes a free port."""
    api_key: str | None = None
    """Clients must send `Authorization: Api-Key …`; None lets everyone in."""
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
    """Requests run together, at most; batches have a power of two of them, because engines have fixed shapes."""
    max_wait_s: float = 0.005
    """How long a batch waits to become full."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port: expected 0 to 65535, got {self.port}")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            raise ConfigError("api_key: expected printable ASCII characters, at least one")
        for name in ("max_payload", "max_clients", "max_batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1, got {getattr(self, name)}")
        for name in ("request", "message", "handshake", "send"):
            if not getattr(self, f"{name}_timeout_s") > 0:
                raise ConfigError(
                    f"{name}_timeout_s: expected seconds above 0, got {getattr(self, f'{name}_timeout_s')}"
                )
        for name in ("grace_s", "max_wait_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}: expected 0 or more seconds, got {getattr(self, name)}")
