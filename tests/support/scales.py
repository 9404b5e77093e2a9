"""FP8 scales for tests: the same for every product, or calibrated on one random observation."""

from __future__ import annotations

import numpy as np

from benchmarks.memory import dummy_scales
from vla_accel.families.pi0.network import Pi0
from vla_accel.fp8 import Scales
from vla_accel.nn.calibration import calibrate


def scales_of_any(value: float = 32.0) -> Scales:
    """The same scale for whatever is asked: 32 is wide enough for tiny models, and FP8 does not mind room above."""
    return dummy_scales(value)


def calibrated(model: Pi0, seed: int = 3) -> Scales:
    """Of one random observation of a tiny model: two views and nine tokens."""
    rng = np.random.default_rng(seed)
    observation = (
        rng.integers(0, 256, (2, 28, 28, 3), np.uint8),
        rng.integers(0, 40, 9),
        np.zeros(model.config.action_dim, np.float32),
    )
    return calibrate(model, [observation], "test")
