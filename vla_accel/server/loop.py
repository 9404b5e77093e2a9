"""The event loop of a server, and process settings that keep answers fast."""

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
    """Run `main` to its end, in uvloop if it is installed, else in asyncio's event loop."""
    tune_process()
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


def tune_process() -> None:
    """Set up this process for messages of hundreds of kilobytes and two busy threads.

    By default glibc returns such blocks to the system after each message, at about 70 page faults each: keep up to
    64 MiB of freed memory. And let a waiting thread have Python's lock after 0.5 ms instead of 5.
    """
    with contextlib.suppress(OSError, AttributeError):  # no glibc
        libc = ctypes.CDLL(None)
        for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            libc.mallopt(option, _KEPT_BYTES)
    sys.setswitchinterval(min(_SWITCH_S, sys.getswitchinterval()))
