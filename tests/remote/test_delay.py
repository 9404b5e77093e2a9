"""The delay that `AsyncRunner` announces to a guided policy. Time is simulated."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vla_accel.errors import EngineError
from vla_accel.remote import async_runner
from vla_accel.remote.async_runner import AsyncRunner
from vla_accel.remote.delay import DelayEstimate
from vla_accel.remote.inference import Job

HZ, HORIZON = 20.0, 10


class SimulatedInference:
    """Replaces `remote.inference.Inference`; call n takes `seconds(n)` of the simulated clock."""

    def __init__(self, clock: Any, seconds: Callable[[int], float]) -> None:
        self._clock, self._seconds = clock, seconds
        self.jobs: list[Job] = []
        self._took = self._ends = 0.0
        self.busy = False

    def begin(self, job: Job) -> None:
        self._took = self._seconds(len(self.jobs))
        self._ends, self.busy = self._clock.now + self._took, True
        self.jobs.append(job)

    def wait_until(self, end: float) -> bool:
        self._clock.now = max(self._clock.now, min(end, self._ends))
        return self._ends <= self._clock.now + 1e-9

    def taken(self) -> Job | None:
        if not self.busy or self._ends > self._clock.now + 1e-9:
            return None
        self.busy = False
        job = self.jobs[-1]
        job.actions, job.seconds = np.zeros((HORIZON, 2)), self._took
        return job


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def simulated(
        seconds: Callable[[int], float], *, ticks: int, max_delay: int | None = None, **options: Any
    ) -> tuple[list[tuple[int, int]], AsyncRunner, SimulatedInference]:
        """(actions left, delay announced) of each guided inference, the runner, and its inferences."""
        clock = types.SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
        inference = SimulatedInference(clock, seconds)
        monkeypatch.setattr(async_runner, "time", clock)
        monkeypatch.setattr(async_runner, "Inference", lambda policy: inference)
        policy = types.SimpleNamespace(infer=print, supports_prev_chunk=True, metadata={"max_delay": max_delay})
        runner = AsyncRunner(policy, HZ, **{"underrun": np.zeros(2), **options})
        runner.start({})
        for _ in range(ticks):
            due = clock.now + 1 / HZ
            runner.step({})
            clock.now = max(clock.now, due)
        jobs = [job for job in inference.jobs if job.prev_chunk is not None]
        return [(len(job.prev_chunk), job.delay) for job in jobs], runner, inference  # type: ignore[arg-type]

    return simulated


def test_a_cold_first_call_does_not_count(simulate: Any) -> None:
    announced, runner, inference = simulate(lambda n: 2.0 if n == 0 else 0.04, ticks=40)
    assert announced == [(5, 1)] * 7
    report = runner.report()
    assert (report.late, report.stale, report.underruns) == (0, 0, 0)
    assert report.latency_ms == pytest.approx(40)
    before = len(inference.jobs)
    runner.start({})
    assert len(inference.jobs) == before + 1, "only the first start of a runner warms up"


def test_one_slow_inference_changes_no_announced_delay_and_a_lasting_change_does(simulate: Any) -> None:
    announced, runner, _ = simulate(lambda n: 1.0 if n == 4 else 0.04 if n < 15 else 0.18, ticks=160)
    assert runner.report().stale == 1, "a second is longer than the chunk lasts"
    delays = [delay for _, delay in announced]
    first = delays.index(4)
    assert delays[:first] == [1] * first and first <= 14 + 3
    assert delays[first:] == [4] * len(delays[first:])


def test_no_delay_beyond_the_policys_training_is_announced(simulate: Any) -> None:
    announced, runner, inference = simulate(lambda n: 0.23, ticks=60, max_delay=3)
    assert {delay for _, delay in announced} == {3}
    assert runner.report().late == len(announced) - inference.busy, "five ticks, of which three were announced"
    assert runner.report().underruns == 0


@pytest.mark.parametrize("seconds", [0.001, 0.04, 0.2, 0.47])
@pytest.mark.parametrize("max_delay", [None, 1, 9])
def test_the_announced_delay_is_valid_at_any_speed(seconds: float, max_delay: int | None, simulate: Any) -> None:
    factors = np.random.default_rng(0).uniform(0.2, 3, 1000)
    announced, _, _ = simulate(lambda n: seconds * factors[n], ticks=300, max_delay=max_delay)
    assert announced
    for left, delay in announced:
        assert 0 <= delay <= min(left - 1, HORIZON if max_delay is None else max_delay) and left <= HORIZON


def test_an_underrun_error_has_the_numbers(simulate: Any) -> None:
    with pytest.raises(EngineError) as error:
        simulate(lambda n: 0.4, ticks=60, underrun="raise")
    # 0.4 s are 8 ticks; ten actions that must last twice the delay allow 5, which are 250 ms.
    for part in ("8 ticks of 50 ms", "twice", "10 actions allow 5 ticks", "250 ms"):
        assert part in str(error.value)


def test_the_estimate_ignores_few_slow_inferences_and_follows_many() -> None:
    estimate = DelayEstimate(HZ)
    assert (estimate.expected(), estimate.measured) == (1, False)
    for ticks, expected in ((2, 2), (40, 2), (2, 2), (2, 2), (3, 3), (3, 3), (30, 3), (2, 3), (3, 3), (3, 3)):
        estimate.add(0.0, ticks)
        assert estimate.expected() == expected
    assert estimate.longest_ticks == 40
    assert [estimate.announced(left) for left in (1, 2, 3, 4, 10)] == [0, 1, 2, 3, 3]
    for _ in range(10):
        estimate.add(0.0, 1)
    assert estimate.expected() == 1, "only the newest ten count"
