"""The GPU's kernels of one call whose graph is replayed: their durations, their overlap, and the GPU's idle time.

A kernel that is launched before its predecessor has ended (programmatic dependent launch) waits inside itself, and
streams overlap, so the durations add up to more than the call takes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vla_accel.errors import EngineError

CALLS = 9
"""Calls that are recorded; the call with the median length is reported."""
PAUSE_S = 0.05
"""Between two calls: longer than a GPU is idle within one."""
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, order=True)
class Interval:
    """When something ran on the GPU, in nanoseconds of any clock."""

    begin: int
    end: int
    name: str


def figures(call: Iterable[Interval]) -> dict[str, Any]:
    """One call in microseconds: `span` from the first begin to the last end, in which the GPU was `busy` or `idle`;
    `sum` of all durations, of which `overlapped` lay before the end of an earlier kernel.

    `kernels`, the longest sums first: `name`, `count`, `sum_us`, `overlapped_us`, and `idle_before_us`, in which all
    earlier kernels had ended. `launched`: all their counts.
    """
    found: dict[str, dict[str, Any]] = {}
    ordered = sorted(call)
    frontier = ordered[0].begin
    for one in ordered:
        name = one.name[:120]
        row = found.setdefault(name, {"name": name, "count": 0, "sum": 0, "overlapped": 0, "idle_before": 0})
        lasted, before = one.end - one.begin, max(one.begin, frontier)
        row["count"] += 1
        row["sum"] += lasted
        row["overlapped"] += lasted - max(one.end - before, 0)
        row["idle_before"] += before - frontier
        frontier = max(frontier, one.end)
    whole = {key: sum(row[key] for row in found.values()) for key in ("sum", "overlapped", "idle_before")}
    span = frontier - ordered[0].begin
    return {
        "span_us": span / 1e3,
        "busy_us": (whole["sum"] - whole["overlapped"]) / 1e3,
        "idle_us": whole["idle_before"] / 1e3,
        "sum_us": whole["sum"] / 1e3,
        "overlapped_us": whole["overlapped"] / 1e3,
        "launched": len(ordered),
        "kernels": [
            {"name": row["name"], "count": row["count"]}
            | {f"{key}_us": row[key] / 1e3 for key in ("sum", "overlapped", "idle_before")}
            for row in sorted(found.values(), key=lambda row: -row["sum"])
        ],
    }


def split(intervals: Iterable[Interval], calls: int) -> list[list[Interval]]:
    """The intervals of each of `calls` calls, which the longest times without any lie between."""
    ordered = sorted(intervals)
    ends = list(itertools.accumulate((one.end for one in ordered), max))
    idle = {index: ordered[index].begin - ends[index - 1] for index in range(1, len(ordered))}
    cuts = sorted(sorted(idle, key=lambda index: -idle[index])[: calls - 1])
    return [ordered[a:b] for a, b in itertools.pairwise((0, *cuts, len(ordered)))]


def median_call(calls: Iterable[Sequence[Interval]]) -> Sequence[Interval]:
    """The one whose length, from the first begin to the last end, is the median (of an even number the lower)."""
    by_length = sorted(calls, key=lambda call: max(one.end for one in call) - min(one.begin for one in call))
    return by_length[(len(by_length) - 1) // 2]


def intervals(events: Iterable[Any]) -> list[Interval]:
    """Kernels, copies and memsets among the profiler's raw events, without host activity and annotations."""
    found = []
    for event in events:
        kind = event.activity_type() if hasattr(event, "activity_type") else None  # newer versions of torch have it
        on_gpu = event.device_type() == torch.autograd.DeviceType.CUDA and (kind is None or kind in _ON_DEVICE)
        if on_gpu and not event.is_user_annotation():
            found.append(Interval(event.start_ns(), event.start_ns() + event.duration_ns(), event.name()))
    return found


def recorded(call: Callable[[], object]) -> dict[str, Any]:
    """`figures` of the call of median length among `CALLS` warm calls that wait for the GPU. `spans_us`: the shortest
    and the longest. Raises EngineError if the profiler sees no kernels."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(CALLS):
            call()
            time.sleep(PAUSE_S)
    results: Any = profiler.profiler
    seen = intervals(results.kineto_results.events())
    if len(seen) < CALLS:
        raise EngineError(
            f"profile: expected kernels of {CALLS} calls, torch's profiler saw {len(seen)}; it needs CUPTI"
        )
    found = split(seen, CALLS)
    spans = [figures(one)["span_us"] for one in found]
    return {"calls": CALLS, "spans_us": [min(spans), max(spans)], **figures(median_call(found))}
