"""The last five minutes: quantiles of latencies and the rate of requests, in bounded memory. Knows no requests."""

from __future__ import annotations

import math
import time
from collections import Counter, deque

WINDOW_S = 300.0
_SLOT_S = 10.0
_GROWTH = 1.04
"""From one bucket's bound to the next: quantiles are right to 2 %."""
_FINEST_S = 1e-6


class Recent:
    """Durations by name, in slots of ten seconds, of which the oldest fall out."""

    def __init__(self) -> None:
        self._slots: deque[tuple[int, dict[str, Counter[int]]]] = deque()

    def add(self, name: str, seconds: float) -> None:
        """Take in a duration."""
        bucket = round(math.log(max(seconds, _FINEST_S) / _FINEST_S, _GROWTH))
        self._now().setdefault(name, Counter())[bucket] += 1

    def names(self) -> list[str]:
        """What was added in the window, in the order of its first appearance."""
        self._now()
        return list(dict.fromkeys(name for _, slot in self._slots for name in slot))

    def quantile(self, name: str, share: float) -> float:
        """The duration that a share of those in the window stays below, in seconds; NaN where there is none."""
        self._now()
        total: Counter[int] = Counter()
        for _, slot in self._slots:
            total.update(slot.get(name, {}))
        left = math.ceil(share * total.total())
        for bucket in sorted(total):
            left -= total[bucket]
            if left <= 0:
                return _FINEST_S * _GROWTH**bucket
        return math.nan

    def per_second(self, name: str) -> float:
        """How many came a second, over the last whole slot and the one under way."""
        self._now()
        now = time.monotonic()
        first = int(now / _SLOT_S) - 1
        count = sum(slot[name].total() for number, slot in self._slots if number >= first and name in slot)
        return count / (now - first * _SLOT_S)

    def _now(self) -> dict[str, Counter[int]]:
        """The slot under way; those beyond the window are dropped."""
        number = int(time.monotonic() / _SLOT_S)
        while self._slots and self._slots[0][0] <= number - WINDOW_S / _SLOT_S:
            self._slots.popleft()
        if not self._slots or self._slots[-1][0] != number:
            self._slots.append((number, {}))
        return self._slots[-1][1]
