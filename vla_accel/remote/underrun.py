"""The action for a control tick without a computed one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from vla_accel.errors import ConfigError
from vla_accel.remote.numbers import at_least

UNKNOWN_LIMIT_S = 0.5
"""How long to repeat an action that may be a velocity; the default timeout of ROS's velocity controllers."""


@dataclass(frozen=True)
class Hold:
    """Hold the robot while no action is left: repeat the last action with its motion dimensions set to 0.

    Args:
        motion_dims: action dimensions (from 0) that are a velocity or a step, for which 0 means no motion. The others
            (absolute targets, grippers) are repeated. `()` for none; None for those that the policy declares.
        limit_ticks: consecutive ticks to hold before `step` raises EngineError. None: no limit if the motion dimensions
            are known; half a second if not, because the repeated action may be a velocity.
    """

    motion_dims: tuple[int, ...] | None = None
    limit_ticks: int | None = None

    def __post_init__(self) -> None:
        if self.motion_dims is not None:
            try:
                dims = tuple(at_least(0, one, "motion_dims") for one in self.motion_dims)
            except TypeError:
                raise ConfigError(f"motion_dims: expected dimensions (0, 1, …), got {self.motion_dims!r}") from None
            object.__setattr__(self, "motion_dims", dims)
        if self.limit_ticks is not None:
            object.__setattr__(self, "limit_ticks", at_least(0, self.limit_ticks, "limit_ticks"))


Choice = Literal["hold", "raise"] | Hold | np.ndarray


class Underrun:
    """The user's choice for ticks without an action: "hold" (as `Hold()`), "raise", a `Hold`, or an action.

    `declared`: motion dimensions that the policy declares; None if it declares none. `hz`: control rate.
    """

    def __init__(self, choice: Any, declared: tuple[int, ...] | None, hz: float) -> None:
        self._own: np.ndarray | None = None
        self._dims: tuple[int, ...] | None = None
        self._limit = 0.0  # ticks to hold
        if isinstance(choice, Hold) or (isinstance(choice, str) and choice == "hold"):
            hold = choice if isinstance(choice, Hold) else Hold()
            self._dims = declared if hold.motion_dims is None else hold.motion_dims
            default = math.inf if self._dims is not None else math.ceil(UNKNOWN_LIMIT_S * hz)
            self._limit = default if hold.limit_ticks is None else hold.limit_ticks
        elif not (isinstance(choice, str) and choice == "raise"):
            try:
                self._own = np.array(choice, np.float64)
            except (TypeError, ValueError):
                self._own = np.array(np.nan)
            if self._own.ndim != 1 or not np.isfinite(self._own).all():
                expected = "'hold', 'raise', a Hold or an action of finite numbers"
                raise ConfigError(f"underrun: expected {expected}, got {choice!r:.60}")

    def check(self, action: np.ndarray) -> None:
        """Raise ConfigError if the choice does not fit the robot's actions, of which `action` is one."""
        if self._own is not None and self._own.shape != action.shape:
            raise ConfigError(f"underrun: expected an action of shape {action.shape}, got {self._own.shape}")
        if self._dims and max(self._dims) >= len(action):
            raise ConfigError(f"motion_dims: expected dimensions 0 to {len(action) - 1}, got {list(self._dims)}")

    def action(self, last: np.ndarray | None, missed: int) -> np.ndarray | None:
        """The action to use after the action `last` and `missed` consecutive ticks without one, including this one; or
        None to raise an error."""
        if self._own is not None:
            return self._own
        if last is None or missed > self._limit:
            return None
        held = last.copy()
        held[list(self._dims or ())] = 0.0
        return held

    @property
    def described(self) -> str:
        """What happens, for a log message."""
        if self._own is not None:
            return "using the action of `underrun`"
        if not self._limit:
            return "raising an error"
        limit = "" if self._limit == math.inf else f", for at most {self._limit:g} ticks"
        if self._dims is None:
            return f"repeating the last action{limit}: the policy declares no motion_dims, so it may be a velocity"
        zeroed = f" with dimensions {list(self._dims)} set to 0" if self._dims else ""
        return f"repeating the last action{zeroed}{limit}"
