"""What an observation shows: its camera images as JPEG, its numbers and its texts, by path."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

LONGEST_SIDE = 256
"""Pixels; larger images are shown smaller."""
QUALITY = 75
_MOST_NUMBERS = 64
"""A longer vector is no state of a robot."""


def parts(observation: Mapping[str, Any]) -> Iterator[tuple[str, bytes | float | str]]:
    """Yield path and value of each image (JPEG), number and text. Anything else is left out."""
    for key, value in _flat(observation, ""):
        if isinstance(value, str):
            yield key, value
            continue
        array = _array(value)
        if (picture := _picture(array)) is not None:
            yield f"camera/{key}", jpeg(picture)
        elif array is not None and array.size <= _MOST_NUMBERS and array.ndim <= 2:
            for index, number in enumerate(array.reshape(-1, array.shape[-1] if array.ndim else 1)[-1]):
                yield f"state/{key}/{index}", float(number)


def jpeg(picture: np.ndarray) -> bytes:
    """Encode a picture uint8 (height, width, 3), reduced to `LONGEST_SIDE`."""
    from PIL import Image

    image, file = Image.fromarray(np.ascontiguousarray(picture)), io.BytesIO()
    image.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    image.save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def path_of(key: object) -> str:
    """Return a key as a part of an entity's path."""
    return re.sub(r"[^\w/-]", "_", str(key)).strip("/")


def _flat(observation: Mapping[Any, Any], before: str) -> Iterator[tuple[str, Any]]:
    for key, value in observation.items():
        path = f"{before}{path_of(key)}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}/")
        else:
            texts = isinstance(value, (list, tuple)) and len(value) == 1 and isinstance(value[0], str)
            yield path, value[0] if texts else value


def _array(value: Any) -> np.ndarray | None:
    """The value as numbers; None for what is none, and for GPU tensors, whose copy would wait for the GPU."""
    if value is None or getattr(value, "is_cuda", False):
        return None
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):  # torch raises RuntimeError for a tensor with a gradient
        return None
    return array if array.size and array.dtype.kind in "buif" else None


def _picture(array: np.ndarray | None) -> np.ndarray | None:
    """The newest picture uint8 (height, width, 3) of (…, height, width, 3) or (…, 3, height, width); floats are in
    [0, 1]."""
    if array is None or array.ndim < 3:
        return None
    picture = array[(-1,) * (array.ndim - 3)]
    if picture.shape[-1] != 3:
        picture = np.moveaxis(picture, 0, -1)
    if picture.shape[-1] != 3:
        return None
    if picture.dtype.kind == "f":
        picture = np.nan_to_num(picture) * 255.0
    return np.clip(picture, 0, 255).astype(np.uint8)
