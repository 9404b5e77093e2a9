"""`vla-accel cache list|clear|verify`: the folder of built TensorRT engines."""

from __future__ import annotations

import datetime

from vla_accel.cli.asked.engines import Cache
from vla_accel.cli.common import print_json, print_table, say
from vla_accel.engines.cache import EngineCache, Entry, clear_compiled
from vla_accel.errors import ConfigError


def main(options: Cache, words: list[str]) -> int:
    """The command; see `Cache`."""
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
    if entries:
        _table(f"engines in {store.folder}", entries)
    else:
        say(f"no engines in {store.folder}")
    bad = [e for e in entries if e.problem]
    rows = [_row(e) for e in entries]
    total = sum(e.size for e in entries)
    print_json({"cache": str(store.folder), "bytes": total, "problems": len(bad), "engines": rows})
    return int(options.action == "verify" and bool(bad))


def _row(entry: Entry) -> dict[str, object]:
    about = entry.about
    return {
        "file": entry.path.name,
        **{key: about.get(key) for key in ("name", "target", "precision")},
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
