"""The report of `vla-accel bench`: whole calls of each system as stacked bars, with their floors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vla_accel.report import charts
from vla_accel.report.colours import OTHER
from vla_accel.report.conditions import conditions, fell_back, ledger, machine
from vla_accel.report.page import Number, Page, Picture, Section, Table, bars_picture

Points = list[tuple[float, float]]
KERNEL_TIMES = ("sum", "overlapped", "idle_before")
MOST_KERNELS = 30
"""Kernels of a call that are listed."""
CLOSE = 4
"""Systems slower than this many times the fastest are left out of the first picture, where parts would be invisible."""


def page(report: Mapping[str, Any]) -> Page:
    """The page of a report of schema `vla_accel.bench/1`."""
    rows = report["rows"]
    fastest = min(rows, key=lambda row: row["median_ms"])
    model = report["model"].get("name") or report["model"].get("kind", "policy")
    summary = (
        f"{ran(fastest)} with {_steps(fastest['steps'])} is the fastest: {fastest['median_ms']:.2f} ms a call "
        f"(median), {1e3 / fastest['median_ms']:.3g} Hz, on {machine(report['hardware'])}."
    )
    near = [row for row in rows if row["median_ms"] <= CLOSE * fastest["median_ms"]]
    pictures = [_calls(rows, "all systems")]
    if len(near) < len(rows):
        pictures.insert(0, _calls(near, f"those within {CLOSE} times the fastest"))
    sections = [Section("Whole calls", pictures), ledger((_label(row), row.get("engines") or []) for row in rows)]
    if report["throughput"]:
        sections.insert(1, Section("Batched calls", [_batches(report["throughput"])]))
    if more := tables(report):
        sections.append(Section("Other timings", [Table(*one) for one in more]))
    left_out = ", ".join(f"{name} ({why})" for name, why in report["left_out"].items())
    host = report.get("host", {})
    busy = host.get("others_busy")
    others = "" if busy is None else f"kept {busy:.1f} of {host['cores']} cores busy during the run"
    more = {"left_out": left_out, "other_processes": others}
    sections.append(conditions(report["command"], report["hardware"], report["software"], **more))
    return Page(f"Latency of {model}", summary, sections)


def call_parts(row: Mapping[str, Any]) -> dict[str, float]:
    """Medians of a row's parts in ms, scaled so that they do not exceed the call's, and the rest."""
    parts, median = dict(row["parts_ms"]), row["median_ms"]
    rest = median - sum(parts.values())
    if rest > 0:
        return {**parts, OTHER: rest}
    return {name: ms * median / (median - rest) for name, ms in parts.items()}


def _calls(rows: list[dict[str, Any]], which: str) -> Picture:
    bars = []
    for row in rows:
        speedup = f", {row['speedup']:.1f}×" if row.get("speedup") else ""
        text, floor = f"{row['median_ms']:.1f} ms{speedup}", (row["floors_ms"] or {}).get("total")
        bars.append(charts.Bar(_label(row), call_parts(row), text, floor))
    names = list(dict.fromkeys(name for bar in bars for name in bar.parts))
    header = ["system", "median ms", "p10 ms", "p90 ms", "times as fast", "floor ms", *(f"{n} ms" for n in names)]
    body = [
        [
            bar.label,
            *(Number(row[key]) for key in ("median_ms", "p10_ms", "p90_ms")),
            Number(row.get("speedup"), "{:.1f}×"),
            Number(bar.floor),
            *(Number((bar.parts | row["parts_ms"]).get(name)) for name in names),
        ]
        for row, bar in zip(rows, bars, strict=True)
    ]
    mark = "; the mark is the machine's floor" if any(bar.floor for bar in bars) else ""
    return bars_picture(
        f"Median of a whole call by system and denoising steps, {which}, stacked by part{mark}",
        bars,
        "median of one call [ms]",
        Table(f"Whole calls, NumPy in to NumPy out: {which}", header, body),
    )


def batch_lines(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Points], dict[str, Points]]:
    """(batch, ms an observation) of each system, and of its floor if known."""
    found: dict[str, Points] = {}
    floors: dict[str, Points] = {}
    for row in rows:
        found.setdefault(ran(row), []).append((row["batch"], row["median_ms"] / row["batch"]))
        if limit := row.get("floors_ms"):
            floors.setdefault(ran(row), []).append((row["batch"], limit["total"] / row["batch"]))
    return found, floors


def _batches(rows: list[dict[str, Any]]) -> Picture:
    found, floors = batch_lines(rows)
    body = [
        [ran(r), Number(r["steps"], "{}"), Number(r["batch"], "{}"), Number(r["median_ms"]),
         Number(r["per_second"], "{:.0f}"), Number(r.get("floors_ms", {}).get("total"))]
        for r in rows
    ]  # fmt: skip
    words = "; ".join(f"{name} at {p[-1][0]}: {p[-1][1]:.1f} ms an observation" for name, p in found.items())
    return Picture(
        "Median of a batched call by its observations, for each of them; dashed: the machine's floor",
        f"Lines over the batch: {words}.",
        lambda narrow: charts.lines(found, x="observations in a call", y="ms an observation", narrow=narrow,
                                    limits=floors),
        Table("Throughput", ("system", "steps", "batch", "median ms", "observations/s", "floor ms"), body),
    )  # fmt: skip


def tables(report: Mapping[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, header and rows of what was timed in addition to whole calls: calls at a rate, starts, kernels."""
    rows, found = report["rows"], []
    if any("paced" in row for row in rows):
        body = [
            [ran(row), str(row["steps"]), *(f"{row['paced'][n]:.2f}" for n in ("median_ms", "p90_ms")),
             str(row["paced"]["late"]), "-" if row["paced"]["power_w"] is None else f"{row['paced']['power_w']:.0f}"]
            for row in rows
        ]  # fmt: skip
        title = f"calls at {rows[0]['paced']['hz']:g} Hz"
        found.append((title, ["system", "steps", "median ms", "p90", "late", "W"], body))
    if started := [row for row in rows if "start" in row]:
        names = [name for name in started[0]["start"]["cold"] if name != "total"]
        body = [
            [f"{ran(row)}, {which}", *(f"{row['start'][which][name]:.2f}" for name in names)]
            for row in started for which in ("cold", "warm")
        ]  # fmt: skip
        title = f"seconds of a start; reading the file alone {started[0]['start']['file_read']:.2f}"
        found.append((title, ["system", *(n.replace("_", " ") for n in names)], body))
    for name, profile in report.get("kernels", {}).items():
        whole = (f"{what} {profile[f'{what}_us']:.0f}" for what in ("span", "busy", "overlapped", "idle"))
        body = [
            [one["name"][:60], str(one["count"]), *(f"{one[f'{what}_us']:.1f}" for what in KERNEL_TIMES)]
            for one in profile["kernels"][:MOST_KERNELS]
        ]
        title = f"{name}, kernels of a call in µs under the profiler: {', '.join(whole)}"
        found.append((title, ["kernel", "times", *(what.replace("_", " ") for what in KERNEL_TIMES)], body))
    return found


def console_tables(report: Mapping[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, header and rows of every table that the command prints."""
    names, body, batches = report["parts"], [], []
    columns = [*(name.replace("_", " ") for name in names)]
    for row in report["rows"]:
        parts, floor = row["parts_ms"], row["floors_ms"].get("total")
        memory = row["memory"]["total"] / 1e9 if row["memory"] else None
        share = f"{100 * row['share_of_floor']:.0f} %" if floor else "-"
        times = [Number(row[name]) for name in ("median_ms", "p10_ms", "p90_ms")]
        inside = [Number(value) for value in (*(parts.get(name) for name in names), row.get("step_ms"), floor)]
        speedup = Number(row["speedup"] or None, "{:.1f}×")
        body.append([ran(row), row["steps"], *times, speedup, *inside, share, Number(memory)])
    for row in report["throughput"]:
        values = (*(row["parts_ms"][name] for name in names), row.get("floors_ms", {}).get("total"))
        rate = Number(row["per_second"], "{:.0f}")
        batches.append([ran(row), row["steps"], row["batch"], Number(row["median_ms"]), rate, *map(Number, values)])
    timed = ["system", "steps", "median ms", "p10", "p90", "speed-up", *columns, "a step", "floor", "of floor", "GB"]
    batched = ["system", "steps", "batch", "median ms", "observations/s", *columns, "floor"]
    found = [("whole calls, NumPy in to NumPy out", timed, body)]
    found += [("batched calls", batched, batches)] if batches else []
    return [(title, header, [[*map(str, row)] for row in rows]) for title, header, rows in found] + tables(report)


def ran(row: Mapping[str, Any]) -> str:
    """A row's system, with the times of placed steps, and with what ran instead."""
    times = ", ".join(f"{time:.3g}" for time in row.get("schedule", [])[:-1])
    return row["system"] + (f" at {times}" if times else "") + fell_back(row.get("engines") or [])


def _label(row: Mapping[str, Any]) -> str:
    return f"{ran(row)}, {_steps(row['steps'])}"


def _steps(steps: int) -> str:
    return f"{steps} step{'s' * (steps > 1)}"
