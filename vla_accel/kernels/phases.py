"""How long each phase of a start takes: reading weights, preparing them, compiling, tuning, capturing.

Code that does one of these wraps it in `phase`; `recorded` opens a record for this thread. The record is not part of a
`Runtime`, because it starts before the device is known and covers code that needs no runtime. A nested phase's time
does not count for the outer one. Times are the host's: GPU work counts where the host waits for it.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from vla_accel.runtime import OPEN

PHASES = ("read", "prepare", "compile", "tune", "capture")


@dataclass
class Spent:
    """Seconds of each phase, and `total` seconds of the record. Complete when `recorded` has ended."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    total: float = 0.0
    _nested: list[float] = field(default_factory=lambda: [0.0])
    """Seconds of nested phases, for each phase that is running."""

    @property
    def described(self) -> dict[str, float]:
        """Plain data: the phases, `other` (imports, buffers, first calls) and `total`."""
        return {**self.seconds, "other": self.total - sum(self.seconds.values()), "total": self.total}

    def add(self, name: str, taken: float) -> None:
        """Count seconds of a phase as nested in the phase that is running."""
        self.seconds[name] += taken
        self._nested[-1] += taken


@contextmanager
def recorded() -> Iterator[Spent]:
    """Record the phases that this thread runs."""
    spent, began = Spent(), time.perf_counter()
    outer, OPEN.record = OPEN.record, spent
    try:
        with _listening_to_triton(spent):
            yield spent
    finally:
        OPEN.record = outer
        spent.total = time.perf_counter() - began


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Count the time inside as a phase of `PHASES`, if this thread has an open record."""
    spent: Spent | None = OPEN.record
    if spent is None:
        yield
        return
    began = time.perf_counter()
    spent._nested.append(0.0)
    try:
        yield
    finally:
        nested = spent._nested.pop()
        taken = time.perf_counter() - began
        spent.add(name, taken)
        spent.seconds[name] -= nested


@contextmanager
def _listening_to_triton(spent: Spent) -> Iterator[None]:
    """Count Triton's compilation, which happens at a kernel's first launch, inside other phases. What another thread
    compiles counts where this thread waits for it.
    """
    if importlib.util.find_spec("triton") is None:
        yield
        return
    from triton import knobs

    def listen(*, times: Any, **_: Any) -> None:
        if OPEN.record is spent:
            spent.add("compile", times.total / 1e6)

    before, knobs.compilation.listener = knobs.compilation.listener, listen
    try:
        yield
    finally:
        knobs.compilation.listener = before
