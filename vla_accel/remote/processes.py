"""Processes that a program starts for itself."""

from __future__ import annotations

import signal
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess


def start(process: BaseProcess) -> None:
    """Start a spawned process that ignores Ctrl-C, even while it imports: a terminal signals the whole group, but the
    parent ends its processes itself."""
    resource_tracker.ensure_running()  # started implicitly, it could unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the process inherits this mask
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
