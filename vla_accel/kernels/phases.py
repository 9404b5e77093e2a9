"""Where the seconds of a start go: reading weights, preparing them, compiling, tuning, capturing.

Whoever does one of these says so with `phase`; whoever wants to know opens `recorded`. Time inside a phase that another
phase takes is the other's alone. The host's clock: work that a GPU still has to do counts where the host waits for it.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib.util
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

PHASES = ("read", "prepare", "compile", "tune", "capture")


@dataclass
class Spent:
    """Seconds by phase, and `total`, of what ran inside `recorded`."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    total: float = 0.0
    _inner: list[float] = field(default_factory=lambda: [0.0])

    @property
    def described(self) -> dict[str, float]:
        """Plain data: the phases, `other` (imports, buffers, first calls) and `total`."""
        return {**self.seconds, "other": self.total - sum(self.seconds.values()), "total": self.total}


_OPEN: contextvars.ContextVar[Spent | None] = contextvars.ContextVar("open record of phases", default=None)


@contextlib.contextmanager
def recorded() -> Iterator[Spent]:
    """What runs inside is counted; complete at the end."""
    spent, began = Spent(), time.perf_counter()
    token = _OPEN.set(spent)
    try:
        with _triton_told(spent):
            yield spent
    finally:
        _OPEN.reset(token)
        spent.total = time.perf_counter() - began


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """What runs inside is of a phase of `PHASES`."""
    spent = _OPEN.get()
    if spent is None:
        yield
        return
    began = time.perf_counter()
    spent._inner.append(0.0)
    try:
        yield
    finally:
        taken = time.perf_counter() - began
        spent.seconds[name] += taken - spent._inner.pop()
        spent._inner[-1] += taken


@contextlib.contextmanager
def _triton_told(spent: Spent) -> Iterator[None]:
    """Triton compiles at a kernel's first launch, in the middle of other phases, and tells a listener how long. What
    another thread compiles counts where this one waits for it."""
    if importlib.util.find_spec("triton") is None:
        yield
        return
    from triton import knobs

    def listen(*, times: Any, **_: Any) -> None:
        if _OPEN.get() is not spent:
            return
        taken = times.total / 1e6
        spent.seconds["compile"] += taken
        spent._inner[-1] += taken

    before, knobs.compilation.listener = knobs.compilation.listener, listen
    try:
        yield
    finally:
        knobs.compilation.listener = before
