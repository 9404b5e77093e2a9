"""Runs of several policies over the same episodes, compared episode by episode (`eval.harness.pairs`).

    python -m eval.paired REFERENCE.json OTHER.json … --output paired.json

Reads result files of a benchmark, such as `python -m eval.libero` writes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table

from eval.harness.benchmark import schema
from eval.harness.pages import paired_page, run_page
from eval.harness.pairs import compare
from eval.harness.report import check_output, read_result
from eval.script import run_script
from vla_accel.cli.common import print_json
from vla_accel.cli.options import Argument, OutputFile
from vla_accel.errors import ConfigError
from vla_accel.files import write_json
from vla_accel.report.page import check_path, write


@dataclass(frozen=True)
class Arguments:
    """Compare runs of several policies with a reference run over the same episodes."""

    reference: Annotated[Path, Argument("REFERENCE", positional=True)]
    """Result file of a benchmark, such as `python -m eval.libero` writes."""
    others: Annotated[tuple[Path, ...], Argument("OTHER ...", positional=True)]
    """Result files to compare with it, one or more."""
    output: OutputFile = None
    """JSON report."""
    note: str = ""
    """A note that is stored with the figures."""
    report: OutputFile = None
    """HTML file that opens offline: pictures, tables, and films of the episodes that only one of them won, where both
    runs were filmed (--film-all)."""


def _print(report: Mapping[str, Any]) -> None:
    legend = "lost: only the reference won; gained: only this won; p: McNemar, exact; sees: with 80 % power at 5 %"
    table = Table(title=f"paired with {report['reference']}; {legend}")
    for column in ("run", "steps", "pairs", "reference", "this", "lost", "gained", "p", "sees", "errors"):
        table.add_column(column)
    for row, name in ((r, n) for whole in report["rows"] for r, n in _with_suites(whole)):
        cells = [name, str(row["steps"] or "-"), str(row["pairs"])]
        for rate in (row["reference"], row["other"]):
            low, high = 100 * rate["wilson_95_low"], 100 * rate["wilson_95_high"]
            cells.append(f"{rate['successes']} of {rate['episodes']}, {low:.1f} to {high:.1f} %")
        errors = f"{row['reference']['errors']} and {row['other']['errors']}"
        sees = "-" if row["smallest_difference"] is None else f"{100 * row['smallest_difference']:.1f} %"
        table.add_row(*cells, str(row["lost"]), str(row["gained"]), f"{row['mcnemar_exact_p']:.3g}", sees, errors)
    # Without a terminal, do not wrap lines.
    console = Console()
    width = None if console.is_terminal else max(console.width, 120)
    Console(width=width, markup=False, emoji=False).print(table)


def _with_suites(row: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], str]]:
    """A row and, where there are several, its suites' own, each with its name."""
    suites = [({**suite, "steps": row["steps"]}, f"  {suite['suite']}") for suite in row.get("suites", ())]
    return [(row, row["name"]), *suites]


def run(arguments: Arguments) -> dict[str, Any]:
    """Compare, print a table and one JSON line, write the report; returns it."""
    if arguments.report is not None:
        check_path(arguments.report)
    paths: Sequence[Path] = (arguments.reference, *arguments.others)
    names = [path.stem for path in paths]
    if not arguments.others:
        raise ConfigError("others: expected at least one result file, got none")
    if len(set(names)) < len(names):
        raise ConfigError(f"result files: expected different names, which the table has, got {', '.join(names)}")
    check_output(arguments.output, paths)
    read = dict(zip(names, map(read_result, paths), strict=True))
    benchmarks = {benchmark for _, benchmark in read.values()}
    if len(benchmarks) > 1:
        raise ConfigError(f"result files: expected one benchmark, got {', '.join(sorted(benchmarks))}")
    results = {name: result for name, (result, _) in read.items()}
    for path, result in zip(paths, results.values(), strict=True) if arguments.report is not None else ():
        try:
            run_page(result)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path}: expected a whole result, what its report shows is damaged: {error!r}"
            ) from error
    reference = results[names[0]]
    others = {name: results[name] for name in names[1:]}
    # The files' names, not where they lie on this machine.
    command = ["python", "-m", "eval.paired", *(path.name for path in paths)]
    report = {
        "note": arguments.note,
        "command": command,
        "schema": schema(benchmarks.pop(), "paired"),
        **compare(reference, others, names[0]),
    }
    _print(report)
    if arguments.output is not None:
        write_json(arguments.output, report)
    if arguments.report is not None:
        print(f"report: {write(paired_page(report, results), arguments.report)}", file=sys.stderr)
    print_json(report)
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 compared, 1 the files cannot be compared."""
    return run_script("eval.paired", Arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
