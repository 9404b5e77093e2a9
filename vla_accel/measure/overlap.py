"""The GPU's kernels of one call as it runs, its graph replayed: how long each takes, what of that lies beside others,
and when the GPU is idle.

CUPTI tells when each kernel began and ended. A kernel that is launched before its predecessor has ended (programmatic
dependent launch) waits inside itself, and streams run beside each other: durations add up to more than the call takes.
So each kernel is told by what it adds to the time in which the GPU is busy, too. Knows intervals, not policies.
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
"""Calls that are recorded; the one whose length is the median is told."""
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
    """One call in microseconds: `span` from the first begin to the last end, of which the GPU was `busy` or `idle`;
    `sum` of all durations, which is more than busy by what `overlapped`.

    `kernels`, the longest sums first, each with its `name`, its `count`, and its shares in three of these: `sum_us`,
    `overlapped_us`, of it what lay before the end of a kernel that had begun earlier, and `idle_before_us`, in which
    all kernels before it had ended. `launched`: all their counts.
    """
    found: dict[str, dict[str, Any]] = {}
    ordered = sorted(call)
    frontier = ordered[0].begin
    for one in ordered:
        name = one.name[:120]
        told = found.setdefault(name, {"name": name, "count": 0, "sum": 0, "overlapped": 0, "idle_before": 0})
        lasted, before = one.end - one.begin, max(one.begin, frontier)
        told["count"] += 1
        told["sum"] += lasted
        told["overlapped"] += lasted - max(one.end - before, 0)
        told["idle_before"] += before - frontier
        frontier = max(frontier, one.end)
    whole = {key: sum(told[key] for told in found.values()) for key in ("sum", "overlapped", "idle_before")}
    span = frontier - ordered[0].begin
    return {
        "span_us": span / 1e3,
        "busy_us": (whole["sum"] - whole["overlapped"]) / 1e3,
        "idle_us": whole["idle_before"] / 1e3,
        "sum_us": whole["sum"] / 1e3,
        "overlapped_us": whole["overlapped"] / 1e3,
        "launched": len(ordered),
        "kernels": [
            {"name": told["name"], "count": told["count"]}
            | {f"{key}_us": told[key] / 1e3 for key in ("sum", "overlapped", "idle_before")}
            for told in sorted(found.values(), key=lambda told: -told["sum"])
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
    """Kernels, copies and memsets among torch.profiler's events, raw ones of kineto or FunctionEvents. What the host
    did (launches, waiting, the profiler's own buffers) is none of them, nor is an annotation drawn over kernels."""
    found = []
    for event in events:
        kind = _told(event, "activity_type")
        ran_on_gpu = _told(event, "device_type") == torch.autograd.DeviceType.CUDA
        if not ran_on_gpu or _told(event, "is_user_annotation") or (kind is not None and kind not in _ON_DEVICE):
            continue
        if hasattr(event, "start_ns"):
            begin = _told(event, "start_ns")
            end = begin + _told(event, "duration_ns")
        else:
            begin, end = (round(1e3 * microseconds) for microseconds in (event.time_range.start, event.time_range.end))
        found.append(Interval(begin, end, _told(event, "name")))
    return found


def _told(event: Any, name: str) -> Any:
    """An attribute, or what a method of this name returns; None where there is neither."""
    value = getattr(event, name, None)
    return value() if callable(value) else value


def recorded(call: Callable[[], object]) -> dict[str, Any]:
    """`figures` of a call that is warm, and waits for the GPU: of `CALLS` calls the one of median length. `spans_us`:
    the shortest and the longest. Raises EngineError where the profiler sees no kernels."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(CALLS):
            call()
            time.sleep(PAUSE_S)
    results = getattr(profiler.profiler, "kineto_results", None)
    seen = intervals(profiler.events() or () if results is None else results.events())
    if len(seen) < CALLS:
        raise EngineError(
            f"profile: expected kernels of {CALLS} calls, torch's profiler saw {len(seen)}; it needs CUPTI"
        )
    found = split(seen, CALLS)
    spans = [figures(one)["span_us"] for one in found]
    return {"calls": CALLS, "spans_us": [min(spans), max(spans)], **figures(median_call(found))}
