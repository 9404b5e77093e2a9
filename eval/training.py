"""The record of how a bundled checkpoint was trained: `training.json` in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vla_accel.checkpoints.bundled import NAMED

DEFAULT_GPU = "NVIDIA H200"
"""The GPU of runs whose record does not name one."""


def record_of(checkpoint: str | None) -> Path | None:
    """The record of a bundled checkpoint; None if there is none."""
    path = NAMED[checkpoint] / "training.json" if checkpoint in NAMED else None
    return path if path is not None and path.is_file() else None


def runs_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The training runs of a record, the oldest first. `batch`: over all GPUs; `gpu`: their model; `tower_of`: the
    family of a run from which these weights only have the vision tower."""
    settings = record["settings"]
    last = {
        "suites": settings["suites"],
        **{name: record[name] for name in ("gpus", "steps", "seconds")},
        "gpu": record.get("gpu", DEFAULT_GPU),
        "batch": record["gpus"] * settings["batch"],
    }
    return [*record.get("earlier", []), last]
