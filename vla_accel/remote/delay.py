"""An estimate of how many control ticks an inference takes."""

from __future__ import annotations

import math
from collections import deque


class DelayEstimate:
    """The delay of the next inference in control ticks, at the control rate `hz`.

    With d(0) <= … <= d(n-1), the sorted delays of the newest n <= 10 inferences, the estimate is

        expected = d(floor(4/5 * (n - 1))), and 1 for n = 0.

    One slow inference of two to six, or two of seven to ten, do not change it; a lasting change of speed does so after
    at most three inferences. The delay announced to a policy that is guided by the k remaining actions is

        announced = max(0, min(expected, k - 1, max_delay)),

    so that at least one action of the new chunk stays free, and a policy that was trained for short delays never
    gets a longer one. A chunk that arrives later is still used, but its first actions are not guided.
    """

    def __init__(self, hz: float, max_delay: int | None = None) -> None:
        self._hz, self._max_delay = hz, max_delay
        self._ticks: deque[int] = deque(maxlen=10)
        self._seconds: deque[float] = deque(maxlen=10)

    @property
    def measured(self) -> bool:
        """Whether any inference was measured."""
        return bool(self._ticks)

    @property
    def longest_ticks(self) -> int:
        """The longest of the newest delays; 0 without any."""
        return max(self._ticks, default=0)

    @property
    def longest_s(self) -> float:
        """The longest of the newest inferences in seconds; 0 without any."""
        return max(self._seconds, default=0.0)

    def add(self, seconds: float, ticks: int | None = None) -> None:
        """Record an inference of this duration, and the ticks from its observation to its use. None: the robot stood
        still, and the duration is converted."""
        self._ticks.append(math.ceil(seconds * self._hz) if ticks is None else ticks)
        self._seconds.append(seconds)

    def expected(self) -> int:
        """The estimate for the next inference, in ticks."""
        return sorted(self._ticks)[4 * (len(self._ticks) - 1) // 5] if self._ticks else 1

    def announced(self, left: int) -> int:
        """The `inference_delay` for a policy that is guided by `left` actions."""
        most = left - 1 if self._max_delay is None else min(left - 1, self._max_delay)
        return max(0, min(self.expected(), most))
