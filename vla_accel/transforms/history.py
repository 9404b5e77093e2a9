"""The last observations of an episode, for models that read several of them."""

from __future__ import annotations

from collections import deque
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
        self._kept: deque[dict[str, np.ndarray]] = deque(maxlen=count)
        self._before: list[dict[str, np.ndarray]] = []

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> History | None:
        """Return an empty history for a policy with this metadata; None for one that reads one observation."""
        count, robot = metadata.get(HISTORY), metadata.get("robot")
        if not isinstance(count, int) or not isinstance(robot, Mapping):
            return None
        return cls(count, (*robot["images"], *robot["state"]))

    def clear(self) -> None:
        """Begin an episode."""
        self._kept.clear()

    def add(self, observation: Mapping[str, Any]) -> Mapping[str, Any]:
        """Keep a copy of an observation, and return it with its history.

        One that has a history is returned as it is, and so is one that no policy accepts, which is not kept either. An
        observation of other keys, shapes or types than the last one begins a new history.
        """
        self._before = list(self._kept)
        if not isinstance(observation, Mapping) or self.has(observation):
            return observation
        found = {key: value for key in self.keys if (value := find(observation, key)) is not ABSENT}
        # An array would no longer show what is refused: a mask, other colours than RGB.
        if any(np.ma.is_masked(value) or getattr(value, "mode", "RGB") != "RGB" for value in found.values()):
            return observation
        try:
            new = {key: np.array(value) for key, value in found.items()}
        except (TypeError, ValueError):
            return observation
        if self._kept and _form(self._kept[-1]) != _form(new):
            self._kept.clear()
        self._kept.append(new)
        return {**observation, **{key: np.stack([one[key] for one in self._kept]) for key in new}}

    def undo(self) -> None:
        """Forget what the last `add` has kept: the policy did not accept it."""
        self._kept = deque(self._before, self.count)

    def has(self, observation: Mapping[str, Any]) -> bool:
        """Return whether an observation has a history of its own: images (k, H, W, 3)."""
        return any(getattr(find(observation, key), "ndim", 0) == 4 for key in self.keys)


def _form(observation: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return {key: (value.shape, value.dtype) for key, value in observation.items()}
