"""Triton's kernels of several calls compiled side by side, before any of them is launched.

Compiling is most of a first start. Triton compiles a kernel where it is first launched, one after the other; half of
that is the compiler's own code and the assembler, which the host's cores can share.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import triton
from triton.runtime._async_compile import active_mode


def compile_side_by_side(calls: Iterable[Callable[[], object]], unfit: tuple[type[Exception], ...]) -> None:
    """Make the calls, of which only kernels that are compiled already are launched, and wait until the others are
    compiled. Nothing that a call computes counts. What is wrong with one (an error of `unfit`, a kernel that does not
    compile) is not said here: it is said again where the call is made."""
    with ThreadPoolExecutor(os.cpu_count()) as pool, _Sending(pool, ignore_errors=True):
        for call in calls:
            with contextlib.suppress(*unfit):
                call()


class _Sending(triton.AsyncCompileMode):
    """This thread's launches of kernels that are not compiled yet only send them to the compiler."""

    def submit(self, key: Any, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
        return _Sent(super().submit(key, compile_fn, finalize_fn))


class _Sent:
    """Takes a kernel's place: here, where it was sent, in launches that do nothing; in later ones and other threads',
    where Triton finds it from 3.7 on, it is the compiled kernel, or raises what is wrong with that."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(_UNLAUNCHED if active_mode.get() else self._kernel.result(), name)


_UNLAUNCHED = SimpleNamespace(function=None, packed_metadata=None, launch_metadata=lambda *_: None, run=lambda *_: None)
