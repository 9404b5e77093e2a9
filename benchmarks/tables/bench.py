"""Tables of `vla-accel bench` reports: whole calls, their components and kernels, batches, starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.tables.table import (
    MODELS,
    NOT_STORED,
    PROJECTS,
    Cell,
    Row,
    blocks,
    command,
    machine,
    of,
    plural,
    steps_of,
    table,
)
from vla_accel.measure.host import busy_host
from vla_accel.measure.roofline import Ceilings, add_batch_floors, steps_timed
from vla_accel.report.bench import ran

PI0_PARTS = ("vision", "kv_cache", "denoise")
"""Components of reports that do not list their own."""
MOST_KERNELS = 8
"""Kernels of a call that a table lists."""
SPANS = ("span", "busy", "idle", "sum", "overlapped")


def call(row: Row | None) -> str:
    """Median ms of a report's row, and its speed-up over the baseline."""
    if row is None:
        return "-"
    speedup = f", {row['speedup']:.1f}×" if row.get("speedup") else ""
    return f"{row['median_ms']:.2f}{speedup}"


def component_columns(parts: Sequence[str]) -> dict[str, Cell]:
    """Columns for the time, floor and rate of each component, the rest of the call, and its floor."""

    def rest(row: Row) -> str:
        found = row.get("parts_ms") or {}
        return f"{row['median_ms'] - sum(found.get(name, 0.0) for name in parts):.2f}" if found else "-"

    def share(row: Row) -> str:
        return f"{100 * row['floors_ms']['total'] / row['median_ms']:.0f} %" if _floors(row) else "-"

    each: dict[str, Cell] = {name.replace("kv_cache", "KV cache"): partial(_component, name) for name in parts}
    return {**each, "the rest": rest, "floor": "{floors_ms[total]:.2f}", "floor / call": share}


def _component(name: str, row: Row) -> str:
    if name not in (row.get("parts_ms") or {}):
        return "-"
    floor = f" ({_floors(row)[name]:.2f})" if name in _floors(row) else ""
    rates = ((f"{name}_tflops", "TFLOP/s"), (f"{name}_gb_per_s", "GB/s"))
    reached = "".join(f", {row[key]:.0f} {unit}" for key, unit in rates if row.get(key))
    return f"{row['parts_ms'][name]:.2f}{floor}{reached}"


def _floors(row: Row) -> Mapping[str, float]:
    return row.get("floors_ms") or {}


# -- whole calls --------------------------------------------------------------------------------------------------


def calls(result: Row) -> str:
    """A row for each system, a column for each number of steps."""
    systems: dict[str, dict[str, Any]] = {}
    for row in result["rows"]:
        systems.setdefault(row["system"], {"name": ran(row)})[row["steps"]] = row
    steps, kind = dict.fromkeys(row["steps"] for row in result["rows"]), result["model"].get("kind", "")
    base = next((name for name in (*(f"{name}-eager" for name in PROJECTS), "eager") if name in systems), None)
    each: dict[str, Cell] = {steps_of(kind, n): lambda row, n=n: call(row.get(n)) for n in steps}
    note = "Median ms of a whole call, NumPy in to NumPy out" + (f"; speed-up over {base}." if base else ".")
    return table({"system": "{name}", **each}, systems.values(), note)


def components(result: Row) -> str:
    """The components of each call."""
    rows = [row for row in result["rows"] if row["parts_ms"]]
    columns = {"system": "{system}", "steps": "{steps}", **component_columns(result.get("parts", PI0_PARTS))}
    one = steps_of(result["model"].get("kind", ""), 1)
    if one.startswith("1 ") and any("step_ms" in row for row in result["rows"]):
        columns[f"a {one.removeprefix('1 ')}"] = "{step_ms:.2f}"
    note = "Median ms of each component (its floor), and the rate it reached."
    if any(steps_timed(row) < row["steps"] for row in rows):
        note += (
            "\nThe first step of the loop overlaps the prefix and counts as time of the KV cache; the rate of the loop "
            "is that of the other steps."
        )
    return table(columns, rows, note)


# -- batches and kernels ------------------------------------------------------------------------------------------


def batched(result: Row) -> list[dict[str, Any]]:
    """Batched calls of a report, with the floors of their components where these are known."""
    found = [dict(row) for row in result["throughput"]]
    if result["ceilings"]:
        add_batch_floors(found, result["rows"], Ceilings(**result["ceilings"]))
    return found


def _batches(result: Row) -> str:
    rows, note = batched(result), ""
    columns: dict[str, Cell] = {name: f"{{{name}}}" for name in ("system", "steps", "batch")}
    columns |= {"median ms": "{median_ms:.2f}", "observations/s": "{per_second:.0f}"}
    if any(row.get("parts_ms") for row in rows):
        columns |= component_columns(result.get("parts", PI0_PARTS))
        note = "Median ms of a call with this batch and of its components (their floors)."
    elif any("floors_ms" in row for row in rows):
        columns["floor ms"] = "{floors_ms[total]:.2f}"
    return table(columns, rows, note)


def _kernels(result: Row) -> str:
    profiles = [{"system": system, **found} for system, found in (result.get("kernels") or {}).items()]
    spans = [{**found, **{name: found[f"{name}_us"] / 1e3 for name in SPANS}} for found in profiles]
    return blocks(
        table(
            {"system": "{system}", "kernels": "{launched}", **of(SPANS, "{@:.2f}")},
            spans,
            "Ms of one call, the median of several calls. Span: from the beginning of its first kernel to the end of "
            "its last. Sum: the durations of all kernels, which is busy plus overlapped. The profiler makes the "
            "replayed graph slower.",
        ),
        table(
            "system = {system} | kernel = `{name:.48}` | times = {count} | sum = {sum_us:.0f} | "
            "overlapped = {overlapped_us:.0f} | idle before = {idle_before_us:.0f}",
            [{"system": p["system"], **kernel} for p in profiles for kernel in p["kernels"][:MOST_KERNELS]],
            "µs of that call for the longest kernels of each system. A kernel that is launched early waits for its "
            "predecessor; this wait counts as overlapped.",
        ),
    )


def conditions(result: Row) -> str:
    """What was timed, on which machine, with which command."""
    model, ceilings = result["model"], result["ceilings"]
    sizes = ""
    if "views" in model:
        sizes = (
            f"{model['kind']}, {plural(model['views'], 'view')}, {model['action_horizon']} actions, random weights; "
        )
    elif model:
        sizes = f"checkpoint {model['name']} ({model['kind']}), {model['action_horizon']} actions; "
    count = max(row["calls"] for row in result["rows"])
    text = f"{sizes}{machine(result)}; {count} calls of each system, alternating; {command(result)}."
    if ceilings:
        text += (
            f" Ceilings measured on the same GPU: {ceilings['bf16_flops'] * 1e-12:.0f} TFLOP/s in BF16, "
            f"{ceilings['fp8_flops'] * 1e-12:.0f} in FP8, {ceilings['bytes_per_s'] * 1e-9:.0f} GB/s copied."
        )
    for name, once in result.get("timed_once", {}).items():
        text += f" {name} was timed at {steps_of(model.get('kind', ''), once['steps'])} only: {once['why']}."
    if busy := busy_host(result.get("host", {})):
        text += f" {busy[0].upper()}{busy[1:]}."
    if result["left_out"]:
        text += f" Left out: {', '.join(sorted(result['left_out']))} (not installed)."
    return text + "\n"


def bench(result: Row) -> str:
    """All tables of a report."""
    return blocks(calls(result), components(result), _batches(result), _kernels(result), conditions(result))


def benches(results: Sequence[Row | None]) -> str:
    """All tables of each stored report, below its model's name."""
    stored = [result for result in results if result is not None]
    each = [part for result in stored for part in (f"### {MODELS[result['model']['kind']]}\n", bench(result))]
    return blocks(*each) or NOT_STORED


def whole_calls(result: Row) -> str:
    """Whole calls alone."""
    return blocks(calls(result), conditions(result))


def batches(result: Row) -> str:
    """Batched calls alone."""
    return blocks(_batches(result), conditions(result))


# -- calls at a rate, and starts ----------------------------------------------------------------------------------


def paced(result: Row) -> str:
    """Calls at a fixed rate."""
    rows = [row for row in result["rows"] if "paced" in row]
    rates = " or ".join(dict.fromkeys(f"{row['paced']['hz']:g}" for row in rows))
    return table(
        f"system = {{system}} | steps = {{steps}} | without pauses = {{median_ms:.2f}} | at {rates} Hz = "
        "{paced[median_ms]:.2f} | 90 % within = {paced[p90_ms]:.2f} | longest = {paced[max_ms]:.2f} | "
        "late = {paced[late]} of {paced[calls]} | W = {paced[power_w]:.0f}",
        rows,
        "Ms of a whole call: the median without pauses between calls, and the times of calls at a fixed rate. Between "
        "these calls the GPU idles and lowers its clocks. Late: calls that began after their scheduled time. W: mean "
        f"power of the GPU at the fixed rate. {conditions(result)}",
    )


def starts(result: Row) -> str:
    """The starts of each system, with and without caches."""
    rows = [
        {**row, "which": which, "s": row["start"][kind], "most": 1.5 * row["start"]["file_read"] + 2}
        for row in result["rows"]
        if row.get("start")
        for kind, which in (("cold", "first"), ("warm", "second"))
    ]
    columns = {"system": "{system}", "start": "{which}"}
    columns |= {name.replace("_", " "): f"{{s[{name}]:.1f}}" for name in rows[0]["s"] if name != "total"}
    return table(
        {**columns, "reading the file alone": "{start[file_read]:.1f}", "goal": "{most:.1f}"},
        rows,
        "Seconds from the start of a process to its first action. At the first start there are no compiled kernels, "
        "tuning results or Python bytecode; the second start reads those that the first wrote. At both starts the "
        "weights file is in the page cache. Goal for the first action: 1.5 times the reading of the file alone, plus "
        f"2 s. {conditions(result)}",
    )
