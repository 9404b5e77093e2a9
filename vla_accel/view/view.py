"""The interface between what runs a policy and what shows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


class View:
    """Shows what a policy sees and does. This class shows nothing; `open_view` returns one that uses rerun.

    No method waits for the viewer or raises. A view keeps the objects that it gets and reads them later, so nothing may
    write to them afterwards. Ticks are control ticks of an episode.
    """

    on = False
    """Whether anything is shown."""

    def began(self, title: str) -> None:
        """An episode begins: its ticks count from 0, and follow all ticks shown before, planned ones included."""

    def inferred(
        self,
        tick: int,
        observation: Mapping[str, Any],
        actions: Any,
        latency_ms: Mapping[str, Any],
        name: str = "",
    ) -> None:
        """The policy has computed a chunk.

        Args:
            tick: Tick of the observation.
            observation: The policy's input.
            actions: (n, action_dim); row i belongs to `tick` + i.
            latency_ms: Milliseconds by component; a name may end with `_ms`.
            name: Name of the policy, if there are several.
        """

    def executed(self, tick: int, action: np.ndarray) -> None:
        """The robot executes this action (action_dim,)."""

    def measured(self, tick: int, numbers: Mapping[str, float]) -> None:
        """Other numbers of a tick, by name; `/` in a name makes a group."""

    def close(self, timeout_s: float = 10.0) -> None:
        """Show what is left, for at most `timeout_s`, and report what was not shown."""


OFF = View()
