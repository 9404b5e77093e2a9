"""Tables of `vla-accel bench` reports: whole calls, their components and kernels, batches, starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.tables.table import Cell, Row, Table, blocks, columns, command, machine, of, steps_of
from vla_accel.measure.host import beside
from vla_accel.measure.roofline import Ceilings, add_batch_floors, steps_timed
from vla_accel.report.bench import ran

PI0_PARTS = ("vision", "kv_cache", "denoise")
"""Components of reports that do not list their own."""
MOST_KERNELS = 8
"""Kernels of a call that a table lists."""
FLOOR = {
    "floor": "{floors_ms[total]:.2f}",
    "of the floor": lambda row: f"{100 * row['floors_ms']['total'] / row['median_ms']:.0f} %" if _floors(row) else "-",
}


def call(row: Row | None) -> str:
    """Median ms of a report's row, and its speed-up over the baseline."""
    if row is None:
        return "-"
    speedup = f", {row['speedup']:.1f}×" if row.get("speedup") else ""
    return f"{row['median_ms']:.2f}{speedup}"


def component_columns(parts: Sequence[str]) -> dict[str, Cell]:
    """Columns for the time, floor and rate of each component, the rest of the call, and its floor."""
    return {
        **{name.replace("kv_cache", "KV cache"): partial(_component, name) for name in parts},
        "the rest": partial(_rest, parts),
        **FLOOR,
    }


def _component(name: str, row: Row) -> str:
    if name not in (row.get("parts_ms") or {}):
        return "-"
    floor = f" ({_floors(row)[name]:.2f})" if name in _floors(row) else ""
    rates = ((f"{name}_tflops", "TFLOP/s"), (f"{name}_gb_per_s", "GB/s"))
    reached = "".join(f", {row[key]:.0f} {unit}" for key, unit in rates if row.get(key))
    return f"{row['parts_ms'][name]:.2f}{floor}{reached}"


def _rest(parts: Sequence[str], row: Row) -> str:
    found = row.get("parts_ms") or {}
    return f"{row['median_ms'] - sum(found.get(name, 0.0) for name in parts):.2f}" if found else "-"


def _floors(row: Row) -> Mapping[str, float]:
    return row.get("floors_ms") or {}


def _parts(result: Row) -> Sequence[str]:
    return result.get("parts", PI0_PARTS)


# -- whole calls --------------------------------------------------------------------------------------------------


def _systems(result: Row) -> list[dict[str, Any]]:
    """A row for each system: its name, and its row at each step count."""
    systems: dict[str, dict[str, Any]] = {}
    for row in result["rows"]:
        systems.setdefault(row["system"], {"name": ran(row)})[row["steps"]] = row
    return list(systems.values())


def _by_steps(result: Row) -> dict[str, Cell]:
    steps, kind = dict.fromkeys(row["steps"] for row in result["rows"]), result["model"].get("kind", "")
    return {"system": "{name}", **{steps_of(kind, n): lambda row, n=n: call(row.get(n)) for n in steps}}


def _baseline(result: Row) -> str:
    systems = {row["system"] for row in result["rows"]}
    base = next((name for name in ("openpi-eager", "lerobot-eager", "eager") if name in systems), None)
    return "Median ms of a whole call, NumPy in to NumPy out" + (f"; speed-up over {base}." if base else ".")


calls = Table(_by_steps, _systems, _baseline)


def _component_columns(result: Row) -> dict[str, Cell]:
    timed = any("step_ms" in row for row in result["rows"])
    step = steps_of(result["model"].get("kind", ""), 1).removeprefix("1 ")
    return {
        "system": "{system}",
        "steps": "{steps}",
        **component_columns(_parts(result)),
        **({f"a {step}": "{step_ms:.2f}"} if timed else {}),
    }


def _timed(result: Row) -> list[Row]:
    return [row for row in result["rows"] if row["parts_ms"]]


def _component_note(result: Row) -> str:
    note = "Median ms of each component (its floor), and the rate it reached."
    if any(steps_timed(row) < row["steps"] for row in _timed(result)):
        note += (
            "\nThe first step of the loop overlaps the prefix and counts as time of the KV cache; the rate of the loop "
            "is that of the other steps."
        )
    return note


components = Table(_component_columns, _timed, _component_note)


# -- batches and kernels ------------------------------------------------------------------------------------------


def batched(result: Row) -> list[dict[str, Any]]:
    """Batched calls of a report, with the floors of their components where these are known."""
    found = [dict(row) for row in result["throughput"]]
    if result["ceilings"]:
        add_batch_floors(found, result["rows"], Ceilings(**result["ceilings"]))
    return found


def _batch_columns(result: Row) -> dict[str, Cell]:
    first = columns(
        "system = {system} | steps = {steps} | batch = {batch} | median ms = {median_ms:.2f} | "
        "observations/s = {per_second:.0f}"
    )
    found = batched(result)
    if any(row.get("parts_ms") for row in found):
        return first | component_columns(_parts(result))
    return first | ({"floor ms": FLOOR["floor"]} if any("floors_ms" in row for row in found) else {})


def _batch_note(result: Row) -> str:
    parts = any(row.get("parts_ms") for row in result["throughput"])
    return "Median ms of a call with this batch and of its components (their floors)." if parts else ""


_batches = Table(_batch_columns, batched, _batch_note)
SPANS = ("span", "busy", "idle", "sum", "overlapped")
_spans = Table(
    {"system": "{system}", "kernels": "{launched}", **of(SPANS, "{@:.2f}")},
    lambda result: [
        {"system": system, "launched": found["launched"], **{name: found[f"{name}_us"] / 1e3 for name in SPANS}}
        for system, found in (result.get("kernels") or {}).items()
    ],
    "Ms of one call, the median of several, from the beginning of its first kernel to the end of its last (span). The "
    "profiler makes the replayed graph slower. Sum: the durations of all kernels, which is busy plus overlapped.",
)
_kernels = Table(
    "system = {system} | kernel = `{name:.48}` | times = {count} | sum = {sum_us:.0f} | "
    "overlapped = {overlapped_us:.0f} | idle before = {idle_before_us:.0f}",
    lambda result: [
        {"system": system, **kernel}
        for system, found in (result.get("kernels") or {}).items()
        for kernel in found["kernels"][:MOST_KERNELS]
    ],
    "µs of that call for the longest kernels of each system. A kernel that is launched early waits for its "
    "predecessor; that wait is overlapped.",
)


def conditions(result: Row) -> str:
    """What was timed, on which machine, with which command."""
    model, ceilings = result["model"], result["ceilings"]
    sizes = ""
    if "views" in model:
        sizes = f"{model['kind']}, {model['views']} views, {model['action_horizon']} actions, random weights; "
    elif model:
        sizes = f"checkpoint {model['name']} ({model['kind']}), {model['action_horizon']} actions; "
    count = max(row["calls"] for row in result["rows"])
    text = f"{sizes}{machine(result)}; {count} calls of each system, in turns; {command(result)}."
    if ceilings:
        text += (
            f" Ceilings measured on the same GPU: {ceilings['bf16_flops'] * 1e-12:.0f} TFLOP/s in BF16, "
            f"{ceilings['fp8_flops'] * 1e-12:.0f} in FP8, {ceilings['bytes_per_s'] * 1e-9:.0f} GB/s copied."
        )
    for name, once in result.get("timed_once", {}).items():
        steps = steps_of(model.get("kind", ""), once["steps"])
        text += f" {name} was timed at {steps} only: {once['why']}."
    if busy := beside(result.get("host", {})):
        text += f" {busy[0].upper()}{busy[1:]}."
    if result["left_out"]:
        text += f" Left out: {', '.join(sorted(result['left_out']))} (not installed)."
    return text + "\n"


bench = blocks(calls, components, _batches, _spans, _kernels, conditions)
whole_calls = blocks(calls, conditions)
batches = blocks(_batches, conditions)


# -- calls at a rate, and starts ----------------------------------------------------------------------------------


def _paced_columns(result: Row) -> Mapping[str, Cell]:
    rates = " or ".join(dict.fromkeys(f"{row['paced']['hz']:g}" for row in result["rows"] if "paced" in row))
    return {
        **columns("system = {system} | steps = {steps} | without pauses = {median_ms:.2f}"),
        f"at {rates} Hz": "{paced[median_ms]:.2f}",
        **columns(
            "90 % within = {paced[p90_ms]:.2f} | longest = {paced[max_ms]:.2f} | "
            "late = {paced[late]} of {paced[calls]} | W = {paced[power_w]:.0f}"
        ),
    }


paced = Table(
    _paced_columns,
    lambda result: [row for row in result["rows"] if "paced" in row],
    lambda result: (
        "Ms of a whole call: the median without pauses between calls, and the times of calls at a fixed rate. Between "
        "those the GPU idles and lowers its clocks. Late: calls that began after their time; W: mean power of the GPU "
        f"meanwhile. {conditions(result)}"
    ),
)


def _start_rows(result: Row) -> list[dict[str, Any]]:
    return [
        {**row, "which": which, "s": row["start"][kind], "most": 1.5 * row["start"]["file_read"] + 2}
        for row in result["rows"]
        if row.get("start")
        for kind, which in (("cold", "first"), ("warm", "second"))
    ]


def _start_columns(result: Row) -> dict[str, Cell]:
    names = [name for name in _start_rows(result)[0]["s"] if name != "total"]
    return {
        "system": "{system}",
        "start": "{which}",
        **{name.replace("_", " "): template for name, template in of(names, "{s[@]:.1f}").items()},
        "reading the file alone": "{start[file_read]:.1f}",
        "1.5 times that + 2": "{most:.1f}",
    }


starts = Table(
    _start_columns,
    _start_rows,
    lambda result: (
        "Seconds from the start of a process to its first action. The first start finds no compiled kernels, no "
        "tuning results and no Python bytecode; the second finds those of the first. Both find the weights file in "
        f"the page cache. {conditions(result)}"
    ),
)
