"""`vla-accel doctor`: what this machine can run, with a short self-test; or the statistics of a checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vla_accel.cli.options import Checkpoint, Count
from vla_accel.config import load_config
from vla_accel.errors import ConfigError
from vla_accel.measure.recording import load_observations, named
from vla_accel.measure.statistics import fits
from vla_accel.progress import going_on

STATISTICS_SCHEMA = "vla_accel.statistics/1"


@dataclass(frozen=True)
class Doctor:
    """Report what this machine can run, and test it with the bundled checkpoint: one call in the default engine and one
    in FP32 eager must agree. The exit status is the test's. On a GPU the very first test compiles kernels.

    With a checkpoint, print the ranges of its states and actions instead. With recorded observations, also print the
    share of values outside these ranges; the exit status is 1 if some are far outside."""

    checkpoint: Checkpoint = None
    """A folder, a bundled checkpoint's name or one on the hub."""
    config: str | None = None
    """With a checkpoint: a YAML or JSON file with the settings that it lacks: preset, tokenizer, embodiment."""
    observations: Path | None = None
    """With a checkpoint: observations that vla_accel.measure.recording.save_observations wrote. If they have a key
    `actions`, its values are compared with the range of the actions."""
    count: Count = 256
    """Maximum number of observations, spread over the file."""
    json: bool = False
    """Print one JSON document instead of the summary."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto is the GPU if there is one."""


def main(options: Doctor, words: list[str]) -> int:
    """Examine, test and report; 0 if the self-test passed, or if a checkpoint's statistics fit the data."""
    from vla_accel.machine import resolve_device
    from vla_accel.measure import diagnosis

    if options.observations is None and options.count != Doctor.count:
        raise ConfigError(f"count: expected --observations with it, got {options.count} alone")
    device = resolve_device(options.device)
    if options.checkpoint is not None:
        return examine_checkpoint(options.checkpoint, options, device)
    for name in ("config", "observations"):
        if getattr(options, name) is not None:
            raise ConfigError(f"{name}: expected a checkpoint that it belongs to, got none")
    found = diagnosis.examine(device)
    say = (lambda _: None) if options.json else partial(print, flush=True)
    say("\n".join(summary(found)))
    with going_on("self-test", say):  # it loads policies and, on a GPU, compiles kernels
        test = diagnosis.self_test(device)
    report = found | {"self_test": test, "passed": test["passed"]}
    print(json.dumps(report, indent=1) if options.json else verdict(test))
    return 0 if test["passed"] else 1


def examine_checkpoint(name: str, options: Doctor, device: Any) -> int:
    """Report a checkpoint's statistics, and how recorded data fit them; 1 if some data are far outside."""
    from vla_accel.families.loading import load

    recorded = [] if options.observations is None else load_observations(options.observations, options.count)
    checkpoint = load(name, load_config(options.config), device=device, whole=False)
    with named(options.observations):
        found = fits(checkpoint.processor, recorded)
    far = any(one.far.any() for one in found)
    if options.json:
        content = {one.name: one.as_dict() for one in found}
        report = {"schema": STATISTICS_SCHEMA, "checkpoint": checkpoint.name, "statistics": content, "passed": not far}
        print(json.dumps(report, indent=1))
    else:
        print("\n".join(line for one in found for line in one.lines()) or "no statistics")
    return 1 if far else 0


def summary(report: dict[str, Any]) -> list[str]:
    """The report as lines."""
    about = report["machine"]
    threads = f"{about['threads']} thread{'s' * (about['threads'] > 1)}"
    lines = ["machine", f"  {about['system']}", f"  {about['cpu']}, {threads}"]
    if about["no_gpu"] is None and "gpu" in about:
        memory, version = about["memory_gib"], about["compute_capability"]
        lines.append(f"  {about['gpu']}, compute capability {version}, {memory} GiB, driver {about['driver']}")
    else:
        lines.append(f"  no GPU: {about['no_gpu'] or 'not requested'}")
    lines += ["software", "  " + ", ".join(f"{name} {version}" for name, version in report["software"].items())]
    lines += ["engines", *_list({name: one["why_not"] for name, one in report["engines"].items()})]
    reasons = {
        name: f"missing {', '.join(one['missing'])}: {one['install']}" if one["missing"] else None
        for name, one in report["extras"].items()
    }
    return [
        *lines,
        "extras",
        *(_list(reasons) or ["  unknown: vla_accel is not installed (pip install -e . in a checkout)"]),
    ]


def verdict(test: dict[str, Any]) -> str:
    """The self-test as a line."""
    if "error" in test:
        return f"  FAILED: {test['error']}"
    used = ", ".join(dict.fromkeys(str(engine["used"]) for engine in test["engines"]))
    return (
        f"  {'passed' if test['passed'] else 'FAILED'}: {used} on {test['device']} and FP32 eager agree to a cosine of "
        f"{test['cosine']:.6f} (at least {test['least_cosine']} required), {test['seconds']} s"
    )


def _list(reasons: dict[str, str | None]) -> list[str]:
    width = max(map(len, reasons), default=0)
    return [f"  {name:<{width}}  {'yes' if why is None else f'no   {why}'}" for name, why in reasons.items()]
