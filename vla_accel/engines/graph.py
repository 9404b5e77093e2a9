"""CUDA graphs for a whole call: upload, every engine and the download, with timing events between the engines.

The upload and the first engine may have a graph of their own, so that they run while the host prepares the other
inputs. A last engine whose work may end early (`engines.base.Turns`) adds a graph for one turn and one for the rest.
A second engine whose inputs seldom change (`Component.seldom`) has a graph of its own, which a call may leave out.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from vla_accel.engines.base import Engine, Turns
from vla_accel.errors import EngineError
from vla_accel.kernels.capture import CAPTURE_LOCK, Graph, recorded
from vla_accel.kernels.phases import phase
from vla_accel.ledger import Ledger, LedgerEntry

GRAPH = "cuda_graph"
STREAM = "stream"
SELDOM = 1
"""The place of an engine that a call may leave out: it follows the first one."""


class Turning:
    """The turns of a captured engine: the graph `turn`, replayed until the work is finished, then the graph `rest`."""

    def __init__(self, turns: Turns, turn: Graph, rest: Graph) -> None:
        self.turns, self.turn, self.rest = turns, turn, rest
        self.device = turns.finished.device
        self.flags = [torch.zeros(1, dtype=torch.bool, pin_memory=True) for _ in range(2)]
        self.copied = [torch.cuda.Event() for _ in range(2)]

    def replay(self) -> None:
        """Enqueue turns and then the rest. The host reads a turn's flag while the next turn runs, so that the GPU never
        waits for the host."""
        with torch.cuda.device(self.device):
            for index in range(self.turns.count):
                now, before = index % 2, 1 - index % 2
                self.turn.replay()
                self.flags[now].copy_(self.turns.finished, non_blocking=True)
                self.copied[now].record()
                if index:
                    self.copied[before].synchronize()
                    if bool(self.flags[before]):
                        break
            self.rest.replay()


@dataclass
class Captured:
    """The graphs of a call and the events before the first engine and after each.

    `first`: the upload and the first engine, if they have a graph of their own; `seldom`: the second engine, if its
    inputs seldom change; `starts`: start events of engines that come first in their graph, by index; `turning`: the
    last engine's turns.
    """

    graph: Graph
    events: list[torch.cuda.Event]
    names: list[str]
    first: Graph | None = None
    seldom: Graph | None = None
    starts: dict[int, torch.cuda.Event] = field(default_factory=dict)
    turning: Turning | None = None
    _left_out: bool = False

    def start(self) -> None:
        """Enqueue the upload and the first engine on the current stream, if they have a graph of their own."""
        if self.first is not None:
            self.first.replay()

    def replay(self, *, changed: bool = True) -> None:
        """Enqueue everything else on the current stream. `changed`: whether to run the engine of `seldom`."""
        self._left_out = self.seldom is not None and not changed
        if self.seldom is not None and changed:
            self.seldom.replay()
        self.graph.replay()
        if self.turning is not None:
            self.turning.replay()

    def times(self) -> dict[str, float]:
        """Milliseconds of each engine in the last replay, 0 if it was left out; the device must have finished it."""
        found = {}
        for index, name in enumerate(self.names):
            start, end = self.starts.get(index, self.events[index]), self.events[index + 1]
            found[name] = 0.0 if self._left_out and index == SELDOM else start.elapsed_time(end)
        return found


def capture(
    engines: Sequence[tuple[str, Engine]],
    after: Callable[[], None],
    ledger: Ledger,
    *,
    before: Callable[[], None] | None = None,
    between: Callable[[], None] | None = None,
    split_first: bool = False,
) -> Captured | None:
    """Capture `before`, the engines in order, and `after`; return None if that is impossible or memory is short.

    Running out of memory is recorded in the ledger as a fallback from a graph to a stream (or raises, when strict).

    Args:
        before: Work in front of the first engine; not part of its time.
        between: Work at the beginning of the graph of the other engines; not part of their time.
        split_first: Whether `before` and the first of several engines get a graph of their own.
    """
    if early := [name for name, engine in engines[:-1] if engine.turns() is not None]:
        raise EngineError(f"CUDA graph: expected turns of the last engine alone, got them of {', '.join(early)}")
    if not all(engine.capturable for _, engine in engines):
        return None
    split_first = split_first and len(engines) > 1
    names = [name for name, _ in engines]
    detail = f"{names[0]}, then {' → '.join(names[1:])}" if split_first else " → ".join(names)
    try:
        with CAPTURE_LOCK, phase("capture"):
            captured = _capture(engines, before or _nothing, between or _nothing, after, split_first)
    except torch.OutOfMemoryError as error:
        ledger.record(LedgerEntry("call", GRAPH, STREAM, f"out of memory during capture: {error}", detail))
        return None
    ledger.record(LedgerEntry("call", GRAPH, GRAPH, "", detail))
    return captured


def _nothing() -> None:
    pass


@contextlib.contextmanager
def recording(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, previous: torch.cuda.CUDAGraph | None = None
) -> Iterator[None]:
    """Record the work enqueued inside into a graph for later replays.

    The graph owns the workspaces of its matrix products (32 MiB on a Hopper). cuBLAS keeps one for every stream: that
    of the warm-up lies outside the graph's memory, and anything that clears the workspaces (such as torch.compile's
    mode reduce-overhead) frees it; the graph would then write into other tensors or into unmapped memory.

    Args:
        previous: A graph that is always replayed before this one, which may reuse its memory.
    """
    with CAPTURE_LOCK:
        torch._C._cuda_clearCublasWorkspaces()
        try:
            with recorded(graph, stream, previous):
                yield
        finally:
            # The graph keeps these workspaces: the next product of this process must get others.
            torch._C._cuda_clearCublasWorkspaces()


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream on which all graphs of a device are recorded: cuBLAS keeps a workspace for every stream."""
    return torch.cuda.Stream(device)


def warmed_up(device: torch.device, work: Callable[[], object]) -> torch.cuda.Stream:
    """Run `work` twice on the stream that records it, which is returned: capture may not compile kernels or pick
    algorithms."""
    side = side_stream(device)
    with CAPTURE_LOCK:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                work()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
    return side


def _capture(
    engines: Sequence[tuple[str, Engine]], before: Callable[[], None], between: Callable[[], None],
    after: Callable[[], None], split_first: bool,
) -> Captured:  # fmt: skip
    device = engines[0][1].device
    with torch.cuda.device(device), torch.inference_mode():
        side = warmed_up(device, lambda: [before(), between(), *(engine.run() for _, engine in engines), after()])
        turns = engines[-1][1].turns()
        last = len(engines) if turns is None else len(engines) - 1
        first, graph, turning = Graph() if split_first else None, Graph(), None
        events = [_event() for _ in range(len(engines) + 1)]
        has_seldom = split_first and leaves_out([engine for _, engine in engines])
        seldom, starts = Graph() if has_seldom else None, dict[int, torch.cuda.Event]()

        def run(start: int, end: int) -> None:
            if start == 0:
                before()
                events[0].record()
            elif seldom is not None:
                starts[start] = _event()
                starts[start].record()
            for (_, engine), event in zip(engines[start:end], events[start + 1 :], strict=False):
                engine.run()
                event.record()

        try:
            if first is not None:
                with recording(first, side):
                    run(0, 1)
            begin = 0 if first is None else 1
            if seldom is not None:
                with recording(seldom, side, first):
                    between()
                    run(SELDOM, SELDOM + 1)
                begin = SELDOM + 1
            with recording(graph, side, first if seldom is None else seldom):
                between()
                run(begin, last)
                if turns is None:
                    after()
                else:
                    turns.begin()
            if turns is not None:
                turning = Turning(turns, Graph(), Graph())
                with recording(turning.turn, side):
                    turns.advance()
                with recording(turning.rest, side):
                    turns.end()
                    events[-1].record()
                    after()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            names = ", ".join(name for name, _ in engines)
            raise EngineError(f"CUDA graph of {names}: capture failed: {error}") from error
    return Captured(graph, events, [name for name, _ in engines], first, seldom, starts, turning)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True, external=True)


def leaves_out(engines: Sequence[Engine]) -> bool:
    """Return whether calls may leave out the second engine, because its inputs seldom change."""
    return len(engines) > SELDOM + 1 and engines[SELDOM].component.seldom
