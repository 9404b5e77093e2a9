"""Denoising schedules judged by their distance from the exact flow, and the one with the fewest steps that ends no
further from it than the checkpoint's own.

An Euler step from t to t - h leaves an error of h² / 2 · d²x/dt², so steps belong where the path bends. Times are
searched on one half of the observations; all figures are of the other half.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vla_accel.config import NamedSchedule
from vla_accel.errors import ObservationError
from vla_accel.measure import bench
from vla_accel.measure.flow import FINE, Errors, Exact, Flow, Units
from vla_accel.measure.paired import Mean
from vla_accel.measure.systems import timed
from vla_accel.nn.flow import Schedule
from vla_accel.policy import OptimizedPolicy

SCHEMA = "vla_accel.flow/1"
FEWEST = 8
"""Observations at least: one half to search times, the other to judge them."""
SEARCHED = 5
"""Most steps whose times are searched. Every further time costs one more dimension and gains little."""
TIMES = (0.8, 0.6, 0.45, 0.33, 0.24, 0.18, 0.13, 0.1, 0.07, 0.05, 0.035, 0.025, 0.018, 0.013, 0.009, 0.006, 0.004,
         0.002)  # fmt: skip
"""Times that are searched: about equal ratios, because the velocity bends near t = 0."""


@dataclass(frozen=True)
class Gate:
    """Whether a schedule ends no further from the exact flow than the default.

    Attributes:
        difference: of the errors (shares of the spread), candidate minus default, paired by observation.
        more_flips: of the binary commands of an observation, likewise.
        reasons: why the schedule did not pass.
    """

    passed: bool
    difference: Mean
    more_flips: Mean
    reasons: tuple[str, ...]


def no_further_from_exact(candidate: Errors, default: Errors) -> Gate:
    """Judge a schedule by its errors on the same observations as the default's.

    It passes if the one-sided 95 % bound of the mean difference is at most 0, and if the 95 % interval of the flipped
    commands does not show that there are more.
    """
    difference, flips = Mean.of(candidate.share - default.share), Mean.of(candidate.flips - default.flips)
    reasons = []
    if not difference.upper <= 0:
        reasons.append(f"its error may exceed the default's by {difference.upper:.1%} of the spread")
    if flips.low > 0:
        reasons.append(f"at least {flips.low:.2g} more binary commands of a chunk flip than with the default")
    return Gate(not reasons, difference, flips, tuple(reasons))


@dataclass(frozen=True)
class Row:
    """A schedule and its errors on the observations that judge.

    Attributes:
        setting: the schedule as `PolicyConfig.schedule` has it.
        error: mean over the observations, as a share of the spread.
        dimensions: mean error of each dimension, in the robot's units.
        flips: binary commands with the other value.
        gate: compared with the default.
    """

    name: str
    schedule: Schedule
    setting: NamedSchedule | tuple[float, ...]
    error: Mean
    dimensions: tuple[float, ...]
    flips: int
    gate: Gate


@dataclass(frozen=True)
class FlowReport:
    """Schedules of one checkpoint.

    Attributes:
        rows: the checkpoint's default first.
        searched_on: number of observations that chose the searched times.
        judged_on: number of other observations, on which all rows were measured.
        commands: binary commands of the exact chunks for `judged_on`.
        units: measured on all observations.
        half_error, euler_error: distance of the exact flow from itself with half as many steps, and from `FINE` uniform
            Euler steps, as shares of the spread.
        seed: of the noise and the halves.
    """

    rows: tuple[Row, ...]
    searched_on: int
    judged_on: int
    commands: int
    units: Units
    half_error: float
    euler_error: float
    seed: int

    @property
    def default(self) -> Row:
        return self.rows[0]

    @property
    def passed(self) -> list[Row]:
        """The schedules that end no further from the exact flow than the default, and the default: the fewest steps
        first, then the smallest error."""
        return sorted((r for r in self.rows if r.gate.passed), key=lambda r: (r.schedule.steps, r.error.value))

    @property
    def chosen(self) -> Row:
        return self.passed[0]

    def as_dict(self) -> dict[str, Any]:
        """Plain data (schema `vla_accel.flow/1`)."""
        rows = [
            {
                "name": row.name,
                "num_steps": row.schedule.steps,
                "schedule": list(row.setting) if isinstance(row.setting, tuple) else row.setting,
                "error": asdict(row.error),
                "dimensions": list(row.dimensions),
                "flips": row.flips,
                **asdict(row.gate),
                "chosen": row is self.chosen,
            }
            for row in self.rows
        ]
        return {
            "schema": SCHEMA,
            "rows": rows,
            "searched_on": self.searched_on,
            "judged_on": self.judged_on,
            "commands": self.commands,
            "spread": self.units.spread.tolist(),
            "binary": np.flatnonzero(self.units.binary).tolist(),
            "half_error": self.half_error,
            "euler_error": self.euler_error,
            "euler_steps": FINE,
            "seed": self.seed,
        }


def check_count(count: int) -> None:
    """Raise ObservationError for fewer observations than two halves need."""
    if count < FEWEST:
        raise ObservationError(
            f"observations: expected at least {FEWEST}, one half to search times and one to judge them, got {count}"
        )


def judge(
    flow: Flow, own: Schedule, *, steps: Sequence[int], configured: Schedule | None = None, seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> FlowReport:  # fmt: skip
    """Judge uniform, cubic and searched times of these numbers of steps against the exact flow.

    Args:
        flow: The flow of at least `FEWEST` observations.
        own: The checkpoint's default schedule.
        steps: Other numbers of steps to try.
        configured: A further schedule to judge.
        seed: Seed of the split into halves.
        progress: Receives progress messages.

    Raises:
        ObservationError: There are too few observations, or their actions do not differ.
    """
    progress(f"the exact flow by {FINE} steps, half and a quarter of them")
    exact = Exact.of(flow)
    count = len(exact.actions)
    check_count(count)
    units = Units.of(exact.actions, flow.motion_dims)
    halves = np.random.default_rng(seed).permutation(count)
    searching, judging = np.sort(halves[: count // 2]), np.sort(halves[count // 2 :])

    @functools.cache
    def errors(schedule: Schedule) -> Errors:
        return units.errors(flow.robot(flow.integrate(schedule)), exact.actions)

    searched = search(lambda schedule: float(errors(schedule)[searching].share.mean()), steps, progress)
    candidates: list[tuple[str, Schedule, NamedSchedule | tuple[float, ...]]] = []
    if not own.is_uniform:
        candidates.append((f"{own.steps} own", own, own.times))
    for n in (own.steps, *sorted({*steps} - {own.steps}, reverse=True)):
        candidates.append((f"{n} uniform", Schedule.uniform(n), "uniform"))
        candidates.append((f"{n} cubic", Schedule.cubic(n), "cubic"))
        candidates += [(f"{n} searched", found, found.times) for found in searched if found.steps == n]
    if configured is not None:
        candidates.append((f"{configured.steps} configured", configured, configured.times))
    base = errors(own)[judging]
    rows: dict[Schedule, Row] = {}
    for name, schedule, setting in candidates:
        if schedule not in rows:  # one cubic step is a uniform one
            found = errors(schedule)[judging]
            by_dimension, flips = tuple(found.robot.mean(axis=0).tolist()), int(found.flips.sum())
            gate = no_further_from_exact(found, base)
            rows[schedule] = Row(name, schedule, setting, Mean.of(found.share), by_dimension, flips, gate)
    half, euler = (float(units.errors(a, exact.actions).share.mean()) for a in (exact.half, exact.euler))
    commands = len(judging) * exact.actions.shape[1] * int(units.binary.sum())
    return FlowReport(tuple(rows.values()), len(searching), len(judging), commands, units, half, euler, seed)


def search(
    error: Callable[[Schedule], float], steps: Sequence[int], progress: Callable[[str], None] = lambda _: None
) -> list[Schedule]:
    """Return times of 2 to `SEARCHED` steps, for the numbers in `steps`, whose error is smallest by coordinate descent.

    Each number starts from the best times of one step fewer and the best additional one, then moves one time at a time
    between its neighbours until nothing improves.
    """
    known: dict[tuple[float, ...], float] = {}

    def at(inner: tuple[float, ...]) -> float:
        if inner not in known:
            known[inner] = error(Schedule((1.0, *inner, 0.0)))
        return known[inner]

    best: tuple[float, ...] = ()
    found = []
    for n in range(2, min(max(steps, default=0), SEARCHED) + 1):
        best = min((_changed(best, len(best), t) for t in TIMES if t not in best), key=at)
        before: tuple[float, ...] = ()
        while best != before:
            before = best
            for place in range(n - 1):
                low, high = (*best, 0.0)[place + 1], (1.0, *best)[place]
                best = min((_changed(best, place, t) for t in TIMES if low < t < high), key=at)
        progress(f"searched times of {n} steps: {', '.join(map(str, (1, *best, 0)))}")
        found += [Schedule((1.0, *best, 0.0))] if n in steps else []
    return found


def _changed(times: tuple[float, ...], place: int, value: float) -> tuple[float, ...]:
    """Replace the time at `place`, or add one if `place` is the length; in falling order."""
    return tuple(sorted((*times[:place], value, *times[place + 1 :]), reverse=True))


def time_steps(
    policy: OptimizedPolicy, steps: Sequence[int], observations: Sequence[Mapping[str, Any]], *, calls: int,
    seed: int = 0, progress: Callable[[str], None] = lambda _: None,
    heard: Callable[[float | None], None] = lambda _: None,
) -> dict[int, dict[str, Any]]:  # fmt: skip
    """Time whole calls of a policy in turns; return a row of `bench.run` for each number of steps. The
    times of the steps do not change the work."""
    systems = [
        timed(f"{n} step{'s' * (n > 1)}", policy.with_steps(n, "uniform"), time.perf_counter(), None)
        for n in dict.fromkeys(steps)
    ]
    rows = bench.run(systems, lambda rng: dict(observations[int(rng.integers(len(observations)))]), calls=calls,
                     turn=max(1, min(10, calls // 2)), seed=seed, progress=progress, heard=heard)  # fmt: skip
    return {row["steps"]: row for row in rows}
