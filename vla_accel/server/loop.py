"""The event loop that a server runs in, and what keeps its answers quick. Knows nothing about servers."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import sys
from collections.abc import Coroutine
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_KEPT_BYTES = 64 * 2**20
_SWITCH_S = 0.0005


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run `main` to its end, in uvloop's event loop where it is installed, else in asyncio's."""
    tune_process()
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


def tune_process() -> None:
    """Settings of the whole process, for messages of hundreds of kilobytes and two busy threads.

    glibc gives such blocks back to the system and takes them again, some 70 page faults each, for every message: freed
    memory is kept, up to 64 MiB. A thread that waits for Python's lock is let in after 0.5 ms, not 5.
    """
    with contextlib.suppress(OSError, AttributeError):  # no glibc
        libc = ctypes.CDLL(None)
        for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            libc.mallopt(option, _KEPT_BYTES)
    sys.setswitchinterval(min(_SWITCH_S, sys.getswitchinterval()))
