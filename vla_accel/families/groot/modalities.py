"""GR00T's groups of states and actions: named parts of a vector, each with its own scaling, some relative to the state.

Source of the formulas: the state and action processors of Isaac-GR00T and of lerobot 0.6.1 (both Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from vla_accel.errors import CheckpointError
from vla_accel.transforms.normalisation import Range

Scaling = Literal["range", "mean_std", "sin_cos"]
Relative = Literal["no", "difference", "pose"]


@dataclass(frozen=True)
class Group:
    """One named part of a vector.

    Attributes:
        name: Its name.
        size: The robot's numbers.
        scaling: "range" maps [low, high] to [-1, 1], and numbers without a range to 0; "mean_std" is (x - low) / high,
            numbers without a spread stay; "sin_cos" makes two numbers of each angle.
        low: Float64 (size,), or (rows, size) with a row for each action of a chunk.
        high: As `low`.
        clipped: Whether normalized states are clipped to [-1, 1].
        bounded: Whether the model's actions are clipped to [-1, 1].
        relative: An action is a difference from the state group `reference`, or a pose (xyz and two rows of the
            rotation) in its frame.
        reference: Of relative actions; by default the state group of the same name.
    """

    name: str
    size: int
    scaling: Scaling = "range"
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    clipped: bool = True
    bounded: bool = True
    relative: Relative = "no"
    reference: str | None = None

    def __post_init__(self) -> None:
        if self.scaling == "sin_cos":
            return
        for array in (self.low, self.high):
            if array is None or array.shape[-1] != self.size or array.ndim not in (1, 2):
                got = None if array is None else array.shape
                raise CheckpointError(f"statistics of {self.name}: expected ({self.size},), got {got}")

    @property
    def anchor(self) -> str | None:
        """The state group that relative actions refer to; None for absolute ones."""
        return None if self.relative == "no" else self.reference or self.name

    @property
    def width(self) -> int:
        """The model's numbers."""
        return 2 * self.size if self.scaling == "sin_cos" else self.size

    def normalise(self, x: np.ndarray) -> np.ndarray:
        """Normalize x (..., size) to (..., width) float64. With statistics by row, the first axis is the chunk's."""
        if self.scaling == "sin_cos":
            return np.concatenate((np.sin(x), np.cos(x)), -1)
        low, span = self._scale(len(x) if x.ndim > 1 else 1)
        scaled = (x - low) / np.where(span == 0, 1.0, span)
        if self.scaling == "mean_std":
            return np.where(span == 0, x, scaled)
        scaled = np.where(span == 0, 0.0, 2.0 * scaled - 1.0)
        return scaled.clip(-1.0, 1.0) if self.clipped else scaled

    def restore(self, x: np.ndarray) -> np.ndarray:
        """Unnormalize actions (rows, size) to the robot's, or to differences and poses."""
        low, span = self._scale(len(x))
        if self.scaling == "mean_std":
            return np.where(span == 0, x, x * span + low)
        x = x.clip(-1.0, 1.0) if self.bounded else x
        return (x + 1.0) * 0.5 * span + low

    def _scale(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Return low and span, of the first `rows` rows if the statistics have rows."""
        assert self.low is not None and self.high is not None
        low, high = self.low, self.high
        if low.ndim == 2:
            if rows > len(low):
                raise CheckpointError(f"statistics of {self.name}: expected {rows} rows, got {len(low)}")
            low, high = low[:rows], high[:rows]
        return low, high if self.scaling == "mean_std" else high - low

    @property
    def range(self) -> Range:
        """The expected range of each number before it is normalised, (size,) or (rows, size); infinite for angles."""
        if self.scaling == "sin_cos" or self.low is None or self.high is None:
            return Range(np.full(self.size, -np.inf), np.full(self.size, np.inf), "no statistics")
        if self.scaling == "mean_std":
            return Range.around(self.low, self.high)
        return Range(self.low, self.high, "quantiles, or minimum and maximum")

    def absolute(self, x: np.ndarray, state: np.ndarray) -> np.ndarray:
        """Convert relative actions (rows, size) to absolute ones; `state` (size,) is the reference."""
        if self.relative == "pose":
            return _poses(_frame(state) @ _frames(x))
        return x + state if self.relative == "difference" else x

    def against(self, x: np.ndarray, state: np.ndarray) -> np.ndarray:
        """Convert absolute actions to relative ones, the inverse of `absolute`."""
        if self.relative == "pose":
            return _poses(np.linalg.inv(_frame(state)) @ _frames(x))
        return x - state if self.relative == "difference" else x


@dataclass(frozen=True)
class Groups:
    """A robot's vector as groups in order."""

    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        """Raise CheckpointError if no number of any group varies: such statistics are not of real data."""
        if self.groups and not any(g.range.span.any() for g in self.groups):
            names = ", ".join(g.name for g in self.groups)
            raise CheckpointError(
                f"statistics of {names}: expected some that vary in at least one of {self.size} dimensions, got a span "
                "of 0 in each"
            )

    @property
    def range(self) -> Range:
        """The expected range of each number before it is normalised, of relative actions before they are absolute."""
        ranges = [g.range for g in self.groups]
        rows = {len(r.low) for r in ranges if r.low.ndim == 2}

        def joined(parts: list[np.ndarray]) -> np.ndarray:
            if not rows:
                return np.concatenate(parts)
            return np.concatenate([np.broadcast_to(p, (min(rows), p.shape[-1])) if p.ndim == 1 else p[: min(rows)]
                                   for p in parts], -1)  # fmt: skip

        meanings = ", ".join(dict.fromkeys(r.meaning for r in ranges))
        return Range(joined([r.low for r in ranges]), joined([r.high for r in ranges]), meanings)

    @property
    def size(self) -> int:
        """The robot's numbers."""
        return sum(g.size for g in self.groups)

    @property
    def width(self) -> int:
        """The model's numbers."""
        return sum(g.width for g in self.groups)

    def split(self, vector: np.ndarray) -> dict[str, np.ndarray]:
        """Split (..., size) into groups by name."""
        ends = np.cumsum([g.size for g in self.groups])[:-1]
        return {g.name: part for g, part in zip(self.groups, np.split(vector, ends, -1), strict=True)}

    def normalise(self, vector: np.ndarray) -> np.ndarray:
        """Normalize numbers (..., size) in the units of the statistics to the model's (..., width)."""
        parts = self.split(vector)
        return np.concatenate([g.normalise(parts[g.name]) for g in self.groups], -1)

    invert = normalise
    """Of actions: invert the scaling of `restore`."""

    def before_scaling(self, vector: np.ndarray, state: dict[str, np.ndarray]) -> np.ndarray:
        """Return the robot's actions (rows, size) in the units of the statistics, relative ones relative to `state`."""
        parts = self.split(vector)
        found = [g.against(parts[g.name], state[g.anchor]) if g.anchor else parts[g.name] for g in self.groups]
        return np.concatenate(found, -1)

    def restore(self, normalised: np.ndarray, state: dict[str, np.ndarray]) -> np.ndarray:
        """Unnormalize the model's actions (rows, at least width) to the robot's (rows, size)."""
        parts = self.split(normalised[:, : self.size].astype(np.float64))
        found = [g.restore(parts[g.name]) for g in self.groups]
        return np.concatenate(
            [g.absolute(x, state[g.anchor]) if g.anchor else x for g, x in zip(self.groups, found, strict=True)], -1
        )


def check_references(actions: Groups, state: Sequence[Group], where: str) -> None:
    """Raise CheckpointError if a relative action refers to no state group of its size."""
    sizes = {g.name: g.size for g in state}
    for group in actions.groups:
        if group.anchor is not None and sizes.get(group.anchor) != group.size:
            raise CheckpointError(
                f"{where}: action {group.name} is relative to state {group.anchor} of {group.size} numbers; the state "
                f"has {sizes}"
            )


def _frame(pose: np.ndarray) -> np.ndarray:
    """Return a pose (9,), xyz and the first two rows of a nearly orthonormal rotation, as a 4 x 4 transform."""
    first, second = pose[3:6], pose[6:9]
    first = first / np.linalg.norm(first)
    second = second - (first @ second) * first
    second = second / np.linalg.norm(second)
    frame = np.eye(4)
    frame[:3, :3] = first, second, np.cross(first, second)
    frame[:3, 3] = pose[:3]
    return frame


def _frames(poses: np.ndarray) -> np.ndarray:
    return np.stack([_frame(pose) for pose in poses.astype(np.float64)])


def _poses(frames: np.ndarray) -> np.ndarray:
    """Return transforms (n, 4, 4) as poses (n, 9)."""
    return np.concatenate((frames[:, :3, 3], frames[:, :2, :3].reshape(len(frames), 6)), 1)
