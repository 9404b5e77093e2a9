"""What a call's kernels add up to: from made-up times to sums, overlap and idle time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vla_accel.errors import EngineError
from vla_accel.measure import overlap
from vla_accel.measure.overlap import Interval, figures, intervals, median_call, split

GPU, HOST = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
CALL = [
    Interval(1_000, 5_000, "product"),
    Interval(4_000, 9_000, "norm"),  # launched early: waits for 1 µs
    Interval(12_000, 20_000, "product"),  # after 3 µs without any
    Interval(13_000, 15_000, "beside"),  # on another stream, inside the one before
    Interval(20_000, 21_000, "norm"),
]


def test_what_overlaps_and_what_is_idle() -> None:
    found = figures(reversed(CALL))
    whole = {name: value for name, value in found.items() if name != "kernels"}
    assert whole == {
        "span_us": 20.0, "busy_us": 17.0, "idle_us": 3.0, "sum_us": 20.0, "overlapped_us": 3.0, "launched": 5,
    }  # fmt: skip
    assert found["kernels"] == [
        {"name": "product", "count": 2, "sum_us": 12.0, "overlapped_us": 0.0, "idle_before_us": 3.0},
        {"name": "norm", "count": 2, "sum_us": 6.0, "overlapped_us": 1.0, "idle_before_us": 0.0},
        {"name": "beside", "count": 1, "sum_us": 2.0, "overlapped_us": 2.0, "idle_before_us": 0.0},
    ]


def test_a_long_kernel_hides_those_that_end_before_it() -> None:
    """The time without any begins where the last of all before has ended, not the one that began last."""
    found = figures([Interval(0, 10_000, "long"), Interval(2_000, 3_000, "short"), Interval(11_000, 12_000, "next")])
    assert (found["busy_us"], found["idle_us"], found["overlapped_us"]) == (11.0, 1.0, 1.0)


def test_calls_are_told_apart_by_the_pauses_between_them() -> None:
    def later(by: int) -> list[Interval]:
        return [Interval(one.begin + by, one.end + by, one.name) for one in CALL]

    calls = [CALL, later(50_000_000), later(90_000_000)[:2]]
    assert split([one for call in reversed(calls) for one in call], 3) == calls
    assert split(CALL, 1) == [CALL]
    # Where a long kernel still runs there is no pause.
    long = [Interval(0, 99, "long"), Interval(1, 2, "short"), Interval(100, 101, "next")]
    assert split([*long, Interval(150, 151, "other")], 2) == [long, [Interval(150, 151, "other")]]
    lengths = [[Interval(0, end, "k")] for end in (7, 3, 9, 1)]
    assert median_call(lengths) == [Interval(0, 3, "k")] and median_call(lengths[:3]) == [Interval(0, 7, "k")]


def raw(name: str, device: Any, kind: str | None, begin: int = 5, annotation: bool = False) -> Any:
    """As kineto hands it out: methods."""
    told = {"name": name, "device_type": device, "start_ns": begin, "duration_ns": 3, "is_user_annotation": annotation}
    told |= {} if kind is None else {"activity_type": kind}
    return SimpleNamespace(**{key: lambda value=value: value for key, value in told.items()})


@pytest.mark.parametrize("tells_its_kind", [True, False])
def test_what_the_host_did_is_no_kernel(tells_its_kind: bool) -> None:
    events = [
        raw("attend", GPU, "kernel"), raw("cuLaunchKernelEx", HOST, "cuda_driver"), raw("a copy", GPU, "gpu_memcpy", 9),
        raw("Activity Buffer Request", HOST, "overhead"), raw("a step", GPU, "gpu_user_annotation", annotation=True),
        *([raw("Stream Sync", GPU, "cuda_sync")] if tells_its_kind else []),
    ]  # fmt: skip
    if not tells_its_kind:
        for event in events:
            del event.activity_type
    assert intervals(events) == [Interval(5, 8, "attend"), Interval(9, 12, "a copy")]


def test_the_median_call_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake of torch's profiler: a call of two kernels takes a microsecond longer each time."""
    events: list[Any] = []

    class Profiler:
        profiler = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events))

        def __init__(self, **_: Any) -> None:
            events.clear()

        def __enter__(self) -> Profiler:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    def call() -> None:
        began, longer = 10**9 * len(events), 1000 * len(events) // 2
        events.append(raw("first", GPU, "kernel", began))
        events.append(raw("second", GPU, "kernel", began + longer))

    monkeypatch.setattr("torch.profiler.profile", Profiler)
    monkeypatch.setattr(overlap, "PAUSE_S", 0.0)
    found = overlap.recorded(call)
    assert (found["calls"], found["span_us"], found["spans_us"]) == (9, 4.003, [0.003, 8.003])
    assert [one["name"] for one in found["kernels"]] == ["first", "second"]
    with pytest.raises(EngineError, match=r"profile: expected kernels of 9 calls, torch's profiler saw 0"):
        overlap.recorded(lambda: None)
