"""What a policy sees of LIBERO: openpi's keys, images and state (`examples/libero/main.py`), but for `prompt`."""

from __future__ import annotations

import math

import numpy as np

IMAGE_SIZE = 224
CAMERAS = {
    "observation/image": "agentview_image",
    "observation/wrist_image": "robot0_eye_in_hand_image",
}
"""openpi's key to robosuite's."""
PROPRIO = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")
"""robosuite's keys: end effector xyz, its quaternion (x, y, z, w), the two fingers."""


def to_openpi(observation: dict[str, np.ndarray], size: int = IMAGE_SIZE) -> dict[str, np.ndarray]:
    """A LIBERO observation in openpi's form: images turned by 180 degrees and `size` a side, state (8,) float64."""
    seen = {key: resize_with_pad(observation[name][::-1, ::-1], size) for key, name in CAMERAS.items()}
    position, quaternion, fingers = (observation[name] for name in PROPRIO)
    seen["observation/state"] = np.concatenate((position, quaternion_to_axis_angle(quaternion), fingers))
    return seen


def example() -> dict[str, np.ndarray]:
    """What a policy sees, in black: for warming it up."""
    images = {key: np.zeros((IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8) for key in CAMERAS}
    return {**images, "observation/state": np.zeros(8)}


def quaternion_to_axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """(x, y, z, w) to axis times angle, in [0, 2 pi): q and -q differ, as in openpi's `_quat2axisangle`."""
    w = float(np.clip(quaternion[3], -1.0, 1.0))
    sine = math.sqrt(1.0 - w * w)
    if math.isclose(sine, 0.0):
        return np.zeros(3)
    return np.asarray(quaternion[:3]) * 2.0 * math.acos(w) / sine


def resize_with_pad(image: np.ndarray, size: int = IMAGE_SIZE) -> np.ndarray:
    """Fit a uint8 (H, W, 3) image into (size, size, 3): bilinear, aspect kept, black borders."""
    from PIL import Image

    height, width = image.shape[:2]
    if (height, width) == (size, size):
        return np.ascontiguousarray(image)
    ratio = max(width / size, height / size)
    inner = Image.fromarray(np.ascontiguousarray(image)).resize(
        (int(width / ratio), int(height / ratio)), resample=Image.Resampling.BILINEAR
    )
    outer = Image.new(inner.mode, (size, size), 0)
    outer.paste(inner, (max(0, (size - inner.width) // 2), max(0, (size - inner.height) // 2)))
    return np.asarray(outer)
