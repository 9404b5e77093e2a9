"""Means of paired differences and their bounds by Student's t distribution."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vla_accel.errors import ConfigError

CONFIDENCE = 0.95
POWER = 0.8


@dataclass(frozen=True)
class Mean:
    """A mean of independent values.

    Attributes:
        value: the mean.
        low, high: the two-sided 95 % interval.
        upper: the one-sided 95 % bound from above.
        detectable: the smallest true mean that a one-sided 95 % test tells from 0 in 80 % of runs.
    """

    value: float
    low: float
    high: float
    upper: float
    detectable: float

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray) -> Mean:
        """Return the mean of at least two values. Raises ConfigError for fewer."""
        found = np.asarray(values, np.float64)
        if len(found) < 2:
            raise ConfigError(f"mean: expected at least 2 values for an interval, got {len(found)}")
        mean, error, freedom = float(found.mean()), float(found.std(ddof=1)) / math.sqrt(len(found)), len(found) - 1
        half = error * student((1 + CONFIDENCE) / 2, freedom)
        one_sided = student(CONFIDENCE, freedom)
        return cls(mean, mean - half, mean + half, mean + error * one_sided,
                   error * (one_sided + student(POWER, freedom)))  # fmt: skip


@functools.cache
def student(probability: float, freedom: int) -> float:
    """Return the quantile of Student's t distribution, for a probability from 0.5 to below 1.

    With t = √freedom · tan θ the density of θ is proportional to cos θ to the power of freedom - 1.
    """
    width = math.pi / 2 / 100_000
    ends = np.arange(1, 100_001) * width
    share = np.cumsum(np.cos(ends - width / 2) ** (freedom - 1))
    return math.sqrt(freedom) * math.tan(float(np.interp(2 * probability - 1, share / share[-1], ends)))
