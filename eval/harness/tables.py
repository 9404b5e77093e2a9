"""The tables on the terminal at the end of a run, from the summary of `report.summarise_run`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import rich.table
from rich.console import Console

from eval.harness.report import WHOLES, policy_name
from vla_accel.report.page import Number, Table

RATES = ("Success", "95% interval", "Errors")
WIDE = 150  # a terminal that holds the summary in one table
UNWATCHED = 180  # columns without a terminal


def stderr_console() -> Console:
    """The console for progress and tables; without a terminal its lines are long. Brackets are no markup."""
    width = None if Console(stderr=True).is_terminal else UNWATCHED
    return Console(stderr=True, highlight=False, markup=False, emoji=False, width=width)


def run_title(result: Mapping[str, Any]) -> str:
    """The policy, the suite, and how much of it was played."""
    protocol = result["protocol"]
    part = f", part {result['shard']}" if "shard" in result else ""
    stress = "".join(f", {name} {value:g}" for name, value in protocol.get("stress", {}).items())
    several = " of each" if "," in protocol["suite"] else ""
    limit = protocol["max_steps"]
    limit = limit if isinstance(limit, int) else " and ".join(map(str, limit))
    tasks, trials = len(protocol["tasks"]), protocol["trials"]
    return (
        f"{policy_name(result)} on {protocol['suite']}: {tasks} task{'s' * (tasks > 1)}{several} x {trials} "
        f"trial{'s' * (trials > 1)}{part}, {limit} actions at most (limit: {protocol['max_steps_source']}){stress}"
    )


def print_summary(console: Console, summary: Mapping[str, Any], *, title: str) -> None:
    """Print the sweep over step counts, suites, tasks, the fit, the target and warnings."""
    for table in _tables(summary, title, wide=console.width >= WIDE):
        # Without a title of its own, since rich would wrap it to the width of the table.
        console.print(f"\n{table.title}", style="bold", soft_wrap=True)
        shown = rich.table.Table()
        for index, name in enumerate(table.header):
            left = index == 0 and name != "Steps"
            wraps = left or (table.title == "Components" and console.width < WIDE)
            shown.add_column(name, justify="left" if left else "right", no_wrap=not wraps)
        for row in table.rows:
            shown.add_row(*map(str, row))
        console.print(shown)
    if fastest := _fastest(summary):
        console.print(_verdict(fastest["target"]))
    for warning in summary["warnings"]:
        console.print(f"warning: {warning}", style="yellow")


def _tables(summary: Mapping[str, Any], title: str, *, wide: bool) -> Iterator[Table]:
    rows = summary["rows"]
    rates = [[_steps(row), *_rate(row["success"]), *_latency(row["breakdown"])] for row in rows]
    names = dict.fromkeys(name for row in rows if row["breakdown"] for name in row["breakdown"]["components"])
    names = [name for name in names if name not in WHOLES]
    parts = [[_part(row["breakdown"], name) for name in names] for row in rows]
    header, more = ("Steps", *RATES, "Latency (ms)", "Hz"), [f"{name} (ms)" for name in names]
    if wide:
        yield Table(title, [*header, *more], [[*a, *b] for a, b in zip(rates, parts, strict=True)])
    else:
        yield Table(title, header, rates)
        if names:
            steps = [[_steps(row), *cells] for row, cells in zip(rows, parts, strict=True)]
            yield Table("Components", ["Steps", *more], steps)
    if "suites" in rows[0]:
        found = [(suite["suite"], row, suite) for row in rows for suite in row["suites"]]
        found.sort(key=lambda one: [s["suite"] for s in rows[0]["suites"]].index(one[0]))
        found += [("all", row, row["success"]) for row in rows]
        yield Table("Success by suite", ("Suite", "Steps", *RATES), [[n, _steps(r), *_rate(s)] for n, r, s in found])
    tasks = [
        [f"{task.get('suite', '')} {task['task_id']}: {task['task']}".strip(), _steps(row), *_rate(task)]
        for same in zip(*(row["tasks"] for row in rows), strict=True)
        for row, task in zip(rows, same, strict=True)
    ]
    yield Table("Success by task", ("Task", "Steps", *RATES), tasks)
    if fit := summary["denoise_fit"]:
        line = f"{fit['component']} time = {fit['intercept_ms']:.2f} ms + {fit['slope_ms']:.2f} ms x steps"
        line += " (two points define the line)" if len(fit["rows"]) == 2 else ""
        cells = [
            [str(r["steps"]), Number(r["predicted_ms"]), Number(r["measured_ms"]), f"{r['error_percent']:+.1f}%"]
            for r in fit["rows"]
        ]
        yield Table(line, ("Steps", "Predicted (ms)", "Measured (ms)", "Error"), cells)
    if fastest := _fastest(summary):
        target = fastest["target"]
        steps = "" if fastest["steps"] is None else f" at steps = {fastest['steps']}"
        line = f"For {target['target_hz']:g} Hz ({target['budget_ms']:.1f} ms){steps}, each component alone"
        goals = [[name, Number(goal["now_ms"]), *_goal(target, goal)] for name, goal in target["components"].items()]
        yield Table(line, ("Component", "Now (ms)", "Must reach (ms)", "Speed-up"), goals)


def _steps(row: Mapping[str, Any]) -> str:
    return "-" if row["steps"] is None else str(row["steps"])


def _rate(rate: Mapping[str, Any]) -> tuple[str, str, str]:
    value = "-" if rate["rate"] is None else f"{100 * rate['rate']:.1f}%"
    interval = f"{100 * rate['wilson_95_low']:.1f}-{100 * rate['wilson_95_high']:.1f}%"
    return f"{value} ({rate['successes']}/{rate['episodes']})", interval, str(rate["errors"])


def _latency(breakdown: Mapping[str, Any] | None) -> tuple[Number, Number]:
    if not breakdown:
        return Number(None), Number(None)
    return Number(breakdown["components"]["total"]["mean_ms"]), Number(breakdown["hz"], "{:.1f}")


def _part(breakdown: Mapping[str, Any] | None, name: str) -> str:
    part = breakdown and breakdown["components"].get(name)
    return f"{part['mean_ms']:.2f} ({100 * part['share']:.1f}%)" if part else "-"


def _fastest(summary: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The row of the fastest step count, if any was timed by component."""
    timed = [row for row in summary["rows"] if row["target"] and row["target"]["components"]]
    return min(timed, key=lambda row: row["target"]["total_ms"], default=None)


def _goal(target: Mapping[str, Any], goal: Mapping[str, Any]) -> tuple[str, str]:
    """What a component would have to reach, if no other changed."""
    if target["met"]:
        return "keep", "-"
    if goal["allowed_ms"] is None:
        return "not enough alone", "-"
    return f"{goal['allowed_ms']:.2f}", f"{goal['speedup']:.1f}x"


def _verdict(target: Mapping[str, Any]) -> str:
    """One sentence: the target is met, or which component prevents it."""
    hz = f"{target['target_hz']:g} Hz"
    now = f"{target['total_ms']:.1f} ms ({1e3 / target['total_ms']:.1f} Hz)"
    if target["met"]:
        return f"{hz} is met: a call takes {now}."
    name, largest = max(target["components"].items(), key=lambda item: item[1]["now_ms"])
    enough = "cannot" if largest["allowed_ms"] is None else "can"
    return (
        f"{hz} is not met: a call takes {now}, {target['overall_speedup']:.2f}x too long. "
        f"{name} is the largest part, and making it faster alone {enough} be enough."
    )
