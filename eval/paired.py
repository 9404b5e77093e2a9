"""Runs of several policies over the same episodes, compared episode by episode (`eval.harness.pairs`).

    python -m eval.paired REFERENCE.json OTHER.json … --output paired.json

Reads result files of a benchmark, such as `python -m eval.libero` writes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from eval.harness.benchmark import schema
from eval.harness.pages import paired_page, pairs_table, print_figures, run_page
from eval.harness.pairs import compare
from eval.harness.report import check_output, read_result
from eval.script import run_script
from vla_accel.cli.common import print_json, write_if
from vla_accel.cli.options import Argument, OutputFile
from vla_accel.errors import ConfigError
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
    """HTML file that opens offline: pictures, tables, and videos of the episodes that only one of them won, where both
    runs were filmed (--film-all)."""


def run(arguments: Arguments) -> dict[str, Any]:
    """Compare, print a table and one JSON line, write the report; returns it."""
    if arguments.report is not None:
        check_path(arguments.report)
    paths = (arguments.reference, *arguments.others)
    names = [path.stem for path in paths]
    if not arguments.others:
        raise ConfigError("others: expected at least one result file, got none")
    if len(set(names)) < len(names):
        raise ConfigError(f"result files: expected different names, which the table has, got {', '.join(names)}")
    check_output(arguments.output, paths)
    read = [read_result(path) for path in paths]
    benchmarks = sorted({benchmark for _, benchmark in read})
    if len(benchmarks) > 1:
        raise ConfigError(f"result files: expected one benchmark, got {', '.join(benchmarks)}")
    results = {name: result for name, (result, _) in zip(names, read, strict=True)}
    for path, (result, _) in zip(paths, read, strict=True) if arguments.report is not None else ():
        try:
            run_page(result)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path}: expected a whole result, what its report shows is damaged: {error!r}"
            ) from error
    report = {
        "note": arguments.note,
        # The files' names, not where they lie on this machine.
        "command": ["python", "-m", "eval.paired", *(path.name for path in paths)],
        "schema": schema(benchmarks[0], "paired"),
        **compare(results[names[0]], {name: results[name] for name in names[1:]}, names[0]),
    }
    print_figures(pairs_table(report))
    write_if(arguments.output, report)
    if arguments.report is not None:
        print(f"report: {write(paired_page(report, results), arguments.report)}", file=sys.stderr)
    print_json(report)
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 compared, 1 the files cannot be compared."""
    return run_script("eval.paired", Arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
