"""Ctrl-C reaches the program alone, and nothing that it started goes on without it."""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

from vla_accel.client import load as clients
from vla_accel.errors import EngineError
from vla_accel.remote.processes import start


def _blocked(pipe: Any) -> None:
    pipe.send(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def test_a_process_never_sees_the_interrupt() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_blocked, args=(theirs,))
    start(process)
    theirs.close()
    assert ours.recv()
    process.join()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_an_interrupt_ends_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[BaseProcess] = []

    def interrupted(process: BaseProcess) -> None:
        process.start()
        begun.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(clients, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        clients.load("ws://127.0.0.1:9", 2, 3600.0, {})
    assert [process.is_alive() for process in begun] == [False]


def test_clients_that_end_unasked_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_process", print)
    with pytest.raises(EngineError, match="clients: one of their processes ended unasked"):
        clients.load("ws://127.0.0.1:9", 1, 1.0, {})
