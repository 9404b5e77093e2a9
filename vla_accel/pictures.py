"""Where a camera's image lies in the square that a model takes, whoever fits it: the host (`transforms.images`) or a
GPU (`ops.resize`); and how its bytes become pixels, for checkpoints that were trained with others than
`byte / 127.5 - 1` (`ops.pixels`). Knows no arrays of pixels.

A level p is the pixel `p / 127.5 - 1`: 0 is black, 255 is white, and -255 is the pixel -3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from vla_accel.errors import ObservationError

Resize = Literal["antialias", "bilinear", "corner"]
"""How images are brought to another size, each as checkpoints were trained with it. "antialias" is Pillow's bilinear
filter, as in openpi; "bilinear" samples four neighbours, as in lerobot, rounded to whole numbers, where lerobot keeps
fractions; "corner" does so, too, and pads only above and on the left."""

TOP, LEFT, BOTTOM, RIGHT, OUTSIDE, LOWEST, HIGHEST, OFFSET, SHIFT, SCALE, MAP_WIDTH = 0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 14
"""Columns of a pixel map, and their number; `SHIFT` and `SCALE` are the first of three, one a channel."""
_LARGEST = float(np.finfo(np.float32).max)


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


@dataclass(frozen=True)
class ChannelScale:
    """Levels p of a camera's image become `(p - shift) * scale + offset`, with a `shift` and a `scale` for each
    channel."""

    shift: tuple[float, float, float] = (0.0, 0.0, 0.0)
    scale: tuple[float, float, float] = (1.0, 1.0, 1.0)
    offset: float = 0.0


@dataclass(frozen=True)
class PixelValues:
    """The pixels that a checkpoint was trained with.

    Attributes:
        outside: Level of the bars around an image of another aspect ratio.
        clipped: Lowest and highest level of images that were resized; None for no bounds.
        cameras: How the levels of each camera are scaled, in the order of the preset's images. Empty where none is.
    """

    outside: float = 0.0
    clipped: tuple[float, float] | None = None
    cameras: tuple[ChannelScale, ...] = ()

    def maps(self, sizes: Sequence[tuple[int, int, int]], size: int, method: Resize) -> np.ndarray:
        """Return a pixel map for each view.

        Args:
            sizes: Of each view its camera's place in the preset, and height and width of its image.
            size: Side of the square that the model takes.
            method: How images are fitted into that square.

        Returns:
            float32 (views, `MAP_WIDTH`).
        """
        made = np.zeros((len(sizes), MAP_WIDTH), np.float32)
        for row, (camera, height, width) in zip(made, sizes, strict=True):
            top, left, inner_height, inner_width = placed(height, width, size, method)
            scale = self.cameras[camera] if self.cameras else ChannelScale()
            row[: OUTSIDE + 1] = top, left, top + inner_height, left + inner_width, self.outside
            resized = (height, width) != (size, size)
            row[LOWEST:OFFSET] = self.clipped if self.clipped and resized else (-_LARGEST, _LARGEST)
            row[OFFSET] = scale.offset
            row[SHIFT:SCALE], row[SCALE:MAP_WIDTH] = scale.shift, scale.scale
        return made


def example_map(size: int) -> tuple[float, ...]:
    """Return a pixel map of a wide image in a square of `size`, with bars, bounds and a scale for each channel."""
    scale = ChannelScale((110.0, 120.0, 130.0), (0.9, 1.0, 1.1), 100.0)
    values = PixelValues(outside=-255.0, clipped=(-255.0, 255.0), cameras=(scale,))
    return tuple(values.maps([(0, size, 2 * size)], size, "bilinear")[0].tolist())
