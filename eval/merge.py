"""The parts of one run as one result (`eval.harness.merge`).

    python -m eval.merge part1.json part2.json … --output whole.json

Reads result files that a benchmark's command wrote with `--shard`; prints and writes what one job would have.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from eval.harness.figures import draw_result
from eval.harness.merge import merge
from eval.harness.pages import run_page
from eval.harness.report import check_output, read_result, row_line
from eval.harness.tables import print_summary, run_title, stderr_console
from eval.script import run_script
from vla_accel.cli.common import print_json
from vla_accel.cli.options import Argument, OutputFile, Written
from vla_accel.errors import ConfigError
from vla_accel.files import write_json
from vla_accel.report import page


@dataclass(frozen=True)
class Arguments:
    """Put the parts of one run together, which jobs played with --shard."""

    parts: Annotated[tuple[Path, ...], Argument("PART ...", positional=True)]
    """Result files, such as `python -m eval.libero --shard 1/2` writes."""
    output: Annotated[Path, Written()]
    """Result JSON of the whole run; its picture goes into the same folder."""
    report: OutputFile = None
    """HTML file that opens offline: pictures, tables, films, conditions."""


def run(arguments: Arguments) -> None:
    """Merge, print tables and one JSON line, write the result. Raises ConfigError for parts that do not fit."""
    if arguments.report is not None:
        page.check_path(arguments.report)
    names = [str(path) for path in arguments.parts]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"parts: expected different result files, at least one, got {', '.join(names) or 'none'}")
    check_output(arguments.output, arguments.parts)
    parts = {str(path): read_result(path)[0] for path in arguments.parts}
    # The files' names, not where they lie on this machine.
    result = merge(parts, ["python", "-m", "eval.merge", *(path.name for path in arguments.parts)])
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    result["figure"] = draw_result(result, arguments.output)
    write_json(arguments.output, result, allow_nan=False)
    print_summary(stderr_console(), result["summary"], title=run_title(result))
    print(f"output: {arguments.output}", file=sys.stderr)
    if arguments.report is not None:
        print(f"report: {page.write(run_page(result), arguments.report)}", file=sys.stderr)
    rows = [row_line(row) for row in result["summary"]["rows"]]
    print_json({"output": str(arguments.output), "episodes": len(result["episodes"]), "rows": rows})


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 merged, 1 the parts do not make one run."""
    return run_script("eval.merge", Arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
