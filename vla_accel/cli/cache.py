"""`vla-accel cache list|clear|verify`: the folder of built TensorRT engines."""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from vla_accel.cli.common import parse, print_table
from vla_accel.cli.options import Folder
from vla_accel.engines.cache import EngineCache, Entry, clear_compiled
from vla_accel.errors import ConfigError


@dataclass(frozen=True)
class Options:
    """List, check or empty the cache of built engines."""

    action: Annotated[Literal["list", "clear", "verify"], tyro.conf.Positional]
    """list: what is there. verify: read every engine and compare it with its description; exit status 1 if one is
    damaged. clear: remove all."""
    cache: Folder = None
    """Folder; empty: the user's cache folder."""


def main(arguments: list[str]) -> int:
    """The command; see `Options`."""
    options = parse(Options, arguments, "vla-accel cache", __doc__)
    if options.cache is not None and not options.cache.is_dir():
        raise ConfigError(f"cache: expected a folder of engines, got {options.cache}")
    store = EngineCache(options.cache)
    if options.action == "clear":
        count, size = store.clear()
        if options.cache is None:
            clear_compiled()
        print(json.dumps({"cache": str(store.folder), "removed": count, "bytes": size}))
        return 0
    entries = store.verify() if options.action == "verify" else store.entries()
    _table(f"engines in {store.folder}", entries)
    bad = [e for e in entries if e.problem]
    rows = [_row(e) for e in entries]
    total = sum(e.size for e in entries)
    print(json.dumps({"cache": str(store.folder), "bytes": total, "problems": len(bad), "engines": rows}))
    return int(options.action == "verify" and bool(bad))


def _row(entry: Entry) -> dict[str, object]:
    about = entry.about
    return {
        "file": entry.path.name,
        "name": about.get("name"),
        "target": about.get("target"),
        "precision": about.get("precision"),
        "library": f"{about.get('library')} {about.get('version')}",
        "bytes": entry.size,
        "used": datetime.datetime.fromtimestamp(entry.used, datetime.timezone.utc).isoformat(timespec="seconds"),
        "problem": entry.problem,
    }


def _table(title: str, entries: list[Entry]) -> None:
    columns = ("file", "library", "target", "precision", "MB", "last used", "state")
    rows = []
    for row in map(_row, entries):
        size = f"{int(str(row['bytes'])) / 1e6:.1f}"
        words = (row["file"], row["library"], row["target"], row["precision"], size, row["used"])
        rows.append([*map(str, words), str(row["problem"] or "ok")])
    print_table(title, columns, rows)
