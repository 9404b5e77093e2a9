"""What scripts share: options, one line for an error, and atomic writes of pictures and folders."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from vla_accel.cli import ended
from vla_accel.cli.options import read
from vla_accel.errors import OutputError
from vla_accel.files import replacing

T = TypeVar("T")


def run_script(
    name: str, kind: type[T], run: Callable[[T], object], words: Sequence[str] | None, later: str = ""
) -> int:
    """Run `python -m NAME` with its options, a dataclass, from `words` (the program's own if None); `later`: as in
    `concluded`.

    The exit status: 0 done, 1 an error was printed, 130 interrupted; wrong usage ends the program with status 2.
    """

    def whole() -> int:
        run(read(kind, words, f"python -m {name}"))
        return 0

    return concluded(whole, later=later)


def concluded(run: Callable[[], int], *, error: int = 1, later: str = "") -> int:
    """Run a program, print its error in one line (`vla_accel.cli.ended`), and return its exit status. `error`: the
    status of an error; `later`: text after the message of an interrupt."""
    status, message = ended(run)
    if message is None:
        return status
    print(f"error: {' '.join(message.split())}" if status == 1 else message + later, file=sys.stderr)
    return error if status == 1 else status


def write_png(figure: Any, path: Path) -> None:
    """Write a matplotlib figure atomically."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=130)


@contextlib.contextmanager
def replacing_files(folder: Path) -> Iterator[Path]:
    """A hidden folder within `folder` to write files to. When the block succeeds, and the files are on the disk, they
    move to `folder`; when it raises, they are removed, and `folder` if it is new. Raises OutputError if `folder` cannot
    be written, also when the disk becomes full within the block."""
    there = folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".") as name:
            yield Path(name)
            written = list(Path(name).iterdir())
            for path in written:
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
            for path in written:
                os.replace(path, folder / path.name)
    except BaseException as error:
        if not there:
            with contextlib.suppress(OSError):
                folder.rmdir()
        if not isinstance(error, OSError) or isinstance(error, OutputError):
            raise
        place = Path(error.filename2 or error.filename or folder)  # the second name of a copy is its target
        if not place.is_relative_to(folder) and place not in folder.parents:
            raise
        raise OutputError(f"{folder}: cannot be written: {error.strerror or error}") from error
