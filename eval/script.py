"""What scripts on result files share: options from words, one line for an error, JSON that is written whole."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from vla_accel.cli import ended
from vla_accel.cli.options import read
from vla_accel.files import replacing

T = TypeVar("T")


def run_script(name: str, kind: type[T], run: Callable[[T], object], words: Sequence[str] | None) -> int:
    """Run `python -m NAME` with its options, a dataclass, from `words` (the program's own if None).

    The exit status: 0 done, 1 an error was said, 130 interrupted; wrong usage ends the program with status 2.
    """

    def whole() -> int:
        run(read(kind, words, f"python -m {name}"))
        return 0

    return concluded(whole)


def concluded(run: Callable[[], int], *, error: int = 1, later: str = "") -> int:
    """The exit status of a program whose end is said in one line (`vla_accel.cli.ended`); `error`: that of an error,
    `later`: what an interrupted one is told besides."""
    status, said = ended(run)
    if said is None:
        return status
    print(f"error: {' '.join(said.split())}" if status == 1 else said + later, file=sys.stderr)
    return error if status == 1 else status


def write_png(figure: Any, path: Path) -> None:
    """Write a matplotlib figure, whole or not at all."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=130)
