"""Named tensors of safetensors files, whole or in shards, read one at a time, so that a checkpoint may be larger than
the free memory. No pickle is ever opened."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vla_accel.config import LARGEST
from vla_accel.config.mapping import read_mapping
from vla_accel.errors import CheckpointError, ConfigError

INDEX = "model.safetensors.index.json"
# The pages of a mapped file count as memory of the process until it is closed: reopen it after this many bytes.
_MAPPED_BYTES = 16 << 20
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
}  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """A stored tensor that is a part of a canonical one.

    Attributes:
        name: Its stored name.
        rows: Its number of rows; None: those of the whole canonical tensor.
        entry: Index into a stored tensor that stacks those of several models. Its matrices are (in, out), the transpose
            of a canonical one.
        frame: It is a convolution of frames, of which one frame needs the last slice in time, or has axes of one value.
        pairs: Numbers of a head, whose rotated pairs are stored next to each other; canonical heads have their first
            numbers in one half, and their second ones in the other.
        transposed: Whether it is the transpose of a canonical matrix.
        start: Its first row in a stored tensor that has more than its `rows`; None: that has these rows alone.
    """

    name: str
    rows: int | None = None
    entry: int | None = None
    frame: bool = False
    pairs: int | None = None
    transposed: bool = False
    start: int | None = None

    def why_not(self, stored: tuple[int, ...], whole: tuple[int, ...]) -> str | None:
        """Return why a stored shape cannot be this piece of a canonical tensor of shape `whole`; None if it can."""
        expected = whole if self.rows is None else (self.rows, *whole[1:])
        if self.transposed:
            expected = expected[::-1]
        if self.entry is not None:
            if stored[1:] == expected[::-1] and self.entry < stored[0]:
                return None
            expected = (max(self.entry + 1, stored[0] if stored else 0), *expected[::-1])
        if self.frame:
            one = stored[:2] + stored[3:] if len(stored) == 5 else stored
            if [side for side in one if side > 1] == [side for side in expected if side > 1]:
                return None
        if self.pairs is not None and expected[0] % self.pairs:
            return f"expected heads of {self.pairs}, got {stored}"
        if self.start is not None and stored and stored[0] >= self.start + expected[0]:
            stored = (expected[0], *stored[1:])
        return None if stored == expected else f"expected {expected}, got {stored}"

    def taken(self, stored: Tensor) -> Tensor:
        """Return the piece of the stored tensor, in canonical order. Of a `frame`, axes of one value may differ."""
        if self.frame and stored.ndim == 5:
            stored = stored[:, :, -1]
        if self.transposed:
            return stored.T
        if self.start is not None and self.rows is not None:
            return stored[self.start : self.start + self.rows]
        if self.pairs is not None:
            return stored.unflatten(0, (-1, self.pairs // 2, 2)).transpose(1, 2).flatten(0, 2)
        return stored if self.entry is None else stored[self.entry].T if stored.ndim > 2 else stored[self.entry]


class Weights(Protocol):
    """Stored tensors: shapes, sizes in bytes, and dtypes of those that are not floats, each by name."""

    shapes: dict[str, tuple[int, ...]]
    sizes: dict[str, int]
    integers: dict[str, str]

    def read(self, name: str) -> Tensor:
        """Return a tensor on the CPU in its stored dtype. Free it before reading the next one to save memory."""
        ...


class JoinedWeights:
    """The tensors of several sources, each with a prefix before their names."""

    def __init__(self, sources: Mapping[str, Weights]) -> None:
        self._places = {start + name: (source, name) for start, source in sources.items() for name in source.shapes}
        self.shapes = {key: source.shapes[name] for key, (source, name) in self._places.items()}
        self.sizes = {key: source.sizes[name] for key, (source, name) in self._places.items()}
        self.integers = {
            key: source.integers[name] for key, (source, name) in self._places.items() if name in source.integers
        }

    def read(self, name: str) -> Tensor:
        source, own = self._places[name]
        return source.read(own)


class SmallWeights:
    """Tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.shapes = {name: tuple(value.shape) for name, value in tensors.items()}
        self.sizes = {name: value.nbytes for name, value in tensors.items()}
        self.integers: dict[str, str] = {}

    def read(self, name: str) -> Tensor:
        return self.tensors[name]


class SafetensorsWeights:
    """The tensors of a safetensors file, or of the `model*.safetensors` of a folder, with or without an index.

    Raises CheckpointError for a missing, damaged or doubled file or key, and for an index that is not the files'.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.sizes: dict[str, int] = {}
        self.integers: dict[str, str] = {}
        table = _read_index(path / INDEX) if (path / INDEX).is_file() else None
        for file in self._files(table):
            self._add(file)
        if table is not None:
            self._compare(table)
        self._reader: Any = None
        self._opened: Path | None = None
        self._touched = 0
        # Opening a file with many tensors takes milliseconds: a large one is opened at most 64 times.
        self._most_mapped = max(_MAPPED_BYTES, sum(self.sizes.values()) // 64)

    def _files(self, table: Mapping[str, str] | None) -> list[Path]:
        if not self.path.is_dir():
            files = [self.path]
        elif table is not None:
            files = [self.path / name for name in sorted(set(table.values()))]
        else:
            # Other safetensors files in the folder (calibration scales, a processor's state) are not weights.
            files = sorted(self.path.glob("model*.safetensors"))
        absent = [f.name for f in files if not f.is_file()]
        if absent or not files:
            expected = ", ".join(absent) or "model.safetensors"
            whole = table is not None and (self.path / "model.safetensors").is_file()
            hint = f"; if model.safetensors holds all weights, remove {INDEX}" if whole else ""
            raise CheckpointError(f"checkpoint {self.path}: expected {expected}, found {listing(self.path)}{hint}")
        return files

    def _add(self, file: Path) -> None:
        with _open(file) as reader:
            for key in reader.keys():  # noqa: SIM118 - not a mapping
                if key in self._places:
                    raise CheckpointError(f"checkpoint {self.path}: key {key} is in more than one file")
                view = reader.get_slice(key)
                shape, dtype = tuple(view.get_shape()), _DTYPES.get(view.get_dtype(), torch.float8_e4m3fn)
                self._places[key], self.shapes[key] = file, shape
                if not dtype.is_floating_point:
                    self.integers[key] = str(dtype)
                self.sizes[key] = torch.Size(shape).numel() * dtype.itemsize

    def _compare(self, table: Mapping[str, str]) -> None:
        absent = sorted(k for k, name in table.items() if self._places.get(k) != self.path / name)
        unlisted = sorted(self._places.keys() - table.keys())
        if absent or unlisted:
            raise CheckpointError(
                f"checkpoint {self.path}: {INDEX} and the files differ: {len(absent)} not in the file named: "
                f"{some(absent)}; {len(unlisted)} not in the index: {some(unlisted)}"
            )

    def read(self, name: str) -> Tensor:
        file = self._places[name]
        if self._reader is None or self._opened != file or self._touched > self._most_mapped:
            self._reader = None
            self._reader = _open(file)
            self._opened, self._touched = file, 0
        self._touched += self.sizes[name]
        try:
            return self._reader.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"checkpoint {file}: {name}: damaged safetensors file: {error}") from error


def _open(file: Path) -> Any:
    try:
        with file.open("rb") as opened:  # safetensors reports an unreadable file as missing
            if opened.read(23) == b"version https://git-lfs":
                raise CheckpointError(f"checkpoint {file}: expected weights, got a git-lfs pointer: run git lfs pull")
        return safe_open(file, framework="pt")
    except OSError as error:
        raise CheckpointError(f"checkpoint {file}: cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise CheckpointError(f"checkpoint {file}: damaged safetensors file: {error}") from error


def read_arrays(file: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a safetensors file of statistics, BF16 as float32. Raises CheckpointError."""
    opened = _open(file)
    tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
    # Copies: a mapped tensor would change if the file is overwritten.
    return {name: np.array((t.float() if t.dtype == torch.bfloat16 else t).numpy()) for name, t in tensors.items()}


def _read_index(path: Path) -> dict[str, str]:
    try:
        table = json.loads(path.read_text())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {path}: expected an index with a weight_map, got {error!r}") from error
    flat = isinstance(table, dict) and all(isinstance(v, str) and Path(v).name == v for v in table.values())
    if not flat or not table:
        raise CheckpointError(
            f"checkpoint {path}: expected weight_map from keys to files of this folder, got {table!r:.60}; without an "
            "index, all model*.safetensors of the folder are read"
        )
    return table


def some(names: list[str], limit: int = 8) -> str:
    """Return the first names of a list, and the number of the others."""
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


def listing(path: Path) -> str:
    """Return the content of a folder, for an error message."""
    if not path.is_dir():
        return "no such folder" if not path.exists() else "a file"

    def described(entry: Path) -> str:
        wrong = " (a link to nothing)" if not entry.exists() else " (no right to read it)"
        return entry.name + "/" * entry.is_dir() + wrong * (not os.access(entry, os.R_OK))

    names = sorted(map(described, path.iterdir()))
    return ", ".join(names[:12]) or "an empty folder"


def read_json(path: Path) -> dict[str, Any]:
    """Read a checkpoint's JSON or YAML file. Raises CheckpointError."""
    try:
        return read_mapping(path)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error


def size_of(content: Mapping[str, Any], key: str, path: Path, default: int | None = None) -> int:
    """Return a size in a checkpoint's file, `default` if it has none. Raises CheckpointError for an impossible size."""
    value = default if content.get(key) is None else content[key]
    if type(value) is not int or not 1 <= value <= LARGEST:
        raise CheckpointError(f"{path}: {key}: expected a whole number from 1 to {LARGEST}, got {value!r:.60}")
    return value
