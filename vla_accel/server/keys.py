"""Who may use a server: named keys, from a file that may change while the server runs. Knows no connections.

Of the keys only digests are kept, and no message has one in it.
"""

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
"""The name of a key that has none."""
_LINE = re.compile(r"(?:([\w.-]+):[ \t]+)?(\S(?:.*\S)?)")


class Keys:
    """The keys of a server, by name: one that is given, or those of a file, which is read anew when it changes.

    A file has lines `NAME: KEY`, or a single line with a key alone; `#` begins a line that is none.
    Raises ConfigError for a file without keys, and for what is no key.
    """

    def __init__(self, key: str | None = None, file: Path | None = None) -> None:
        self._file = file
        self._seen: tuple[int, int, int] | None = None
        self._digests: dict[bytes, str] = {}
        if file is not None:
            self._seen = self._stamp(file)
            self._digests = {_digest(key): name for name, key in read_keys(file).items()}
        elif key is not None:
            self._digests = {_digest(key): DEFAULT}

    @property
    def needed(self) -> bool:
        """Whether anybody is asked for a key."""
        return bool(self._digests)

    def name_of(self, authorization: str) -> str | None:
        """The name of the key in an `Authorization` header, or None if it is nobody's."""
        given, name = hashlib.sha256(authorization.encode("utf-8", "surrogateescape")).digest(), None
        for digest, known in self._digests.items():  # all of them: the time tells nothing
            if hmac.compare_digest(given, digest):
                name = known
        return name

    def name_of_page(self, authorization: str) -> str | None:
        """As `name_of`, also for what a browser sends once it has asked: `Basic`, with any name and the key as the
        password. Only for pages: a browser sends it along unasked, wherever a connection comes from."""
        kind, _, credentials = authorization.partition(" ")
        if kind != "Basic":
            return self.name_of(authorization)
        try:
            _, _, key = base64.b64decode(credentials, validate=True).decode().partition(":")
        except ValueError:
            return None
        return self.name_of(f"Api-Key {key}")

    def refresh(self) -> bool:
        """Read the file again if it has changed, and say whether it had; one that cannot be used changes nothing."""
        if self._file is None:
            return False
        stamp = self._stamp(self._file)
        if stamp == self._seen:
            return False
        self._seen = stamp
        try:
            self._digests = {_digest(key): name for name, key in read_keys(self._file).items()}
        except ConfigError as error:
            logger.error("the keys stay as they were: %s", error)
            return False
        logger.warning("keys read again: %s", ", ".join(self._digests.values()))
        return True

    @staticmethod
    def _stamp(file: Path) -> tuple[int, int, int] | None:
        try:
            stat = file.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_ino, stat.st_size  # a second write may come before the clock's next tick


def read_keys(path: Path) -> dict[str, str]:
    """Keys by name. Not an option of its own: command lines are public. Raises ConfigError that quotes no key."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no UTF-8"
        raise ConfigError(f"api key {path}: expected a readable text file, got: {reason}") from None
    keys: dict[str, str] = {}
    rows = [(i, line.strip()) for i, line in enumerate(lines, 1) if line.strip() and not line.strip().startswith("#")]
    if not rows:
        raise ConfigError(f"api key {path}: expected a key, got an empty file")
    for number, line in rows:
        match = _LINE.fullmatch(line)
        if match is None or not (line.isascii() and line.isprintable()):
            raise ConfigError(f"api key {path}: line {number}: expected printable ASCII characters")
        name, key = match[1] or DEFAULT, match[2]
        if match[1] is None and len(rows) > 1:
            raise ConfigError(f"api key {path}: line {number}: with several keys expected NAME: KEY, no space in NAME")
        if again := name if name in keys else next((f"the key of {n}" for n, k in keys.items() if k == key), ""):
            raise ConfigError(f"api key {path}: line {number}: expected a name and a key of its own, got {again} again")
        keys[name] = key
    return keys


def _digest(key: str) -> bytes:
    # Of equal length whatever was sent, so that comparing tells nothing about the key's.
    return hashlib.sha256(f"Api-Key {key}".encode()).digest()
