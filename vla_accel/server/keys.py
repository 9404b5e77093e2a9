"""API keys with names, from a file that may change while the server runs. Only digests stay in memory, and no message
contains a key."""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import re
from pathlib import Path

from vla_accel.errors import ConfigError

logger = logging.getLogger("vla_accel.server")

DEFAULT = "default"
"""The name of a key without one."""
_LINE = re.compile(r"(?:([\w.-]+):[ \t]+)?(\S(?:.*\S)?)")


class Keys:
    """The accepted keys by name: a single key, or those of a file, which is read again when it changes.

    A file has lines `NAME: KEY`, or one line with a key alone; lines that begin with `#` are comments.
    """

    def __init__(self, key: str | None = None, file: Path | None = None) -> None:
        self._file, self._stamp = file, _stamp(file)
        self._digests = _digests(read_keys(file) if file is not None else {DEFAULT: key} if key is not None else {})

    @property
    def required(self) -> bool:
        """Whether clients need a key."""
        return bool(self._digests)

    def name_of(self, authorization: str) -> str | None:
        """The name of the key in an `Authorization` header; None if it is unknown."""
        digest, name = _digest(authorization), None
        for known, known_name in self._digests.items():  # all of them, so that the time reveals nothing
            if hmac.compare_digest(digest, known):
                name = known_name
        return name

    def name_of_page(self, authorization: str) -> str | None:
        """As `name_of`, and also for HTTP Basic with the key as the password, which browsers send.

        For pages only: a browser attaches Basic credentials to websockets that other sites open.
        """
        kind, _, credentials = authorization.partition(" ")
        if kind != "Basic":
            return self.name_of(authorization)
        try:
            _, _, key = base64.b64decode(credentials, validate=True).decode().partition(":")
        except ValueError:
            return None
        return self.name_of(f"Api-Key {key}")

    def refresh(self) -> bool:
        """Read the file again if it changed; whether the keys changed. An unusable file changes nothing."""
        stamp = _stamp(self._file)
        if self._file is None or stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            self._digests = _digests(read_keys(self._file))
        except ConfigError as error:
            logger.error("the keys stay unchanged: %s", error)
            return False
        logger.warning("read the keys again: %s", ", ".join(self._digests.values()))
        return True


def read_keys(path: Path) -> dict[str, str]:
    """Keys by name from a file. Raises ConfigError, which quotes no key."""
    where = f"api key {path}"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no UTF-8"
        raise ConfigError(f"{where}: expected a readable text file, got: {reason}") from None
    keys: dict[str, str] = {}
    rows = [(i, line.strip()) for i, line in enumerate(lines, 1) if line.strip() and not line.strip().startswith("#")]
    if not rows:
        raise ConfigError(f"{where}: expected a key, got an empty file")
    for number, line in rows:
        match = _LINE.fullmatch(line)
        if match is None or not (line.isascii() and line.isprintable()):
            raise ConfigError(f"{where}: line {number}: expected printable ASCII characters")
        name, key = match[1] or DEFAULT, match[2]
        if match[1] is None and len(rows) > 1:
            raise ConfigError(f"{where}: line {number}: with several keys expected NAME: KEY, no space in NAME")
        if again := name if name in keys else next((f"the key of {n}" for n, k in keys.items() if k == key), ""):
            raise ConfigError(f"{where}: line {number}: expected a name and a key of its own, got {again} again")
        keys[name] = key
    return keys


def _digests(keys: dict[str, str]) -> dict[bytes, str]:
    return {_digest(f"Api-Key {key}"): name for name, key in keys.items()}


def _digest(authorization: str) -> bytes:
    # Digests have the same length whatever a client sent, so comparing them does not reveal the length of a key.
    return hashlib.sha256(authorization.encode("utf-8", "surrogateescape")).digest()


def _stamp(file: Path | None) -> tuple[int, int, int] | None:
    try:
        stat = file.stat() if file is not None else None
    except OSError:
        return None
    # The clock may not advance between two writes: compare the size, too.
    return None if stat is None else (stat.st_mtime_ns, stat.st_ino, stat.st_size)
