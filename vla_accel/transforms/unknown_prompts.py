"""Instructions in an observation under keys that the preset does not name.

The configuration's `default_prompt` would otherwise replace the robot's own instruction without an error. Knows nothing
of tokens or models.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

_NAMES = {
    "instruction", "instructions", "language", "language_instruction", "prompt", "task", "task_description",
    "task_instruction",
}  # fmt: skip
"""The last part of the keys under which robots and data sets send an instruction."""
_SIMILAR = 0.75


def unknown_prompts(observation: Mapping[Any, Any], prompt: str) -> Iterator[tuple[str, str]]:
    """Yield texts under the usual names of an instruction, or under a name that is close to the preset's.

    Args:
        observation: The robot's observation; mappings may be nested.
        prompt: The preset's key of the instruction.

    Yields:
        The path of each text, its keys joined by slashes, and the text.
    """
    yield from _search(observation, (), _last(prompt))


def _search(node: Any, path: tuple[str, ...], expected: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            name = key.decode(errors="replace") if isinstance(key, bytes) else str(key)
            yield from _search(value, (*path, name), expected)
        return
    text = _text(node)
    if not path or not text:
        return
    last = _last(path[-1])
    if last in _NAMES or difflib.SequenceMatcher(None, last, expected).ratio() >= _SIMILAR:
        yield "/".join(path), text


def _last(key: str) -> str:
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
