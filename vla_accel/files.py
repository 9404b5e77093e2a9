"""Files and lines that appear whole or not at all, what identifies a file and what a record says of its place, where
the user's cache is, and who may write to what is run as code. Knows nothing about what is in them."""

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
    """A path as the user wrote it, with ~ and ~NAME as their home folders. Python leaves them as they are."""
    return Path(os.path.expanduser(name))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A hidden name beside `path`, of the same suffix, to write to; it takes the place of `path` when the block ends
    well, after its content is on the disk, and is removed when the block raises. Folders are made as needed. Raises
    OutputError where this cannot be, also when the disk becomes full within the block, and for a device or a pipe,
    which root could replace."""
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
        # An error of another file, read within the block, is none of this one's.
        if isinstance(error, OutputError) or Path(error.filename or temporary) not in (temporary, *path.parents):
            raise
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_json(path: Path, content: object, *, allow_nan: bool = True) -> None:
    """Write JSON, whole or not at all, as `replacing` does. `allow_nan`: else ValueError for what is no number."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, allow_nan=allow_nan) + "\n")


def _is_special(path: Path) -> bool:
    """Whether there is something that is neither a file nor a folder."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def lock(descriptor: int, otherwise: str) -> None:
    """For as long as it is open. Raises ConfigError, which says `otherwise`, where another process has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ConfigError(otherwise) from None


class LineFile:
    """A file of lines that is written by one process at a time, each line on the disk before the next; `close` it.

    Raises ConfigError if another process writes it.
    """

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
        """Give up the file and the lock on it."""
        self._file.close()

    def read(self) -> tuple[list[bytes], int]:
        """The lines, without their ends. A last one that a kill cut short is removed: of how many bytes."""
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        cut = len(content) - len(whole)
        if cut:
            self._file.truncate(len(whole))
        return whole.splitlines(), cut

    def append(self, line: bytes) -> None:
        """Add a line, whole and on the disk before this returns. Raises OutputError, and the file is as before."""
        before, rest = self._file.seek(0, os.SEEK_END), line + b"\n"
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            self._file.truncate(before)
            raise OutputError(
                f"{self.path}: cannot be written: {error.strerror or error}; the same command goes on from what it "
                "holds"
            ) from error

    def keep(self, lines: Iterable[bytes]) -> None:
        """These lines take the place of all, or nothing changes."""
        with replacing(self.path) as temporary:
            temporary.write_bytes(b"".join(line + b"\n" for line in lines))
        self._file.close()
        self._open()


def without_folders(words: Iterable[str]) -> list[str]:
    """A command's words for the record: where one machine keeps its files says nothing to a reader, so that of absolute
    paths, also in lists and behind an option's =, names remain. Others are as they were typed."""

    def told(word: str) -> str:
        option, equals, value = word.rpartition("=")
        parts = (Path(part).name if part.startswith("/") else part for part in value.split(","))
        return f"{option}{equals}{','.join(parts)}"

    return [told(word) for word in words]


def require_writable(path: Path, name: str) -> None:
    """Raise OutputError, which says `name` (an option's), unless a file can be written there; leaves nothing behind.
    For before long work whose end would find out."""
    if os.path.isdir(path):  # which says no, and raises nothing, of what is in a folder without rights
        raise OutputError(f"{name}: expected a file to write, got the folder {path}")
    if _is_special(path):
        raise OutputError(f"{name}: expected a regular file to write, got {path}, a device, a pipe or a socket")
    _require_room(path.parent, path, name)


def require_writable_folder(path: Path, name: str) -> None:
    """`require_writable` for a folder that gets files, and is made as needed."""
    _require_room(path, path, name)


def _require_room(folder: Path, path: Path, name: str) -> None:
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    try:
        # Modes do not tell: a file system may be read-only, full, or take no files.
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0")
            file.flush()
    except OSError as error:
        raise OutputError(f"{name}: {path} cannot be written: {folder}: {error.strerror or error}") from error


def content_hash(path: Path) -> str:
    """SHA-256 of a file's content, as 64 hex digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def cache_folder() -> Path:
    """This package's folder in the user's cache (XDG)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vla_accel"


# -- who may write to what is run as code -------------------------------------------------------------------------


def why_not_private(path: Path) -> str | None:
    """Why a file or folder is not to be trusted, and what to type; None if it is this user's (or root's) and nobody
    else may write to it. Where there are no such modes (Windows), None."""
    if not hasattr(os, "geteuid"):
        return None
    found, user = path.stat(), os.geteuid()
    if found.st_uid not in (user, 0):
        return (
            f"{path} belongs to user {found.st_uid}, and built engines are code: expected user {user} or root. If you "
            f"trust what is in it: sudo chown -R {user} {path}"
        )
    if found.st_mode & _OTHERS_WRITE:
        return (
            f"{path} may be written to by others (mode {found.st_mode & 0o777:o}), and built engines are code. If you "
            f"trust what is in it: chmod -R go-w {path}"
        )
    return None


def require_private(path: Path) -> None:
    """Raise EngineError with `why_not_private`."""
    reason = why_not_private(path)
    if reason is not None:
        raise EngineError(reason)


@contextlib.contextmanager
def replacing_privately(path: Path) -> Iterator[Path]:
    """`replacing` for a file that its owner alone may write to, whatever the umask; new folders are closed to
    others (0700)."""
    for folder in (*reversed(path.parent.parents), path.parent):  # `parents=True` gives only the last one the mode
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)
    with replacing(path) as temporary:
        temporary.touch(mode=0o644)
        yield temporary
