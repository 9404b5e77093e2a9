"""Turns of a captured engine, replayed without a GPU: what is asked when, and what is enqueued meanwhile."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vla_accel.engines import graph
from vla_accel.engines.base import Turns


class Gpu:
    """A stream that works only when it is waited for: what is enqueued takes effect then, up to what is waited for."""

    def __init__(self, ends_after: int) -> None:
        self.ends_after, self.turns, self.log = ends_after, 0, list[str]()
        self.finished = torch.zeros(1, dtype=torch.bool)
        self.queue: list[Any] = []

    def enqueue(self, work: Any) -> Any:
        self.queue.append(work)
        return work

    def until(self, work: Any) -> None:
        while self.queue:
            done = self.queue.pop(0)
            done()
            if done is work:
                return

    def turn(self) -> None:
        self.log.append("turn")

        def work() -> None:
            self.turns += 1
            self.finished.fill_(self.turns >= self.ends_after)

        self.enqueue(work)

    def rest(self) -> None:
        self.log.append("rest")


class Flag:
    """Page-locked memory: a copy into it is enqueued, too."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.value = gpu, False

    def copy_(self, source: torch.Tensor, non_blocking: bool) -> None:
        assert non_blocking

        def work() -> None:
            self.value = bool(source)

        self.gpu.enqueue(work)

    def __bool__(self) -> bool:
        return self.value


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.mark = gpu, None

    def record(self) -> None:
        self.mark = self.gpu.enqueue(lambda: None)

    def synchronize(self) -> None:
        self.gpu.log.append("wait")
        self.gpu.until(self.mark)


def replayed(ends_after: int, count: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    gpu = Gpu(ends_after)
    cuda = SimpleNamespace(Event=lambda: Event(gpu), device=lambda device: contextlib.nullcontext())
    fake = SimpleNamespace(zeros=lambda *a, **k: Flag(gpu), bool=torch.bool, cuda=cuda)
    monkeypatch.setattr(graph, "torch", fake)

    def nothing() -> None:
        raise AssertionError("captured before")

    turns = Turns(count, gpu.finished, nothing, nothing, nothing)
    turning: Any = graph.Turning(turns, SimpleNamespace(replay=gpu.turn), SimpleNamespace(replay=gpu.rest))  # type: ignore[arg-type]
    turning.replay()
    return gpu.log


@pytest.mark.parametrize("ends_after", [1, 2, 3, 7])
def test_one_turn_is_always_on_its_way(ends_after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    log = replayed(ends_after, 8, monkeypatch)
    # The host waits for a turn only when the next one is enqueued, and so runs one more than it needs.
    assert log == ["turn", *["turn", "wait"] * ends_after, "rest"]


def test_turns_that_never_end_are_as_many_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert replayed(99, 4, monkeypatch) == ["turn", *["turn", "wait"] * 3, "rest"]
    assert replayed(99, 1, monkeypatch) == ["turn", "rest"]
