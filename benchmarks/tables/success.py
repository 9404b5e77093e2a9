"""Tables of success in LIBERO: the bundled checkpoints, their training, paired runs, late answers and tuning."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from benchmarks.tables.table import (
    NOT_STORED,
    Cell,
    Row,
    blocks,
    command,
    doubts,
    machine,
    machines,
    picture,
    plural,
    table,
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


def success(results: Sequence[Row]) -> str:
    """Success of the bundled checkpoint by suite and number of steps."""
    rows = []
    for result in results:
        for row in _rows(result):
            low, high = (f"{100 * row['success'][f'wilson_95_{end}']:.1f}" for end in ("low", "high"))
            rows.append({**row, "suite": result["protocol"]["suite"], "wilson": f"{low} to {high} %"})
    return table(
        "suite = {suite} | steps = {steps} | success = **{success[rate]:.1%}** | "
        "episodes = {success[successes]}/{success[episodes]} | Wilson 95 % = {wilson} | errors = {success[errors]}",
        rows,
        "\n\n".join(map(_conditions, results)),
    )


def tasks(results: Sequence[Row]) -> str:
    """Success by task, a table for each suite."""
    tables = []
    for result in results:
        rows = _rows(result)
        count = "{tasks[@][successes]}/{tasks[@][episodes]}"
        each = {plural(row["steps"], "step"): count.replace("@", str(i)) for i, row in enumerate(rows)}
        by_task = zip(*(row["tasks"] for row in rows), strict=True)
        lines = [{"task": tasks[0]["task"], "tasks": tasks} for tasks in by_task]
        tables.append(table({result["protocol"]["suite"]: "{task}", **each}, lines))
    return blocks(*tables)


def latency(result: Row) -> str:
    """Latency of a run's calls by number of steps."""
    share = "{parts[@][mean_ms]:.1f} ({parts[@][share]:.0%})"
    parts = {"vision ms": "vision", "KV cache ms": "kv_cache", "denoise ms": "denoise"}
    columns = {
        "steps": "{steps}",
        "mean ms": "{parts[total][mean_ms]:.1f}",
        "median ms": "{parts[total][p50_ms]:.1f}",
        "Hz": "{hz:.1f}",
        **{header: share.replace("@", name) for header, name in parts.items()},
    }
    rows = [{"steps": row["steps"], "parts": row["breakdown"]["components"]} for row in reversed(_rows(result))]
    for row in rows:
        row["hz"] = 1e3 / row["parts"]["total"]["mean_ms"]
    return table(columns, rows, _conditions(result))


def training(record: Row) -> str:
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
    rows = [
        *zip(names, lines, strict=True),
        ("observations collected", f"about {record['gpus'] * record['history'][-1]['store']}"),
        ("start states", f"{sum(task['count'] for task in started)}, seeds from {seeds}"),
        ("nearest shipped evaluation state", f"{nearest * 1e3:.1f} mm (the object that moved most)"),
        ("success while collecting, at the end", f"{won}/{played} (training start states, with bursts of noise)"),
    ]
    return table("checkpoint = {name} |  = {value}", [{"name": name, "value": value} for name, value in rows])


# -- paired runs --------------------------------------------------------------------------------------------------


def paired(result: Row) -> str:
    """Runs compared with the first of them on equal episodes."""
    policies, reference = result["policies"], result["reference"]
    rows = [
        {
            **row,
            "name": row["name"] + fell_back(policies[row["name"]]["engines"]),
            "p": f"{row['mcnemar_exact_p']:.3f}" if row["mcnemar_exact_p"] >= 0.001 else "< 0.001",
            "rates": [with_interval(row[side]) for side in ("other", "reference")],
            "sees": smallest_difference(row["pairs"], row["lost"] + row["gained"]),
        }
        for row in sorted(result["rows"], key=lambda row: row["steps"] or 0)
    ]
    old = doubts((name, run.get("policy"), run.get("weights")) for name, run in policies.items())
    return table(
        f"run = {{name}} | steps = {{steps}} | success (95 %) = {{rates[0]}} | {reference} (95 %) = {{rates[1]}} | "
        "pairs = {pairs} | regressions / improvements = {lost} / {gained} | p = {p} | detectable = {sees:.1%} | "
        "errors = {other[errors]}, {reference[errors]}",
        rows,
        f"Pairs: the same task, initial state and seed. Regressions: pairs that only {reference} won; improvements: "
        "pairs that only the run won; p: McNemar's exact test, two-sided; detectable: the smallest true difference "
        "that as many pairs detect at 5 % with a power of 80 %; intervals: Wilson. A pair with a crash is an error and "
        "is not compared. "
        f"{machines(policies.items())}; {command(result)}.{with_note(result)}{old}",
    )


def stressed(result: Row) -> str:
    """`paired` of runs under stress, with a picture."""
    suites = result["protocol"]["suite"].replace(",", " and ")
    return blocks(
        paired(result),
        f"Stress: {stress_of(result) or 'none'}, on {suites}.\n",
        picture("Success of each policy under stress, with intervals", STRESS_PICTURE),
    )


def schedules(results: Sequence[Row]) -> str:
    """`paired` of each checkpoint and stress."""
    found = []
    for result in results:
        checkpoint, stress = result["policies"][result["reference"]]["policy"], stress_of(result)
        found.append(f"`{checkpoint}`, {f'stress: {stress}' if stress else 'without stress'}\n\n{paired(result)}")
    return blocks(*found)


# -- late answers -------------------------------------------------------------------------------------------------


def late(results: Sequence[Any]) -> str:
    """A row for each latency of a run or a system. `results`: grids of `eval.libero.late`, and a `vla-accel bench`."""
    grids, bench = results
    hz, points = grids[0]["control_hz"], [row for grid in grids for row in grid["rows"]]
    systems: dict[int, list[str]] = {}
    most = max(row["steps"] for row in bench["rows"])
    for row in (row for row in bench["rows"] if row["steps"] == most):
        # No answer comes at the tick of its observation.
        ticks = max(1, math.ceil(row["median_ms"] * hz / 1e3))
        systems.setdefault(ticks, []).append(f"{row['system']} ({row['median_ms']:.0f} ms)")
    rows = []
    for ticks in sorted({*(row["latency_ticks"] for row in points), *systems}):
        found = {row["chunking"]: row for row in points if row["latency_ticks"] == ticks}
        named = ", ".join(systems.get(ticks, ())) or None
        rows.append({"ticks": ticks, "ms": 1e3 * ticks / hz, "systems": named, **found})
    kinds = [kind for kind in LABELS if any(row["chunking"] == kind for row in points)]
    each: dict[str, Cell] = {LABELS[kind]: lambda row, kind=kind: _late_rate(row.get(kind)) for kind in kinds}
    counts = ", ".join(dict.fromkeys(str(row["steps"]) for row in points))
    runs = [(command(grid).strip("`"), grid["policy"]) for grid in grids]
    old = doubts((name, policy.get("policy"), policy.get("weights")) for name, policy in runs)
    grid_table = table(
        {"ticks late": "{ticks}", "ms": "{ms:.0f}", **each, "systems this late": "{systems}"},
        rows,
        f"Success (Wilson, 95 %), {counts} denoising steps; a tick is {1e3 / hz:.0f} ms. Systems: π0.5 at its "
        "published size, by the median of a call in [the latency table](docs/results/latency.md). A dash: not run. "
        f"{machines(runs)}; {command(grids[0])}.{''.join(dict.fromkeys(map(with_note, grids)))}{old}",
    )
    return blocks(grid_table, picture("Success against latency, a line for each kind of chunks", LATE_PICTURE))


def _late_rate(row: Row | None) -> str:
    if row is None or row["rate"] is None:
        return "-"
    return f"{with_interval(row)} of {row['episodes']}" + (f", {row['errors']} crashed" if row["errors"] else "")


# -- tuning -------------------------------------------------------------------------------------------------------


_RENAMED = {
    r"it lost (\d+) and gained (\d+) of (\d+) pairs": r"\1 regressions and \2 improvements in \3 pairs",
    r"fell the other way in at least (\S+) % of chunks, ": r"flipped in at least \1 % of chunks, at most ",
}
"""Patterns in stored searches, and the words that `vla-accel tune` writes in their place today."""


def _renamed(text: str) -> str:
    for old, new in _RENAMED.items():
        text = re.sub(old, new, text)
    return text


def tune(result: Row | None) -> str:
    """Everything that a search tried, the fastest first."""
    if result is None:
        return NOT_STORED
    rows = []
    for row in sorted(result["tried"], key=lambda row: (row["latency"] or {}).get("median_ms", math.inf)):
        played, chosen = row["success"], row["chosen"]
        more = {
            "name": f"**{row['name']}**" if chosen else row["name"],
            "bound": played and f"above {100 * played['lower_bound']:+.1f} points",
            "verdict": "chosen" if chosen else _renamed(row["dropped"] or "the reference"),
        }
        rows.append({**row, **more})
    left_out = "; ".join(f"{name}: {why}" for name, why in result["left_out"].items())
    tried = table(
        "configuration = {name} | median ms = {latency[median_ms]:.2f} | cosine = {agreement[cosine]:.6f} | "
        "regressions / improvements = {success[lost]} / {success[gained]} of {success[pairs]}, {bound} | "
        "verdict = {verdict}",
        rows,
        f"**{result['chosen']}** is {result['times_as_fast']:.1f} times as fast as FP32 eager: "
        f"{_renamed(result['why'])}. Above: the proven lower bound of the candidate's success minus FP32 eager's. "
        f"{machine(result)}; {result['seconds'] / 60:.0f} minutes; {command(result)}."
        + (f" Not tried: {left_out}." if left_out else ""),
    )
    return blocks(tried, picture("Latency against disagreement with FP32 eager", TUNE_PICTURE))
