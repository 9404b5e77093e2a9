"""A checkpoint's statistics: unusual ranges, and the share of recorded data outside them, which shows statistics of
another robot, unit or convention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_accel.errors import of_one
from vla_accel.transforms.normalisation import FAR, Range

ACTIONS = ("actions", "action")
"""Keys of a recording that hold the robot's actions, (n,) or (k, n)."""


@dataclass(frozen=True)
class Fit:
    """Statistics of the state or the actions, compared with `rows` rows of data. `outside`: the share of rows
    outside the range by dimension, empty without data; `far`: the share more than `FAR` spans outside."""

    name: str
    range: Range
    rows: int
    outside: np.ndarray
    far: np.ndarray

    def lines(self) -> list[str]:
        """In words: one line, and one for each dimension with something unusual."""
        if not self.range.known:
            return [f"{self.name}: not normalised, so that there is no range"]
        unusual = self.range.suspicious()
        if not self.rows:
            return [f"{self.name}: {self.range.meaning}"] + [
                f"  {i}: {self.range.describe(i)}{'; ' + unusual[i] if i in unusual else ''}"
                for i in range(self.range.low.shape[-1])
            ]
        share = 100 * float(self.outside.mean())
        lines = [f"{self.name}: {share:.2f} % of the values of {self.rows} rows lie outside {self.range.meaning}"]
        for i in sorted({*map(int, np.flatnonzero(self.outside)), *unusual}):
            far = f", {100 * self.far[i]:.2f} % by more than {FAR:g} spans" if self.far[i] else ""
            note = f"; {unusual[i]}" if i in unusual else ""
            lines.append(f"  {i}: {100 * self.outside[i]:.2f} % outside {self.range.describe(i)}{far}{note}")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """Plain data; a range that is not known is null."""
        low, high = self.range.limits()
        return {
            "range": self.range.meaning,
            "low": [float(x) if np.isfinite(x) else None for x in low],
            "high": [float(x) if np.isfinite(x) else None for x in high],
            "suspicious": {str(i): text for i, text in self.range.suspicious().items()},
            "rows": self.rows,
            "outside": self.outside.tolist(),
            "far_outside": self.far.tolist(),
        }


def fits(
    processor: Any, observations: Sequence[Mapping[str, Any]] = (), prepared: Sequence[Any] | None = None
) -> list[Fit]:  # fmt: skip
    """Compare the statistics of state and actions with recorded observations, whose key of `ACTIONS` holds the actions.
    `prepared`: the processor's inputs of the observations, if known. Raises ObservationError."""
    if not hasattr(processor, "ranges"):
        return []
    rows: dict[str, list[np.ndarray]] = {name: [] for name in processor.ranges}
    for index, one in enumerate(observations):
        with of_one(index, len(observations)):
            key = next((k for k in ACTIONS if k in one), None)
            actions = None if key is None else np.asarray(one[key])
            if actions is not None and actions.ndim == 1:
                actions = actions[None]
            inputs = processor.prepare(one) if prepared is None else prepared[index]
            for name, found in processor.before_scaling(inputs, actions).items():
                rows[name].append(found)
    return [_fit(name, expected, rows[name]) for name, expected in processor.ranges.items()]


def _fit(name: str, expected: Range, data: list[np.ndarray]) -> Fit:
    if not data:
        return Fit(name, expected, 0, np.empty(0), np.empty(0))
    outside, far = (np.concatenate([expected.widened(spans).outside(rows) for rows in data]) for spans in (0.0, FAR))
    return Fit(name, expected, len(outside), outside.mean(0), far.mean(0))
