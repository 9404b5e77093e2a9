"""Compile the Triton kernels of several calls in parallel, before any of them is launched.

Compilation takes most of a first start. Triton compiles a kernel at its first launch, one after the other; half of
that time is the compiler's own code and the assembler, which several cores can share.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import triton


def compile_in_parallel(calls: Iterable[Callable[[], object]], unfit: tuple[type[Exception], ...]) -> None:
    """Make the calls and wait until their kernels are compiled. Kernels that are not compiled yet are not launched, so
    that results are undefined. Errors of `unfit` and of the compiler are ignored here; the next call raises them.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool, _Submitting(pool, ignore_errors=True):
        for call in calls:
            with contextlib.suppress(*unfit):
                call()


class _Submitting(triton.AsyncCompileMode):
    """Submits kernels that this thread launches and that are not compiled yet."""

    def __enter__(self) -> Any:
        self.thread: int | None = threading.get_ident()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.thread = None

    def submit(self, key: Any, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
        return _Submitted(super().submit(key, compile_fn, finalize_fn), self)


class _Submitted:
    """A kernel that was submitted: in launches of the submitting thread it does nothing; in other threads, and later
    where Triton still finds it (from 3.7 on), it is the compiled kernel, or raises the compiler's error.
    """

    def __init__(self, kernel: triton.FutureKernel, mode: _Submitting) -> None:
        self._kernel, self._mode = kernel, mode

    def __getattr__(self, name: str) -> Any:
        skipped = self._mode.thread == threading.get_ident()
        return getattr(_UNLAUNCHED if skipped else self._kernel.result(), name)


_UNLAUNCHED = SimpleNamespace(function=None, packed_metadata=None, launch_metadata=lambda *_: None, run=lambda *_: None)
