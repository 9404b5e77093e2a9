"""Tables of success in LIBERO: the bundled checkpoints, their training, paired runs, late answers and tuning."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.tables.table import (
    Cell,
    Row,
    Table,
    blocks,
    columns,
    command,
    doubts,
    machine,
    machines,
    plural,
    with_interval,
    with_note,
)
from eval.harness.late import LABELS
from eval.harness.statistics import smallest_difference
from eval.training import DEFAULT_GPU, runs_of
from vla_accel.report.conditions import fell_back

LATE_PICTURE, STRESS_PICTURE, TUNE_PICTURE = "libero_late.png", "libero_stress.png", "tune_demo_h100.png"


def stress_of(result: Row) -> str:
    """The disturbances of a run in words; empty without any."""
    return ", ".join(f"{name} {value:g}" for name, value in result["protocol"].get("stress", {}).items())


# -- runs of one policy -------------------------------------------------------------------------------------------


def _rows(result: Row) -> list[Row]:
    return sorted(result["summary"]["rows"], key=lambda row: -row["steps"])


def _conditions(result: Row) -> str:
    policy, limit = result["policy"], result["protocol"]["max_steps"]
    limit = limit if isinstance(limit, int) else " and ".join(map(str, limit))
    metadata = policy["metadata"]
    engines = " and ".join(dict.fromkeys(e["used"] for e in metadata["engines"] if e["component"] != "call"))
    return (
        f"{machine(result['launches'][-1])}; {engines} engines in {metadata['dtype']}; "
        f"{result['episodes_s'] / 60:.0f} minutes of episodes, at most {limit} actions each; {command(result)}."
        f"{with_note(result)}{doubts([(result['protocol']['suite'], policy.get('name'), policy.get('weights'))])}"
    )


success = Table(
    {
        **columns(
            "suite = {suite} | steps = {steps} | success = **{success[rate]:.1%}** | "
            "episodes = {success[successes]}/{success[episodes]}"
        ),
        "Wilson 95 %": lambda row: "{} to {} %".format(
            *(f"{100 * row['success'][f'wilson_95_{end}']:.1f}" for end in ("low", "high"))
        ),
        "errors": "{success[errors]}",
    },
    lambda results: [{**row, "suite": result["protocol"]["suite"]} for result in results for row in _rows(result)],
    lambda results: "\n\n".join(map(_conditions, results)),
)


def _task_columns(result: Row) -> dict[str, Cell]:
    rows = _rows(result)
    count = "{tasks[@][successes]}/{tasks[@][episodes]}"
    each = {plural(row["steps"], "step"): count.replace("@", str(i)) for i, row in enumerate(rows)}
    return {result["protocol"]["suite"]: "{task}", **each}


_tasks = Table(
    _task_columns,
    lambda result: [
        {"task": tasks[0]["task"], "tasks": tasks}
        for tasks in zip(*(row["tasks"] for row in _rows(result)), strict=True)
    ],
)


def tasks(results: Sequence[Row]) -> str:
    """Success by task, a table for each suite."""
    return "\n".join(map(_tasks, results))


_PARTS = {"vision ms": "vision", "KV cache ms": "kv_cache", "denoise ms": "denoise"}
latency = Table(
    {
        **columns(
            "steps = {steps} | mean ms = {parts[total][mean_ms]:.1f} | median ms = {parts[total][p50_ms]:.1f} | "
            "Hz = {hz:.1f}"
        ),
        **{header: f"{{parts[{name}][mean_ms]:.1f}} ({{parts[{name}][share]:.0%}})" for header, name in _PARTS.items()},
    },
    lambda result: [
        {"steps": row["steps"], "parts": parts, "hz": 1e3 / parts["total"]["mean_ms"]}
        for row in reversed(_rows(result))
        for parts in (row["breakdown"]["components"],)
    ],
    _conditions,
)


def _training(record: Row) -> list[tuple[str, str]]:
    """How a bundled checkpoint was trained, and how far its start states are from those of the evaluation."""
    last = record["history"][-10:]
    won, played = (sum(line["episodes"]["policy"][i] for line in last) for i in (0, 1))
    started = [task for manifest in record["start_states"].values() for task in manifest["tasks"].values()]
    seeds = " and ".join(str(manifest["seed"]) for manifest in record["start_states"].values())
    nearest = min(task["min_distance_m"] for task in started)
    runs = runs_of(record)
    towers, whole = ([run for run in runs if ("tower_of" in run) is is_tower] for is_tower in (True, False))
    names = [f"the vision tower, in {run['tower_of']}" for run in towers]
    scratch = "all but the vision tower from scratch" if towers else "from scratch"
    names += [f"run {i} of {len(whole)}" + (f", {scratch}" if i == 1 else "") for i in range(1, 1 + len(whole))]
    lines = [
        f"{', '.join(run['suites'])}; {run['gpus']} {run.get('gpu', DEFAULT_GPU)}, {run['seconds'] / 60:.1f} minutes; "
        f"{run['steps']} steps of {run['batch']} observations x {record['settings']['samples']} draws"
        for run in [*towers, *whole]
    ]
    return [
        *zip(names, lines, strict=True),
        ("observations collected", f"about {record['gpus'] * record['history'][-1]['store']}"),
        ("start states", f"{sum(task['count'] for task in started)}, seeds from {seeds}"),
        ("nearest shipped evaluation state", f"{nearest * 1e3:.1f} mm (the object that moved most)"),
        ("success while collecting, at the end", f"{won}/{played} (training start states, with bursts of noise)"),
    ]


training = Table(
    {"checkpoint": "{name}", "": "{value}"},
    lambda record: [{"name": name, "value": value} for name, value in _training(record)],
)

# -- paired runs --------------------------------------------------------------------------------------------------


def _paired_columns(result: Row) -> dict[str, Cell]:
    return {
        "run": "{name}",
        "steps": "{steps}",
        "success (95 %)": lambda row: with_interval(row["other"]),
        f"{result['reference']} (95 %)": lambda row: with_interval(row["reference"]),
        "pairs": "{pairs}",
        "lost / gained": "{lost} / {gained}",
        "p": lambda row: f"{p:.3f}" if (p := row["mcnemar_exact_p"]) >= 0.001 else "< 0.001",
        "could see": "{sees:.1%}",
        "errors": "{other[errors]}, {reference[errors]}",
    }


def _paired_note(result: Row) -> str:
    policies, reference = result["policies"], result["reference"]
    old = doubts((name, run.get("policy"), run.get("weights")) for name, run in policies.items())
    return (
        f"Equal tasks, initial states and seeds. Lost: pairs that only {reference} won; gained: pairs that only the "
        "run won; p: McNemar's exact test, two-sided; could see: the smallest true difference that such a run finds at "
        "5 % in four of five cases; intervals: Wilson. A pair with a crash is an error and is not compared. "
        f"{machines(policies.items())}; {command(result)}.{with_note(result)}{old}"
    )


paired = Table(
    _paired_columns,
    lambda result: [
        {
            **row,
            "name": row["name"] + fell_back(result["policies"][row["name"]]["engines"]),
            "sees": smallest_difference(row["pairs"], row["lost"] + row["gained"]),
        }
        for row in sorted(result["rows"], key=lambda row: row["steps"] or 0)
    ],
    _paired_note,
)


def _stress(result: Row) -> str:
    suites = result["protocol"]["suite"].replace(",", " and ")
    return (
        f"Stress: {stress_of(result) or 'none'}, on {suites}.\n\n"
        f"![Success of each policy under stress, with intervals](../benchmarks/results/{STRESS_PICTURE})\n"
    )


stressed = blocks(paired, _stress)

# -- late answers -------------------------------------------------------------------------------------------------


def _late_systems(bench: Row, hz: float) -> dict[int, list[str]]:
    """Ticks to the systems whose answers come that late; no answer comes at the tick of its observation."""
    found: dict[int, list[str]] = {}
    most = max(row["steps"] for row in bench["rows"])
    for row in (row for row in bench["rows"] if row["steps"] == most):
        ticks = max(1, math.ceil(row["median_ms"] * hz / 1e3))
        found.setdefault(ticks, []).append(f"{row['system']} ({row['median_ms']:.0f} ms)")
    return found


def _late_rows(results: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """A row for each latency that was played or that a system has. `results`: grids of `eval.libero.late`, and a
    `vla-accel bench`."""
    grids, bench = results
    hz = grids[0]["control_hz"]
    systems, points = _late_systems(bench, hz), [row for grid in grids for row in grid["rows"]]
    for ticks in sorted({*(row["latency_ticks"] for row in points), *systems}):
        found = {row["chunking"]: row for row in points if row["latency_ticks"] == ticks}
        yield {"ticks": ticks, "ms": 1e3 * ticks / hz, "systems": ", ".join(systems.get(ticks, ())) or None, **found}


def _late_rate(row: Row | None) -> str:
    if row is None or row["rate"] is None:
        return "-"
    return f"{with_interval(row)} of {row['episodes']}" + (f", {row['errors']} crashed" if row["errors"] else "")


def _late_columns(results: Sequence[Any]) -> dict[str, Cell]:
    played = {row["chunking"] for grid in results[0] for row in grid["rows"]}
    kinds = [kind for kind in LABELS if kind in played]
    each: dict[str, Cell] = {LABELS[kind]: lambda row, kind=kind: _late_rate(row.get(kind)) for kind in kinds}
    return {"ticks late": "{ticks}", "ms": "{ms:.0f}", **each, "systems this late": "{systems}"}


def _late_note(results: Sequence[Any]) -> str:
    grids = results[0]
    rows, hz = [row for grid in grids for row in grid["rows"]], grids[0]["control_hz"]
    counts = ", ".join(dict.fromkeys(str(row["steps"]) for row in rows))
    names = [command(grid) for grid in grids]
    where = machines((name.strip("`"), grid["policy"]) for name, grid in zip(names, grids, strict=True))
    old = doubts((n, g["policy"].get("policy"), g["policy"].get("weights")) for n, g in zip(names, grids, strict=True))
    return (
        f"Success (Wilson, 95 %), {counts} denoising steps; a tick is {1e3 / hz:.0f} ms. Systems: π0.5 at its "
        "published size, by the median of a call in [the table above](#latency). A dash: not played. "
        f"{where}; {names[0]}.{''.join(dict.fromkeys(map(with_note, grids)))}{old}"
    )


late = blocks(
    Table(_late_columns, _late_rows, _late_note),
    lambda _: f"![Success against latency, a line for each kind of chunks](../benchmarks/results/{LATE_PICTURE})\n",
)

# -- tuning -------------------------------------------------------------------------------------------------------


def _episodes(row: Row) -> str:
    played = row["success"]
    if played is None:
        return "-"
    bound = f"above {100 * played['lower_bound']:+.1f} points"
    return f"{played['lost']} / {played['gained']} of {played['pairs']}, {bound}"


def _tune_note(result: Row) -> str:
    left_out = "; ".join(f"{name}: {why}" for name, why in result["left_out"].items())
    return (
        f"**{result['chosen']}** is {result['times_as_fast']:.1f} times as fast as FP32 eager: {result['why']}. "
        f"{machine(result)}; {result['seconds'] / 60:.0f} minutes; {command(result)}."
        + (f" Not tried: {left_out}." if left_out else "")
    )


tune = blocks(
    Table(
        {
            "configuration": lambda row: f"**{row['name']}**" if row["chosen"] else row["name"],
            "median ms": "{latency[median_ms]:.2f}",
            "cosine": "{agreement[cosine]:.6f}",
            "lost / gained": _episodes,
            "verdict": lambda row: "chosen" if row["chosen"] else row["dropped"] or "the reference",
        },
        lambda result: sorted(result["tried"], key=lambda row: (row["latency"] or {}).get("median_ms", math.inf)),
        _tune_note,
    ),
    lambda _: f"![Latency against disagreement with FP32 eager](../benchmarks/results/{TUNE_PICTURE})\n",
)
