"""One caller at a time for a set of static buffers, over threads and CUDA streams."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch


class Exclusive:
    """Excludes other threads from static buffers, and on a GPU orders the streams that use them.

    A lock alone is not enough on a GPU: work that one thread has enqueued may still run when another thread, on
    another stream, writes the same buffers. The same thread may enter again.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._done: dict[torch.device, torch.cuda.Event] = {}

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Hold the buffers, which are on `device`. On a GPU the current stream first waits for the last holder's."""
        with self._lock:
            if device.type != "cuda":
                yield
                return
            stream = torch.cuda.current_stream(device)
            if device in self._done:
                stream.wait_event(self._done[device])
            try:
                yield
            finally:
                self._done.setdefault(device, torch.cuda.Event()).record(stream)
