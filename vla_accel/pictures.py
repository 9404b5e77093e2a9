"""Where a camera's image lies in the square that a model takes, whoever fits it: the host (`transforms.images`) or a
GPU (`ops.resize`). Knows no pixels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from vla_accel.errors import ObservationError

Resize = Literal["antialias", "bilinear", "corner"]
"""How images are brought to another size, each as checkpoints were trained with it. "antialias" is Pillow's bilinear
filter, as in openpi; "bilinear" samples four neighbours, as in lerobot, rounded to whole numbers, where lerobot keeps
fractions; "corner" does so, too, and pads only above and on the left."""


@dataclass(frozen=True)
class Picture:
    """A camera's image uint8 (H, W, 3) that is still to be fitted into a square of `size`."""

    image: np.ndarray
    size: int
    method: Resize


def fitted(height: int, width: int, size: int) -> tuple[int, int, int, int]:
    """Top, left, height and width of an image of this size inside a square of `size`, aspect ratio kept."""
    ratio = max(width / size, height / size)
    inner_height, inner_width = int(height / ratio), int(width / ratio)
    return (size - inner_height) // 2, (size - inner_width) // 2, inner_height, inner_width


def placed(height: int, width: int, size: int, method: Resize, key: str = "image") -> tuple[int, int, int, int]:
    """`fitted`, where a method puts it. Raises ObservationError, which names `key`, where nothing of the image is
    left."""
    top, left, inner_height, inner_width = fitted(height, width, size)
    if not (inner_height and inner_width):
        raise ObservationError(f"{key}: expected a shape that can be resized to {size}, got {(height, width, 3)}")
    if method == "corner":
        top, left = size - inner_height, size - inner_width
    return top, left, inner_height, inner_width


@lru_cache(maxsize=16)
def neighbours(count: int, out: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each of `out` samples of `count` inputs: the input at or before it, the next one, and how far it is on the way
    to that, float32."""
    centre = np.clip((np.arange(out) + 0.5) * (count / out) - 0.5, 0, None)
    low = np.minimum(centre.astype(np.int64), count - 1)
    return low, np.minimum(low + 1, count - 1), (centre - low).astype(np.float32)
