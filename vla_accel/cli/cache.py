"""`vla-accel cache list|clear|verify`: the folder of built TensorRT engines."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from vla_accel.cli.common import print_json, print_table, say
from vla_accel.cli.options import Argument, Folder
from vla_accel.errors import ConfigError


@dataclass(frozen=True)
class Cache:
    """List, check or empty the cache of built engines."""

    action: Annotated[Literal["list", "clear", "verify"], Argument(positional=True)]
    """list; verify: compare every engine with its description, exit status 1 if one is damaged; clear: remove all."""
    cache: Folder = None
    """Folder of the engines. Default: the user's cache folder."""


def main(options: Cache, words: list[str]) -> int:
    """List, verify or clear; the exit status."""
    from vla_accel.engines.cache import EngineCache, clear_compiled

    if options.cache is not None and not options.cache.is_dir():
        raise ConfigError(f"cache: expected a folder of engines, got {options.cache}")
    store = EngineCache(options.cache)
    if options.action == "clear":
        count, size = store.clear()
        if options.cache is None:
            clear_compiled()
        say(f"removed {count} engines, {size / 1e6:.1f} MB, from {store.folder}")
        print_json({"cache": str(store.folder), "removed": count, "bytes": size})
        return 0
    entries = store.verify() if options.action == "verify" else store.entries()
    rows = [_row(entry) for entry in entries]
    if rows:
        columns = ("file", "library", "target", "precision", "MB", "last used", "state")
        cells = [
            [str(r["file"]), r["library"], str(r["target"]), str(r["precision"]), f"{r['bytes'] / 1e6:.1f}", r["used"],
             str(r["problem"] or "ok")]
            for r in rows
        ]  # fmt: skip
        print_table(f"engines in {store.folder}", columns, cells)
    else:
        say(f"no engines in {store.folder}")
    problems, total = sum(bool(entry.problem) for entry in entries), sum(entry.size for entry in entries)
    print_json({"cache": str(store.folder), "bytes": total, "problems": problems, "engines": rows})
    return int(options.action == "verify" and problems > 0)


def _row(entry: Any) -> dict[str, Any]:
    about = entry.about
    return {
        "file": entry.path.name,
        **{key: about.get(key) for key in ("name", "target", "precision")},
        "library": f"{about.get('library')} {about.get('version')}",
        "bytes": entry.size,
        "used": datetime.datetime.fromtimestamp(entry.used, datetime.timezone.utc).isoformat(timespec="seconds"),
        "problem": entry.problem,
    }
