"""Tables of denoising schedules: how far they end from the exact flow, and what a call with each takes."""

from __future__ import annotations

from operator import itemgetter

from benchmarks.tables.table import Row, blocks, command, doubts, machine, picture, table, with_note
from vla_accel.report.flow import COLUMNS, judged, summary

PICTURES = {"demo": "flow_pi05_demo_h200.png", "smolvla_demo": "flow_smolvla_demo_h200.png"}
"""Checkpoint to picture."""


def flow(result: Row) -> str:
    """A row for each schedule, the result in words and the picture."""
    found, checkpoint = judged(result), result["checkpoint"]
    columns = {name: itemgetter(index) for index, name in enumerate(found.header)}
    text, exact, _ = summary(result)
    doubt = doubts([(checkpoint, checkpoint, result.get("weights"))])
    conditions = f"{found.title}. {COLUMNS} {machine(result)}; {command(result)}.{with_note(result)}{doubt}"
    drawn = picture("Error of the final actions against the median of a call", PICTURES[checkpoint])
    return blocks(table(columns, [[*map(str, row)] for row in found.rows], f"{text} {exact}\n\n{conditions}"), drawn)
