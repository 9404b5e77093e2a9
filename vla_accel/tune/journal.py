"""The journal of a search: one measurement a line, so that an interrupted search continues and repeats nothing. The
first line describes the search; an incomplete last line is dropped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vla_accel.errors import ConfigError
from vla_accel.files import LineFile

SCHEMA = "vla_accel.tune.journal/1"


class Journal:
    """Measurements by (kind, name); a context manager. `about`: everything that a measurement depends on (JSON types).
    Raises ConfigError for a journal of another search, a damaged one, or one that another process has open."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        self.found: dict[tuple[str, str], Any] = {}
        self._file = LineFile(path)
        try:
            self._read(json.loads(json.dumps(about)))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file and release its lock."""
        self._file.close()

    def get(self, kind: str, name: str) -> Any:
        """Return a measurement, or None."""
        return self.found.get((kind, name))

    def put(self, kind: str, name: str, value: Any) -> Any:
        """Write a measurement (JSON types) to disk and return it. Raises OutputError."""
        self._write({"kind": kind, "name": name, "value": value})
        self.found[kind, name] = value
        return value

    def _read(self, about: Mapping[str, Any]) -> None:
        whole, _ = self._file.read()
        if not whole:
            return self._write({"schema": SCHEMA, "about": about})
        try:
            head, *lines = [json.loads(line) for line in whole]
            schema, before = head["schema"], head["about"]
            self.found = {(line["kind"], line["name"]): line["value"] for line in lines}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self.path}: expected a journal of vla-accel tune, got {error!r}; --overwrite starts afresh"
            ) from error
        if schema == SCHEMA and before != about and not lines:  # nothing is lost
            self._file.keep([])
            return self._read(about)
        if schema != SCHEMA or before != about:
            other = ", ".join(sorted(_differing(before, about) or ["schema"]))
            raise ConfigError(
                f"{self.path} is about another search, differing in {other}; give --output another folder, or "
                "--overwrite to start afresh"
            )

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.append(json.dumps(line).encode())


def _differing(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The dotted names of the values that differ."""
    found = []
    for name in {**one, **other}:
        pair, path = (one.get(name), other.get(name)), f"{prefix}{name}"
        both = all(isinstance(value, dict) for value in pair)
        found += _differing(*pair, f"{path}.") if both else [path] * (pair[0] != pair[1])  # type: ignore[arg-type]
    return found
