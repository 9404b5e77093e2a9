"""The renderer of tables from rows and a template for each column, and texts that several notes share."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from eval.training import record_of
from vla_accel.files import without_folders

MODELS = {
    "pi05": "π0.5", "pi0": "π0", "smolvla": "SmolVLA", "groot": "GR00T N1.7", "groot_n16": "GR00T N1.6",
    "groot_n15": "GR00T N1.5", "pi0_fast": "π0-FAST", "act": "ACT", "diffusion_policy": "Diffusion Policy",
    "vla_jepa": "VLA-JEPA", "evo1": "Evo-1", "fastwam": "FastWAM", "molmoact2": "MolmoAct2", "xvla": "X-VLA",
    "starvla_groot": "starVLA QwenGR00T", "starvla_pi": "starVLA QwenPI", "starvla_oft": "starVLA QwenOFT",
    "openvla_oft": "OpenVLA-OFT", "multi_task_dit": "Multi-task DiT",
}  # fmt: skip
"""Display names of the model families."""
PROJECTS = {"openpi": "openpi", "lerobot": "lerobot", "oft": "openvla-oft"}
"""Display names of the projects whose code is timed, by the first word of their systems."""
Row = Mapping[str, Any]
Cell = str | Callable[[Any], str]
"""A format string for a row, such as `"{latency[p50]:.2f}"`, or a function of the row."""


def table(columns: str | Mapping[str, Cell], rows: Iterable[Any], note: str = "") -> str:
    """A Markdown table with a paragraph below it; empty without rows. `columns`: header to cell, in order, or as text:
    `header = cell | header = cell`."""
    cells = dict(part.split(" = ", 1) for part in columns.split(" | ")) if isinstance(columns, str) else columns
    body = [[filled(cell, row) for cell in cells.values()] for row in rows]
    if not body:
        return ""
    text = "".join("| " + " | ".join(line) + " |\n" for line in (cells, ["---"] * len(cells), *body))
    return f"{text}\n{note}\n" if note else text


def blocks(*parts: str) -> str:
    """Tables and paragraphs with an empty line between those that are not empty."""
    return "\n".join(filter(None, parts))


def picture(words: str, file: str) -> str:
    """A picture of benchmarks/results, with its text."""
    return f"![{words}](benchmarks/results/{file})\n"


class _Missing(Exception):
    """A row has no value for a field of the template."""


class _Formatter(string.Formatter):
    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        try:
            value, key = super().get_field(field_name, args, kwargs)
        except (KeyError, TypeError):  # absent, or a part of what is absent
            raise _Missing from None
        if value is None:
            raise _Missing
        return value, key

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec.endswith("%"):
            return f"{100 * value:{format_spec[:-1]}f} %"
        return format(value, format_spec)


def filled(cell: Cell, row: Any) -> str:
    """The text of a cell; a dash where the row has no value for it."""
    try:
        return cell(row) if callable(cell) else _Formatter().vformat(cell, (), row)
    except _Missing:
        return "-"


def of(names: Iterable[str], template: str) -> dict[str, str]:
    """Columns that differ by one name, which `template` has as `@`."""
    return {name: template.replace("@", name) for name in names}


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def steps_of(kind: str, steps: int) -> str:
    """A number of steps of a family's loop; those of π0-FAST are tokens, and ACT has none."""
    if kind == "act":
        return "one pass"
    return plural(steps, "token" if kind == "pi0_fast" else "step")


def with_interval(rate: Row) -> str:
    """A success rate with its Wilson interval, such as `98.0 % (95.7 to 99.1)`; a dash without episodes."""
    if rate["rate"] is None:
        return "-"
    return f"{100 * rate['rate']:.1f} % ({100 * rate['wilson_95_low']:.1f} to {100 * rate['wilson_95_high']:.1f})"


def machine(result: Row) -> str:
    """Hardware, torch version and commit of a report."""
    hardware = result["hardware"]
    place = hardware.get("gpu") or f"{hardware['cpu']}, {plural(hardware['threads'], 'thread')}"
    return f"{place}, torch {result['software']['torch']}{commit(result)}"


NOT_STORED = "No run is stored.\n"
"""In place of a table whose runs are not stored yet."""
MANY = 5
"""With more reports than this from one place, `machines` names only those of other places."""


def machines(results: Iterable[tuple[str, Row]], described: Callable[[Row], str] = machine) -> str:
    """`machine` of several named reports, or another description; with their names where these differ, but for the
    place of most of many reports."""
    where: dict[str, list[str]] = {}
    for name, result in results:
        where.setdefault(described(result), []).append(name)
    if len(where) == 1:
        return next(iter(where))
    places = sorted(where, key=lambda place: -len(where[place]))
    named = {place: f"{', '.join(dict.fromkeys(names))}: {place}" for place, names in where.items()}
    if len(where[places[0]]) <= MANY:
        return "; ".join(named.values())
    return "; ".join((places[0], *(named[place] for place in places[1:])))


def commit(result: Row) -> str:
    """`, commit ...` of the code that made a report; empty where the report has none."""
    git = result.get("git") or {}
    name = git.get("commit") or result["software"].get("commit") or ""
    changed = "+" if git.get("modified") or name.endswith("+") else ""
    return f", commit {name[:7]}{changed}" if name else ""


def command(result: Row) -> str:
    """The command of a run in backticks, without the folders of its machine."""
    words = result["command"].split() if isinstance(result["command"], str) else result["command"]
    return f"`{' '.join(without_folders(words))}`"


def with_note(result: Row) -> str:
    """The note that was stored with a run, after a space."""
    return f" {result['note']}" if result.get("note") else ""


OLD, UNKNOWN = "older weights", "weights without a fingerprint"
_WARNINGS = {
    OLD: "Made with older weights than the bundled checkpoint has now",
    UNKNOWN: "The weights of these runs are unknown, because they carry no fingerprint",
}


def doubt(checkpoint: str | None, weights: str | None) -> str:
    """`OLD` if a run used other weights than its bundled checkpoint has now, `UNKNOWN` if it does not say which;
    else empty. `weights`: their fingerprint."""
    if weights is None:
        return UNKNOWN
    path = record_of(checkpoint)
    return OLD if path is not None and weights != json.loads(path.read_text())["weights"] else ""


def doubts(runs: Iterable[tuple[str, str | None, str | None]]) -> str:
    """Warnings about the runs (name, checkpoint, fingerprint of the weights) that `doubt` names, after a space."""
    found: dict[str, list[str]] = {}
    for name, checkpoint, weights in runs:
        found.setdefault(doubt(checkpoint, weights), []).append(name)
    return "".join(
        f" **{text}: {', '.join(dict.fromkeys(found[kind]))}.**" for kind, text in _WARNINGS.items() if kind in found
    )
