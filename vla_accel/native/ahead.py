"""The loop's first step beside the prefix: a layer of the expert needs the keys and values of its own layer alone."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch


class Ahead:
    """Which of a prefix's `depth` layers have their keys and values, and a stream for what reads them meanwhile.

    The prefix calls `begin` first and `reached` behind each layer's. Who comes after it works inside `beside`, which
    begins where the prefix does, and asks there by `wait`. `complete`: what is still to be done for a layer, on the
    stream that waited. In a CUDA graph they become two branches.
    """

    def __init__(self, device: torch.device, depth: int, complete: Callable[[int], None]) -> None:
        self.begun, self.layers = torch.cuda.Event(), [torch.cuda.Event() for _ in range(depth)]
        self.stream, self._complete = _stream(device), complete

    def begin(self) -> None:
        """What the prefix is enqueued behind is there."""
        self.begun.record()

    def reached(self, layer: int) -> None:
        """A layer's keys and values are enqueued."""
        self.layers[layer].record()

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """What is enqueued inside waits for nothing of the prefix but for what it asks; what comes after it waits for
        both."""
        self.stream.wait_event(self.begun)
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

    def wait(self, layer: int) -> None:
        """What follows on this stream may read the layer's keys and values."""
        self.stream.wait_event(self.layers[layer])
        self._complete(layer)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all shapes of a device: cuBLAS keeps a workspace for every stream it has ever seen."""
    return torch.cuda.Stream(device)
