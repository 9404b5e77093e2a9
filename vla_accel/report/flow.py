"""The report of `vla-accel flow`: how far schedules end from the exact flow, and what a call with each takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from vla_accel.report import charts
from vla_accel.report.conditions import conditions, ledger, machine
from vla_accel.report.page import Cell, Number, Page, Picture, Section, Table, Text

Row = Mapping[str, Any]
ONE_CHECKPOINT = (
    "These errors and times are this checkpoint's on this machine: the velocity of another one may bend elsewhere."
)
COLUMNS = (
    "Spread: the standard deviation of the actions. Minus default, bound: the one-sided 95 % upper bound of the mean "
    "error minus the default's; a schedule whose bound is at most 0 is no further from the exact flow. Detectable: the "
    "smallest difference from the default that so many observations detect with a power of 80 %."
)
"""The columns of `judged`."""


def page(result: Mapping[str, Any]) -> Page:
    """The page of a report of schema `vla_accel.flow/1`."""
    points = flow_points(result["rows"])
    words = "; ".join(f"{p.label}: {p.x:.2f} ms, {p.y:.2f} %" for p in points)
    title = (
        "Median of a call against the error of the final actions; the line joins those that no other schedule beats in "
        "both, a cross marks a schedule that may end further from the exact flow than the default"
    )
    picture = Picture(title, f"Points: {words}.", partial(draw_flow, points), judged(result))
    more = {"observations": result["observations"] or "random", "config": result["config"], "seed": result["seed"]}
    sections = [
        Section("Error against time", [picture, Text(COLUMNS), Text(ONE_CHECKPOINT)]),
        Section("By dimension", [dimensions(result)]),
        ledger([(result["config"], result["engines"])]),
        conditions(result["command"], result["hardware"], result["software"], **more),
    ]
    return Page(f"Denoising schedules of {result['checkpoint']}", " ".join(summary(result)), sections)


def summary(result: Mapping[str, Any]) -> list[str]:
    """The result, how exact the exact flow is, and what the comparison could have missed."""
    default, chosen = result["rows"][0], chosen_of(result)
    if chosen is default:
        text = f"Keep the checkpoint's own schedule, {default['name']}: no other one is shown to end as near."
    else:
        text = (
            f"Chosen: {_full_name(chosen)}. It ends no further from the exact flow than the checkpoint's own schedule, "
            f"{default['name']}: its error is {_percent(chosen)} of the spread, compared with {_percent(default)}. "
            f"{_times(chosen, default)} on {machine(result['hardware'])}."
        )
    exact = (
        f"Computed with half as many steps, the exact flow changes by {result['half_error']:.2%} of the spread; "
        f"{result['euler_steps']} uniform Euler steps differ from it by {result['euler_error']:.1%}."
    )
    if seen := [row["difference"]["detectable"] for row in result["rows"][1:]]:
        exact += (
            f" With {result['judged_on']} observations, differences from the default of {min(seen):.1%} to "
            f"{max(seen):.1%} (by schedule) are detected with a power of 80 %."
        )
    return [text, exact, ONE_CHECKPOINT]


def judged(result: Mapping[str, Any]) -> Table:
    """A row for each schedule."""
    body: list[list[Cell]] = []
    for row in result["rows"]:
        error, difference = row["error"], row["difference"]
        times = ", ".join(f"{t:g}" for t in row["schedule"]) if isinstance(row["schedule"], list) else "-"
        interval = f"{100 * error['low']:.1f} to {100 * error['high']:.1f}"
        compared: list[Cell] = [Number(100 * difference["upper"], "{:+.2f}"), Number(100 * difference["detectable"])]
        compared = ["-", "-"] if row is result["rows"][0] else compared
        flips = Number(row["flips"], "{}") if result["commands"] else "-"
        last = [flips, Number(row["median_ms"]), verdict(row, result)]
        body.append([row["name"], times, Number(100 * error["value"]), interval, *compared, *last])
    header = (
        *("schedule", "times", "error %", "95 % interval", "minus default %, bound", "detectable %"),
        *(f"flips of {result['commands']}", "median ms", "verdict"),
    )
    title = (
        f"Error of the final actions against the exact flow, in % of their spread; {result['judged_on']} observations, "
        f"{result['searched_on']} others chose the searched times"
    )
    return Table(title, header, body)


def dimensions(result: Mapping[str, Any]) -> Table:
    """A row for each schedule, a column for each dimension of the robot's action."""
    names = [f"{i} (binary)" if i in result["binary"] else f"{i}" for i in range(len(result["spread"]))]
    rows = [("spread", result["spread"]), *((row["name"], row["dimensions"]) for row in result["rows"])]
    body: list[list[Cell]] = [[name, *(Number(value, "{:.2g}") for value in values)] for name, values in rows]
    return Table("Mean error by dimension of the robot's action, in its units", ("schedule", *names), body)


def flow_points(rows: Sequence[Row]) -> list[charts.Point]:
    """Latency against error in percent of the spread."""
    known = [(row["median_ms"], 100 * row["error"]["value"]) for row in rows]
    return [
        charts.Point(
            row["name"], *here, chosen=row["chosen"], dropped=not row["passed"], reference=row is rows[0],
            front=not any(x <= here[0] and y <= here[1] and (x, y) != here for x, y in known),
        )
        for row, here in zip(rows, known, strict=True)
    ]  # fmt: skip


def draw_flow(points: Sequence[charts.Point], narrow: bool = False) -> Any:
    """Latency against error: a matplotlib figure."""
    return charts.scatter(points, x="median of one call [ms]", y="error [% of the spread]", narrow=narrow)


def chosen_of(result: Mapping[str, Any]) -> Row:
    """The row of the chosen schedule."""
    return next(row for row in result["rows"] if row["chosen"])


def verdict(row: Row, result: Mapping[str, Any]) -> str:
    """Whether a schedule was chosen, or why not."""
    if row["chosen"]:
        return "chosen"
    if row is result["rows"][0]:
        return "the default"
    return "no further" if row["passed"] else "may be further"


def _full_name(row: Row) -> str:
    times = row["schedule"]
    return f"{row['name']} ({', '.join(f'{t:g}' for t in times)})" if isinstance(times, list) else row["name"]


def _times(chosen: Row, default: Row) -> str:
    took = f"A call takes {chosen['median_ms']:.2f} ms"
    if chosen["num_steps"] == default["num_steps"]:  # the times of the steps do not change the work
        return f"{took}, as with the default,"
    return f"{took} instead of {default['median_ms']:.2f}"


def _percent(row: Row) -> str:
    return f"{row['error']['value']:.1%}"
