"""Safetensors files written one tensor at a time, so that a file may be larger than the memory.

The format is a length, a JSON header with the offset of every tensor, and the values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from vla_accel.files import replacing

_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class SafetensorsWriter:
    """Write a file in a `with` block; leaving the block without writing every tensor is an error.

    Args:
        path: The file.
        entries: Dtype and shape of every tensor, by name.
        metadata: Strings for the header.
    """

    def __init__(
        self,
        path: Path,
        entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
        self._places: dict[str, tuple[torch.dtype, tuple[int, ...], int]] = {}
        offset = 0
        # Wider values first, so that every tensor is aligned to its own size.
        for name, (dtype, shape) in sorted(entries.items(), key=lambda e: (-e[1][0].itemsize, e[0])):
            end = offset + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
            self._places[name] = (dtype, shape, offset)
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._left = set(entries)
        self._start = 8 + len(text)
        self._file = open(path, "wb")  # noqa: SIM115 - closed by __exit__
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._start + offset)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor, cast to its dtype. Raises ValueError for another shape or a second write."""
        dtype, shape, offset = self._places[name]
        if tuple(tensor.shape) != shape or name not in self._left:
            raise ValueError(f"{name}: expected shape {shape}, once, got {tuple(tensor.shape)}")
        values = tensor.detach().to("cpu", dtype).contiguous().flatten()
        self._file.seek(self._start + offset)
        self._file.write(memoryview(values.view(torch.uint8).numpy()))  # pyright: ignore[reportArgumentType]
        self._left.remove(name)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        if kind is None and self._left:
            raise ValueError(f"{len(self._left)} tensors were not written: {sorted(self._left)[:8]}")


def save_weights(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a file of tensors in memory, whole or not at all (`files.replacing`).

    `safetensors.save_file` is not used: its file is readable by the owner only, and its error on a full disk is no
    OSError.
    """
    entries = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with replacing(path) as temporary, SafetensorsWriter(temporary, entries) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
