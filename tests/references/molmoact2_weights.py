"""Random weights and observations of a small MolmoAct2, which any interpreter draws alike by their names. Imports NumPy
alone."""

from __future__ import annotations

import groot_weights
import numpy as np

CAMERAS = ("front", "wrist")
SIZES = {"resized": {"front": (96, 132), "wrist": (50, 40)}}
TASKS = ("Pick up the black bowl!", "open it", 'Task: put the "wine bottle" on the rack. Then stop')


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The authors' tensor of a name, float32: activations and actions of order one."""
    drawn = groot_weights.weight(name, shape)
    if "action_expert" in name and "embed" in name and len(shape) > 1:
        return drawn * np.float32(2.0 / shape[1] ** 0.5)
    if "modulation" in name or name.endswith("final_layer.linear.weight"):
        return drawn * np.float32(0.3)
    return drawn


def images_of(variant: str) -> dict[str, np.ndarray]:
    """Three images of each camera, uint8 (3, H, W, 3); those of the two are unlike."""
    sizes = SIZES.get(variant, dict.fromkeys(CAMERAS, (70, 70)))
    return {
        k: (128 + 60 * groot_weights.draw(f"molmo.{k}", 3, *size, 3) + shift).clip(0, 255).astype(np.uint8)
        for (k, size), shift in zip(sizes.items(), (40, -40), strict=True)
    }


def state() -> np.ndarray:
    """Three states (3, 8), whose gripper lies in [-1, 1]."""
    drawn = groot_weights.draw("molmo.state", 3, 8)
    drawn[:, 6] = drawn[:, 6].clip(-1, 1)
    return drawn


def noise() -> np.ndarray:
    """Noise (3, 6, 32) of three chunks."""
    return np.float32(0.4) * groot_weights.draw("molmo.noise", 3, 6, 32)


def previous() -> np.ndarray:
    """What is left of a previous chunk, as the model has it, (4, 7)."""
    return np.float32(0.4) * groot_weights.draw("molmo.previous", 4, 7)
