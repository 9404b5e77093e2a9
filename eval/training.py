"""The record of how a bundled checkpoint was trained, `training.json` beside its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vla_accel.checkpoints.bundled import NAMED

DEFAULT_GPU = "NVIDIA H200"
"""The GPUs of the runs whose record does not name them."""


def record_of(checkpoint: str | None) -> Path | None:
    """The record of a bundled checkpoint; None for any other, and for one that has none."""
    path = NAMED[checkpoint] / "training.json" if checkpoint in NAMED else None
    return path if path is not None and path.is_file() else None


def runs_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The training runs that a record tells of, the oldest first; `batch`: of all GPUs together, which are `gpu`;
    `tower_of`: of a run that trained no more than the vision tower of these weights, the family that it was of."""
    settings = record["settings"]
    last = {
        "suites": settings["suites"],
        **{name: record[name] for name in ("gpus", "steps", "seconds")},
        "gpu": record.get("gpu", DEFAULT_GPU),
        "batch": record["gpus"] * settings["batch"],
    }
    return [*record.get("earlier", []), last]
