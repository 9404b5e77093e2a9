"""Progress on standard error: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

INTERVAL_S = 5.0
"""Seconds between two lines."""
Advance = Callable[[int, int], None]
"""Takes the amount done since the last call, and the total."""


def in_lines(title: str) -> Advance:
    """Print the percentage every few seconds."""
    done, printed = 0, time.monotonic()

    def advance(count: int, total: int) -> None:
        nonlocal done, printed
        done += count
        if time.monotonic() - printed >= INTERVAL_S:
            printed = time.monotonic()
            print(f"{title}: {100 * done // max(total, 1)} %", file=sys.stderr, flush=True)

    return advance


def counted(what: str, say: Callable[[str], None]) -> Callable[[int, int], None]:
    """Report "done/total what" every few seconds and at the end."""
    reported = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal reported
        if done == total or time.monotonic() - reported >= INTERVAL_S:
            reported = time.monotonic()
            say(f"{done}/{total} {what}")

    return report


@contextlib.contextmanager
def going_on(what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Report `what` at the start of the block, then every few seconds how long it has been running."""
    began, over = time.monotonic(), threading.Event()

    def repeat() -> None:
        while not over.wait(INTERVAL_S):
            say(f"{what}: {time.monotonic() - began:.0f} s so far")

    say(what)
    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def shown(title: str, *, size: bool = False) -> Iterator[Advance]:
    """Show a bar that disappears at the end, or lines. Args: `size`: whether the amounts are bytes."""
    if not sys.stderr.isatty():
        yield in_lines(title)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    what = TextColumn("{task.description}", markup=False)
    columns = (what, BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*(columns if size else ()), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda count, total: progress.update(task, advance=count, total=total)
