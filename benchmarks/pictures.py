"""Draw the PNG pictures of docs/ from the stored runs: `python -m benchmarks.pictures`. Their bytes depend on
matplotlib's version, so no test compares them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from benchmarks.tables import flow, registry, server, shapes, success
from benchmarks.tables.bench import batched
from eval.harness import late
from eval.script import run_script, write_png
from vla_accel.cli.options import Written
from vla_accel.report import charts
from vla_accel.report.bench import batch_lines, call_parts
from vla_accel.report.flow import draw_flow, flow_points
from vla_accel.report.tune import agreement_points, draw_agreement


@dataclass(frozen=True)
class Arguments:
    """Draw the pictures of docs/ whose runs are stored."""

    output: Annotated[Path, Written(folder=True)] = registry.RESULTS
    """Folder for the PNGs."""


def _tune(result: dict[str, Any]) -> Any:
    """Latency against disagreement."""
    return draw_agreement(agreement_points(result["tried"]))


def _flow(result: dict[str, Any]) -> Any:
    """Error of the final actions against latency."""
    return draw_flow(flow_points(result["rows"]))


def _late(results: Sequence[Any]) -> Any:
    """Success against latency, all grids in one picture."""
    grids, _ = results
    return late.figure({**grids[0], "rows": [row for grid in grids for row in grid["rows"]]})


def _paired(result: dict[str, Any]) -> Any:
    """Success of the reference and of each policy, with its Wilson interval."""
    rates = {result["reference"]: result["rows"][0]["reference"]} | {r["name"]: r["other"] for r in result["rows"]}
    values = [(rate["rate"], rate["wilson_95_low"], rate["wilson_95_high"]) for rate in rates.values()]
    return charts.intervals(list(rates), values, narrow=False)


def _shapes(results: Sequence[dict[str, Any]]) -> Any:
    """A stacked bar for each shape and system."""
    bars = [
        charts.Bar(
            f"{shape}: {row['system']}",
            call_parts(row),
            f"{row['median_ms']:.1f} ms",
            (row["floors_ms"] or {}).get("total"),
        )
        for shape, _, row in shapes.timed_calls(results)
    ]
    return charts.stacked(bars, unit="median of one call [ms]", narrow=False)


def _batches(results: Sequence[dict[str, Any]]) -> Any:
    """Ms per observation against the batch, a line for each shape and system, and a dashed one for its floor."""
    found: dict[str, Any] = {}
    floors: dict[str, Any] = {}
    for result in shapes.published(results):
        if len({row["batch"] for row in result["throughput"]}) > 1:
            mine = [row for row in batched(result) if row["system"].startswith(shapes.OURS)]
            for into, lines in zip((found, floors), batch_lines(mine), strict=True):
                into |= {f"{shapes.shape_of(result)}: {system}": points for system, points in lines.items()}
    return charts.lines(found, x="observations in a call", y="ms per observation", limits=floors)


def _server(results: Sequence[dict[str, Any]]) -> Any:
    """Requests a second against clients, a line for each policy, model of GPU and number of GPUs."""
    lines = {
        f"{result['policy']}, {server.replicas(result)} {server.gpu_of(result)}": [
            (row["clients"], row["per_second"]) for row in result["rows"]
        ]
        for result in server.by_gpus(results)
    }
    return charts.lines(lines, x="concurrent clients", y="requests a second")


PICTURES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    flow.PICTURES["demo"]: ("flow_pi05", _flow),
    flow.PICTURES["smolvla_demo"]: ("flow_smolvla", _flow),
    success.TUNE_PICTURE: ("tune_demo", _tune),
    success.LATE_PICTURE: ("late", _late),
    success.STRESS_PICTURE: ("paired_stress", _paired),
    shapes.SHAPES: ("shapes", _shapes),
    shapes.BATCHES: ("shapes", _batches),
    server.GPUS_PICTURE: ("server_gpus", _server),
}
"""File to the table with the same source, and what draws the matplotlib figure."""


def run(arguments: Arguments) -> None:
    """Draw, and print what was drawn and what has no run. Raises DependencyError without matplotlib."""
    drawn, absent = [], []
    for name, (table, draw) in PICTURES.items():
        try:
            results = registry.load(registry.TABLES[table][1])
        except FileNotFoundError:
            absent.append(name)
            continue
        write_png(draw(results), arguments.output / name)
        drawn.append(name)
    print(json.dumps({"drawn": drawn, "absent": absent}))


main = partial(run_script, "benchmarks.pictures", Arguments, run)


if __name__ == "__main__":
    sys.exit(main(None))
