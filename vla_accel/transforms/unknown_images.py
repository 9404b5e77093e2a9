"""Images in an observation under keys that the preset does not name.

A misspelt key of an optional camera would otherwise mask that camera without an error. Knows nothing of statistics or
models, and needs no torch and no Pillow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

_SMALLEST_EDGE = 8  # pixels; smaller arrays are poses, keypoints or readings of tactile sensors
_CHANNELS = (1, 3, 4)
_ENCODED = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")  # JPEG, PNG


def unknown_images(observation: Mapping[Any, Any], known: Iterable[str]) -> Iterator[str]:
    """Yield the keys of images that `known` does not name.

    Args:
        observation: The robot's observation; mappings may be nested, also inside lists.
        known: Keys that are not searched. A key with slashes may be a path into nested mappings.

    Yields:
        The path of each image, its keys joined by slashes.
    """
    known = tuple(known)
    yield from _search(observation, (), {*((k,) for k in known), *(tuple(k.split("/")) for k in known)})


def _search(node: Any, path: tuple[str, ...], known: set[tuple[str, ...]]) -> Iterator[str]:
    if path in known:
        return
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _search(value, (*path, str(key)), known)
    elif isinstance(node, (list, tuple)) and node and isinstance(node[0], Mapping):
        for index, value in enumerate(node):
            yield from _search(value, (*path, str(index)), known)
    elif looks_like_image(node):
        yield "/".join(path)


def looks_like_image(value: Any) -> bool:
    """Return whether `value` holds one or several images.

    Images are arrays and tensors of numbers with three to five axes and 1, 3 or 4 channels, channels last or first,
    nested lists of such a shape, images of Pillow, and the bytes of JPEG and PNG files. Only the first elements of a
    list are read.
    """
    outer: list[int] = []
    while isinstance(value, (list, tuple)) and value and len(outer) < 5:
        outer.append(len(value))
        value = value[0]
    if type(value).__module__.partition(".")[0] == "PIL" or _first_bytes(value).startswith(_ENCODED):
        return True
    if not _is_numeric(value):
        return False
    shape = (*outer, *getattr(value, "shape", ()))
    if not 3 <= len(shape) <= 5:
        return False
    layouts = ((shape[-1], shape[-3:-1]), (shape[-3], shape[-2:]))
    return any(channels in _CHANNELS and min(edges) >= _SMALLEST_EDGE for channels, edges in layouts)


def _is_numeric(value: Any) -> bool:
    """Whether a number, an array or a tensor holds integers or floats."""
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return getattr(dtype, "kind", "") in tuple("iuf") or any(name in str(dtype) for name in ("int", "float"))


def _first_bytes(value: Any) -> bytes:
    """The first bytes of a byte string or of an array (n,) of bytes; empty for others."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value[:8])
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype == np.uint8:
        return value[:8].tobytes()
    return b""
