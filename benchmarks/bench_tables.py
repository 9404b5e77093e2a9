"""Tables of `vla-accel bench` reports: whole calls beside their baselines, components beside their floors, batches,
starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.markdown import bare_command, machine, rows, steps_of
from vla_accel.measure.host import beside
from vla_accel.measure.roofline import Ceilings, add_batch_floors, steps_timed
from vla_accel.report.bench import ran

PI0_PARTS = ("vision", "kv_cache", "denoise")
"""Components in reports that do not name their model's."""
WHOLE = ("span", "busy", "idle", "sum", "overlapped")
KERNEL_TIMES = ("sum", "overlapped", "idle_before")
MOST_KERNELS = 8
"""Of a call that a table lists."""


def bench(result: dict[str, Any]) -> str:
    """One `vla-accel bench`: whole calls by system and steps, the components beside their floors, batched calls."""
    timed, kind = result["rows"], result["model"].get("kind", "")
    steps = list(dict.fromkeys(r["steps"] for r in timed))
    found = {(r["system"], r["steps"]): r for r in timed}
    systems = list(dict.fromkeys(r["system"] for r in timed))
    body = [[_ran(found, s, steps), *(call(found.get((s, n))) for n in steps)] for s in systems]
    text = rows(["system", *(steps_of(kind, n) for n in steps)], body)
    base = next((s for s in ("openpi-eager", "lerobot-eager", "eager") if s in systems), None)
    text += "\nMedian ms of a whole call, NumPy in to NumPy out" + (f"; times as fast as {base}.\n" if base else ".\n")
    inside = [r for r in timed if r["parts_ms"]]
    if inside:
        parts = result.get("parts", PI0_PARTS)
        header = ["system", "steps", *component_header(parts)]
        body = [[r["system"], str(r["steps"]), *components(r, parts)] for r in inside]
        if any("step_ms" in r for r in inside):
            header.append(f"a {steps_of(kind, 1).split()[1]}")
            for line, r in zip(body, inside, strict=True):
                line.append(f"{r['step_ms']:.2f}" if "step_ms" in r else "-")
        text += "\n" + rows(header, body)
        text += "\nMedian ms of each component, (its floor), and the rate it reached.\n"
        if any(steps_timed(r) < r["steps"] for r in inside):
            text += (
                "The loop's first step runs beside the prefix, and is in the time of the KV cache; the loop's rate is "
                "of the other steps.\n"
            )
    if result["throughput"]:
        text += "\n" + _batches(result)
    if result.get("kernels"):
        text += "\n" + _kernels(result["kernels"])
    return text + "\n" + _conditions(result)


def batches(result: dict[str, Any]) -> str:
    """Of one `vla-accel bench`, the batched calls only."""
    return _batches(result) + "\n" + _conditions(result)


def batched(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Batched calls of a report, with the floors of their components where they are known."""
    found = [dict(row) for row in result["throughput"]]
    if result["ceilings"]:
        add_batch_floors(found, result["rows"], Ceilings(**result["ceilings"]))
    return found


def _batches(result: dict[str, Any]) -> str:
    """Batched calls; their components and floors where the run has them."""
    found, parts = batched(result), result.get("parts", PI0_PARTS)
    header = ["system", "steps", "batch", "median ms", "observations/s"]
    body = [
        [r["system"], str(r["steps"]), str(r["batch"]), f"{r['median_ms']:.2f}", f"{r['per_second']:.0f}"]
        for r in found
    ]
    if any(r.get("parts_ms") for r in found):
        body = [[*line, *components(r, parts)] for line, r in zip(body, found, strict=True)]
        told = "\nMedian ms of a call of so many observations and of its components, (their floors).\n"
        return rows([*header, *component_header(parts)], body) + told
    if any("floors_ms" in r for r in found):
        header.append("floor ms")
        for line, r in zip(body, found, strict=True):
            line.append(f"{r['floors_ms']['total']:.2f}" if "floors_ms" in r else "-")
    return rows(header, body)


def _kernels(found: dict[str, dict[str, Any]]) -> str:
    """A call of each system as the GPU ran it, and its longest kernels."""
    whole = [
        [name, str(told["launched"]), *(f"{told[f'{what}_us'] / 1e3:.2f}" for what in WHOLE)]
        for name, told in found.items()
    ]
    by_kernel = [
        [name, f"`{one['name'][:48]}`", str(one["count"]), *(f"{one[f'{what}_us']:.0f}" for what in KERNEL_TIMES)]
        for name, told in found.items()
        for one in told["kernels"][:MOST_KERNELS]
    ]
    return (
        f"{rows(['system', 'kernels', *WHOLE], whole)}\n"
        "Ms of one call, the median one of some, from its first kernel's begin to its last one's end (span), with its "
        "graph replayed under the profiler, which makes it longer; sum: of all kernels' durations, busy and what "
        "overlapped.\n\n"
        f"{rows(['system', 'kernel', 'times', *(what.replace('_', ' ') for what in KERNEL_TIMES)], by_kernel)}\n"
        "µs of that call, the longest kernels of each system. A kernel that is launched early waits for the one before "
        "inside itself: that part of it is overlapped.\n"
    )


def whole_calls(result: dict[str, Any]) -> str:
    """Of one `vla-accel bench`, the whole calls only."""
    return bench({**result, "rows": [{**r, "parts_ms": {}} for r in result["rows"]], "throughput": [], "kernels": {}})


def _ran(found: dict[tuple[str, int], dict[str, Any]], system: str, steps: list[int]) -> str:
    """A system's name, and what ran in place of the engines that it asked for."""
    return ran(next(found[system, n] for n in steps if (system, n) in found))


def call(row: dict[str, Any] | None) -> str:
    """Median ms of a row of a report, and how many times as fast as the baseline."""
    if row is None:
        return "-"
    speedup = f", {row['speedup']:.1f}×" if row.get("speedup") else ""
    return f"{row['median_ms']:.2f}{speedup}"


def component_header(parts: Sequence[str]) -> list[str]:
    """The columns of `components`."""
    return [*(p.replace("kv_cache", "KV cache") for p in parts), "the rest", "floor", "of the floor"]


def components(row: dict[str, Any], parts: Sequence[str]) -> list[str]:
    """Cells of each component, of the rest of the call, of its floor."""
    found, floors = row.get("parts_ms", {}), row.get("floors_ms") or {}
    cells = []
    for name in parts:
        floor = f" ({floors[name]:.2f})" if name in floors else ""
        reached = "".join(
            f", {row[key]:.0f} {unit}"
            for key, unit in ((f"{name}_tflops", "TFLOP/s"), (f"{name}_gb_per_s", "GB/s"))
            if row.get(key)
        )
        cells.append(f"{found[name]:.2f}{floor}{reached}" if name in found else "-")
    rest = row["median_ms"] - sum(found.get(name, 0.0) for name in parts)
    return [
        *cells,
        f"{rest:.2f}" if found else "-",
        f"{floors['total']:.2f}" if floors else "-",
        f"{100 * floors['total'] / row['median_ms']:.0f} %" if floors else "-",
    ]


def paced(result: dict[str, Any]) -> str:
    """Calls at a robot's rate beside calls without a pause, from `vla-accel bench --hz`."""
    told = [(row, row["paced"]) for row in result["rows"] if "paced" in row]
    body = [
        [
            row["system"], str(row["steps"]), f"{row['median_ms']:.2f}",
            *(f"{slow[key]:.2f}" for key in ("median_ms", "p90_ms", "max_ms")),
            f"{slow['late']} of {slow['calls']}",
            "-" if slow["power_w"] is None else f"{slow['power_w']:.0f}",
        ]
        for row, slow in told
    ]  # fmt: skip
    rates = " or ".join(dict.fromkeys(f"{slow['hz']:g}" for _, slow in told))
    header = ["system", "steps", "without pauses", f"at {rates} Hz", "90 % within", "longest", "late", "W"]
    text = (
        "ms of a whole call: the median without pauses between calls, and of calls at a rate, between which the GPU "
        "rests and lowers its clocks; late: calls that began after their time; W: the GPU's mean power meanwhile."
    )
    return rows(header, body) + f"\n{text} {_conditions(result)}\n"


def starts(result: dict[str, Any]) -> str:
    """Where the seconds of a start go, from `vla-accel bench --starts`."""
    timed, body = [row for row in result["rows"] if row.get("start")], []
    names = [name for name in timed[0]["start"]["cold"] if name != "total"]
    for row in timed:
        told = row["start"]
        most = f"{1.5 * told['file_read'] + 2:.1f}"
        for which, meant in (("cold", "first"), ("warm", "second")):
            cells = [f"{told[which][name]:.1f}" for name in names]
            body.append([row["system"], meant, *cells, f"{told['file_read']:.1f}", most])
    spoken = (name.replace("_", " ") for name in names)
    header = ["system", "start", *spoken, "reading the file alone", "1.5 times that + 2"]
    text = (
        "Seconds from the start of a process to its first action. The first start finds no compiled kernels, no "
        "tunings and no bytecode of Python's, the second those that it left; the file of weights is in memory for both."
    )
    return rows(header, body) + f"\n{text} {_conditions(result)}\n"


def _conditions(result: dict[str, Any]) -> str:
    """What was timed, where, with which command."""
    model, ceilings = result["model"], result["ceilings"]
    sizes = ""
    if "views" in model:
        sizes = f"{model['kind']}, {model['views']} views, {model['action_horizon']} actions, random weights; "
    elif model:
        sizes = f"checkpoint {model['name']} ({model['kind']}), {model['action_horizon']} actions; "
    calls = {r["calls"] for r in result["rows"]}
    text = (
        f"{sizes}{machine(result)}; {max(calls)} calls of each system, in turns; `{bare_command(result['command'])}`."
    )
    if ceilings:
        text += (
            f" Ceilings measured on the same GPU: {ceilings['bf16_flops'] * 1e-12:.0f} TFLOP/s in BF16, "
            f"{ceilings['fp8_flops'] * 1e-12:.0f} in FP8, {ceilings['bytes_per_s'] * 1e-9:.0f} GB/s copied."
        )
    for name, told in result.get("timed_once", {}).items():
        text += f" {name} was timed at {steps_of(model.get('kind', ''), told['steps'])} alone: {told['why']}."
    if told := beside(result.get("host", {})):
        text += f" {told[0].upper()}{told[1:]}."
    if result["left_out"]:
        text += f" Left out: {', '.join(sorted(result['left_out']))} (not installed)."
    return text + "\n"
