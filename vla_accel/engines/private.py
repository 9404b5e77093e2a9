"""Built engines are code, and whoever may write to them can run what they like: who may is asked here.

Knows nothing about what is in a file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from vla_accel.errors import EngineError
from vla_accel.files import replacing

_OTHERS_WRITE = 0o022  # group and world


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
    """`files.replacing` for a file that its owner alone may write to, whatever the umask; new folders are closed to
    others (0700)."""
    for folder in (*reversed(path.parent.parents), path.parent):  # `parents=True` gives only the last one the mode
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)
    with replacing(path) as temporary:
        temporary.touch(mode=0o644)
        yield temporary
