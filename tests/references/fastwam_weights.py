"""Random weights of a small FastWAM that any interpreter draws alike, by the names that they are stored under."""

from __future__ import annotations

import numpy as np
from groot_weights import draw
from groot_weights import weight as usual


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The tensor of a name, float32: no bias zero, no norm one, activations of order one."""
    if "gamma" in name:
        return 1.0 + 0.1 * draw(name, *shape)
    if name.endswith("modulation"):
        return 0.3 * draw(name, *shape)
    if "relative_attention_bias" in name or name.startswith("shared"):
        return draw(name, *shape)
    gain = 0.3 if name.endswith((".o.weight", "ffn.2.weight", "head.weight", "conv2.weight")) else 1.0
    return gain * usual(name, shape)
