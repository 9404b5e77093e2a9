"""Images and instructions in an observation under keys that the preset does not name.

A misspelt camera key would mask an optional camera, and the configuration's `default_prompt` would replace an
instruction under a misspelt key: both without an error. Needs neither torch nor Pillow.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

_SMALLEST_EDGE = 8  # pixels; smaller arrays are poses, keypoints or tactile sensors
_CHANNELS = (1, 3, 4)
_ENCODED = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")  # JPEG, PNG
_LIST_ELEMENTS = 8  # elements of a list that are searched; robots send pairs such as (time, image)
_DEEPEST = 5
_PROMPT_NAMES = {
    "instruction",
    "instructions",
    "language",
    "language_instruction",
    "prompt",
    "task",
    "task_description",
    "task_instruction",
}
"""The last part of the keys under which robots and data sets send an instruction."""
_SIMILAR = 0.75


def unknown_images(observation: Mapping[Any, Any], known: Iterable[str]) -> Iterator[str]:
    """Yield the keys of images that `known` does not name.

    Args:
        observation: The robot's observation; mappings may be nested, also inside lists.
        known: Keys to skip. A key with slashes may be a path into nested mappings.

    Yields:
        The path of each image, its keys joined by slashes.
    """
    known = tuple(known)
    skipped = {*((k,) for k in known), *(tuple(k.split("/")) for k in known)}
    for path, value in _leaves(observation, (), skipped):
        if looks_like_image(value):
            yield "/".join(path)


def unknown_prompts(observation: Mapping[Any, Any], prompt: str) -> Iterator[tuple[str, str]]:
    """Yield texts under the usual names of an instruction, or under a name close to `prompt`, the preset's key.

    Yields:
        The path of each text, its keys joined by slashes, and the text.
    """
    expected = _last_part(prompt)
    for path, value in _leaves(observation, (), set()):
        text = _text(value)
        if not (path and text):
            continue
        name = _last_part(path[-1])
        if name in _PROMPT_NAMES or difflib.SequenceMatcher(None, name, expected).ratio() >= _SIMILAR:
            yield "/".join(path), text


def _leaves(node: Any, path: tuple[str, ...], skipped: set[tuple[str, ...]]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value below a mapping, also of mappings inside lists, with its path; paths in `skipped` are left out."""
    if path in skipped:
        return
    if isinstance(node, Mapping):
        for key, value in node.items():
            name = key.decode(errors="replace") if isinstance(key, bytes) else str(key)
            yield from _leaves(value, (*path, name), skipped)
    elif isinstance(node, (list, tuple)) and any(isinstance(one, Mapping) for one in node[:_LIST_ELEMENTS]):
        for index, value in enumerate(node):
            yield from _leaves(value, (*path, str(index)), skipped)
    else:
        yield path, node


def looks_like_image(value: Any) -> bool:
    """Return whether `value` holds one or several images.

    Images are arrays, tensors and memoryviews of numbers with three to five axes and 1, 3 or 4 channels, channels last
    or first, nested lists of such a shape, Pillow images, the bytes of JPEG, PNG and WebP files, and lists, tuples and
    arrays of objects with one of these among their first elements.
    """
    return _holds_image(value, 0)


def _holds_image(value: Any, depth: int) -> bool:
    value = _as_array(value)
    if type(value).__module__.partition(".")[0] == "PIL" or _is_encoded(value) or _is_shaped(value):
        return True
    if not isinstance(value, (list, tuple)) or depth == _DEEPEST:
        return False
    return any(_holds_image(one, depth + 1) for one in value[:_LIST_ELEMENTS])


def _as_array(value: Any) -> Any:
    """Memoryviews and objects with `__array__` as arrays, the first elements of object or byte arrays as a list."""
    if isinstance(value, np.generic):
        return value.tobytes() if value.dtype.kind == "V" else value
    if (isinstance(value, memoryview) and value.ndim > 1) or (
        not hasattr(value, "dtype") and hasattr(value, "__array__") and not isinstance(value, type)
    ):
        try:
            value = np.asarray(value)
        except Exception:  # the object's own code may raise anything; a model could not read it either
            return value
    if isinstance(value, np.ndarray) and value.dtype.kind in "OSV":
        return value.reshape(-1)[:_LIST_ELEMENTS].tolist()
    return value


def _is_shaped(value: Any) -> bool:
    """Whether an array or nested lists have the shape of images; only the first element of a list is read."""
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


def _last_part(key: str) -> str:
    return re.split(r"[/.]", key.strip().lower())[-1]


def _text(value: Any) -> str:
    """A text, also the only one of a list or an array; empty for anything else."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "USO":
        value = value.tolist()
    while isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    return value.strip() if isinstance(value, str) else ""
