"""The report of `vla-accel parity`: how well final actions and components agree with FP32 eager."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vla_accel.report.charts import Bar
from vla_accel.report.conditions import conditions, fell_back, ledger
from vla_accel.report.page import Number, Page, Section, Table, bars_picture

FIGURES = ("cosine", "median_cosine", "worst_cosine", "max_error", "mean_error")


def page(report: Mapping[str, Any], command: Sequence[str]) -> Page:
    """The page of a report of schema `vla_accel.parity/1`."""
    parts = _parts(report)
    # A cosine of equal vectors may round to more than one, and a bar has no negative length.
    apart = {name: max(0.0, 1 - found["cosine"]) for name, found in parts.items()}
    picture = bars_picture(
        "Disagreement with FP32 eager, one minus the cosine: components in the order they run, then the final actions",
        [Bar(name, {"1 - cosine": value}, f"{value:.2e}") for name, value in apart.items()],
        "1 - cosine",
        agreement(report),
    )
    dimensions = {str(i): found for i, found in enumerate(report["dimensions"])}
    names = ("cosine", "max_error", "mean_error")
    by_dimension = _table("By dimension of the robot's actions", "dimension", names, dimensions)
    more = {"weights": report["weights"], "observations": report["recorded"] or "random"}
    sections = [
        Section("Agreement", [picture, by_dimension]),
        ledger([(report["name"], report["engines"])]),
        conditions(command, report["hardware"], report["software"], **more),
    ]
    return Page(f"Agreement of {report['name']}", summary(report), sections)


def summary(report: Mapping[str, Any]) -> str:
    """The verdict, and the figures that it is based on."""
    verdict = "agrees" if report["passed"] else "does NOT agree"
    chunks = report["observations"] * report["draws"]
    rest = "-" if report["rest_cosine"] is None else f"{report['rest_cosine']:.6f}"
    text = (
        f"{report['name']}{fell_back(report['engines'])} {verdict} with FP32 eager on {chunks} chunks of "
        f"{report['observations']} observations. Commands flipped in {report['flipped']} of them. Cosine of the final "
        f"actions in the others: {rest}"
    )
    text += "." if report["threshold"] is None else f" (at least {report['threshold']} required)."
    if report.get("relative_error") is not None:
        text += f" The error is {report['relative_error']:.1%} of the change between observations"
        eager = report.get("eager_error")
        text += "." if eager is None else f", and {eager:.1%} in eager of the same dtype."
    if report.get("reasons"):  # older reports have none
        text += f" Reasons: {'; '.join(report['reasons'])}."
    return text


def _parts(report: Mapping[str, Any]) -> dict[str, Mapping[str, float]]:
    actions = {"actions (normalized)": report["actions"], "actions (robot)": report["robot_actions"]}
    return {**report["components"], **actions}


def agreement(report: Mapping[str, Any]) -> Table:
    """A row for each component, and for the final actions."""
    return _table("Agreement with FP32 eager", "what", FIGURES, _parts(report))


def _table(title: str, first: str, names: Sequence[str], rows: Mapping[str, Mapping[str, float]]) -> Table:
    forms = {name: "{:.2e}" if "error" in name else "{:.6f}" for name in names}
    body = [[row, *(Number(values[name], form) for name, form in forms.items())] for row, values in rows.items()]
    return Table(title, (first, *(name.replace("_", " ") for name in names)), body)
