"""Several calls' kernels, compiled by Triton side by side for a GPU that is not there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="NOT RUN: needs triton: pip install 'triton>=3.6' (Linux)")

import triton
from triton import language as tl
from triton.backends.compiler import GPUTarget

from vla_accel.kernels import phases
from vla_accel.kernels.compiling import compile_in_parallel


@triton.jit
def _filled(out_ptr, VALUE: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, BLOCK), VALUE)


@triton.jit
def _broken(out_ptr, BLOCK: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, BLOCK), nobody_knows_this)  # noqa: F821  # pyright: ignore[reportUndefinedVariable]


FILLED: Any = _filled
BROKEN: Any = _broken


class Compiled:
    """What Triton's compiler gives, and who asked for it."""

    def __init__(self, source: Any, said: list[str]) -> None:
        self.name, self._said = source.fn.__name__, said
        self.function = self.packed_metadata = None

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, *_: Any) -> None:
        self._said.append("launched")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """What happens, in order. The compiler is Triton's; launches are only counted."""
    found: list[str] = []
    here = threading.get_ident()
    compile_ = triton.compiler.compile

    def compiled(source: Any, **options: Any) -> Compiled:
        compile_(source, **options)
        found.append("compiled here" if threading.get_ident() == here else "compiled beside")
        return Compiled(source, found)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.compiler, "compile", compiled)
    driver = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )  # fmt: skip
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    yield found
    for kernel in (FILLED, BROKEN):
        kernel.device_caches.clear()


def filling(value: int) -> Any:
    out = torch.zeros(16)
    return lambda: FILLED[(1,)](out, value, 16)


def test_kernels_are_compiled_beside_and_launched_where_they_are_called(said: list[str]) -> None:
    calls = [filling(value) for value in (1, 2, 2, 3)]
    with phases.recorded() as spent:
        compile_in_parallel(calls, ())
        assert said == ["compiled beside"] * 3, "nothing is launched, and nothing compiled twice"
        assert spent.seconds["compile"] == 0, "whoever waits for them counts"
        for call in calls:
            call()
        assert said[3:] == ["launched"] * 4
        filling(4)()
    assert said[7:] == ["compiled here", "launched"]
    assert spent.seconds["compile"] > 0


def test_what_was_sent_is_launched_by_every_other_launch(said: list[str]) -> None:
    """By other threads meanwhile, and under other options that mean the same."""
    out = torch.zeros(16)

    def beside() -> None:
        thread = threading.Thread(target=filling(7))
        thread.start()
        thread.join()

    def named() -> None:
        FILLED[(1,)](out, 7, 16, num_warps=4)

    compile_in_parallel([filling(7), beside, named], ())
    assert said.count("launched") == 1
    filling(7)()
    named()
    assert said.count("launched") == 3


def test_what_is_wrong_is_said_where_it_is_called(said: list[str]) -> None:
    def unfit() -> None:
        raise NotImplementedError("only 64")

    def broken() -> None:
        BROKEN[(1,)](torch.zeros(16), 16)

    compile_in_parallel([unfit, broken, filling(5)], (NotImplementedError,))
    assert said == ["compiled beside"]
    for _ in range(2):
        with pytest.raises(triton.compiler.errors.CompilationError, match="nobody_knows_this"):
            broken()
    # A mistake is not hidden, and the next launch is an ordinary one.
    with pytest.raises(NotImplementedError):
        compile_in_parallel([unfit], ())
    filling(6)()
    assert said[1:] == ["compiled here", "launched"]
