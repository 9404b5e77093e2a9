"""The arithmetic of the report: success rates with intervals, paired counts, the fit over steps, the rate target."""

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
    """Successes out of the episodes that ran to their end; crashed episodes are counted apart, as errors."""

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
        raise ConfigError(
            f"discordant pairs: expected at least 0 regressions and improvements, got {lost} and {gained}"
        )
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


def fit_line(measured_ms: Mapping[int, float]) -> dict[str, Any] | None:
    """Fit `time = intercept_ms + slope_ms * steps` by least squares (JSON types, with a row for each step count); None
    below two step counts."""
    if len(measured_ms) < 2:
        return None
    steps = np.array(sorted(measured_ms), dtype=np.float64)
    times = np.array([measured_ms[int(n)] for n in steps])
    centred = steps - steps.mean()
    slope = float(centred @ (times - times.mean()) / (centred @ centred))
    intercept = float(times.mean()) - slope * float(steps.mean())
    rows = []
    for count in sorted(measured_ms):
        predicted, measured = intercept + slope * count, measured_ms[count]
        error = 100 * (measured - predicted) / predicted if predicted else 0.0
        rows.append({"steps": count, "predicted_ms": predicted, "measured_ms": measured, "error_percent": error})
    return {"intercept_ms": intercept, "slope_ms": slope, "rows": rows}


def rate_goals(parts_ms: Mapping[str, float], total_ms: float, target_hz: float) -> dict[str, Any]:
    """What each part of a call of `total_ms` would have to reach for `target_hz`, if all other time stayed as it is
    (JSON types). `allowed_ms` is None for a part that is not enough alone."""
    budget = 1e3 / target_hz
    components = {}
    for name, now in parts_ms.items():
        allowed = budget - (total_ms - now)
        components[name] = {
            "now_ms": now,
            "allowed_ms": allowed if allowed > 0 else None,
            "speedup": now / allowed if allowed > 0 else None,
        }
    return {
        "target_hz": target_hz,
        "budget_ms": budget,
        "total_ms": total_ms,
        "met": total_ms <= budget,
        "overall_speedup": total_ms / budget,
        "components": components,
    }
