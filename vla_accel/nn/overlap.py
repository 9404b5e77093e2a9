"""Work on a side stream: two parts that do not depend on each other, and the loop's first step next to the prefix, as
each layer of the expert needs only its own keys and values."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch


class Overlap:
    """Events for a prefix's `depth` layers, and a side stream for the consumer of their keys and values.

    The prefix records `begun` first, and each of `layers` after that layer's keys and values. The consumer runs inside
    `consumer()` and calls `wait(layer)` before it reads a layer; `complete` then enqueues the layer's remaining work on
    the consumer's stream. In a CUDA graph the prefix and the consumer become two branches.
    """

    def __init__(self, device: torch.device, depth: int, complete: Callable[[int], None]) -> None:
        self.begun, self.layers = torch.cuda.Event(), [torch.cuda.Event() for _ in range(depth)]
        self.stream, self._complete = _stream(device), complete

    @contextlib.contextmanager
    def consumer(self) -> Iterator[None]:
        """Run on the side stream after the work before the prefix; afterwards the current stream waits for it."""
        self.stream.wait_event(self.begun)
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

    def wait(self, layer: int) -> None:
        """Order the following work on this stream after the keys and values of a layer."""
        self.stream.wait_event(self.layers[layer])
        self._complete(layer)


@contextlib.contextmanager
def at_once(device: torch.device, other: Callable[[], None]) -> Iterator[None]:
    """Enqueue `other` on the side stream, next to the work inside. In a CUDA graph they become two branches. On a CPU,
    `other` runs first."""
    if device.type != "cuda":
        other()
        yield
        return
    side, current = _stream(device), torch.cuda.current_stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        other()
    yield
    current.wait_stream(side)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one side stream of a device: cuBLAS keeps a workspace for every stream that it has seen."""
    return torch.cuda.Stream(device)
