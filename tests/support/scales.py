"""FP8 scales for tests: the same for every product, or calibrated on one random observation."""

from __future__ import annotations

import numpy as np

from vla_accel.components.calibration import calibration
from vla_accel.fp8 import Scales
from vla_accel.models.pi0 import Pi0
from vla_accel.quantize import calibrate


class _Any(dict[str, float]):
    def __init__(self, value: float) -> None:
        self.value = value

    def __contains__(self, _: object) -> bool:
        return True

    def __missing__(self, _: str) -> float:
        return self.value


def scales_of_any(value: float = 32.0) -> Scales:
    """The same scale for whatever is asked: 32 is wide enough for tiny models, and FP8 does not mind room above."""
    return Scales(_Any(value), 1, "test", "none", "none")


def calibrated(model: Pi0, seed: int = 3) -> Scales:
    """Of one random observation of a tiny model: two views and nine tokens."""
    rng = np.random.default_rng(seed)
    observation = (
        rng.integers(0, 256, (2, 28, 28, 3), np.uint8),
        rng.integers(0, 40, 9),
        np.zeros(model.config.action_dim, np.float32),
    )
    return calibrate(model, calibration(model), [observation], "test")
