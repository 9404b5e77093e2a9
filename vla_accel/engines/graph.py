"""CUDA graphs for a whole call: every engine and the download, with timing events between them.

Knows engines and buffers, not policies. The first engine may have a graph of its own, so that it runs while the host
prepares what only the others need; all others are one graph. Replaying costs a launch each; the events inside cost
nothing else. A last engine whose work may end early (`engines.base.Turns`) has a graph of its own for a turn, which is
replayed between one for all before it and one for all behind it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from vla_accel.engines.base import Engine, Turns
from vla_accel.errors import EngineError
from vla_accel.kernels.phases import phase
from vla_accel.ledger import Ledger, LedgerEntry

GRAPH = "cuda_graph"
STREAM = "stream"
_ONE_AT_A_TIME = threading.RLock()
"""Graphs of a device share the stream on which they are recorded (`side_stream`), and cuBLAS its workspaces."""


class Turning:
    """The turns of a captured engine: `turn`, replayed until it is done, and `rest`, what comes behind it."""

    def __init__(self, turns: Turns, turn: torch.cuda.CUDAGraph, rest: torch.cuda.CUDAGraph) -> None:
        self.turns, self.turn, self.rest = turns, turn, rest
        self.device = turns.finished.device
        self.flags = [torch.zeros(1, dtype=torch.bool, pin_memory=True) for _ in range(2)]
        self.told = [torch.cuda.Event() for _ in range(2)]

    def replay(self) -> None:
        """Enqueue turns, and then the rest. The host waits for a turn's flag while the next turn runs, so that the GPU
        never waits for the host."""
        with torch.cuda.device(self.device):
            for index in range(self.turns.count):
                now, before = index % 2, 1 - index % 2
                self.turn.replay()
                self.flags[now].copy_(self.turns.finished, non_blocking=True)
                self.told[now].record()
                if index:
                    self.told[before].synchronize()
                    if bool(self.flags[before]):
                        break
            self.rest.replay()


@dataclass
class Captured:
    """A graph and the events at its seams: before the first engine and after each. `lead`: the first engine, if it is
    not in `graph`; `turning`: what comes behind it."""

    graph: torch.cuda.CUDAGraph
    events: list[torch.cuda.Event]
    names: list[str]
    lead: torch.cuda.CUDAGraph | None = None
    turning: Turning | None = None

    def begin(self) -> None:
        """Enqueue the first engine on the current stream, if it has a graph of its own."""
        if self.lead is not None:
            self.lead.replay()

    def replay(self) -> None:
        """Enqueue everything else on the current stream."""
        self.graph.replay()
        if self.turning is not None:
            self.turning.replay()

    def times(self) -> dict[str, float]:
        """Milliseconds of each engine in the last replay; the device must have finished it."""
        pairs = zip(self.names, self.events, self.events[1:], strict=False)
        return {name: start.elapsed_time(end) for name, start, end in pairs}


def capture(
    engines: Sequence[tuple[str, Engine]], after: Callable[[], None], ledger: Ledger, *, lead: bool = False
) -> Captured | None:  # fmt: skip
    """Capture the engines in order, and `after`. None where some engine cannot be captured. `lead`: the first of
    several gets a graph of its own.

    Running out of memory is recorded in the ledger as a fallback from a graph to a stream (or raises, when strict).
    """
    stubborn = [name for name, engine in engines if not engine.capturable]
    early = [name for name, engine in engines[:-1] if engine.turns() is not None]
    if early:
        raise EngineError(f"CUDA graph: expected turns of the last engine alone, got them of {', '.join(early)}")
    if stubborn:
        return None
    lead = lead and len(engines) > 1
    names = [name for name, _ in engines]
    detail = f"{names[0]}, then {' → '.join(names[1:])}" if lead else " → ".join(names)
    try:
        with _ONE_AT_A_TIME, phase("capture"):
            captured = _capture(engines, after, lead)
    except torch.OutOfMemoryError as error:
        ledger.record(LedgerEntry("call", GRAPH, STREAM, f"out of memory during capture: {error}", detail))
        return None
    ledger.record(LedgerEntry("call", GRAPH, GRAPH, "", detail))
    return captured


@contextlib.contextmanager
def recording(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, behind: torch.cuda.CUDAGraph | None = None
) -> Iterator[None]:  # fmt: skip
    """What is enqueued inside goes into a graph that is replayed long after; `stream` may have been warmed up on.
    `behind`: a graph that is always replayed before this one, whose memory it may use again.

    The graph owns the workspaces of its matrix products. cuBLAS keeps one for every stream: that of the warm-up lies
    outside the graph's memory, and whoever clears the workspaces (as torch.compile's mode reduce-overhead does when it
    records) frees it. The graph would then write into other tensors, or where no memory is mapped. Costs every graph a
    workspace (32 MiB on a Hopper); graphs recorded elsewhere, with a workspace outside their memory, lose it here.
    """
    with _ONE_AT_A_TIME:
        torch._C._cuda_clearCublasWorkspaces()
        try:
            pool = None if behind is None else behind.pool()
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                yield
        finally:
            # The graph goes on using these workspaces: the next product of this process must get others.
            torch._C._cuda_clearCublasWorkspaces()


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The one on which all graphs of a device are recorded: cuBLAS keeps a workspace for every stream it has seen."""
    return torch.cuda.Stream(device)


def _capture(engines: Sequence[tuple[str, Engine]], after: Callable[[], None], lead: bool) -> Captured:
    device = engines[0][1].device
    with torch.cuda.device(device), torch.inference_mode():
        # Compiles kernels, picks algorithms and makes library handles, none of which may happen during capture.
        side = side_stream(device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                for _, engine in engines:
                    engine.run()
                after()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        turns = engines[-1][1].turns()
        last = len(engines) if turns is None else len(engines) - 1
        first, graph, turning = torch.cuda.CUDAGraph() if lead else None, torch.cuda.CUDAGraph(), None
        events = [torch.cuda.Event(enable_timing=True, external=True) for _ in range(len(engines) + 1)]

        def run(begin: int, end: int) -> None:
            if begin == 0:
                events[0].record()
            for (_, engine), event in zip(engines[begin:end], events[begin + 1 :], strict=False):
                engine.run()
                event.record()

        try:
            if first is not None:
                with recording(first, side):
                    run(0, 1)
            with recording(graph, side, first):
                run(0 if first is None else 1, last)
                if turns is None:
                    after()
                else:
                    turns.begin()
            if turns is not None:
                turning = Turning(turns, torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph())
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
    return Captured(graph, events, [name for name, _ in engines], first, turning)
