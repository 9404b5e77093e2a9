"""Atomic writes of files and lines, hashes, the user's cache folder, and checks of file permissions."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from vla_accel.errors import ConfigError, EngineError, OutputError

_OTHERS_WRITE = 0o022  # group and world


def user_path(name: str | Path) -> Path:
    """Return the path with ~ and ~NAME expanded."""
    return Path(os.path.expanduser(name))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder, which replaces `path` atomically when the block ends.

    The content is on the disk before it replaces `path`. If the block raises, `path` stays as it was. Creates missing
    folders. Raises OutputError if the file cannot be written, or `path` is a device or a pipe.
    """
    if _is_special(path):
        raise OutputError(f"{path}: cannot be written: not a regular file")
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.{threading.get_native_id()}{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        # The block may also read other files: their errors are not about `path`.
        if isinstance(error, OutputError) or Path(error.filename or temporary) not in (temporary, *path.parents):
            raise
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_json(path: Path, content: object, *, allow_nan: bool = True) -> None:
    """Write JSON atomically. If `allow_nan` is False, raises ValueError for NaN and infinity. Raises OutputError."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, allow_nan=allow_nan) + "\n")


def _is_special(path: Path) -> bool:
    """Whether the path exists and is neither a file nor a folder."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def lock(descriptor: int, otherwise: str) -> None:
    """Lock an open file until it is closed. Raises ConfigError(otherwise) if another process has the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ConfigError(otherwise) from None


class LineFile:
    """A file of lines with one writing process, else ConfigError. `append` returns when the line is on the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._open()

    def _open(self) -> None:
        self._file: io.FileIO = open(self.path, "a+b", buffering=0)  # noqa: SIM115 - held until close()
        otherwise = f"{self.path}: another process is writing it; wait for it, or give --output another name"
        try:
            lock(self._file.fileno(), otherwise)
        except ConfigError:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file and release its lock."""
        self._file.close()

    def read(self) -> tuple[list[bytes], int]:
        """Return the lines, and the bytes of an incomplete last line, which is removed from the file."""
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        cut = len(content) - len(whole)
        if cut:
            self._file.truncate(len(whole))
        return whole.splitlines(), cut

    def append(self, line: bytes) -> None:
        """Append a line and sync it to the disk. If it raises OutputError, the file is unchanged."""
        before, rest = self._file.seek(0, os.SEEK_END), line + b"\n"
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            self._file.truncate(before)
            reason = f"{error.strerror or error}; the same command goes on from what it holds"
            raise OutputError(f"{self.path}: cannot be written: {reason}") from error

    def keep(self, lines: Iterable[bytes]) -> None:
        """Replace all lines atomically."""
        with replacing(self.path) as temporary:
            temporary.write_bytes(b"".join(line + b"\n" for line in lines))
        self._file.close()
        self._open()


def without_folders(words: Iterable[str]) -> list[str]:
    """Return a command's words with absolute paths reduced to their names, also in lists and after `=`."""

    def shortened(word: str) -> str:
        option, equals, value = word.rpartition("=")
        parts = (Path(part).name if part.startswith("/") else part for part in value.split(","))
        return f"{option}{equals}{','.join(parts)}"

    return [shortened(word) for word in words]


def require_writable(path: Path, name: str) -> None:
    """Raise OutputError unless a file can be written at `path`, which `name` names. Creates nothing."""
    if os.path.isdir(path):
        raise OutputError(f"{name}: expected a file to write, got the folder {path}")
    if _is_special(path):
        raise OutputError(f"{name}: expected a regular file to write, got {path}, a device, a pipe or a socket")
    require_writable_folder(path.parent, name, path)


def require_writable_folder(folder: Path, name: str, path: Path | None = None) -> None:
    """Raise OutputError unless files, such as `path`, can be written into this folder, which need not exist yet."""
    path = path or folder
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    try:
        # Permissions do not show whether a file system is read-only or full.
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0")
            file.flush()
    except OSError as error:
        raise OutputError(f"{name}: {path} cannot be written: {folder}: {error.strerror or error}") from error


def content_hash(path: Path) -> str:
    """Return the SHA-256 of a file's content as 64 hex digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def cache_folder() -> Path:
    """Return this package's folder in the user's cache folder (XDG_CACHE_HOME)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vla_accel"


def why_not_private(path: Path) -> str | None:
    """Explain why a file or folder may have been written by another user than this one or root; None if it was not."""
    if not hasattr(os, "geteuid"):
        return None
    found, user = path.stat(), os.geteuid()
    if found.st_uid not in (user, 0):
        problem = f"belongs to user {found.st_uid}, and built engines are code: expected user {user} or root."
        return f"{path} {problem} If you trust its content: sudo chown -R {user} {path}"
    if found.st_mode & _OTHERS_WRITE:
        problem = f"may be written to by others (mode {found.st_mode & 0o777:o}), and built engines are code."
        return f"{path} {problem} If you trust its content: chmod -R go-w {path}"
    return None


def require_private(path: Path) -> None:
    """Raise EngineError with the reason of `why_not_private`, if there is one."""
    if (reason := why_not_private(path)) is not None:
        raise EngineError(reason)


@contextlib.contextmanager
def replacing_privately(path: Path) -> Iterator[Path]:
    """As `replacing`, for a file that only its owner may write to, whatever the umask. New folders get mode 0700."""
    for folder in (*reversed(path.parent.parents), path.parent):  # mkdir(parents=True) sets only the last one's mode
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)
    with replacing(path) as temporary:
        temporary.touch(mode=0o644)
        yield temporary
