"""The result of a run: one JSON file, and the tables a person reads.

Everything here is computed from the logged episodes, so that a resumed run reports like one that
was never interrupted. Latencies are summarised only over episodes that ran under the conditions
(hardware and number of workers) of the last launch: means over different machines mean nothing.
Errors are listed apart from failures and never enter a rate.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eval.harness.benchmark import schema
from eval.harness.log import log_path
from eval.harness.protocol import EpisodeKey, Protocol
from eval.harness.rollout import EpisodeResult
from eval.harness.statistics import Rate, fit_line, goals_to_json, rate_goals
from vla_accel.errors import ConfigError
from vla_accel.report.colours import OTHER

WHOLES = ("total", "wall", "infer")  # timings that span several parts
AGREEMENT = 0.02  # share of the total that the parts may leave unexplained without a warning

SPREAD = 2.0  # p90 over p10 of a call's latency from which the mean is not to be trusted


@dataclass(frozen=True)
class Samples:
    """Timings of many calls at one step count, in milliseconds.

    Attributes:
        sections: the parts of each call.
        totals: each whole call: the total that the policy reports, else the wall clock.
        walls: each whole call on the harness's wall clock.
    """

    sections: list[dict[str, float]]
    totals: list[float]
    walls: list[float]


def rate_of(results: Iterable[EpisodeResult]) -> Rate:
    """Count successes, finished episodes and errors."""
    outcomes = [result.outcome for result in results]
    errors = outcomes.count("error")
    return Rate(outcomes.count("success"), len(outcomes) - errors, errors)


def comparable(
    results: Mapping[EpisodeKey, EpisodeResult],
    launches: Sequence[Mapping[str, Any]],
    launch_of: Mapping[EpisodeKey, int],
) -> set[EpisodeKey]:
    """The episodes whose latencies belong together: run under the last used conditions."""
    used = [launch_of[key] for key in results]
    if not used:
        return set()
    last = _conditions(launches[max(used)])
    return {key for key in results if _conditions(launches[launch_of[key]]) == last}


def samples_of(results: Iterable[EpisodeResult]) -> Samples:
    """Every call of the episodes that did not crash."""
    samples = Samples([], [], [])
    for result in results:
        timings = result.timings
        if result.error or not timings:
            continue
        total = "total" if "total" in timings else "wall"
        names = [name for name in timings if name not in WHOLES]
        for call, wall in enumerate(timings["wall"]):
            samples.sections.append({name: timings[name][call] for name in names})
            samples.totals.append(timings[total][call])
            samples.walls.append(wall)
    return samples


def summarise_run(
    protocol: Protocol,
    results: Mapping[EpisodeKey, EpisodeResult],
    timed: Iterable[EpisodeKey],
    *,
    task_names: Mapping[tuple[str, int], str],
    target_hz: float,
    breakdown: Callable[[int | None, Samples], dict[str, Any]],
) -> dict[str, Any]:
    """The run in numbers (JSON types).

    Args:
        timed: the episodes whose latencies count.
        task_names: the task in words, by `EpisodeKey.task`.
        breakdown: makes the breakdown JSON of `vla_accel.latency` from one step count's samples.

    Returns:
        `rows` (one per step count: rates, per suite where there are several, per task, latency breakdown, target),
        `denoise_fit`, and `warnings`: what a reader must know before trusting the latencies.
    """
    timed, suites = set(timed), (protocol.suites if len(protocol.suites) > 1 else ("",))
    rows: list[dict[str, Any]] = []
    by_steps: dict[str, dict[int, float]] = {}
    warnings: list[str] = []
    for steps in protocol.steps:
        mine = [result for key, result in results.items() if key.steps == steps]
        samples = samples_of(result for result in mine if result.key in timed)
        row: dict[str, Any] = {
            "steps": steps,
            "success": rate_of(mine).to_json(),
            "mean_env_steps_of_successes": _mean([r.env_steps for r in mine if r.success]),
            "tasks": [
                {
                    **({"suite": suite} if suite else {}),
                    "task_id": task_id,
                    "task": task_names[suite, task_id],
                    **rate_of(r for r in mine if r.key.task == (suite, task_id)).to_json(),
                }
                for suite in suites
                for task_id in protocol.tasks
            ],
            **(
                {"suites": [{"suite": s, **rate_of(r for r in mine if r.key.suite == s).to_json()} for s in suites]}
                if len(suites) > 1
                else {}
            ),
            "breakdown": None,
            "target": None,
        }
        if samples.totals:
            row |= _latency(steps, samples, target_hz, breakdown)
            warnings += row.pop("warnings")
            if steps is not None:
                for name, mean in _parts(row["breakdown"]).items():
                    by_steps.setdefault(name, {})[steps] = mean
        rows.append(row)
    left_out = sum(1 for key, r in results.items() if r.timings and key not in timed)
    if left_out:
        warnings.append(
            f"latencies leave out {left_out} episodes that ran on other hardware or with another number of workers"
        )
    return {
        "rows": rows,
        "denoise_fit": _denoise_fit(by_steps),
        "warnings": warnings,
    }


def row_line(row: Mapping[str, Any]) -> dict[str, Any]:
    """One step count on the JSON line that ends a command.

    Returns:
        Rates, `mean_ms` (the whole call), `components_ms` (mean milliseconds of each component and of `total`) and
        `hz`. The last three are None where no call was timed.
    """
    breakdown = row["breakdown"]
    means = {name: part["mean_ms"] for name, part in breakdown["components"].items()} if breakdown else None
    return {
        "steps": row["steps"],
        **row["success"],
        "mean_ms": means["total"] if means else None,
        "components_ms": means,
        "hz": breakdown["hz"] if breakdown else None,
    }


def mean_parts(breakdown: Mapping[str, Any]) -> dict[str, float]:
    """Mean milliseconds of each part, and of what none of them explains (`OTHER`)."""
    parts = _parts(breakdown)
    rest = breakdown["components"]["total"]["mean_ms"] - sum(parts.values())
    return {**parts, OTHER: rest} if rest > 0 else parts


def check_output(output: Path | None, read: Iterable[Path]) -> None:
    """Raise ConfigError for an output that would take the place of the episode log of a result that is read; that of
    the result itself is refused with the options."""
    if output is not None and output.resolve() in [log_path(path).resolve() for path in read]:
        raise ConfigError(f"output: expected another file than those that are read, got {output}")


def read_result(path: Path) -> tuple[dict[str, Any], str]:
    """A result file and its benchmark's name. Raises ConfigError if it is none."""
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: expected a readable evaluation result, got: {reason}") from error
    found = result.get("schema") if isinstance(result, dict) else None
    match = re.fullmatch(schema(r"(\w+)", "result"), str(found))
    if match is None:
        raise ConfigError(
            f"{path}: expected a result of schema {schema('BENCHMARK', 'result')!r}, got schema {found!r}"
        )
    for name, kind in _PARTS.items():
        if not isinstance(result.get(name), kind) or (name == "launches" and not result[name]):
            raise ConfigError(f"{path}: expected a whole result, its {name} is missing or damaged")
    for episode in result["episodes"]:
        if not isinstance(episode, dict) or not episode.keys() >= _OF_EPISODE:
            raise ConfigError(f"{path}: expected a whole result, got an episode of {episode!r:.80}")
    return result, match[1]


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
_PARTS = {"protocol": dict, "policy": dict, "launches": list, "episodes": list}
_OF_EPISODE = {"steps", "task_id", "trial", "success"}


def stored_like(result: Mapping[str, Any], benchmark: str) -> dict[str, Mapping[str, Any]]:
    """Stored results of a benchmark, by "stored: NAME", with the model and the kind of device of `result`; their
    weights may differ. Empty if nothing was timed."""
    mine = _timed(result)
    found: dict[str, Mapping[str, Any]] = {}
    for path in sorted(RESULTS.glob(f"{benchmark}_*.json")) if mine else ():
        try:
            stored, _ = read_result(path)
        except ConfigError:
            continue  # another kind of stored file, such as a comparison
        if _timed(stored) == mine:
            found[f"stored: {path.stem}"] = stored
    return found


def _timed(result: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Model and kind of device of the run's latencies, or None."""
    for row in result["summary"]["rows"]:
        if row["breakdown"]:
            # A server may describe its model in any form.
            model = row["breakdown"]["model"]
            sizes = [model.get(name) for name in ("kind", "parameters")] if isinstance(model, Mapping) else [model]
            return (*sizes, row["breakdown"]["hardware"].get("device"))
    return None


def policy_name(result: Mapping[str, Any]) -> str:
    """The short name of who played: a local policy's own, `remote` or `expert`."""
    return result["policy"].get("name", result["policy"]["kind"])


def _latency(
    steps: int | None,
    samples: Samples,
    target_hz: float,
    breakdown: Callable[[int | None, Samples], dict[str, Any]],
) -> dict[str, Any]:
    made = breakdown(steps, samples)
    total = made["components"]["total"]["mean_ms"]
    parts = _parts(made)
    where = "" if steps is None else f" at {steps} step{'s' * (steps > 1)}"
    warnings = []
    if parts and abs(total - sum(parts.values())) > AGREEMENT * total:
        warnings.append(f"the parts{where} sum to {sum(parts.values()):.2f} ms, the total is {total:.2f} ms")
    quick, slow = np.percentile(samples.totals, (10, 90))
    if slow > SPREAD * quick:
        warnings.append(
            f"calls{where} vary from {quick:.1f} ms (p10) to {slow:.1f} ms (p90): other processes used the machine, "
            "so the mean is unreliable"
        )
    return {
        "breakdown": made,
        "wall_mean_ms": _mean(samples.walls),
        "target": goals_to_json(rate_goals(parts, total, target_hz), total, target_hz),
        "warnings": warnings,
    }


def _parts(breakdown: Mapping[str, Any]) -> dict[str, float]:
    """Mean milliseconds of each part of a call."""
    return {name: part["mean_ms"] for name, part in breakdown["components"].items() if name not in WHOLES}


def _denoise_fit(by_steps: Mapping[str, Mapping[int, float]]) -> dict[str, Any] | None:
    """The line of the component that grows most with the number of steps; None below two step counts."""
    fits = {name: fit for name, times in by_steps.items() if (fit := fit_line(times)) is not None}
    if not fits:
        return None
    name = max(fits, key=lambda name: fits[name].slope_ms)
    return {"component": name, **fits[name].to_json()}


def _conditions(launch: Mapping[str, Any]) -> tuple[Any, Any]:
    return launch.get("hardware"), launch.get("workers")


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
