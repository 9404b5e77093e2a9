"""The pictures of docs/ from benchmarks/results: `python -m benchmarks.pictures` draws those whose runs are stored.

matplotlib's versions differ in bytes, so no test compares the pictures. The SVG pictures come from `benchmarks.tables`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from benchmarks import late_table, paired_picture, shapes_table, tune_table
from benchmarks.tables import RESULTS, TABLES, load
from eval.script import run_script
from vla_accel.cli.options import Written


@dataclass(frozen=True)
class Arguments:
    """Draw the pictures of docs/ whose runs are stored."""

    output: Annotated[Path, Written(folder=True)] = RESULTS
    """Folder for the PNGs."""


PICTURES: dict[str, tuple[str, Callable[[Any, Path], None]]] = {
    tune_table.PICTURE: ("tune_demo", tune_table.draw_tune),
    late_table.PICTURE: ("late", late_table.draw_late),
    paired_picture.PICTURE: ("paired_stress", paired_picture.draw_paired),
    shapes_table.SHAPES: ("shapes", shapes_table.draw_shapes),
    shapes_table.BATCHES: ("shapes", shapes_table.draw_batches),
}
"""File to its table, whose stored runs it shows, and what draws it."""


def run(arguments: Arguments) -> None:
    """Draw, and print what was drawn and what has no run. Raises DependencyError without matplotlib."""
    drawn, absent = [], []
    for name, (table, draw) in PICTURES.items():
        try:
            results = load(TABLES[table][1])
        except FileNotFoundError:
            absent.append(name)
            continue
        draw(results, arguments.output / name)
        drawn.append(name)
    print(json.dumps({"drawn": drawn, "absent": absent}))


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 drawn, 1 something is missing."""
    return run_script("benchmarks.pictures", Arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
