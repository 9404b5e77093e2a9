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

AFRESH = "--overwrite starts afresh"


class EpisodeLog:
    """An open episode log; a context manager.

    Args:
        path: the file, created with its folder if missing.
        schema: of its header.
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

    def __init__(
        self, path: Path, schema: str, fingerprint: str, identity: Mapping[str, Any], warn: Callable[[str], None]
    ) -> None:
        self.path = path
        self.results: dict[EpisodeKey, EpisodeResult] = {}
        self.launches: list[dict[str, Any]] = []
        self.launch_of: dict[EpisodeKey, int] = {}
        self._warn = warn
        self._file = LineFile(path)
        try:
            self._load({"schema": schema, "fingerprint": fingerprint, "identity": dict(identity)})
        except BaseException:
            self.close()
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
            ConfigError: the episode is on record already.
            OutputError: it cannot be written, and the log is as before.
        """
        if result.key in self.results:
            raise ConfigError(f"{self.path}: the episode {result.key} is already recorded")
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

    def _load(self, header: dict[str, Any]) -> None:
        lines, cut = self._file.read()
        if cut:
            self._warn(
                f"{self.path}: dropped the last line, {cut} bytes of an episode whose writing was interrupted; that "
                "episode runs again"
            )
        if not lines:
            self._write({"kind": "header", **header})
        for number, line in enumerate(lines, start=1):
            where = f"{self.path}, line {number}"
            try:
                data = json.loads(line)
            except ValueError:
                data = None
            if not isinstance(data, dict):
                raise ConfigError(f"{where}: expected one JSON object, got {line[:60]!r}; {AFRESH}")
            if number == 1:
                self._check_header(where, data, header)
            else:
                self._read(where, data)

    def _check_header(self, where: str, found: dict[str, Any], header: dict[str, Any]) -> None:
        if found.get("schema") != header["schema"]:
            raise ConfigError(
                f"{where}: expected a header of schema {header['schema']!r}, got {found.get('schema')!r}; {AFRESH}"
            )
        if found.get("fingerprint") != header["fingerprint"]:
            what = differences(found.get("identity", {}), header["identity"])
            raise ConfigError(
                f"{self.path} belongs to another run: {what}. Pass another --output, or --overwrite to start again"
            )

    def _read(self, where: str, data: dict[str, Any]) -> None:
        kind = data.pop("kind", None)
        if kind == "launch":
            self.launches.append(data)
            return
        if kind != "episode" or not self.launches:
            raise ConfigError(f"{where}: expected a launch, then episodes, got {kind!r}; {AFRESH}")
        try:
            result = EpisodeResult.from_json(data)
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{where}: not an episode ({error!r}); {AFRESH}") from None
        if result.key in self.results:
            self._warn(f"{where}: {result.key} appears twice; the first counts")
        else:
            self._remember(result)

    def _remember(self, result: EpisodeResult) -> None:
        self.results[result.key] = result
        self.launch_of[result.key] = len(self.launches) - 1

    def _write(self, data: Mapping[str, Any]) -> None:
        self._file.append(json.dumps(data, separators=(",", ":")).encode())


def log_path(output: Path) -> Path:
    """The episode log that belongs to a result file: `x.json` has `x.episodes.jsonl`."""
    return output.with_name(output.stem + ".episodes.jsonl")


def differences(old: Any, new: Any, where: str = "") -> str:
    """Where two identities (JSON types) differ, leaf by leaf, for a reader."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        found = (differences(old.get(k), new.get(k), f"{where}.{k}".lstrip(".")) for k in sorted({*old, *new}))
        return "; ".join(filter(None, found))
    return "" if old == new else f"{where} was {json.dumps(old)}, now {json.dumps(new)}"
