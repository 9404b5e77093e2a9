"""Recording of CUDA graphs. During a recording PyTorch's default generator belongs to it: attention that draws from the
generator (cuDNN's) fails then in every other thread."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

import torch

CAPTURE_LOCK = threading.RLock()
"""Held while a graph is warmed up and recorded and while a candidate runs: graphs of a device share the stream that
records them, and cuBLAS its workspaces."""
_RECORDING = threading.RLock()


class Graph(torch.cuda.CUDAGraph):
    """A CUDA graph whose replay waits while another thread records one."""

    def replay(self) -> None:
        """Enqueue the graph on the current stream."""
        with _RECORDING:
            super().replay()


@contextlib.contextmanager
def recorded(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, previous: torch.cuda.CUDAGraph | None = None
) -> Iterator[None]:
    """Record the work enqueued inside on `stream` into `graph`; it may use the memory of `previous`.

    Other threads may continue calls that a capture forbids. Python's collector waits: it could free the memory of an
    unused graph in this thread, which would end the recording. PyTorch leaves its generator in capture mode after a
    recording that failed; a second, small one takes it out.
    """
    with CAPTURE_LOCK, _RECORDING, _no_collection():
        try:
            pool = None if previous is None else previous.pool()
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                yield
        except BaseException:
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
                torch.zeros(1, device=stream.device)
            raise


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
