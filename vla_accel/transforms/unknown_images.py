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
_LIST_ELEMENTS = 8  # of a list, that are looked at; robots send pairs such as (time, image)
_DEEPEST = 5


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
    elif isinstance(node, (list, tuple)) and any(isinstance(one, Mapping) for one in node[:_LIST_ELEMENTS]):
        for index, value in enumerate(node):
            yield from _search(value, (*path, str(index)), known)
    elif looks_like_image(node):
        yield "/".join(path)


def looks_like_image(value: Any) -> bool:
    """Return whether `value` holds one or several images.

    Images are arrays, tensors and memoryviews of numbers with three to five axes and 1, 3 or 4 channels, channels last
    or first, nested lists of such a shape, images of Pillow, the bytes of JPEG, PNG and WebP files, and lists, tuples
    and arrays of objects with one of these among their first elements.
    """
    return _holds_image(value, 0)


def _holds_image(value: Any, depth: int) -> bool:
    value = _as_known(value)
    if type(value).__module__.partition(".")[0] == "PIL" or _is_encoded(value) or _is_shaped(value):
        return True
    if not isinstance(value, (list, tuple)) or depth == _DEEPEST:
        return False
    return any(_holds_image(one, depth + 1) for one in value[:_LIST_ELEMENTS])


def _as_known(value: Any) -> Any:
    """Memoryviews and objects with `__array__` as arrays, the first elements of arrays of objects or bytes as a list,
    anything else as it is."""
    if isinstance(value, np.generic):
        return value.tobytes() if value.dtype.kind == "V" else value
    if (isinstance(value, memoryview) and value.ndim > 1) or (
        not hasattr(value, "dtype") and hasattr(value, "__array__") and not isinstance(value, type)
    ):
        try:
            value = np.asarray(value)
        except Exception:  # whatever its own code raises; it is no image that a model could read, either
            return value
    if isinstance(value, np.ndarray) and value.dtype.kind in "OSV":
        return value.reshape(-1)[:_LIST_ELEMENTS].tolist()
    return value


def _is_shaped(value: Any) -> bool:
    """Whether an array or nested lists have the shape of images; only the first elements of a list are read."""
    outer: list[int] = []
    while isinstance(value, (list, tuple)) and value and len(outer) < _DEEPEST:
        outer.append(len(value))
        value = value[0]
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


def _is_encoded(value: Any) -> bool:
    """Whether a byte string, or an array (n,) of bytes, begins like an image file."""
    first = b""
    if isinstance(value, (bytes, bytearray, memoryview)):
        first = bytes(value[:12])
    elif isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype == np.uint8:
        first = value[:12].tobytes()
    return first.startswith(_ENCODED) or (first[:4] == b"RIFF" and first[8:] == b"WEBP")
