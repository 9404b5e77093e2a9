"""A policy behind a websocket, as the evaluation uses it: any openpi-compatible server.

A request is never repeated: a lost answer is that episode's error, and the next `reset` connects again. The protocol
itself is `vla_accel.client`'s.
"""

from __future__ import annotations

from vla_accel.client import PolicyClient, check_address

__all__ = ["RemotePolicy", "check_address"]

ANSWER_TIMEOUT_S = 300.0  # a server may compile at its first request


class RemotePolicy(PolicyClient):
    """The policy at `address` (`ws://host:port`); raises as `PolicyClient` does."""

    def __init__(self, address: str, *, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        super().__init__(address, timeout_s=timeout_s)
