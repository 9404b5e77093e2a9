"""One table and two pictures of all stored `vla-accel bench` runs of published sizes: latency against the shape of a
call (model, views, actions, prompt) and against its batch, beside the floor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench_tables import batched
from benchmarks.markdown import MODELS, machine, rows
from eval.script import write_png
from vla_accel.measure.bench import SCHEMA
from vla_accel.report import charts
from vla_accel.report.bench import batch_lines, call_parts

SHAPES, BATCHES = "bench_shapes_h200.png", "bench_batches_h200.png"
OURS = ("native-", "portable-", "realtime-vla")
"""How the names of those begin that are shown; other projects' eager code has tables of its own."""


def shapes(results: Sequence[dict[str, Any]]) -> str:
    """The table of the GPU of most stored runs, and its pictures."""
    return (
        f"{calls(results)}\n"
        f"![Parts of a call, by shape and system, beside the floor](../benchmarks/results/{SHAPES})\n\n"
        f"![ms an observation against observations in a call, beside the floor](../benchmarks/results/{BATCHES})\n"
    )


def calls(results: Sequence[dict[str, Any]]) -> str:
    """A row for each shape, a column for each system: ms of a whole call, and its floor."""
    shown = list(timed_calls(results))
    systems = list(dict.fromkeys(row["system"] for _, _, row in shown))
    found = {(shape, row["system"]): row for shape, _, row in shown}
    lines = dict.fromkeys((shape, row["steps"], _rows_of(result)) for shape, result, row in shown)
    body = [
        [shape, str(steps), str(count), *(_cell(found.get((shape, system))) for system in systems)]
        for shape, steps, count in lines
    ]
    where = "; ".join(dict.fromkeys(machine(result) for _, result, _ in shown))
    return (
        f"{rows(['call', 'steps', 'rows', *systems], body)}\n"
        f"Median ms of a whole call (the floor); rows: of the denoise loop at every step. {where}.\n"
    )


def draw_shapes(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Stacked bars, one for each shape and system."""
    bars = [
        charts.Bar(f"{shape}: {row['system']}", call_parts(row), f"{row['median_ms']:.1f} ms",
                   (row["floors_ms"] or {}).get("total"))
        for shape, _, row in timed_calls(results)
    ]  # fmt: skip
    write_png(charts.stacked(bars, unit="median of one call [ms]", narrow=False), path)


def draw_batches(results: Sequence[dict[str, Any]], path: Path) -> None:
    """ms an observation over the batch, a line for each shape and system, dashed for its floor."""
    found: dict[str, Any] = {}
    floors: dict[str, Any] = {}
    for result in published(results):
        if len({row["batch"] for row in result["throughput"]}) > 1:
            mine = [row for row in batched(result) if row["system"].startswith(OURS)]
            for into, lines in zip((found, floors), batch_lines(mine), strict=True):
                into |= {f"{shape_of(result)}: {system}": points for system, points in lines.items()}
    figure = charts.lines(found, x="observations in a call", y="ms an observation", limits=floors)
    write_png(figure, path)


def published(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of random weights of a published size; the one with the most batches first. Not π0-FAST, which decodes
    tokens and has no loop over rows."""
    mine = [r for r in results if r.get("schema") == SCHEMA and "views" in r["model"]]
    mine = [r for r in mine if r["model"]["kind"] != "pi0_fast"]
    return sorted(mine, key=lambda r: -len(r["throughput"]))


def _rows_of(result: dict[str, Any]) -> int:
    """Of the denoise loop: π0 has a token beside the actions, the state's."""
    return result["model"]["action_horizon"] + (result["model"]["kind"] == "pi0")


def timed_calls(results: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Shape, report and row, of the most steps of each shape and system, each once: of systems that were timed in
    turns, from the run that has the most of them."""
    seen = set()
    for result in sorted(published(results), key=_order):
        most = max(row["steps"] for row in result["rows"])
        for row in result["rows"]:
            key = (shape_of(result), row["system"])
            if row["steps"] == most and row["system"].startswith(OURS) and key not in seen:
                seen.add(key)
                yield key[0], result, row


def _order(result: dict[str, Any]) -> tuple[int, int, int, int, tuple[int, ...], int]:
    """By shape; of one shape, the report with the most of the systems that are shown first."""
    model = result["model"]
    shown = {row["system"] for row in result["rows"] if row["system"].startswith(OURS)}
    kinds = list(MODELS)
    place = kinds.index(model["kind"]) if model["kind"] in kinds else len(kinds)
    camera = tuple(result.get("camera") or ())
    return place, model["action_horizon"], model["views"], result.get("prompt_tokens") or 0, camera, -len(shown)


def shape_of(result: dict[str, Any]) -> str:
    """What distinguishes a report's calls, in words."""
    model, tokens, camera = result["model"], result.get("prompt_tokens"), result.get("camera")
    prompt = f", prompt of {tokens} tokens" if tokens else ""
    images = f", cameras of {camera[0]} × {camera[1]}" if camera else ""
    kind = MODELS.get(model["kind"], model["kind"])
    return f"{kind}, {model['views']} views, {model['action_horizon']} actions{prompt}{images}"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    floor = (row["floors_ms"] or {}).get("total")
    return f"{row['median_ms']:.2f}" + (f" ({floor:.2f})" if floor else "")
