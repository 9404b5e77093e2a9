"""Geometry and pixel values of camera images, shared by the host (`transforms.images`) and the GPU (`kernels.image`).

Level p is the pixel `p / 127.5 - 1`: 0 is black, 255 is white, -255 is the pixel -3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from vla_accel.errors import ObservationError

Resize = Literal["antialias", "bilinear", "corner", "stretched"]
"""How images are resized. "antialias" is Pillow's bilinear filter (openpi); "bilinear" samples four neighbours
(lerobot) and rounds to whole levels, where lerobot keeps fractions; "corner" is "bilinear" with padding only above and
on the left (lerobot's SmolVLA); "stretched" samples four neighbours, without padding, in another aspect ratio
(MolmoAct2)."""

TOP, LEFT, BOTTOM, RIGHT, OUTSIDE, LOWEST, HIGHEST, OFFSET, SHIFT, SCALE, MAP_WIDTH = 0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 14
"""Columns of a pixel map and their number. `SHIFT` and `SCALE` are the first of three columns, one a channel."""
IMAGENET_MEAN, IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""ImageNet's, by channel, of pixels in [0, 1]."""
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Resampling:
    """Resizes whole images to `size` (height, width): to `between` by `filter`, if that is not None, and then by the
    bicubic one. "area" is torch's; "bicubic" its antialiased filter, which is Pillow's."""

    between: tuple[int, int] | None
    size: tuple[int, int]
    filter: Literal["area", "bicubic"] = "area"

    def keeps(self, height: int, width: int) -> bool:
        """Return whether an image of this size stays as it is."""
        return (height, width) == self.size and self.between in (None, self.size)

    def weights(self, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Return float64 (rows, height) and (columns, width): rows · image · columnsᵀ is the resized image."""
        between = self.between or (height, width)
        rows = _resampled(height, between[0], self.size[0], self.filter)
        return rows, _resampled(width, between[1], self.size[1], self.filter)


@lru_cache(maxsize=16)
def _resampled(count: int, between: int, out: int, first: str) -> np.ndarray:
    weights, before = bicubic_weights(between, out), {"area": area_weights, "bicubic": bicubic_weights}[first]
    return weights if between == count else weights @ before(count, between)


@dataclass(frozen=True)
class CentreCrop:
    """Resizes whole images to squares of `size`, after JPEG (`kernels.image.jpeg`), by TensorFlow's antialiased Lanczos
    filter, and enlarges the middle of them, `part` of each side, to the same size by its `crop_and_resize`."""

    size: int
    part: float

    def keeps(self, height: int, width: int) -> bool:
        """Return whether an image has the size already, so that it is only cropped."""
        return (height, width) == (self.size, self.size)

    def weights(self, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Return float64 (size, height) and (size, width) of the Lanczos filter, as `Resampling.weights`."""
        return lanczos_weights(height, self.size), lanczos_weights(width, self.size)

    def neighbours(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return what `neighbours` returns, of the middle: TensorFlow's float32 positions."""
        last, part = np.float32(self.size - 1), np.float32(self.part)
        start = (np.float32(1) - part) / np.float32(2)
        step = (start + part - start) * last / last
        place = start * last + np.arange(self.size, dtype=np.float32) * step
        low = np.floor(place)
        return low.astype(np.int64), np.ceil(place).astype(np.int64), place - low


@dataclass(frozen=True)
class Cameras:
    """The (height, width) of each view, where the device resizes camera images to the model's size by `method`."""

    sizes: tuple[tuple[int, int], ...]
    method: Resize | Resampling | CentreCrop


def fitted(height: int, width: int, size: int) -> tuple[int, int, int, int]:
    """Return (top, left, height, width) of an image centred in a square of `size`, aspect ratio kept."""
    ratio = max(width / size, height / size)
    inner_height, inner_width = int(height / ratio), int(width / ratio)
    return (size - inner_height) // 2, (size - inner_width) // 2, inner_height, inner_width


def placed(height: int, width: int, size: int, method: Resize, key: str = "image") -> tuple[int, int, int, int]:
    """As `fitted`, at the position that `method` uses. Raises ObservationError if no pixel would be left."""
    if method == "stretched":
        return 0, 0, size, size
    top, left, inner_height, inner_width = fitted(height, width, size)
    if not (inner_height and inner_width):
        raise ObservationError(f"{key}: expected a shape that can be resized to {size}, got {(height, width, 3)}")
    if method == "corner":
        top, left = size - inner_height, size - inner_width
    return top, left, inner_height, inner_width


@lru_cache(maxsize=16)
def neighbours(count: int, out: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each of `out` samples of `count` inputs: the lower neighbour, the upper one, and the float32 weight of the
    upper one."""
    centre = np.clip((np.arange(out) + 0.5) * (count / out) - 0.5, 0, None)
    low = np.minimum(centre.astype(np.int64), count - 1)
    return low, np.minimum(low + 1, count - 1), (centre - low).astype(np.float32)


def area_weights(count: int, out: int) -> np.ndarray:
    """Return the weights float64 (out, count) of one axis of torch's "area" resizing: means of neighbouring inputs."""
    low, high = np.arange(out) * count // out, -(-(np.arange(out) + 1) * count // out)
    place = np.arange(count)
    inside = (place >= low[:, None]) & (place < high[:, None])
    return inside / inside.sum(1, keepdims=True)


def bicubic_weights(count: int, out: int) -> np.ndarray:
    """Return the weights float64 (out, count) of one axis of torch's antialiased bicubic resizing."""

    def cubic(x: np.ndarray) -> np.ndarray:
        near = (1.5 * x - 2.5) * x * x + 1.0
        far = ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
        return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))

    return _filtered(count, out, 2, cubic)


def lanczos_weights(count: int, out: int) -> np.ndarray:
    """Return the weights float64 (out, count) of one axis of the antialiased Lanczos filter of three lobes."""
    return _filtered(count, out, 3, lambda x: np.where(x < 3.0, np.sinc(x) * np.sinc(x / 3.0), 0.0))


def bilinear_weights(count: int, out: int) -> np.ndarray:
    """Return the weights float64 (out, count) of one axis of torch's antialiased bilinear resizing."""
    return _filtered(count, out, 1, lambda x: np.maximum(1.0 - x, 0.0))


def _filtered(count: int, out: int, reach: int, weigh: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """The weights of a filter by distance in samples, which is zero from `reach` on."""
    step = count / out
    wide = max(step, 1.0)
    centre = (np.arange(out) + 0.5) * step
    low = np.maximum((centre - reach * wide + 0.5).astype(np.int64), 0)
    high = np.minimum((centre + reach * wide + 0.5).astype(np.int64), count)
    place = np.arange(count)
    weights = weigh(np.abs((place + 0.5 - centre[:, None]) / wide))
    weights *= (place >= low[:, None]) & (place < high[:, None])
    return weights / weights.sum(1, keepdims=True)


@dataclass(frozen=True)
class ChannelScale:
    """Maps the levels p of one camera to `(p - shift) * scale + offset`, with `shift` and `scale` by channel."""

    shift: tuple[float, float, float] = (0.0, 0.0, 0.0)
    scale: tuple[float, float, float] = (1.0, 1.0, 1.0)
    offset: float = 0.0


@dataclass(frozen=True)
class PixelValues:
    """The pixel values that a checkpoint was trained with.

    Attributes:
        outside: Level of the bars around an image of another aspect ratio.
        clipped: Lowest and highest level of resized images; None for no bounds.
        cameras: Scale of each camera, in the order of the preset's images; empty for none.
    """

    outside: float = 0.0
    clipped: tuple[float, float] | None = None
    cameras: tuple[ChannelScale, ...] = ()

    def maps(self, sizes: Sequence[tuple[int, int, int]], size: int, method: Resize) -> np.ndarray:
        """Return a pixel map for each view, float32 (views, `MAP_WIDTH`), read-only.

        `sizes`: for each view (index of its camera in the preset, image height, image width); `size`: side of the
        model's square.
        """
        return _maps(self, tuple(sizes), size, method)


@lru_cache(maxsize=64)
def _maps(values: PixelValues, sizes: Sequence[tuple[int, int, int]], size: int, method: Resize) -> np.ndarray:
    made = np.zeros((len(sizes), MAP_WIDTH), np.float32)
    for row, (camera, height, width) in zip(made, sizes, strict=True):
        top, left, inner_height, inner_width = placed(height, width, size, method)
        scale = values.cameras[camera] if values.cameras else ChannelScale()
        row[: OUTSIDE + 1] = top, left, top + inner_height, left + inner_width, values.outside
        resized = (height, width) != (size, size)
        row[LOWEST:OFFSET] = values.clipped if values.clipped and resized else (-_LARGEST, _LARGEST)
        row[OFFSET] = scale.offset
        row[SHIFT:SCALE], row[SCALE:MAP_WIDTH] = scale.shift, scale.scale
    made.setflags(write=False)
    return made


def example_map(size: int) -> tuple[float, ...]:
    """Return the pixel map of a wide image, with bars, bounds and a scale for each channel."""
    scale = ChannelScale((110.0, 120.0, 130.0), (0.9, 1.0, 1.1), 100.0)
    values = PixelValues(outside=-255.0, clipped=(-255.0, 255.0), cameras=(scale,))
    return tuple(values.maps([(0, size, 2 * size)], size, "bilinear")[0].tolist())
