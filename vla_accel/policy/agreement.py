"""Parity reports next to a checkpoint, which decide about lower precisions of `auto`; and the log of its choices.

A report counts only for the weights, the denoising steps and the engines with which it was made.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vla_accel.config import EngineSpec
from vla_accel.engines.auto import Shown
from vla_accel.errors import CheckpointError
from vla_accel.families.loading import Checkpoint
from vla_accel.files import write_json
from vla_accel.fp8 import fingerprint
from vla_accel.ledger import Ledger
from vla_accel.nn.flow import Schedule
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
    if why := _why_not(content, content["fingerprint"], _steps_of(content)):
        _log.warning("auto: %s will not be used: %s", path.name, why)
    write_json(path, content)
    return path


def shown(folder: Path, model: Network, schedule: Schedule) -> Shown | None:
    """Return the passed report for these weights, steps and native engines that has most components in FP8, or None.

    Logs why a report is not used.
    """
    found: list[Shown] = []
    files = sorted(folder.glob(PATTERN))
    weights = weights_of(model) if files else ""
    for path in files:
        precisions, reason = {}, "expected a parity report"
        try:
            content = json.loads(path.read_text())
            precisions = dict(content["precisions"])
            reason = _why_not(content, weights, schedule)
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"{reason}, got {error!r}"
        if reason is not None:
            _log.info("auto: %s is not used: %s", path.name, reason)
        elif "fp8" in precisions.values():
            found.append(Shown(precisions, path.name))
    return max(found, key=lambda s: (sum(p == "fp8" for p in s.precisions.values()), s.source), default=None)


def for_auto(checkpoint: Checkpoint, specs: Mapping[str, EngineSpec], schedule: Schedule) -> Shown | None:
    """A lower precision that `auto` may take: the checkpoint's folder has FP8 scales and a passed parity report for
    exactly these weights."""
    if checkpoint.kept is None or any(spec.engine != "auto" for spec in specs.values()):
        return None
    found = shown(checkpoint.kept, checkpoint.model, schedule)
    try:
        return found if found is not None and checkpoint.scales is not None else None
    except CheckpointError as error:
        _log.warning("auto: %s is ignored: %s", found and found.source, error)
        return None


def log_choices(name: str, ledger: Ledger, specs: Mapping[str, EngineSpec], device: torch.device) -> None:
    """Log the engines that `auto` built; a warning if one differs from its choice, or a GPU runs eager."""
    groups: dict[tuple[str, str], list[str]] = {}
    level = logging.INFO
    for entry in ledger.entries.values():
        if entry.requested == "auto":
            spec = specs[entry.component]
            plain = entry.used == "eager" or spec.precision == "auto"
            used = entry.used if plain else f"{entry.used} {spec.precision}"
            groups.setdefault((used, entry.reason), []).append(entry.component)
            slow = entry.used != spec.engine or (entry.used == "eager" and device.type != "cpu")
            level = logging.WARNING if slow else level
    if groups:
        text = "; ".join(f"{', '.join(names)}: {used} ({why})" for (used, why), names in groups.items())
        _log.log(level, "%s: auto chose %s", name, text)


def _steps_of(content: Mapping[str, Any]) -> Schedule:
    """The denoising steps of a report."""
    return Schedule.of(content.get("schedule"), content["num_steps"])


def _why_not(content: Mapping[str, Any], fingerprint: str, schedule: Schedule) -> str | None:
    if content["passed"] is not True:
        return "it did not pass"
    if content["fingerprint"] != fingerprint:
        return "it was made with other weights"
    if (made_with := _steps_of(content)) != schedule:
        return f"it was made with {made_with}, not {schedule}"
    used = {e["component"]: e["used"] for e in content["engines"]}
    others = sorted(part for part in content["precisions"] if used.get(part) != "native")
    return f"other engines than native ran {', '.join(others)}" if others else None
