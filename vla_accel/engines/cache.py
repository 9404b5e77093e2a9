"""Built engines on disk, by a hash of what they were built from.

An entry is NAME-KEY.engine, the library's own file, and NAME-KEY.json, its description with the content's SHA-256,
which is written last. A file that others may write to is refused; any other damaged entry is removed and built again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vla_accel.errors import EngineError
from vla_accel.files import (
    cache_folder,
    content_hash,
    replacing_privately,
    require_private,
    user_path,
    why_not_private,
)
from vla_accel.kernels.nvrtc import compiled_folder

SCHEMA = "vla_accel.engine/1"
_NAME = re.compile(r".+-[0-9a-f]{20}\.engine")


def default_folder() -> Path:
    """Default folder of engines, in the user's cache folder (XDG)."""
    return cache_folder() / "engines"


@dataclass(frozen=True)
class Entry:
    """An engine on disk. `about`: its description; `problem`: why it cannot be used, or empty."""

    path: Path
    about: Mapping[str, Any]
    problem: str = ""

    @property
    def size(self) -> int:
        """Bytes of the engine file."""
        return self.path.stat().st_size if self.path.is_file() else 0

    @property
    def used(self) -> float:
        """Time of the last load or write, seconds since the epoch."""
        described = self.path.with_suffix(".json")
        return (described if described.is_file() else self.path).stat().st_mtime


class EngineCache:
    """A folder of engines with a size limit; evicts the least recently used."""

    def __init__(self, folder: Path | str | None = None, limit_gb: float = 20.0) -> None:
        self.folder = default_folder() if folder is None else user_path(folder)
        self.limit = int(limit_gb * 2**30)

    def path(self, name: str, key: str) -> Path:
        return self.folder / f"{name}-{key[:20]}.engine"

    def get(self, name: str, key: str) -> Entry | None:
        """Return the entry of a key, or None. An entry with a `problem` has been removed. Raises EngineError."""
        self._require_private()
        path = self.path(name, key)
        files = [p for p in (path, path.with_suffix(".json")) if p.exists()]
        if not files:
            return None
        for file in files:
            require_private(file)
        entry = examine(path, key)
        if entry.problem:
            self.remove(entry)
        else:
            os.utime(path.with_suffix(".json"))
        return entry

    def put(self, name: str, key: str, content: Any, about: Mapping[str, Any]) -> Entry:
        """Store an engine (anything with a buffer), then evict down to the limit; the new entry stays."""
        self._require_private()
        entry = write_entry(self.path(name, key), content, {**about, "name": name, "key": key})
        self.evict(keep=entry.path)
        return entry

    def entries(self) -> list[Entry]:
        """Every entry, the most recently used first, without reading the engines' content."""
        return sorted((examine(p, whole=False) for p in self._paths()), key=lambda e: e.used, reverse=True)

    def verify(self) -> list[Entry]:
        """Every entry, its whole content compared with its description. Raises EngineError as `get`."""
        self._require_private()
        return [examine(path) for path in self._paths()]

    def clear(self) -> tuple[int, int]:
        """Remove all entries; return their number and bytes."""
        entries = self.entries()
        total = sum(e.size for e in entries)
        for entry in entries:
            self.remove(entry)
        for path in self.folder.glob("*.timing"):
            path.unlink(missing_ok=True)
        return len(entries), total

    def remove(self, entry: Entry) -> None:
        for path in (entry.path.with_suffix(".json"), entry.path):
            path.unlink(missing_ok=True)

    def evict(self, keep: Path) -> None:
        """Remove the least recently used entries but `keep` until the rest fits the limit."""
        entries = self.entries()
        total = sum(e.size for e in entries)
        for entry in reversed(entries):
            if total > self.limit and entry.path != keep:
                total -= entry.size
                self.remove(entry)

    def targets(self, name: str, content: str) -> list[str]:
        """Targets for which the cache has an engine of this content key."""
        found = (e.about for e in self.entries() if not e.problem and e.about.get("name") == name)
        return sorted({str(a["target"]) for a in found if a.get("content") == content})

    def _require_private(self) -> None:
        if self.folder.exists():
            require_private(self.folder)

    def _paths(self) -> Iterator[Path]:
        if not self.folder.is_dir():
            return
        names = {p.with_suffix(".engine") for p in self.folder.glob("*.json")} | set(self.folder.glob("*.engine"))
        yield from sorted(p for p in names if _is_ours(p))


def _is_ours(path: Path) -> bool:
    """Whether a cache wrote an engine's file, by its name or description. The folder may hold other files (a
    checkpoint's config.json, other engines), which must not be removed."""
    if _NAME.fullmatch(path.name):
        return True
    try:
        about = json.loads(path.with_suffix(".json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(about, dict) and about.get("schema") == SCHEMA


def write_entry(path: Path, content: Any, about: Mapping[str, Any]) -> Entry:
    """Write an engine file and its description. Raises EngineError if it cannot be written."""
    view = memoryview(content)
    about = {
        **about,
        "schema": SCHEMA,
        "bytes": view.nbytes,
        "sha256": hashlib.sha256(view).hexdigest(),
        "written": time.time(),
    }
    described = path.with_suffix(".json")
    try:
        # If this process ends between the two writes, the old description must not describe the new content.
        described.unlink(missing_ok=True)
        with replacing_privately(path) as temporary, open(temporary, "wb") as file:
            file.write(view)
        with replacing_privately(described) as temporary:
            temporary.write_text(json.dumps(about, indent=1))
    except OSError as error:
        raise EngineError(f"engine {path}: cannot write {view.nbytes} bytes: {error}") from error
    return Entry(path, about)


def clear_compiled() -> None:
    """Remove the native kernels compiled on this machine; the next start compiles them again."""
    shutil.rmtree(compiled_folder(), ignore_errors=True)


def examine(path: Path, key: str | None = None, *, whole: bool = True) -> Entry:
    """Return an engine file's entry with its first problem. `whole` also reads the content."""
    described = path.with_suffix(".json")
    for file in (path, described):
        if file.exists() and (reason := why_not_private(file)) is not None:
            return Entry(path, {}, reason)
    if not described.is_file():
        return Entry(path, {}, f"{path.name} has no description: its build was interrupted, or it is not ours")
    try:
        about = json.loads(described.read_text())
    except (OSError, ValueError) as error:
        return Entry(path, {}, f"{described.name} is damaged: {error}")
    if not isinstance(about, dict) or about.get("schema") != SCHEMA:
        return Entry(path, {}, f"{described.name} is not a description of an engine ({SCHEMA})")
    if key is not None and about.get("key") != key:
        return Entry(path, about, f"{path.name} was built from something else")
    if not path.is_file():
        return Entry(path, about, f"{path.name} is missing")
    size = path.stat().st_size
    if size != about.get("bytes"):
        word = "truncated" if size < int(about.get("bytes", 0)) else "longer than it was"
        return Entry(path, about, f"{path.name} is {word}: {size} of {about.get('bytes')} bytes")
    if whole and content_hash(path) != about.get("sha256"):
        return Entry(path, about, f"{path.name} is damaged: its content does not have the recorded hash")
    return Entry(path, about)


def key_of(parts: Mapping[str, Any]) -> str:
    """One hash of plain data."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def weights_hash(module: nn.Module) -> str:
    """A hash of every parameter and buffer of a module: names, shapes, dtypes and content."""
    digest = hashlib.sha256()
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        content_sha = hashlib.sha256(memoryview(content.numpy())).hexdigest()  # pyright: ignore[reportArgumentType]
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {content_sha}".encode())
    return digest.hexdigest()


def code_hash(module: nn.Module, *more: Path) -> str:
    """A hash of the source files that define a module's parts, and of `more`."""
    files = {Path(p) for p in more}
    for part in module.modules():
        source = getattr(sys.modules.get(type(part).__module__), "__file__", None)
        if source is not None and type(part).__module__.startswith("vla_accel."):
            files.add(Path(source))
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
