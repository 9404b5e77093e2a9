"""Success against latency, with plain and with guided chunks: a run of its own for each point.

Each point is played under `latency=K` and keeps its result and log in a folder, so that the same command continues
after an interrupt. Latency is counted in simulated control ticks, so it does not depend on the machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from eval.harness import command, options
from eval.harness.benchmark import Benchmark, schema
from eval.harness.evaluation import evaluate
from eval.harness.pairs import described
from eval.harness.policies import Chunking
from eval.harness.progress import stderr_console
from eval.script import concluded, write_png
from vla_accel.cli.common import print_json
from vla_accel.cli.options import Argument, Within, read
from vla_accel.files import without_folders, write_json
from vla_accel.report.charts import figure_class
from vla_accel.report.colours import PARTS

LABELS = {"plain": "plain chunks", "rtc": "real-time chunking", "trained": "trained chunking", "warm": "warm start"}
_PARTS = {"plain": "vision", "rtc": "kv_cache", "trained": "denoise", "warm": "transfer"}
COLOURS = {name: PARTS[part] for name, part in _PARTS.items()}


@dataclass(frozen=True, kw_only=True)
class Arguments(options.Arguments):
    """Options of the benchmark's own command, and the grid. `--output` is the JSON; the picture and the runs of the
    points go into the same folder."""

    ticks: Annotated[tuple[int, ...], Within(0)] = (0, 1, 2, 4, 8)
    """Control ticks from an observation to the arrival of its actions."""
    chunkings: tuple[Chunking, ...] = ("plain", "rtc")
    """How a chunk follows the last one: plain, guided (rtc) or started from it (warm)."""
    note: str = ""
    """A note that is stored with the figures."""
    # Not options of a grid: `chunkings` replaces `chunking`, the expert has no latency, each point would overwrite the
    # report of the last one, and parts of a grid cannot be merged.
    chunking: Annotated[Chunking, Argument(hidden=True)] = "plain"
    expert: Annotated[bool, Argument(hidden=True)] = False
    report: Annotated[Path | None, Argument(hidden=True)] = None
    shard: Annotated[str | None, Argument(hidden=True)] = None


def main(benchmark: Benchmark, arguments: type[Arguments], words: Sequence[str]) -> int:
    """Play the grid, write its JSON and its picture, end with one JSON line; the exit codes are `command.main`'s."""
    later = "; the same command continues from the points' logs"
    return concluded(lambda: run(benchmark, arguments, words), error=2, later=later)


def run(benchmark: Benchmark, arguments: type[Arguments], words: Sequence[str]) -> int:
    """Play and print the results; returns 1 if an episode crashed."""
    program = ("python", "-m", f"eval.{benchmark.name}.late")
    settings = read(arguments, words, " ".join(program))
    with command.stdout_to_stderr():
        grid = play(benchmark, settings, [*program, *words])
    for name in ("output", "figure"):
        stderr_console().print(f"{name}: {grid[name]}", soft_wrap=True)
    print_json({key: grid[key] for key in ("output", "figure", "rows")})
    return 1 if any(row["errors"] for row in grid["rows"]) else 0


def play(benchmark: Benchmark, settings: Arguments, words: list[str]) -> dict[str, Any]:
    """Play every point of the grid; returns its JSON with `output` and `figure` (paths) added.

    Raises:
        ConfigError: an impossible point, such as more ticks than a chunk has actions; before any is played where
            possible.
    """
    output = settings.output or options.RUNS / benchmark.name / "late.json"
    console, folder = stderr_console(), output.with_suffix("")
    points = []
    for ticks, chunking in itertools.product(settings.ticks, settings.chunkings):
        stress, name = ",".join(filter(None, (settings.stress, f"latency={ticks}"))), f"{chunking}-{ticks}"
        video = settings.video and settings.video / name
        point = replace(settings, stress=stress, chunking=chunking, video=video, output=folder / f"{name}.json")
        points.append((ticks, chunking, command.make_request(benchmark, point, words)))
    rows, first = [], None
    for ticks, chunking, request in points:
        console.print(f"{LABELS[chunking]}, {ticks} ticks late", style="bold")
        result = evaluate(request, console)
        first = first or result
        ms, kind = 1e3 * ticks / benchmark.control_hz, _kind(result, chunking)
        for row in result["summary"]["rows"]:
            breakdown = row["breakdown"]
            rows.append({
                **{"chunking": kind, "latency_ticks": ticks, "latency_ms": ms, "steps": row["steps"]},
                **row["success"],
                "mean_env_steps_of_successes": row["mean_env_steps_of_successes"],
                "call_ms": breakdown["components"]["total"]["p50_ms"] if breakdown else None,
            })  # fmt: skip
    assert first is not None
    stress = {name: value for name, value in first["protocol"].get("stress", {}).items() if name != "latency"}
    grid = {
        "note": settings.note,
        "command": without_folders(words),
        "schema": schema(benchmark.name, "late"),
        "protocol": {**first["protocol"], "stress": stress},
        "control_hz": benchmark.control_hz,
        "policy": {name: value for name, value in described(first).items() if name != "chunking"},
        "rows": rows,
    }
    write_json(output, grid, allow_nan=False)
    picture = output.with_suffix(".png")
    write_png(figure(grid), picture)
    return {**grid, "output": str(output), "figure": str(picture)}


def _kind(result: Mapping[str, Any], chunking: Chunking) -> str:
    """Of `LABELS`: a policy that was trained for it pins what others are guided to."""
    config = result["policy"].get("config") or {}
    return "trained" if chunking == "rtc" and config.get("rtc", {}).get("trained") else chunking


def figure(grid: Mapping[str, Any]) -> Any:
    """Success against latency, a line for each chunking and step count, with 95 % intervals: a matplotlib figure."""
    drawn = figure_class()(figsize=(7.0, 4.2), layout="constrained")
    axes = drawn.add_subplot()
    rows, steps = grid["rows"], list(dict.fromkeys(row["steps"] for row in grid["rows"]))
    lines = [(c, n) for c in LABELS for n in steps if any((r["chunking"], r["steps"]) == (c, n) for r in rows)]
    for index, (chunking, count) in enumerate(lines):
        mine = [r for r in rows if (r["chunking"], r["steps"]) == (chunking, count) and r["rate"] is not None]
        low, rates, high = (np.array([100 * r[k] for r in mine]) for k in ("wilson_95_low", "rate", "wilson_95_high"))
        # Next to each other, so that equal rates do not hide each other.
        places = [r["latency_ticks"] + 0.06 * (index - (len(lines) - 1) / 2) for r in mine]
        axes.errorbar(
            places,
            rates,
            yerr=[rates - low, high - rates],
            label=LABELS[chunking] + (f", {count} steps" if len(steps) > 1 else ""),
            color=COLOURS[chunking],
            linestyle=("-", "--", ":", "-.")[steps.index(count) % 4],
            marker="o",
            markersize=4,
            capsize=3,
            linewidth=1.4,
        )
    tick_ms = 1e3 / grid["control_hz"]
    axes.secondary_xaxis("top", functions=(lambda t: t * tick_ms, lambda ms: ms / tick_ms)).set_xlabel("latency [ms]")
    axes.set_xticks(sorted({row["latency_ticks"] for row in rows}))
    axes.set_xlabel(f"control ticks from an observation to its actions ({grid['control_hz']:g} Hz)")
    axes.set_ylabel("success [%], 95 % intervals")
    axes.set_ylim(0, 102)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower left")
    return drawn
