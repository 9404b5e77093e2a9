"""How many control ticks an inference takes, estimated from the newest ones."""

from __future__ import annotations

import math
from collections import deque

_KEPT = 10


class DelayEstimate:
    """The delay of the next inference in control ticks.

    With d(0) <= … <= d(n-1), the delays of the newest n <= 10 inferences in order of size, the estimate is

        expected = d(floor(4/5 * (n - 1))), and 1 for n = 0

    a quantile that one slow inference of two to six, or two of seven to ten, cannot move. A lasting change of speed
    moves it after at most three inferences. What is announced to a policy that is guided by the k actions left of the
    previous chunk is

        announced = max(0, min(expected, k - 1, max_delay))

    so that at least one action of the new chunk is free, and a policy that was trained for short delays never gets a
    longer one. An inference that takes more ticks than announced is still used; its join is merely not guided.

    Args:
        hz: control rate.
        max_delay: the largest delay that the policy accepts; None for any.
    """

    def __init__(self, hz: float, max_delay: int | None = None) -> None:
        self._hz, self._max_delay = hz, max_delay
        self._ticks: deque[int] = deque(maxlen=_KEPT)
        self._seconds: deque[float] = deque(maxlen=_KEPT)

    @property
    def measured(self) -> bool:
        """Whether any inference was measured."""
        return bool(self._ticks)

    @property
    def longest_ticks(self) -> int:
        """The longest of the newest delays; 0 before the first."""
        return max(self._ticks, default=0)

    @property
    def longest_s(self) -> float:
        """The longest of the newest inferences in seconds; 0 before the first."""
        return max(self._seconds, default=0.0)

    def add(self, ticks: int, seconds: float) -> None:
        """Take in an inference that took `seconds`, and `ticks` from its observation to its use."""
        self._ticks.append(ticks)
        self._seconds.append(seconds)

    def add_standing(self, seconds: float) -> None:
        """Take in an inference for which the robot stood still: it would have cost it `seconds` of ticks."""
        self.add(math.ceil(seconds * self._hz), seconds)

    def expected(self) -> int:
        """Ticks that the next inference will probably take."""
        if not self._ticks:
            return 1
        return sorted(self._ticks)[4 * (len(self._ticks) - 1) // 5]

    def announced(self, left: int) -> int:
        """The `inference_delay` to tell a policy that is guided by `left` actions."""
        most = left - 1 if self._max_delay is None else min(left - 1, self._max_delay)
        return max(0, min(self.expected(), most))
