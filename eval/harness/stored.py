"""Stored runs that a new one can stand beside: of the same model, on the same kind of device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval.harness.report import read_result
from vla_accel.errors import ConfigError

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def stored_like(result: Mapping[str, Any], benchmark: str) -> dict[str, Mapping[str, Any]]:
    """Stored results of a benchmark, by "stored: NAME", whose timed model and kind of device are those of `result`.

    Weights may differ: they cost no time. Empty where nothing was timed.
    """
    mine = _timed(result)
    found: dict[str, Mapping[str, Any]] = {}
    for path in sorted(RESULTS.glob(f"{benchmark}_*.json")) if mine else ():
        try:
            stored, _ = read_result(path)
        except ConfigError:
            continue  # another kind of stored file, such as a comparison
        if _timed(stored) == mine:
            found[f"stored: {path.stem}"] = stored
    return found


def _timed(result: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Model and kind of device of the run's latencies, or None."""
    for row in result["summary"]["rows"]:
        if row["breakdown"]:
            # A server says of its model what it likes.
            model = row["breakdown"]["model"]
            sizes = [model.get(name) for name in ("kind", "parameters")] if isinstance(model, Mapping) else [model]
            return (*sizes, row["breakdown"]["hardware"].get("device"))
    return None
