"""The result of a run, computed from its logged episodes, so that a resumed run reports like one without interruption.

Latencies are summarised only over episodes that ran under the conditions (hardware and number of workers) of the last
launch. Errors are listed apart from failures and never enter a rate.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from eval.harness.benchmark import schema
from eval.harness.log import log_path
from eval.harness.protocol import EpisodeKey, Protocol
from eval.harness.rollout import EpisodeResult
from eval.harness.statistics import Rate, fit_line, rate_goals
from vla_accel.errors import ConfigError
from vla_accel.report.colours import OTHER

WHOLES = ("total", "wall", "infer")  # timings that span several parts
AGREEMENT = 0.02  # share of the total that the parts may leave unexplained without a warning
SPREAD = 2.0  # p90 over p10 of a call's latency from which the mean is not to be trusted
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
_PARTS = {"protocol": dict, "policy": dict, "launches": list, "episodes": list}
_OF_EPISODE = {"steps", "task_id", "trial", "success"}


@dataclass
class Samples:
    """Timings of many calls at one step count, in milliseconds.

    Attributes:
        sections: the parts of each call.
        totals: each whole call: the total that the policy reports, else the wall clock.
        walls: each whole call on the harness's wall clock.
    """

    sections: list[dict[str, float]] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)
    walls: list[float] = field(default_factory=list)


TaskNames = Mapping[tuple[str, int], str]
"""The task in words, by `EpisodeKey.task`."""
Breakdown = Callable[["int | None", Samples], dict[str, Any]]
"""Makes the breakdown JSON of `vla_accel.latency` from one step count's samples."""


@dataclass(frozen=True)
class Played:
    """The episodes of a run, the launches that played them, and each episode's launch (an index)."""

    protocol: Protocol
    results: Mapping[EpisodeKey, EpisodeResult]
    launches: Sequence[Mapping[str, Any]]
    launch_of: Mapping[EpisodeKey, int]

    def comparable(self) -> set[EpisodeKey]:
        """The episodes whose latencies belong together: run under the last used conditions."""

        def conditions(key: EpisodeKey) -> tuple[Any, Any]:
            launch = self.launches[self.launch_of[key]]
            return launch.get("hardware"), launch.get("workers")

        last = max(self.results, key=lambda key: self.launch_of[key], default=None)
        return set() if last is None else {key for key in self.results if conditions(key) == conditions(last)}

    def to_json(
        self, task_names: Mapping[tuple[str, int], str], target_hz: float, breakdown: Breakdown
    ) -> dict[str, Any]:
        """The fields of a result that come from its episodes."""
        return {
            "launches": list(self.launches),
            "episodes_s": round(sum(result.wall_s for result in self.results.values()), 3),
            "summary": summarise_run(self, task_names, target_hz, breakdown),
            "episodes": [{**r.to_json(), "launch": self.launch_of[key]} for key, r in self.results.items()],
        }


def rate_of(results: Iterable[EpisodeResult]) -> Rate:
    """Count successes, finished episodes and errors."""
    outcomes = [result.outcome for result in results]
    errors = outcomes.count("error")
    return Rate(outcomes.count("success"), len(outcomes) - errors, errors)


def samples_of(results: Iterable[EpisodeResult]) -> Samples:
    """Every call of the episodes that did not crash."""
    samples = Samples()
    for result in results:
        timings = result.timings
        if result.error or not timings:
            continue
        for call, wall in enumerate(timings["wall"]):
            samples.sections.append({name: ms[call] for name, ms in timings.items() if name not in WHOLES})
            samples.totals.append(timings.get("total", timings["wall"])[call])
            samples.walls.append(wall)
    return samples


def summarise_run(played: Played, task_names: TaskNames, target_hz: float, breakdown: Breakdown) -> dict[str, Any]:
    """The run in numbers (JSON types): `rows` (one per step count: rates, per suite where there are several, per task,
    latency breakdown, target), `denoise_fit`, and `warnings`: what a reader must know before trusting the latencies."""
    protocol, results, timed = played.protocol, played.results, played.comparable()
    suites = protocol.suites if len(protocol.suites) > 1 else ("",)
    rows: list[dict[str, Any]] = []
    by_steps: dict[str, dict[int, float]] = {}
    warnings: list[str] = []
    for steps in protocol.steps:
        mine = [result for key, result in results.items() if key.steps == steps]
        wins = [result.env_steps for result in mine if result.success]
        tasks = [
            {
                **({"suite": suite} if suite else {}),
                "task_id": task_id,
                "task": task_names[suite, task_id],
                **rate_of(r for r in mine if r.key.task == (suite, task_id)).to_json(),
            }
            for suite in suites
            for task_id in protocol.tasks
        ]
        row: dict[str, Any] = {
            "steps": steps,
            "success": rate_of(mine).to_json(),
            "mean_env_steps_of_successes": sum(wins) / len(wins) if wins else None,
            "tasks": tasks,
            "breakdown": None,
            "target": None,
        }
        if len(suites) > 1:
            row["suites"] = [{"suite": s, **rate_of(r for r in mine if r.key.suite == s).to_json()} for s in suites]
        samples = samples_of(result for result in mine if result.key in timed)
        if samples.totals:
            row["breakdown"] = breakdown(steps, samples)
            parts, total = _parts(row["breakdown"]), row["breakdown"]["components"]["total"]["mean_ms"]
            row["wall_mean_ms"] = sum(samples.walls) / len(samples.walls)
            row["target"] = rate_goals(parts, total, target_hz)
            warnings += _doubts(steps, parts, total, samples)
            if steps is not None:
                for name, mean in parts.items():
                    by_steps.setdefault(name, {})[steps] = mean
        rows.append(row)
    left_out = sum(1 for key, r in results.items() if r.timings and key not in timed)
    if left_out:
        warnings.append(
            f"latencies leave out {left_out} episodes that ran on other hardware or with another number of workers"
        )
    fits = [{"component": name, **fit} for name, times in by_steps.items() if (fit := fit_line(times)) is not None]
    # The line of the component that grows most with the number of steps.
    return {"rows": rows, "denoise_fit": max(fits, key=lambda fit: fit["slope_ms"], default=None), "warnings": warnings}


def _doubts(steps: int | None, parts: Mapping[str, float], total: float, samples: Samples) -> list[str]:
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
    return warnings


def row_line(row: Mapping[str, Any]) -> dict[str, Any]:
    """One step count on the JSON line that ends a command: its rates, and mean milliseconds of the call and of each
    component, None where no call was timed."""
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


def _parts(breakdown: Mapping[str, Any]) -> dict[str, float]:
    return {name: part["mean_ms"] for name, part in breakdown["components"].items() if name not in WHOLES}


def check_output(output: Path | None, read: Iterable[Path]) -> None:
    """Raise ConfigError for an output that would replace the episode log of a result that is read; that of the result
    itself is refused with the options."""
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
