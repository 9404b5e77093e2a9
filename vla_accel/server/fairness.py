"""Whose request runs next, and how fast each client may send."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
_MANY_CLIENTS = 1024


class FairQueue(Generic[T]):
    """Round robin over clients; first come, first served within one client."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Hashable, deque[T]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[T]:
        return (item for items in self._waiting.values() for item in items)

    def put(self, client: Hashable, item: T) -> None:
        """Add an item; a client without waiting items joins the end of the round."""
        self._waiting.setdefault(client, deque()).append(item)

    def put_first(self, client: Hashable, item: T) -> None:
        """Return an item whose turn it was: it comes next."""
        self._waiting.setdefault(client, deque()).appendleft(item)
        self._waiting.move_to_end(client, last=False)

    def pop(self) -> T:
        """Take the next item; its client moves to the end of the round."""
        client, items = self._waiting.popitem(last=False)
        item = items.popleft()
        if items:
            self._waiting[client] = items
        return item

    def remove(self, client: Hashable, item: T) -> None:
        """Remove an item if it is waiting."""
        items = self._waiting.get(client)
        if items is not None and item in items:
            items.remove(item)
            if not items:
                del self._waiting[client]


class RateLimit:
    """A token bucket of one second for each client, with `per_second` tokens; None for no limit."""

    def __init__(self, per_second: float | None) -> None:
        self._per_second = per_second
        self._capacity = max(1.0, per_second or 0.0)
        self._buckets: dict[Hashable, tuple[float, float]] = {}  # tokens, and the time of that level

    def spend(self, client: Hashable, observations: int) -> float:
        """Spend a token for each observation; returns the seconds that the client must wait."""
        if self._per_second is None:
            return 0.0
        now = time.monotonic()
        if len(self._buckets) >= _MANY_CLIENTS:  # full buckets carry no information
            self._buckets = {c: b for c, b in self._buckets.items() if self._level(b, now) < self._capacity}
        level = self._level(self._buckets.get(client, (self._capacity, now)), now) - observations
        self._buckets[client] = level, now
        return max(0.0, -level / self._per_second)

    def _level(self, bucket: tuple[float, float], now: float) -> float:
        level, then = bucket
        return min(self._capacity, level + (now - then) * (self._per_second or 0.0))
