"""Checks of numbers that users pass: Python's and NumPy's numbers, but no text, booleans or NaN."""

from __future__ import annotations

import math
import numbers
from typing import Any

from vla_accel.errors import ConfigError


def above_zero(value: Any, name: str, what: str = "seconds") -> float:
    """`value` as a float. Raises ConfigError unless it is a finite number above 0."""
    if not _is_a(numbers.Real, value) or not 0 < value < math.inf:
        raise ConfigError(f"{name}: expected {what} above 0, got {value!r}")
    return float(value)


def zero_or_more(value: Any, name: str) -> float:
    """`value` as a float. Raises ConfigError unless it is a finite number of 0 or more."""
    if not _is_a(numbers.Real, value) or not 0 <= value < math.inf:
        raise ConfigError(f"{name}: expected 0 or more seconds, got {value!r}")
    return float(value)


def finite(value: Any, name: str) -> float:
    """`value` as a float. Raises ConfigError unless it is a finite number."""
    if not _is_a(numbers.Real, value) or not math.isfinite(value):
        raise ConfigError(f"{name}: expected a finite number, got {value!r}")
    return float(value)


def at_least(least: int, value: Any, name: str) -> int:
    """`value` as an int. Raises ConfigError unless it is a whole number of `least` or more."""
    if not _is_a(numbers.Integral, value) or value < least:
        raise ConfigError(f"{name}: expected a whole number of at least {least}, got {value!r}")
    return int(value)


def _is_a(kind: type, value: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
