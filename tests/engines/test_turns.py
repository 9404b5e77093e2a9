"""Turns of a captured engine, replayed without a GPU: what the host waits for, and what is enqueued meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vla_accel.engines import graph
from vla_accel.engines.base import Turns


class Gpu:
    """A stream whose work takes effect when the host waits for it."""

    def __init__(self, ends_after: int) -> None:
        self.ends_after, self.turns, self.log = ends_after, 0, list[str]()
        self.finished = torch.zeros(1, dtype=torch.bool)
        self.queue: list[Callable[[], None]] = []

    def turn(self) -> None:
        def work() -> None:
            self.turns += 1
            self.finished.fill_(self.turns >= self.ends_after)

        self.log.append("turn")
        self.queue.append(work)

    def flag(self) -> Any:
        """Page-locked memory; a copy into it is enqueued, too."""
        gpu = self

        class Flag:
            value = False

            def copy_(self, source: torch.Tensor, non_blocking: bool) -> None:
                assert non_blocking
                gpu.queue.append(lambda: setattr(self, "value", bool(source)))

            def __bool__(self) -> bool:
                return self.value

        return Flag()

    def event(self) -> Any:
        marks: list[Callable[[], None]] = []

        def record() -> None:
            marks.append(lambda: None)
            self.queue.append(marks[-1])

        def synchronize() -> None:
            self.log.append("wait")
            while marks[-1] in self.queue:
                self.queue.pop(0)()

        return SimpleNamespace(record=record, synchronize=synchronize)


@pytest.mark.parametrize(("ends_after", "count"), [(1, 8), (2, 8), (3, 8), (7, 8), (99, 4), (99, 1)])
def test_the_host_waits_for_a_turn_while_the_next_one_runs(
    ends_after: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(ends_after)
    cuda = SimpleNamespace(Event=gpu.event, device=lambda device: contextlib.nullcontext())
    fake = SimpleNamespace(zeros=lambda *_, **__: gpu.flag(), bool=torch.bool, cuda=cuda)
    monkeypatch.setattr(graph, "torch", fake)

    def captured() -> None:
        raise AssertionError("captured before")

    turns = Turns(count, gpu.finished, captured, captured, captured)
    rest: Any = SimpleNamespace(replay=lambda: gpu.log.append("rest"))
    turn: Any = SimpleNamespace(replay=gpu.turn)
    graph.Turning(turns, turn, rest).replay()
    # One turn more than needed is enqueued, but never more than `count`.
    assert gpu.log == ["turn", *["turn", "wait"] * min(ends_after, count - 1), "rest"]
