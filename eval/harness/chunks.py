"""The action of each control tick when answers take several ticks, in simulated time.

Like `vla_accel.remote.async_runner` on a robot: row i of a chunk belongs to the tick of its observation plus i, so a
late answer starts with the row of the tick at which it arrives. One request is pending at a time. Before the first
answer the robot stands still and loses no rows. Without latency this is openpi's loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class _Chunk:
    """Actions (n, action_dim): row 0 belongs to tick `first`; they are available from tick `arrival`."""

    actions: np.ndarray
    first: int
    arrival: int


class Chunks:
    """The actions of an episode; its methods must be called with increasing ticks.

    Args:
        latency: ticks from an observation to the arrival of its chunk, fewer than a chunk has actions.
        replan: actions of a chunk before the next is requested; fewer if it would arrive too late.
    """

    def __init__(self, latency: int, replan: int) -> None:
        self._latency, self._replan = latency, replan
        self._used: _Chunk | None = None
        self._coming: _Chunk | None = None

    def due(self, tick: int) -> bool:
        """Whether to call the policy with the observation of this tick."""
        self._arrive(tick)
        if self._coming is not None:
            return False
        if self._used is None:
            return True
        gone = tick - self._used.first
        return gone >= max(1, min(self._replan, len(self._used.actions) - self._latency))

    def put(self, actions: Sequence[np.ndarray], tick: int) -> None:
        """Add the policy's answer (n, action_dim) to the observation of this tick."""
        arrival = tick + self._latency
        self._coming = _Chunk(np.stack(list(actions)), arrival if self._used is None else tick, arrival)
        self._arrive(tick)

    def left(self, tick: int) -> np.ndarray | None:
        """The actions (k, action_dim) of the chunk in use from this tick on; None before the first and after the last
        of them."""
        self._arrive(tick)
        rest = None if self._used is None else self._used.actions[tick - self._used.first :]
        return None if rest is None or not len(rest) else rest

    def at(self, tick: int) -> np.ndarray | None:
        """The action (action_dim,) of this tick; None where there is none."""
        rest = self.left(tick)
        return None if rest is None else rest[0]

    def _arrive(self, tick: int) -> None:
        if self._coming is not None and self._coming.arrival <= tick:
            self._used, self._coming = self._coming, None
