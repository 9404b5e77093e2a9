"""Convert camera images to uint8, channels last, and resize them to the model's square with black bars."""

from __future__ import annotations

from typing import Any

import numpy as np

from vla_accel.errors import DependencyError, ObservationError
from vla_accel.pictures import Resampling, Resize, neighbours, placed

_ONE = np.float32(1).view(np.uint32)


def to_uint8(image: Any, key: str) -> np.ndarray:
    """Return an image as uint8 (H, W, 3), without a copy if it is one already.

    Args:
        image: uint8, or floats in [0, 1] (truncated, not rounded, as in openpi), channels last or first.
        key: Named in errors.

    Raises:
        ObservationError: Anything else, also a Pillow image in other colours than RGB (HSV, YCbCr, LAB).
    """
    if type(image) is not np.ndarray:
        image = _array(image, key)
    if image.ndim != 3 or 3 not in (image.shape[0], image.shape[-1]) or 0 in image.shape:
        alpha = image.ndim == 3 and 4 in (image.shape[0], image.shape[-1])
        colours = "[..., :3]" if alpha and image.shape[-1] == 4 else "[:3]"
        hint = f"; pass its colours without the alpha channel, image{colours}" if alpha else ""
        raise ObservationError(
            f"{key}: expected shape (height, width, 3), got {image.shape or f'{image.item()!r:.60}'}{hint}"
        )
    if image.dtype != np.uint8:
        image = _levels(image, key)
    # As openpi: three rows are channels.
    return image.transpose(1, 2, 0) if image.shape[0] == 3 else image


def _array(image: Any, key: str) -> np.ndarray:
    """Return an image of another type as an array."""
    if type(image).__module__.partition(".")[0] == "PIL" and getattr(image, "mode", "RGB") != "RGB":
        raise ObservationError(f'{key}: expected an image of mode RGB, got {image.mode}; pass image.convert("RGB")')
    if np.ma.is_masked(image):
        raise ObservationError(f"{key}: expected an image without a mask, got a masked array; fill its pixels first")
    try:
        return np.asarray(image)
    except (TypeError, ValueError) as error:  # lists of unequal length, a tensor on a GPU
        raise ObservationError(f"{key}: expected an array, got a {type(image).__name__} ({error})") from error


def _levels(image: np.ndarray, key: str) -> np.ndarray:
    """Return floats in [0, 1] as uint8 of the same axes, in the same order in memory."""
    if not np.issubdtype(image.dtype, np.floating):
        raise ObservationError(f"{key}: expected dtype uint8, got {image.dtype}")
    if not _in_range(image):
        raise ObservationError(f"{key}: expected uint8, or floats in [0, 1], got {image.min()} to {image.max()}")
    return (255 * image).astype(np.uint8)


def _in_range(image: np.ndarray) -> bool:
    """Return whether all floats are in [0, 1]."""
    # Read as integers, float32 numbers above 1, infinity, NaN and those with a sign are larger than 1: one pass.
    if image.dtype == np.float32 and image.view(np.uint32).max() <= _ONE:
        return True
    # -0 is in the range. The minimum and the maximum are NaN if a number is, and no comparison with NaN holds.
    return bool(image.min() >= 0 and image.max() <= 1)


def frames(image: Any, key: str, most: int) -> list[np.ndarray]:
    """Return the images of a view, oldest first, as `to_uint8`: `most` of them, of fewer the oldest several times.

    Args:
        image: One image, or up to `most`, oldest first, along another first axis.
        key: Named in errors.
        most: The frames that the model reads.
    """
    if np.ndim(image) != 4:
        return [to_uint8(image, key)] * most
    if not 1 <= len(image) <= most:
        some = "one image" if most == 1 else f"1 to {most} images"
        raise ObservationError(f"{key}: expected {some}, got {len(image)}")
    found = [to_uint8(one, key) for one in image]
    return [found[0]] * (most - len(found)) + found


def resize(image: np.ndarray, size: int, method: Resize, key: str = "image") -> np.ndarray:
    """Resize uint8 (H, W, 3) to (size, size, 3) with black bars; an image of that size is returned without a copy.

    Raises ObservationError that names `key` for a shape that cannot be resized.
    """
    if image.shape == (size, size, 3):
        return image
    top, left, height, width = placed(image.shape[0], image.shape[1], size, method, key)
    inner = filtered(image, height, width) if method == "antialias" else _sampled(image, height, width)
    if height == width == size:
        return inner
    out = np.zeros((size, size, 3), np.uint8)
    out[top : top + height, left : left + width] = inner
    return out


def resample(image: np.ndarray, method: Resampling) -> np.ndarray:
    """Return uint8 (H, W, 3) resized and rounded to whole levels; an image that stays as it is without a copy."""
    if method.keeps(image.shape[0], image.shape[1]):
        return image
    rows, columns = method.weights(image.shape[0], image.shape[1])
    return np.rint(columns @ np.tensordot(rows, image, 1)).clip(0, 255).astype(np.uint8)


def filtered(image: np.ndarray, height: int, width: int, *, bicubic: bool = False) -> np.ndarray:
    """Return uint8 (H, W, 3) resized by Pillow's bilinear or bicubic filter. Raises DependencyError without Pillow."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DependencyError(
            "resizing camera images needs Pillow: pip install 'vla_accel[checkpoints]', or send images of the size "
            "the model takes"
        ) from error
    method = Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
    return np.asarray(Image.fromarray(np.ascontiguousarray(image)).resize((width, height), method))


def _sampled(image: np.ndarray, height: int, width: int) -> np.ndarray:
    rows, next_rows, down = neighbours(image.shape[0], height)
    columns, next_columns, right = neighbours(image.shape[1], width)
    lines = image[rows] + down[:, None, None] * (image[next_rows].astype(np.float32) - image[rows])
    result = lines[:, columns] + right[None, :, None] * (lines[:, next_columns] - lines[:, columns])
    return np.rint(result).astype(np.uint8)
