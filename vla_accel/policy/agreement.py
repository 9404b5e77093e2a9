"""Parity reports next to a checkpoint: which lower precisions `auto` may use.

A report counts only for the weights, the number of steps and the engines with which it was made.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vla_accel.config import EngineSpec
from vla_accel.engines.auto import Shown
from vla_accel.files import write_json
from vla_accel.fp8 import fingerprint
from vla_accel.nn.network import Network

PATTERN = "parity_*.json"
"""Files of kept reports, named after the configuration: parity_native_fp8.json."""
_log = logging.getLogger("vla_accel")


def weights_of(model: Network) -> str:
    """The fingerprint of all of a model's weights."""
    return fingerprint(model, [name for name, _ in model.named_parameters()])


def keep(report: Mapping[str, Any], folder: Path, specs: Mapping[str, EngineSpec], name: str) -> Path:
    """Write a report of `vla-accel parity` and its precisions next to the checkpoint, and return the file's path.

    Warns about a report that `auto` will not use.
    """
    path = folder / PATTERN.replace("*", name)
    content = {**report, "precisions": {part: spec.precision for part, spec in specs.items()}}
    if why := _why_not(content, content["fingerprint"], content["num_steps"]):
        _log.warning("auto will not use %s: %s", path.name, why)
    write_json(path, content)
    return path


def shown(folder: Path, model: Network, num_steps: int) -> Shown | None:
    """Return the passed report for these weights, steps and native engines that has most components in FP8, or None.

    Logs why a report does not count.
    """
    found: list[Shown] = []
    files = sorted(folder.glob(PATTERN))
    weights = weights_of(model) if files else ""
    for path in files:
        precisions, reason = {}, "it is no parity report"
        try:
            content = json.loads(path.read_text())
            precisions = dict(content["precisions"])
            reason = _why_not(content, weights, num_steps)
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"{reason}: {error!r}"
        if reason is not None:
            _log.info("auto: %s does not count: %s", path.name, reason)
        elif "fp8" in precisions.values():
            found.append(Shown(precisions, path.name))
    return max(found, key=lambda s: (sum(p == "fp8" for p in s.precisions.values()), s.source), default=None)


def _why_not(content: Mapping[str, Any], fingerprint: str, num_steps: int) -> str | None:
    if content["passed"] is not True:
        return "it did not pass"
    if content["fingerprint"] != fingerprint:
        return "it was made with other weights"
    if content["num_steps"] != num_steps:
        return f"it was made with {content['num_steps']} steps, not {num_steps}"
    used = {e["component"]: e["used"] for e in content["engines"]}
    others = sorted(part for part in content["precisions"] if used.get(part) != "native")
    return f"other engines than native ran {', '.join(others)}" if others else None
