"""The report of a `vla-accel parity`: how well final actions and components agree with FP32 eager."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vla_accel.report import charts
from vla_accel.report.conditions import conditions, fell_back, ledger
from vla_accel.report.page import Number, Page, Picture, Section, Table

FIGURES = ("cosine", "median_cosine", "worst_cosine", "max_error", "mean_error")


def page(report: Mapping[str, Any], command: Sequence[str]) -> Page:
    """The page of a report of schema `vla_accel.parity/1`."""
    verdict = "agrees" if report["passed"] else "does NOT agree"
    chunks = report["observations"] * report["draws"]
    rest = "-" if report["rest_cosine"] is None else f"{report['rest_cosine']:.6f}"
    ran = report["name"] + fell_back(report["engines"])
    summary = (
        f"{ran} {verdict} with FP32 eager over {chunks} chunks of {report['observations']} observations; "
        f"in {report['flipped']} of them a command fell the other way. Cosine of the final actions of the others "
        f"{rest}, at least {report['threshold']} wanted."
    )
    if report.get("relative_error") is not None:
        summary += f" The error is {report['relative_error']:.1%} of what another observation changes."
    # Reports from before these were judged have none.
    if report.get("reasons"):
        summary += f" Why not: {'; '.join(report['reasons'])}."
    more = {"weights": report["weights"], "observations": report["recorded"] or "random"}
    return Page(
        f"Agreement of {report['name']}",
        summary,
        [
            Section("Agreement", [_errors(report), _dimensions(report["dimensions"])]),
            ledger([(report["name"], report["engines"])]),
            conditions(command, report["hardware"], report["software"], **more),
        ],
    )


def _errors(report: Mapping[str, Any]) -> Picture:
    parts = {
        **report["components"], "actions (normalised)": report["actions"], "actions (robot)": report["robot_actions"],
    }  # fmt: skip
    # A cosine of equal vectors may round to more than one, and no bar is shorter than none.
    apart = {name: max(0.0, 1 - a["cosine"]) for name, a in parts.items()}
    bars = [charts.Bar(name, {"1 - cosine": one}, f"{one:.2e}") for name, one in apart.items()]
    body = [
        [name, *(Number(a[key], "{:.2e}" if "error" in key else "{:.6f}") for key in FIGURES)]
        for name, a in parts.items()
    ]
    words = "; ".join(f"{bar.label} {bar.told}" for bar in bars)
    return Picture(
        "Disagreement with FP32 eager, one minus the cosine: components in the order they run, then the final actions",
        f"Bars of one minus the cosine: {words}.",
        lambda narrow: charts.stacked(bars, unit="1 - cosine", narrow=narrow),
        Table("Agreement with FP32 eager", ("what", *(key.replace("_", " ") for key in FIGURES)), body),
    )


def _dimensions(dimensions: Sequence[Mapping[str, float]]) -> Table:
    body = [
        [str(i), Number(d["cosine"], "{:.6f}"), Number(d["max_error"], "{:.2e}"), Number(d["mean_error"], "{:.2e}")]
        for i, d in enumerate(dimensions)
    ]
    return Table("By dimension of the robot's actions", ("dimension", "cosine", "max error", "mean error"), body)
