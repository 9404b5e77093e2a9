"""The record of how a bundled checkpoint was trained, `training.json` beside its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parent.parent / "vla_accel" / "assets" / "pi05_demo" / "training.json"
"""Of the bundled π0.5."""


def runs_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The training runs that a record tells of, the oldest first; `batch`: of all GPUs together."""
    settings = record["settings"]
    last = {
        "suites": settings["suites"],
        **{name: record[name] for name in ("gpus", "steps", "seconds")},
        "batch": record["gpus"] * settings["batch"],
    }
    return [*record.get("earlier", []), last]
