"""The picture of a stored `python -m eval.paired`: success of each policy on the same episodes, with intervals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eval.script import write_png
from vla_accel.report import charts

PICTURE = "libero_stress.png"


def draw_paired(result: dict[str, Any], path: Path) -> None:
    """A line for the reference and each policy: success with its Wilson interval."""
    rates = {result["reference"]: result["rows"][0]["reference"]} | {
        row["name"]: row["other"] for row in result["rows"]
    }
    values = [(rate["rate"], rate["wilson_95_low"], rate["wilson_95_high"]) for rate in rates.values()]
    write_png(charts.intervals(charts.Rates(list(rates), values), narrow=False), path)
