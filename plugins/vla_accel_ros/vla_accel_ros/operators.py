"""Operators of a contract's `apply`: `rad2deg`, `clamp` and `resize`.

Observations run them forward in the order of the list, actions run the inverse in the opposite order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from vla_accel.errors import ConfigError


class Operator(Protocol):
    def forward(self, values: np.ndarray) -> np.ndarray: ...

    def inverse(self, values: np.ndarray) -> np.ndarray: ...


class Degrees:
    """Radians on the topic, degrees for the policy."""

    def forward(self, values: np.ndarray) -> np.ndarray:
        return np.rad2deg(values)

    def inverse(self, values: np.ndarray) -> np.ndarray:
        return np.deg2rad(values)


@dataclass(frozen=True)
class Clamp:
    """Limits every number to `low` to `high`, in both directions."""

    low: float
    high: float

    def forward(self, values: np.ndarray) -> np.ndarray:
        return np.clip(values, self.low, self.high)

    inverse = forward


@dataclass(frozen=True)
class Resize:
    """Picks the nearest pixels of an image (height, width, 3), as rosetta did when it recorded the training data."""

    height: int
    width: int

    def forward(self, values: np.ndarray) -> np.ndarray:
        rows = np.round(np.linspace(0, values.shape[0] - 1, self.height)).astype(int)
        columns = np.round(np.linspace(0, values.shape[1] - 1, self.width)).astype(int)
        return values[rows[:, None], columns]

    def inverse(self, values: np.ndarray) -> np.ndarray:
        raise NotImplementedError


def read_operators(items: Sequence[object], where: str, *, image: bool, action: bool) -> tuple[Operator, ...]:
    """Read an `apply` list. Raises ConfigError for an unknown operator, or one that does not fit the source."""
    return tuple(_read(item, f"{where}[{i}]", image, action) for i, item in enumerate(items))


def _read(item: object, where: str, image: bool, action: bool) -> Operator:
    name, value = item, None
    if isinstance(item, Mapping) and len(item) == 1:
        ((name, value),) = item.items()
    if name == "rad2deg" and value is None and not image:
        return Degrees()
    if name == "clamp" and not image:
        return _clamp(value, where)
    if name == "resize" and image and not action:
        sizes = value if isinstance(value, Sequence) else ()
        if len(sizes) != 2 or not all(type(size) is int and 0 < size <= 8192 for size in sizes):
            raise ConfigError(f"{where}: expected resize: [height, width] in pixels, got {value!r}")
        return Resize(*sizes)
    expected = "resize: [height, width]" if image else "rad2deg or clamp: {min: LOW, max: HIGH}"
    raise ConfigError(f"{where}: expected {expected}, got {item!r}")


def _clamp(value: object, where: str) -> Clamp:
    bounds: Any = [value.get("min"), value.get("max")] if isinstance(value, Mapping) and len(value) == 2 else value
    if isinstance(bounds, Sequence) and len(bounds) == 2 and all(type(one) in (int, float) for one in bounds):
        low, high = bounds
        if -math.inf < low <= high < math.inf:
            return Clamp(float(low), float(high))
    raise ConfigError(f"{where}: expected clamp: {{min: LOW, max: HIGH}} with LOW <= HIGH, got {value!r}")
