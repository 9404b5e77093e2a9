"""What every report says besides its result: the command, versions, hardware, and which engines really ran."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vla_accel.files import without_folders
from vla_accel.report.page import Cell, Section, Table


def conditions(
    command: str | Sequence[str], hardware: Mapping[str, Any], software: Mapping[str, Any], **more: object
) -> Section:
    """The section "Conditions". `more`: further lines, by name."""
    words = command.split() if isinstance(command, str) else command
    shown = " ".join(without_folders(words))
    lines: list[tuple[str, object]] = [("command", shown), *((n.replace("_", " "), v) for n, v in more.items() if v)]
    tables = [
        Table("Command", ("what", "value"), [[name, str(value)] for name, value in lines]),
        Table("Hardware", ("what", "value"), _flat(hardware)),
        Table("Versions", ("package", "version"), _flat(software)),
    ]
    return Section("Conditions", tables)


def ledger(runs: Iterable[tuple[str, Sequence[Mapping[str, Any]]]]) -> Section:
    """The section "Engines": of each named run the ledger's entries."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name, entries in runs:
        for e in entries:
            cells = (e["component"], e["requested"], e["used"], e["reason"] or "-", e["detail"] or "-")
            found.setdefault(cells, []).append(name)
    # What ran alike stands once, with the names of its runs.
    rows: list[list[Cell]] = [[*cells, "; ".join(dict.fromkeys(names))] for cells, names in found.items()]
    header = ("component", "asked for", "ran", "why", "exactly", "in")
    return Section("Engines", [Table("Which path really ran (the ledger)", header, rows)] if rows else [])


def fell_back(engines: Sequence[Mapping[str, Any]]) -> str:
    """What stands behind a run's name: what ran in place of the engines that were asked for, and what `auto` chose."""
    chosen = dict.fromkeys(e["used"] for e in engines if e["requested"] == "auto")
    said = [f"chose {', '.join(chosen)}"] if chosen else []
    said += [f"{e['component']} ran {e['used']}" for e in engines if e["requested"] not in ("auto", e["used"])]
    return f" ({'; '.join(said)})" if said else ""


def machine(hardware: Mapping[str, Any]) -> str:
    """The hardware in some words."""
    return str(hardware.get("gpu") or hardware.get("cpu") or hardware.get("device"))


def _flat(values: Mapping[str, Any]) -> list[list[Cell]]:
    return [[name.replace("_", " "), str(value)] for name, value in values.items() if value is not None]
