"""GR00T N1.7 with random weights, for measuring speed and agreement where no checkpoint can be had."""

from __future__ import annotations

import math
from typing import Any

from vla_accel.models.random_weights import BRANCH_ENDS, Drawn


class DrawnGroot(Drawn):
    """Weights of a GR00T: activations stay of order one through every layer."""

    def _normal(self, name: str) -> tuple[float, float]:
        config: Any = self.config
        if name.endswith("bias"):
            return 0.0, 0.02
        if "norm" in name:
            return 1.0, 0.1
        if name in ("vision.position_embedding", "head.action_positions", "embed.weight"):
            return 0.0, 0.5
        part, gain = name.split(".")[0], 0.2 if "modulation" in name else 1.0
        if ".layers." in name and name.endswith(BRANCH_ENDS):
            gain = 1.0 / math.sqrt(2 * getattr(config, part).depth)
        return 0.0, gain / math.sqrt(self.shapes[name][1:].numel())

    def _query_key_rows(self, name: str) -> int:
        return 0  # its attention is as flat as it falls
