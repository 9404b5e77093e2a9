"""Temporal ensembling: an action is the weighted mean of all predictions of its moment.

Source of the method: Zhao et al., "Learning Fine-Grained Bimanual Manipulation with Low-Cost Hardware" (2023).
"""

from __future__ import annotations

import numpy as np

from vla_accel.remote.numbers import finite

TEMPORAL_ENSEMBLE = "temporal_ensemble"
"""Metadata key: c of the temporal ensembling with which the checkpoint's episodes run; absent if they run without."""


class TemporalEnsemble:
    """The chunks of an episode that still hold actions.

    Args:
        coefficient: c of the weights exp(-c i) of the predictions of one moment, the oldest of which has i = 0. ACT's
            authors take 0.01. 0: all count alike; above 0: older ones count more; below 0: newer ones.

    Raises ConfigError for a coefficient that is no number.
    """

    def __init__(self, coefficient: float) -> None:
        self.coefficient = finite(coefficient, TEMPORAL_ENSEMBLE)
        self._chunks: list[tuple[int, np.ndarray]] = []

    def clear(self) -> None:
        """Begin an episode."""
        self._chunks = []

    def add(self, tick: int, actions: np.ndarray) -> np.ndarray:
        """Add a chunk and return the actions (k, action_dim) of `tick` and the next ones.

        Args:
            tick: The control tick of the first action, not before that of the last chunk.
            actions: (k, action_dim).
        """
        self._chunks = [(first, chunk) for first, chunk in self._chunks if first + len(chunk) > tick]
        self._chunks.append((tick, actions))
        sums, weights = np.zeros(actions.shape), np.zeros((len(actions), 1))
        ages = np.zeros((len(actions), 1))  # predictions of each moment so far
        for first, chunk in self._chunks:
            covering = chunk[tick - first :][: len(actions)]
            part = slice(0, len(covering))
            weight = np.exp(-self.coefficient * ages[part])
            sums[part] += weight * covering
            weights[part] += weight
            ages[part] += 1
        return sums / weights
