"""The last five minutes: quantiles of latencies and the rate of requests, in bounded memory. Knows no requests."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict, deque

WINDOW_S = 300.0
_SLOT_S = 10.0
_GROWTH = 1.04
"""From one bucket's bound to the next: quantiles are right to 2 %."""
_FINEST_S = 1e-6


class Recent:
    """Durations by name, in slots of ten seconds, of which the oldest fall out.

    The whole window's counts are kept beside the slots': what is asked for on the event loop must cost little.
    """

    def __init__(self) -> None:
        self._slots: deque[tuple[int, defaultdict[str, Counter[int]]]] = deque()
        self._whole: defaultdict[str, Counter[int]] = defaultdict(Counter)

    def add(self, name: str, seconds: float) -> None:
        """Take in a duration."""
        bucket = round(math.log(max(seconds, _FINEST_S) / _FINEST_S, _GROWTH))
        for counts in (self._now(), self._whole):
            counts[name][bucket] += 1

    def names(self) -> list[str]:
        """What was added in the window."""
        self._now()
        return list(self._whole)

    def quantile(self, name: str, share: float) -> float:
        """The duration that a share of those in the window stays below, in seconds; NaN where there is none."""
        self._now()
        counts = self._whole.get(name, Counter())
        left = math.ceil(share * counts.total())
        for bucket in sorted(counts):
            left -= counts[bucket]
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

    def _now(self) -> defaultdict[str, Counter[int]]:
        """The slot under way; those beyond the window are dropped."""
        number = int(time.monotonic() / _SLOT_S)
        while self._slots and self._slots[0][0] <= number - WINDOW_S / _SLOT_S:
            for name, counts in self._slots.popleft()[1].items():
                self._whole[name] -= counts  # what falls to zero is no longer in it
                if not self._whole[name]:
                    del self._whole[name]
        if not self._slots or self._slots[-1][0] != number:
            self._slots.append((number, defaultdict(Counter)))
        return self._slots[-1][1]
