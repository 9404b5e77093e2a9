"""How the bytes of a camera's image become the pixels that a model reads, for checkpoints that were trained with others
than `byte / 127.5 - 1`.

Everything here is in levels: a level p is the pixel `p / 127.5 - 1`, so that 0 is black, 255 is white, and -255 is the
pixel -3. Knows no images; `ops.pixels` applies a pixel map to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vla_accel.pictures import Resize, placed

TOP, LEFT, BOTTOM, RIGHT, OUTSIDE, LOWEST, HIGHEST, OFFSET, SHIFT, SCALE, WIDTH = 0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 14
"""Columns of a pixel map, and their number; `SHIFT` and `SCALE` are the first of three, one a channel."""
_LARGEST = float(np.finfo(np.float32).max)


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
            float32 (views, `WIDTH`).
        """
        made = np.zeros((len(sizes), WIDTH), np.float32)
        for row, (camera, height, width) in zip(made, sizes, strict=True):
            top, left, inner_height, inner_width = placed(height, width, size, method)
            scale = self.cameras[camera] if self.cameras else ChannelScale()
            row[: OUTSIDE + 1] = top, left, top + inner_height, left + inner_width, self.outside
            resized = (height, width) != (size, size)
            row[LOWEST:OFFSET] = self.clipped if self.clipped and resized else (-_LARGEST, _LARGEST)
            row[OFFSET] = scale.offset
            row[SHIFT:SCALE], row[SCALE:WIDTH] = scale.shift, scale.scale
        return made
