"""Processes that a program starts for itself. Knows nothing of what they do."""

from __future__ import annotations

import signal
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess


def start(process: BaseProcess) -> None:
    """Start a process, spawned, that Ctrl-C never reaches, not even while it imports: a terminal tells the whole group,
    and it is the parent who ends it."""
    resource_tracker.ensure_running()  # where Python starts it on the way, it may let the signal in again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which the process inherits
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
