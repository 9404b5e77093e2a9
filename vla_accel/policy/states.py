"""One warning where a robot's states are far outside the range of the checkpoint's statistics.

The model sees such a state as a number that no training data had, and answers it with a plausible chunk of actions.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vla_accel.ledger import Ledger
from vla_accel.transforms.ranges import FAR, Range

_SAID = "states are far outside"


class StateCheck:
    """Looks at the states of a policy's calls until one was far outside."""

    def __init__(self, processor: Any, ledger: Ledger) -> None:
        """`processor`: a family's transforms; those without `ranges` are not looked at."""
        self._processor, self._ledger = processor, ledger
        self._range: Range | None = processor.ranges["state"] if hasattr(processor, "ranges") else None
        self._widest = None if self._range is None or not self._range.known else self._range.widened(FAR)

    def look(self, inputs: Any) -> None:
        """Warn where the state of a prepared observation has a number beyond `FAR` spans; once."""
        if self._widest is None or self._range is None or _SAID in self._ledger.told:
            return
        (state,) = self._processor.before_scaling(inputs)["state"]
        outside = np.flatnonzero(self._widest.outside(state))
        if len(outside):
            first = int(outside[0])
            more = f", and {len(outside) - 1} other dimensions likewise" if len(outside) > 1 else ""
            names = " and ".join(self._processor.preset.state)
            expected = f"{self._range.describe(first)} ({self._range.meaning})"
            self._ledger.warn(
                f"{names}: expected dimension {first} in the range of the checkpoint's statistics, {expected}, got "
                f"{state[first]:.4g}, more than {FAR:g} spans outside{more}; `vla-accel doctor CHECKPOINT` shows the "
                "statistics",
                about=_SAID,
            )
