"""The last observations of an episode, for a model that reads several of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vla_accel.transforms.observations import ABSENT, find

HISTORY = "history"
"""Metadata key: the observations that a policy reads, one a control step; absent for a policy that reads one."""


class History:
    """The last observations of one episode.

    Such a model reads images (k, H, W, 3) and a state (k, n) of the last control steps, oldest first; of fewer than
    `count`, it repeats the oldest. Add every observation of the robot, also where the policy is not called.
    """

    def __init__(self, count: int, keys: Sequence[str]) -> None:
        """`count`: observations to keep; `keys`: of images and state."""
        self.count, self.keys = count, tuple(keys)
        self._kept: deque[dict[str, Any]] = deque(maxlen=count)

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> History | None:
        """Return an empty history for a policy with this metadata; None for a policy that reads one observation."""
        count, robot = metadata.get(HISTORY), metadata.get("robot")
        if not isinstance(count, int) or not isinstance(robot, Mapping):
            return None
        return cls(count, (*robot["images"], *robot["state"]))

    def clear(self) -> None:
        """Begin an episode."""
        self._kept.clear()

    def add(self, observation: Mapping[str, Any]) -> Mapping[str, Any]:
        """Keep a copy of an observation, and return it with its history. One that has a history is returned as it is.

        What cannot be stacked, such as images of several sizes, is left as it is: the policy reports it.
        """
        if not isinstance(observation, Mapping) or self.has(observation):
            return observation
        found = {key: value for key in self.keys if (value := find(observation, key)) is not ABSENT}
        try:
            self._kept.append({key: np.array(value) for key, value in found.items()})
            return {**observation, **{key: np.stack([one[key] for one in self._kept]) for key in found}}
        except (TypeError, ValueError, KeyError):
            return observation

    def has(self, observation: Mapping[str, Any]) -> bool:
        """Return whether an observation has a history of its own: images (k, H, W, 3)."""
        return any(getattr(find(observation, key), "ndim", 0) == 4 for key in self.keys)
