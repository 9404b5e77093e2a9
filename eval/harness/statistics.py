"""The arithmetic of the report: success rates with intervals, paired counts, the fit over steps, the rate target.

Pure functions over plain numbers; nothing here knows about episodes, files or tables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vla_accel.errors import ConfigError
from vla_accel.measure.proportion import Z_95, wilson

Z_POWER = 0.8416212335729143
"""Quantile of the normal distribution at 80 %."""


@dataclass(frozen=True)
class Rate:
    """Successes out of the episodes that ran to their end; errors are counted apart.

    Attributes:
        successes: episodes that reached the goal.
        episodes: episodes that ran to their end, errors not among them.
        errors: episodes that crashed.
    """

    successes: int
    episodes: int
    errors: int = 0

    @property
    def value(self) -> float | None:
        """The rate in [0, 1], or None without a finished episode."""
        return self.successes / self.episodes if self.episodes else None

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval in [0, 1]."""
        return wilson(self.successes, self.episodes)

    def to_json(self) -> dict[str, Any]:
        """JSON types: the counts, the rate and its interval."""
        low, high = self.interval
        return {**asdict(self), "rate": self.value, "wilson_95_low": low, "wilson_95_high": high}


def mcnemar_exact(lost: int, gained: int) -> float:
    """Two-sided exact p of McNemar's test: how likely discordant pairs split at least so unevenly by a fair coin; 1
    without any.

    Source: Q. McNemar, Psychometrika 12 (1947) 153, with the binomial distribution in place of its approximation.
    """
    if min(lost, gained) < 0:
        raise ConfigError(f"discordant pairs: expected counts of at least 0, got {lost} and {gained}")
    number = lost + gained
    tail = sum(math.comb(number, k) for k in range(min(lost, gained) + 1))
    return min(1.0, 2 * tail / 2**number)


def smallest_difference(pairs: int, discordant: int) -> float | None:
    """The smallest true difference of two success rates that McNemar's test at 5 % (two-sided) detects in 80 % of runs
    with this number of pairs; None if even the largest difference is not detected.

    The share of discordant pairs is that of this run, or the difference itself, if that is larger. Source: R. J.
    Connor, Biometrics 43 (1987) 207, solved for the difference by bisection.
    """
    share = discordant / pairs if pairs else 0.0

    def seen(difference: float) -> bool:
        among = max(share, difference)
        needed = Z_95 * math.sqrt(among) + Z_POWER * math.sqrt(among - difference**2)
        return difference * math.sqrt(pairs) >= needed

    if not seen(1.0):
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if seen(middle) else (middle, high)
    return high


@dataclass(frozen=True)
class LinearFit:
    """`time = intercept_ms + slope_ms * steps` by least squares, in milliseconds."""

    intercept_ms: float
    slope_ms: float
    measured_ms: Mapping[int, float]

    def predict(self, steps: int) -> float:
        """Predicted milliseconds of `steps` steps."""
        return self.intercept_ms + self.slope_ms * steps

    def rows(self) -> list[dict[str, float]]:
        """Per step count: steps, predicted, measured, and error in % of the prediction."""
        return [
            {
                "steps": steps,
                "predicted_ms": self.predict(steps),
                "measured_ms": measured,
                "error_percent": _percent(measured - self.predict(steps), self.predict(steps)),
            }
            for steps, measured in sorted(self.measured_ms.items())
        ]

    def to_json(self) -> dict[str, Any]:
        """JSON types."""
        return {
            "intercept_ms": self.intercept_ms,
            "slope_ms": self.slope_ms,
            "rows": self.rows(),
        }


def fit_line(measured_ms: Mapping[int, float]) -> LinearFit | None:
    """Fit mean times by step count; None below two step counts, where no line is defined.

    With exactly two the line goes through both, and the errors are zero.
    """
    if len(measured_ms) < 2:
        return None
    steps = np.array(sorted(measured_ms), dtype=np.float64)
    times = np.array([measured_ms[int(n)] for n in steps])
    centred = steps - steps.mean()
    slope = float(centred @ (times - times.mean()) / (centred @ centred))
    return LinearFit(float(times.mean()) - slope * float(steps.mean()), slope, dict(measured_ms))


@dataclass(frozen=True)
class Goal:
    """What one component would have to reach, were all others to stay as they are.

    Attributes:
        component: its name.
        now_ms: its mean time.
        allowed_ms: the time that would meet the target; None if the others alone exceed it.
    """

    component: str
    now_ms: float
    allowed_ms: float | None

    @property
    def speedup(self) -> float | None:
        """How many times faster it would have to be; at most 1 where it already is."""
        if self.allowed_ms is None:
            return None
        return self.now_ms / self.allowed_ms if self.allowed_ms else None


def rate_goals(parts_ms: Mapping[str, float], total_ms: float, target_hz: float) -> list[Goal]:
    """For each part of a call of `total_ms`, what it alone would have to reach for `target_hz`.

    Time that no part accounts for counts among "the others".
    """
    budget = 1e3 / target_hz
    goals = []
    for name, now in parts_ms.items():
        allowed = budget - (total_ms - now)
        goals.append(Goal(name, now, allowed if allowed > 0 else None))
    return goals


def goals_to_json(goals: list[Goal], total_ms: float, target_hz: float) -> dict[str, Any]:
    """The analysis of one step count (JSON types)."""
    return {
        "target_hz": target_hz,
        "budget_ms": 1e3 / target_hz,
        "total_ms": total_ms,
        "met": total_ms <= 1e3 / target_hz,
        "overall_speedup": total_ms * target_hz / 1e3,
        "components": {
            goal.component: {
                "now_ms": goal.now_ms,
                "allowed_ms": goal.allowed_ms,
                "speedup": goal.speedup,
            }
            for goal in goals
        },
    }


def _percent(part: float, whole: float) -> float:
    return 100 * part / whole if whole else 0.0
