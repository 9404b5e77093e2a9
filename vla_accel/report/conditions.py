"""The sections that every report has: the command, versions, hardware, and the engines that ran."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vla_accel.files import without_folders
from vla_accel.report.page import Cell, Section, Table


def conditions(
    command: str | Sequence[str], hardware: Mapping[str, Any], software: Mapping[str, Any], **more: object
) -> Section:
    """The section "Conditions"; `more`: further lines, by name."""
    words = without_folders(command.split() if isinstance(command, str) else command)
    lines = {"command": " ".join(words), **{name: value for name, value in more.items() if value}}

    def rows(values: Mapping[str, Any]) -> list[list[Cell]]:
        return [[name.replace("_", " "), str(value)] for name, value in values.items() if value is not None]

    tables = [
        Table("Command", ("what", "value"), rows(lines)),
        Table("Hardware", ("what", "value"), rows(hardware)),
        Table("Versions", ("package", "version"), rows(software)),
    ]
    return Section("Conditions", tables)


def ledger(runs: Iterable[tuple[str, Sequence[Mapping[str, Any]]]]) -> Section:
    """The section "Engines": the ledger's entries of each named run; equal entries share a row."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name, entries in runs:
        for e in entries:
            cells = (e["component"], e["requested"], e["used"], e["reason"] or "-", e["detail"] or "-")
            found.setdefault(cells, []).append(name)
    rows: list[list[Cell]] = [[*cells, "; ".join(dict.fromkeys(names))] for cells, names in found.items()]
    header = ("component", "requested", "ran", "why", "detail", "used in")
    return Section("Engines", [Table("Which path really ran (the ledger)", header, rows)] if rows else [])


def fell_back(engines: Sequence[Mapping[str, Any]]) -> str:
    """The suffix of a run's name: what ran instead of the requested engines, and what `auto` chose."""
    chosen = dict.fromkeys(e["used"] for e in engines if e["requested"] == "auto")
    notes = [f"chose {', '.join(chosen)}"] if chosen else []
    notes += [f"{e['component']} ran {e['used']}" for e in engines if e["requested"] not in ("auto", e["used"])]
    return f" ({'; '.join(notes)})" if notes else ""


def machine(hardware: Mapping[str, Any]) -> str:
    """The name of the hardware."""
    return str(hardware.get("gpu") or hardware.get("cpu") or hardware.get("device"))
