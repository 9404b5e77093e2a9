"""Overlap of the loop's first step with the prefix: each layer of the expert needs only its own keys and values."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch


class Ahead:
    """Events for a prefix's `depth` layers, and a side stream for the consumer of their keys and values.

    The prefix calls `begin` first, and `reached` after each layer's keys and values. The consumer runs inside
    `beside()` and calls `wait(layer)` before it reads that layer. `complete` enqueues the remaining work of a layer on
    the stream that waited. In a CUDA graph the prefix and the consumer become two branches.
    """

    def __init__(self, device: torch.device, depth: int, complete: Callable[[int], None]) -> None:
        self.begun, self.layers = torch.cuda.Event(), [torch.cuda.Event() for _ in range(depth)]
        self.stream, self._complete = _stream(device), complete

    def begin(self) -> None:
        """Record that the work before the prefix is enqueued."""
        self.begun.record()

    def reached(self, layer: int) -> None:
        """Record that the keys and values of a layer are enqueued."""
        self.layers[layer].record()

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Run on the side stream, which depends only on the work before the prefix and on the layers in `wait`.
        Afterwards the current stream waits for both.
        """
        self.stream.wait_event(self.begun)
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

    def wait(self, layer: int) -> None:
        """Order the following work on this stream after the keys and values of a layer."""
        self.stream.wait_event(self.layers[layer])
        self._complete(layer)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one side stream of a device: cuBLAS keeps a workspace for every stream that it has seen."""
    return torch.cuda.Stream(device)
