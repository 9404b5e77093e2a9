"""The tables at the end of a run, from the summary that `report.summarise_run` makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from eval.harness.report import WHOLES, policy_name

Columns = dict[str, list[str]]
RATE_TITLES = ("Success", "95% interval", "Errors")
WIDE = 150  # a terminal that holds the summary in one table
UNWATCHED = 180  # columns without a terminal


def stderr_console() -> Console:
    """The console for progress and tables; without a terminal its lines are long. Brackets are no markup."""
    width = None if Console(stderr=True).is_terminal else UNWATCHED
    return Console(stderr=True, highlight=False, markup=False, emoji=False, width=width)


def run_title(result: Mapping[str, Any]) -> str:
    """What a result is of: the policy, the suite and how much of it."""
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
    """Print everything the summary holds: sweep, tasks, fit, target, warnings."""
    rows = summary["rows"]
    rates, parts = sweep_columns(rows)
    if console.width >= WIDE:
        _show(console, _table({**rates, **parts}, title))
    else:  # a narrow terminal gets the same columns in two tables
        _show(console, _table(rates, title))
        if parts:
            _show(console, _table({"Steps": rates["Steps"], **parts}, "Components", wrap=True))
    if "suites" in rows[0]:
        _show(console, suite_table(rows))
    _show(console, task_table(rows))
    if summary["denoise_fit"]:
        _show(console, fit_table(summary["denoise_fit"]))
    timed = [row for row in rows if row["target"] and row["target"]["components"]]
    if timed:
        fastest = min(timed, key=lambda row: row["target"]["total_ms"])
        _show(console, target_table(fastest))
        console.print(target_verdict(fastest["target"]))
    for warning in summary["warnings"]:
        console.print(f"warning: {warning}", style="yellow")


def sweep_columns(rows: Sequence[Mapping[str, Any]]) -> tuple[Columns, Columns]:
    """Per step count: success, interval, latency and Hz; and each component with its share."""
    rates: Columns = {"Steps": [_steps(row["steps"]) for row in rows]}
    cells = zip(*(_rate_cells(row["success"]) for row in rows), strict=True)
    rates |= {name: list(column) for name, column in zip(RATE_TITLES, cells, strict=True)}
    breakdowns = [row["breakdown"] for row in rows]
    totals = [b and b["components"]["total"]["mean_ms"] for b in breakdowns]
    rates["Latency (ms)"] = [_number(total, "{:.2f}") for total in totals]
    rates["Hz"] = [_number(b and b["hz"], "{:.1f}") for b in breakdowns]
    parts: Columns = {}
    for name in _parts(rows):
        found = [b and b["components"].get(name) for b in breakdowns]
        parts[f"{name} (ms)"] = [
            f"{part['mean_ms']:.2f} ({100 * part['share']:.1f}%)" if part else "-" for part in found
        ]
    return rates, parts


def suite_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One row per suite and step count, and all of them together."""
    table = Table(title="Success by suite")
    for name in ("Suite", "Steps", *RATE_TITLES):
        table.add_column(name, justify="left" if name == "Suite" else "right", no_wrap=True)
    for index, suite in enumerate(rows[0]["suites"]):
        for row in rows:
            label = suite["suite"] if row is rows[0] else ""
            table.add_row(label, _steps(row["steps"]), *_rate_cells(row["suites"][index]))
    for row in rows:
        table.add_row("all" if row is rows[0] else "", _steps(row["steps"]), *_rate_cells(row["success"]))
    return table


def task_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One row per task and step count."""
    table = Table(title="Success by task")
    table.add_column("Task", overflow="fold")
    for name in ("Steps", *RATE_TITLES):
        table.add_column(name, justify="right", no_wrap=True)
    for index in range(len(rows[0]["tasks"])):
        for row in rows:
            task = row["tasks"][index]
            suite = f"{task['suite']} " if "suite" in task else ""
            label = f"{suite}{task['task_id']}: {task['task']}" if row is rows[0] else ""
            table.add_row(label, _steps(row["steps"]), *_rate_cells(task))
    return table


def fit_table(fit: Mapping[str, Any]) -> Table:
    """Predicted and measured time of the component that grows with the step count."""
    table = Table(
        title=f"{fit['component']} time = {fit['intercept_ms']:.2f} ms + {fit['slope_ms']:.2f} ms x steps",
        caption="two points define the line" if len(fit["rows"]) == 2 else None,
    )
    for name in ("Steps", "Predicted (ms)", "Measured (ms)", "Error"):
        table.add_column(name, justify="right")
    for row in fit["rows"]:
        table.add_row(
            str(row["steps"]),
            f"{row['predicted_ms']:.2f}",
            f"{row['measured_ms']:.2f}",
            f"{row['error_percent']:+.1f}%",
        )
    return table


def target_table(row: Mapping[str, Any]) -> Table:
    """What each component would have to reach for the target rate, if no other changed."""
    target = row["target"]
    steps = "" if row["steps"] is None else f" at steps = {row['steps']}"
    table = Table(title=f"For {target['target_hz']:g} Hz ({target['budget_ms']:.1f} ms){steps}, each component alone")
    table.add_column("Component")
    for name in ("Now (ms)", "Must reach (ms)", "Speed-up"):
        table.add_column(name, justify="right")
    for name, goal in target["components"].items():
        if target["met"]:
            cells = ("keep", "-")
        elif goal["allowed_ms"] is None:
            cells = ("not enough alone", "-")
        else:
            cells = (f"{goal['allowed_ms']:.2f}", f"{goal['speedup']:.1f}x")
        table.add_row(name, f"{goal['now_ms']:.2f}", *cells)
    return table


def target_verdict(target: Mapping[str, Any]) -> str:
    """One sentence: the target is met, or which components prevent it."""
    hz = f"{target['target_hz']:g} Hz"
    now = f"{target['total_ms']:.1f} ms ({1e3 / target['total_ms']:.1f} Hz)"
    if target["met"]:
        return f"{hz} is met: a call takes {now}."
    largest = max(target["components"].items(), key=lambda item: item[1]["now_ms"])
    enough = largest[1]["allowed_ms"] is not None
    return (
        f"{hz} is not met: a call takes {now}, {target['overall_speedup']:.2f}x too long. "
        f"{largest[0]} is the largest part, and making it faster alone "
        f"{'can' if enough else 'cannot'} be enough."
    )


def _table(columns: Columns, title: str, *, wrap: bool = False) -> Table:
    table = Table(title=title)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=not wrap)
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _show(console: Console, table: Table) -> None:
    """Print a table under its title, unwrapped: rich would wrap the title to the table's width."""
    title, table.title = table.title, None
    console.print(f"\n{title}", style="bold", soft_wrap=True)
    console.print(table)


def _parts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for row in rows if row["breakdown"] for name in row["breakdown"]["components"])
    return [name for name in names if name not in WHOLES]


def _rate_cells(rate: Mapping[str, Any]) -> tuple[str, str, str]:
    value = "-" if rate["rate"] is None else f"{100 * rate['rate']:.1f}%"
    return (
        f"{value} ({rate['successes']}/{rate['episodes']})",
        f"{100 * rate['wilson_95_low']:.1f}-{100 * rate['wilson_95_high']:.1f}%",
        str(rate["errors"]),
    )


def _steps(steps: int | None) -> str:
    return "-" if steps is None else str(steps)
