"""How far something is, on standard error: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

SAID_EVERY_S = 10.0
"""Of lines, where there is no terminal for a bar."""
Advance = Callable[[int, int], None]
"""Told how much more is done, and of how much."""


def in_lines(title: str) -> Advance:
    """Says now and then how far that is."""
    done, said = 0, time.monotonic()

    def tell(count: int, total: int) -> None:
        nonlocal done, said
        done += count
        if time.monotonic() - said >= SAID_EVERY_S:
            said = time.monotonic()
            print(f"{title}: {100 * done // max(total, 1)} %", file=sys.stderr, flush=True)

    return tell


@contextlib.contextmanager
def shown(title: str, *, size: bool = False) -> Iterator[Advance]:
    """A bar that goes when it is done, or lines. `size`: what is counted is bytes."""
    if not sys.stderr.isatty():
        yield in_lines(title)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*(columns if size else ()), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda count, total: progress.update(task, advance=count, total=total)
