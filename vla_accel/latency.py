"""Component timings, by CUDA events on a GPU and the wall clock on a CPU, and the breakdown JSON."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from vla_accel.machine import hardware, software

SCHEMA = "vla_accel.breakdown/1"
Given = TypeVar("Given")
Result = TypeVar("Result")


@dataclass
class Sample:
    """One call's sections in milliseconds; `total_ms` is the wall clock of the whole call."""

    sections: dict[str, float]
    total_ms: float


class Stopwatch:
    """Time the named sections of one call: wrap each in `section`, and call `finish` after the synchronisation."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._began = time.perf_counter()
        self._host: dict[str, float] = {}
        self._events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}

    @contextlib.contextmanager
    def section(self, name: str, *, host: bool = False) -> Iterator[None]:
        """Time a block; sections of one name add up. `host`: the block is host work (pre- and postprocessing)."""
        if self._cuda and not host:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._events.setdefault(name, []).append((start, end))
        else:
            start_s = time.perf_counter()
            yield
            self._host[name] = self._host.get(name, 0.0) + (time.perf_counter() - start_s) * 1e3

    def finish(self) -> Sample:
        """Return the sample. Synchronise the device first."""
        total = (time.perf_counter() - self._began) * 1e3
        device = {n: sum(a.elapsed_time(b) for a, b in pairs) for n, pairs in self._events.items()}
        return Sample({**self._host, **device}, total)


@dataclass
class LatencyLog:
    """The newest `limit` samples and their summary."""

    limit: int = 10_000
    samples: list[Sample] = field(default_factory=list)

    def add(self, sample: Sample) -> None:
        self.samples.append(sample)
        del self.samples[: -self.limit]

    def clear(self) -> None:
        self.samples.clear()

    def components(self) -> dict[str, dict[str, float]]:
        """Return mean, p50, p90, p99 in ms and the share of the total, by component and for `total`."""
        return summarise([s.sections for s in self.samples], [s.total_ms for s in self.samples])


def summarise(sections: Sequence[dict[str, float]], totals: Sequence[float]) -> dict[str, dict[str, float]]:
    """Return the `components` of a breakdown of calls, from their sections and totals in ms; empty without calls."""
    if not totals:
        return {}
    names = dict.fromkeys(name for s in sections for name in s)
    columns = {name: np.array([s.get(name, 0.0) for s in sections]) for name in names}
    columns["total"] = np.array(totals)
    mean_total = float(columns["total"].mean())
    result: dict[str, dict[str, float]] = {}
    for name, values in columns.items():
        p50, p90, p99 = (float(np.percentile(values, q)) for q in (50, 90, 99))
        mean = float(values.mean())
        share = mean / mean_total if mean_total else 0.0
        result[name] = {"mean_ms": mean, "p50_ms": p50, "p90_ms": p90, "p99_ms": p99, "share": share}
    return result


def breakdown(
    *,
    model: dict[str, Any],
    engines: list[dict[str, object]],
    steps: int,
    device: torch.device,
    components: dict[str, dict[str, float]],
    samples: int,
    memory: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the breakdown JSON of a policy or an image pipeline. `memory`: bytes on the device by component."""
    total = components.get("total", {}).get("mean_ms", 0.0)
    return {
        "schema": SCHEMA,
        "hardware": hardware(device),
        "software": software(),
        "model": model,
        "engines": engines,
        "steps": steps,
        "samples": samples,
        "components": components,
        **({} if memory is None else {"memory": memory}),
        "hz": 1e3 / total if total else 0.0,
    }


def in_turns(
    systems: Mapping[str, Callable[[Given], Result]],
    prepare: Callable[[], Given],
    *,
    calls: int,
    turn: int = 1,
    settle: Callable[[], None] = lambda: None,
) -> Iterator[tuple[str, float, Result]]:
    """Time `calls` calls of each system, `turn` at a time, in rotating order: drift of clocks affects all alike.

    Yields the system's name, wall-clock milliseconds and result of each call. `prepare` makes the argument of a call,
    before the clock starts; `settle` waits for the device, before and after a call.
    """
    names = list(systems)
    for number, done in enumerate(range(0, calls, turn)):
        first = number % max(len(names), 1)
        for name in names[first:] + names[:first]:
            for _ in range(min(turn, calls - done)):
                given = prepare()
                settle()
                began = time.perf_counter()
                result = systems[name](given)
                settle()
                yield name, (time.perf_counter() - began) * 1e3, result
