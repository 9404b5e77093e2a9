"""How far something is, on standard error: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

SAID_EVERY_S = 5.0
"""Of lines, where there is no terminal for a bar."""
GOES_ON_EVERY_S = SAID_EVERY_S
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


def counted(what: str, say: Callable[[str], None]) -> Callable[[int, int], None]:
    """Says now and then, and at the end, how many of how many are done."""
    said = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal said
        if done == total or time.monotonic() - said >= SAID_EVERY_S:
            said = time.monotonic()
            say(f"{done}/{total} {what}")

    return tell


@contextlib.contextmanager
def going_on(what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Says what begins, and now and then for how long: for what cannot tell how far it is, such as a compilation."""
    began, over = time.monotonic(), threading.Event()

    def tell() -> None:
        while not over.wait(GOES_ON_EVERY_S):
            say(f"{what}: {time.monotonic() - began:.0f} s so far")

    say(what)
    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


@contextlib.contextmanager
def shown(title: str, *, size: bool = False) -> Iterator[Advance]:
    """A bar that goes when it is done, or lines. `size`: what is counted is bytes."""
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
