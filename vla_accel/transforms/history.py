"""The last observations of an episode, for models that read several of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vla_accel.transforms.observations import ABSENT, find

HISTORY = "history"
"""Metadata key: the observations that a policy reads, one a control step; absent if it reads one."""


class History:
    """The last observations of one episode.

    A policy with a history takes images (k, H, W, 3) and a state (k, n) of the last k control steps, oldest first; of
    fewer than it reads, the oldest counts several times. Add the observation of every control step, also where the
    policy is not called.
    """

    def __init__(self, count: int, keys: Sequence[str]) -> None:
        """`count`: observations to keep; `keys`: of images and state."""
        self.count, self.keys = count, tuple(keys)
        self._kept: dict[str, np.ndarray] = {}
        self._before = self._kept

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> History | None:
        """Return an empty history for a policy with this metadata; None for one that reads one observation."""
        count, robot = metadata.get(HISTORY), metadata.get("robot")
        if not isinstance(count, int) or not isinstance(robot, Mapping):
            return None
        return cls(count, (*robot["images"], *robot["state"]))

    def clear(self) -> None:
        """Begin an episode."""
        self._kept = {}

    def add(self, observation: Mapping[str, Any]) -> Mapping[str, Any]:
        """Keep a copy of an observation, and return it with its history.

        One that has a history is returned as it is, and so is one that no policy accepts, which is not kept either. An
        observation of other keys, shapes or types than the last one begins a new history.
        """
        self._before = self._kept
        if not isinstance(observation, Mapping) or self.has(observation):
            return observation
        found = {key: value for key in self.keys if (value := find(observation, key)) is not ABSENT}
        # An array would no longer show what is refused: a mask, other colours than RGB.
        if any(np.ma.is_masked(value) or getattr(value, "mode", "RGB") != "RGB" for value in found.values()):
            return observation
        try:
            new = {key: np.asarray(value) for key, value in found.items()}
        except (TypeError, ValueError):
            return observation
        before = {key: kept[-1] for key, kept in self._kept.items()}
        older = self._kept if _form(before) == _form(new) else {key: value[None][:0] for key, value in new.items()}
        self._kept = {key: _appended(older[key], value, self.count) for key, value in new.items()}
        return {**observation, **self._kept}

    def undo(self) -> None:
        """Forget what the last `add` has kept: the policy did not accept it."""
        self._kept = self._before

    def has(self, observation: Mapping[str, Any]) -> bool:
        """Return whether an observation has a history of its own: images (k, H, W, 3)."""
        return any(getattr(find(observation, key), "ndim", 0) == 4 for key in self.keys)


def _appended(older: np.ndarray, new: np.ndarray, count: int) -> np.ndarray:
    """Return a new array of the last `count` rows of `older` (k, ...) and `new` (...)."""
    kept = older[max(0, len(older) - count + 1) :]
    rows = np.empty((len(kept) + 1, *new.shape), new.dtype)
    rows[:-1], rows[-1] = kept, new
    return rows


def _form(observation: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return {key: (value.shape, value.dtype) for key, value in observation.items()}
