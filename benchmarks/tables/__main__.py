"""Write the tables of README.md and docs/, between `<!-- table: NAME -->` and `<!-- end -->`, and the SVG pictures:
`python -m benchmarks.tables`."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from benchmarks.tables.registry import ROOT, drawings, pages, render
from eval.script import concluded
from vla_accel.cli.options import read


@dataclass(frozen=True)
class Arguments:
    """Write the tables in README.md and docs/, and the SVG pictures."""

    check: bool = False
    """Change nothing; exit with 1 if a table or a picture differs from the stored results."""


def main(arguments: Arguments) -> int:
    """Write or check; returns the exit status."""
    after = {page: render(page.read_text(), page) for page in pages()} | drawings()
    stale = [path for path, text in after.items() if not path.is_file() or path.read_text() != text]
    for path in stale:
        if arguments.check:
            print(f"{path.relative_to(ROOT)}: differs from benchmarks/results; run `make tables`", file=sys.stderr)
        else:
            path.write_text(after[path])
    return int(arguments.check and bool(stale))


if __name__ == "__main__":
    sys.exit(concluded(lambda: main(read(Arguments, None, "python -m benchmarks.tables"))))
