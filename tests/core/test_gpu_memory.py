"""Tests on a GPU take turns at its memory."""

from __future__ import annotations

import threading
from pathlib import Path

from tests.support.gpu_memory import reserved


def test_reservations_wait_for_what_others_hold(tmp_path: Path) -> None:
    got, leave = threading.Event(), threading.Event()

    def hold(wanted: float) -> None:
        with reserved(wanted, 5, tmp_path):
            got.set()
            assert leave.wait(60)

    waiting = threading.Thread(target=hold, args=(100,))  # as much as there is
    with reserved(1.5, 5, tmp_path), reserved(3, 5, tmp_path):
        waiting.start()
        assert not got.wait(0.5)
    assert got.wait(60)
    leave.set()
    waiting.join()
