"""Random weights and observations of a small Evo-1 that any interpreter draws alike, by name.

Imports NumPy alone: the script that asks lerobot, and the tests that do not need it, both take theirs from here.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

try:
    from tests.references.groot_weights import draw, weight
except ImportError:  # as a script
    from groot_weights import draw, weight  # type: ignore[no-redef]

TASKS = ("pick up the black bowl", "open it", " put the wine bottle on the rack\n")
CONSTANT, CONSTANT_VALUE = 3, -0.75
"""A number of the state that does not vary, in training and here: any other value would be 1e8 when normalized."""
GAINS = {"mlp_head.fc2": 3.0, "in_proj_weight": 2.0, "q_proj.weight": 1.5}
"""Factors of some weights, so that the actions depend on everything."""


def evo1_weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """lerobot's tensor of a name, float32: no bias zero, no norm and no LayerScale one, activations of order one."""
    value = weight(name.replace("embedder", "vlm"), shape)
    if len(shape) == 3 and "action_head" in name:  # of several embodiments, transposed
        value = value * (shape[2] / shape[1]) ** 0.5
    value = 0.3 * (1.0 + value) if "lambda_" in name else value
    return next((factor for part, factor in GAINS.items() if part in name), 1.0) * value


def given(cameras: Mapping[str, tuple[int, int]], horizon: int) -> dict[str, np.ndarray]:
    """Three observations. `cameras`: height and width of the images of each. Images differ in their means."""
    found = {}
    for number, (key, size) in enumerate(cameras.items()):
        level = 90.0 + 60.0 * np.arange(3)[:, None, None, None] % 130 + 40.0 * number
        found[key] = np.uint8((level + 50 * draw(f"evo1.{key}", 3, *size, 3)).clip(0, 255))
    noise = np.tanh(draw("evo1.noise", 3, horizon, 24)).astype(np.float32)
    state = draw("evo1.state", 3, 8)
    state[:, CONSTANT] = CONSTANT_VALUE
    return {**found, "state": state, "noise": noise}


def previous(horizon: int) -> np.ndarray:
    """The model's actions (H, 24) of an earlier chunk."""
    return np.pad(0.5 * draw("evo1.previous", horizon, 7), ((0, 0), (0, 17)))
