"""How fast each client may ask: a token bucket of one second for each. Knows nothing about requests."""

from __future__ import annotations

import time
from collections.abc import Hashable

_MANY = 1024


class Rates:
    """Observations a second of each client.

    A client may spend what has come in, at most `per_second` (one second, at least one observation). What it spends
    beyond that is a debt, which it waits for.

    Args:
        per_second: observations a second; None for no limit.
    """

    def __init__(self, per_second: float | None) -> None:
        self._per_second = per_second
        self._most = max(1.0, per_second or 0.0)
        self._buckets: dict[Hashable, tuple[float, float]] = {}  # what may be spent, as of when

    def spend(self, client: Hashable, observations: int) -> float:
        """Spend so many; the seconds that the client must wait."""
        if self._per_second is None:
            return 0.0
        now = time.monotonic()
        if len(self._buckets) >= _MANY:
            self._buckets = {c: b for c, b in self._buckets.items() if self._now(b, now) < self._most}
        left = self._now(self._buckets.get(client, (self._most, now)), now) - observations
        self._buckets[client] = left, now
        return max(0.0, -left / self._per_second)

    def _now(self, bucket: tuple[float, float], now: float) -> float:
        left, then = bucket
        return min(self._most, left + (now - then) * (self._per_second or 0.0))
