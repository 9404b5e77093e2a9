"""The ranges that a checkpoint's statistics give to the numbers of states and actions, and what lies outside of them.

Knows nothing of observations, of models or of where statistics come from.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

DEVIATIONS = 3.0
"""Standard deviations on each side of the mean that count as the range where statistics are mean and std. A normal
distribution has 0.27 % outside."""
FAR = 10.0
"""Spans beyond the range from which on a number is far outside: the statistics are of another robot or unit."""

_NO_SPAN = 1.2e-5  # spans up to this are zero: openpi adds 1e-6 to a standard deviation, a sixth of a range
_TINY = 1e-4
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Range:
    """The expected range of each number.

    Attributes:
        low: float64 (n,), or (rows, n) with a row for each action of a chunk; -inf where nothing is known.
        high: Of the same shape; inf where nothing is known.
        meaning: What `low` and `high` are, such as "mean ± 3 std".
    """

    low: np.ndarray
    high: np.ndarray
    meaning: str

    @classmethod
    def around(cls, mean: np.ndarray, std: np.ndarray) -> Range:
        """`DEVIATIONS` standard deviations on each side of the mean."""
        return cls(mean - DEVIATIONS * std, mean + DEVIATIONS * std, f"mean ± {DEVIATIONS:g} std")

    @property
    def span(self) -> np.ndarray:
        """float64, as `low`; inf where nothing is known."""
        return self.high - self.low

    @property
    def known(self) -> bool:
        """Whether anything is known."""
        return bool(np.isfinite(self.span).any())

    def widened(self, spans: float) -> Range:
        """The range with so many spans more on each side, and room for float32's rounding."""
        known = np.isfinite(self.span)
        low, high = np.where(known, self.low, 0.0), np.where(known, self.high, 0.0)
        more = spans * (high - low) + _ROUNDING * (1.0 + np.maximum(abs(low), abs(high)))
        return Range(self.low - more, self.high + more, self.meaning)

    def outside(self, x: np.ndarray) -> np.ndarray:
        """Which numbers of x (..., n) lie outside; (k, n), k up to the rows, where there are rows."""
        low, high = (self.low, self.high) if self.low.ndim == 1 else (self.low[: len(x)], self.high[: len(x)])
        return (x < low) | (x > high)

    def limits(self) -> tuple[np.ndarray, np.ndarray]:
        """`low` and `high` (n,); of all rows where there are rows."""
        return (self.low, self.high) if self.low.ndim == 1 else (self.low.min(0), self.high.max(0))

    def describe(self, dimension: int) -> str:
        """The range of one number in words."""
        low, high = self.limits()
        return f"{low[dimension]:.4g} to {high[dimension]:.4g}"

    def suspicious(self) -> dict[int, str]:
        """What is unusual about the statistics themselves, by dimension: no span, or one that is tiny compared with the
        largest or with its own distance from zero."""
        low, high = self.limits()
        known = np.isfinite(high - low)
        span = np.where(known, high - low, 0.0)
        largest, found = span.max(initial=0.0), {}
        for i in np.flatnonzero(known):
            offset = max(abs(low[i]), abs(high[i]))
            if span[i] <= _NO_SPAN:
                found[int(i)] = "no span: the training data have one value"
            elif span[i] < _TINY * largest:
                found[int(i)] = f"a span {largest / span[i]:.2g} times smaller than the largest"
            elif span[i] < _TINY * offset:
                found[int(i)] = f"a span {offset / span[i]:.2g} times smaller than its values"
        return found
