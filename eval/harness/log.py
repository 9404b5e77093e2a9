"""The episode log: what makes a run resumable, one JSON object a line.

The first line is the header: schema, fingerprint and the identity that it was made from. A
`launch` line holds the conditions of the episodes after it; an `episode` line is one result. Every line is on the disk
before the next episode starts, so a kill loses at most the episodes that are being played. An incomplete last line is
dropped with a warning; any other damage raises.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from eval.harness.protocol import EpisodeKey
from eval.harness.rollout import EpisodeResult
from vla_accel.errors import ConfigError
from vla_accel.files import LineFile

Warn = Callable[[str], None]


class EpisodeLog:
    """An open episode log; a context manager.

    Args:
        path: the file, created with its folder if missing.
        schema: what its header states.
        fingerprint: of this run; a log of another run is refused.
        identity: what the fingerprint was made from (JSON types), to name where two runs differ.
        warn: receives a message for each dropped line.

    Attributes:
        results: the episodes on record, in the order they were logged.
        launches: the conditions of each launch, oldest first.
        launch_of: for each episode, the index of its launch.

    Raises:
        ConfigError: the log belongs to another run, is damaged, or another process writes it.
    """

    def __init__(self, path: Path, schema: str, fingerprint: str, identity: Mapping[str, Any], warn: Warn) -> None:
        self.path = path
        self._schema = schema
        self.results: dict[EpisodeKey, EpisodeResult] = {}
        self.launches: list[dict[str, Any]] = []
        self.launch_of: dict[EpisodeKey, int] = {}
        self._warn = warn
        self._file = LineFile(path)
        try:
            self._load(fingerprint, identity)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> EpisodeLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file and give up the lock on it."""
        self._file.close()

    def begin_launch(self, conditions: Mapping[str, Any]) -> None:
        """Record the conditions of the following episodes (JSON types)."""
        self._write({"kind": "launch", **conditions})
        self.launches.append(dict(conditions))

    def append(self, result: EpisodeResult) -> None:
        """Record one episode, on disk before this returns.

        Raises:
            ConfigError: the episode is on record already, or no launch was begun.
            OutputError: it cannot be written, and the log is as before.
        """
        if result.key in self.results:
            raise ConfigError(f"{self.path}: the episode {result.key} is already recorded")
        if not self.launches:
            raise ConfigError(f"{self.path}: begin a launch before appending episodes")
        self._write({"kind": "episode", **result.to_json()})
        self._remember(result)

    def forget_errors(self) -> int:
        """Remove the episodes that ended in an error, so that they run again; returns how many."""
        struck = [key for key, result in self.results.items() if result.error]
        if struck:
            lines, _ = self._file.read()
            self._file.keep(line for line in lines if not json.loads(line).get("error"))
        for key in struck:
            del self.results[key], self.launch_of[key]
        return len(struck)

    def _load(self, fingerprint: str, identity: Mapping[str, Any]) -> None:
        whole, cut = self._file.read()
        if cut:
            self._warn(
                f"{self.path}: dropped the last line, {cut} bytes of an episode whose writing was interrupted; that "
                "episode runs again"
            )
        lines = [self._parse(i, line) for i, line in enumerate(whole, start=1)]
        if not lines:
            header = {"schema": self._schema, "fingerprint": fingerprint, "identity": dict(identity)}
            self._write({"kind": "header", **header})
            return
        self._check_header(lines[0], fingerprint, identity)
        for number, line in enumerate(lines[1:], start=2):
            self._read(number, line)

    def _parse(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            data = json.loads(line)
            if not isinstance(data, dict):
                raise ValueError("not an object")
        except ValueError as error:
            raise ConfigError(
                f"{self.path}, line {number}: expected one JSON object, got {line[:60]!r} "
                f"({error}); --overwrite starts afresh"
            ) from None
        return data

    def _check_header(self, header: dict[str, Any], fingerprint: str, identity: Mapping[str, Any]) -> None:
        if header.get("schema") != self._schema:
            raise ConfigError(
                f"{self.path}, line 1: expected a header of schema {self._schema!r}, "
                f"got {header.get('schema')!r}; --overwrite starts afresh"
            )
        if header.get("fingerprint") != fingerprint:
            what = differences(header.get("identity", {}), identity)
            raise ConfigError(
                f"{self.path} belongs to another run: {what}. Give --output another name, or --overwrite to start "
                "afresh"
            )

    def _read(self, number: int, line: dict[str, Any]) -> None:
        kind = line.pop("kind", None)
        if kind == "launch":
            self.launches.append(line)
            return
        if kind != "episode" or not self.launches:
            raise ConfigError(
                f"{self.path}, line {number}: expected a launch, then episodes, got {kind!r}; --overwrite starts afresh"
            )
        try:
            result = EpisodeResult.from_json(line)
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{self.path}, line {number}: not an episode ({error!r}); --overwrite starts afresh"
            ) from None
        if result.key in self.results:
            self._warn(f"{self.path}, line {number}: {result.key} appears twice; the first counts")
            return
        self._remember(result)

    def _remember(self, result: EpisodeResult) -> None:
        self.results[result.key] = result
        self.launch_of[result.key] = len(self.launches) - 1

    def _write(self, data: Mapping[str, Any]) -> None:
        self._file.append(json.dumps(data, separators=(",", ":")).encode())


def log_path(output: Path) -> Path:
    """The episode log that belongs to a result file: `x.json` has `x.episodes.jsonl`."""
    return output.with_name(output.stem + ".episodes.jsonl")


def differences(old: Any, new: Any) -> str:
    """Where two identities (JSON types) differ, leaf by leaf, for a reader."""
    return "; ".join(_leaves(old, new, ""))


def _leaves(old: Any, new: Any, where: str) -> list[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return [
            text
            for key in sorted({*old, *new})
            for text in _leaves(old.get(key), new.get(key), f"{where}.{key}".lstrip("."))
        ]
    return [] if old == new else [f"{where} was {json.dumps(old)}, now {json.dumps(new)}"]
