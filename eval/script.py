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

    status, said = ended(whole)
    if said is not None:
        print(f"error: {' '.join(said.split())}" if status == 1 else said, file=sys.stderr)
    return status


def write_png(figure: Any, path: Path) -> None:
    """Write a matplotlib figure, whole or not at all."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=130)


def write_text(path: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text)
