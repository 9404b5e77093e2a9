"""Tables, JSON lines and reports of all commands. Importing this needs no torch."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_accel.config import load_config
from vla_accel.files import write_json

if TYPE_CHECKING:
    import torch

    from vla_accel.cli.image_options import BenchOptions


def check_names(checkpoint: str, config: str | None) -> None:
    """Raise CheckpointError or ConfigError for unknown names, before a program reports that it loads them."""
    from vla_accel.families.loading import local

    load_config(config)
    local(checkpoint)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table without its empty columns, numbers to the right. If it is too wide for the terminal, transpose
    it if that is narrower; else wrap headers before names; if even single words are too long, give each name its own
    line."""
    from rich.console import Console
    from rich.table import Table

    def table(lines: Sequence[Sequence[str]], folded: float = math.inf) -> Table:
        made = Table(title=title, title_justify="left")
        for i, column in enumerate(zip(*lines, strict=True)):
            most = max(len(word) for cell in column for word in cell.split()) if i >= folded else None
            made.add_column(column[0], justify="right" if i else "left", overflow="fold", max_width=most)
        for row in lines[1:]:
            made.add_row(*row)
        return made

    def width(made: Table) -> int:
        return console.measure(made, options=console.options.update(width=10_000)).maximum

    # A file or pipe has no width to keep to.
    console = Console(width=None if sys.stdout.isatty() else 160, markup=False, emoji=False)
    filled = [one for one in zip_longest(columns, *rows, fillvalue="") if not rows or set(one[1:]) - {"-", ""}]
    lines = list(zip(*filled, strict=True))
    upright, lying = table(lines), table(filled)
    wide = width(upright) > console.width
    if wide and width(lying) < width(upright) and width(table(filled, folded=0)) <= console.width:
        console.print(lying)
    elif wide and width(table(lines, folded=0)) > console.width:
        console.print(title, style="italic", highlight=False)
        widths = [max(map(len, column)) for column in filled[1:]]
        for name, *cells in lines:
            below = "  ".join(("", *map(str.rjust, cells, widths)))
            console.print(name, below, sep="\n", soft_wrap=True, highlight=False)
    else:
        console.print(table(lines, folded=1) if wide else upright)


PARITY_COLUMNS = ("MSE", "cosine", "max error", "PSNR dB")


def parity_cells(parity: Mapping[str, float | None]) -> list[str]:
    """The cells of `PARITY_COLUMNS`; None is a dash."""
    formats = {"mse": ".2e", "cosine": ".6f", "max_error": ".3g", "psnr_db": ".1f"}
    return ["-" if parity[k] is None else format(parity[k], f) for k, f in formats.items()]


def say(text: str) -> None:
    """Print a line for people to standard error."""
    print(text, file=sys.stderr, flush=True)


def print_json(content: Any, *, allow_nan: bool = True) -> None:
    """Print the JSON line that ends a command, for scripts; not on a terminal, where it would hide the result."""
    if not sys.stdout.isatty():
        print(json.dumps(content, allow_nan=allow_nan), flush=True)


def write_if(path: Path | None, content: Any) -> None:
    """Write a JSON file whole, if a path is given."""
    if path is not None:
        write_json(path, content)


def report(
    command: str, options: BenchOptions, device: torch.device, began: float, passed: bool, content: Mapping[str, Any]
) -> dict[str, Any]:
    """Add what every benchmark's JSON holds to its content; `began`: `time.perf_counter()` at the start."""
    from vla_accel import machine

    return {
        "command": command,
        "dtype": options.dtype,
        "rounds": options.rounds,
        "hardware": machine.hardware(device),
        "software": machine.software(),
        **content,
        "seconds": round(time.perf_counter() - began, 1),
        "passed": passed,
    }


def finish(summary: dict[str, Any], output: Path | None) -> int:
    """Write a report, print it as the last line, and return the exit status."""
    write_if(output, summary)
    print_json(summary)
    return 0 if summary["passed"] else 1
