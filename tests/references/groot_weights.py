"""Random weights of a small GR00T N1.7 that any interpreter draws alike, by the names that they are stored under.

Imports NumPy alone: the script that asks lerobot, and the tests that do not need it, both take their weights from here.
"""

from __future__ import annotations

import math
import zlib

import numpy as np

PIECE = 1 << 24
_ENDS = ("o_proj.weight", "down_proj.weight", "to_out.0.weight", "net.2.weight", "linear_fc2.weight")


def draw(name: str, *shape: int) -> np.ndarray:
    """Standard normal numbers of a name, float32: always the same ones (RandomState's streams are frozen)."""
    stream = np.random.RandomState(zlib.crc32(name.encode()))
    numbers = np.empty(math.prod(shape), np.float32)
    # In pieces: the stream's own numbers take twice the room.
    for piece in np.split(numbers, range(PIECE, len(numbers), PIECE)):
        piece[:] = stream.standard_normal(len(piece))
    return numbers.reshape(shape)


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Isaac-GR00T's tensor of a name, float32: no bias zero, no norm one, activations of order one."""
    drawn = draw(name, *shape)
    if name.endswith(".W"):
        return drawn * (0.2 if "decoder.layer2" in name else 1.0) / shape[1] ** 0.5
    if len(shape) == 1 or name.endswith(".b"):
        return 0.1 * drawn + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
    if "embed" in name and "patch" not in name and "timestep" not in name:
        return 0.5 * drawn
    gain = 0.2 if name.endswith(_ENDS) or "norm1.linear" in name else 1.0
    return gain * drawn / int(np.prod(shape[1:])) ** 0.5
