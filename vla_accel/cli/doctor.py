"""`vla-accel doctor`: what this machine can run, why not and what to type, and a self-test of about five seconds; with
a checkpoint, its statistics.

The exit status is that of the self-test: an engine that cannot run here, or an extra that is not installed, is no
failure.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from vla_accel.cli.asked.engines import Doctor
from vla_accel.config import load_config
from vla_accel.engines import ENGINES
from vla_accel.engines.tensorrt_library import installed_version
from vla_accel.errors import ConfigError
from vla_accel.families.loading import load
from vla_accel.machine import driver, hardware, resolve_device, software
from vla_accel.measure.parity import cosine
from vla_accel.measure.recording import load_observations, named
from vla_accel.measure.statistics import fits
from vla_accel.policy import OptimizedPolicy
from vla_accel.progress import going_on

SCHEMA = "vla_accel.doctor/1"
STATISTICS_SCHEMA = "vla_accel.statistics/1"
LEAST_COSINE = 0.99
"""Of the self-test's actions with FP32 eager's: far below any rounding, far above any mistake."""
PACKAGE = "vla_accel"


def main(chosen: Doctor, words: list[str]) -> int:
    """Look, test and report; 0 if the self-test passed, or if a checkpoint's statistics fit the data."""
    if chosen.observations is None and chosen.count != Doctor.count:
        raise ConfigError(f"count: expected --observations with it, got {chosen.count} alone")
    if chosen.checkpoint is not None:
        return examine_checkpoint(chosen)
    for name in ("config", "observations"):
        if getattr(chosen, name) is not None:
            raise ConfigError(f"{name}: expected a checkpoint that it belongs to, got none")
    device = resolve_device(chosen.device)
    found = examine(device)
    tell = (lambda _: None) if chosen.json else partial(print, flush=True)
    tell("\n".join(summary(found)))
    with going_on("self-test", tell):  # which may take long: it loads policies and, on a GPU, compiles kernels
        test = self_test(device)
    print(json.dumps(found | {"self_test": test, "passed": test["passed"]}, indent=1) if chosen.json else verdict(test))
    return 0 if test["passed"] else 1


def examine(device: torch.device) -> dict[str, Any]:
    """Everything but the self-test, as plain data (schema `vla_accel.doctor/1`)."""
    return {
        "schema": SCHEMA,
        "machine": {"system": platform.platform(), **hardware(device), "no_gpu": why_no_gpu()},
        "software": software() | libraries(),
        "engines": {name: {"why_not": why_not(name, device)} for name in ENGINES},
        "extras": extras(),
    }


def examine_checkpoint(chosen: Doctor) -> int:
    """Report a checkpoint's statistics, and how recorded data fit them; 1 where some data are far outside."""
    recorded = [] if chosen.observations is None else load_observations(chosen.observations, chosen.count)
    assert chosen.checkpoint is not None
    checkpoint = load(chosen.checkpoint, load_config(chosen.config), device=resolve_device(chosen.device), whole=False)
    with named(chosen.observations):
        found = fits(checkpoint.processor, recorded)
    far = any(one.far.any() for one in found)
    if chosen.json:
        content = {one.name: one.as_dict() for one in found}
        report = {"schema": STATISTICS_SCHEMA, "checkpoint": checkpoint.name, "statistics": content, "passed": not far}
        print(json.dumps(report, indent=1))
    else:
        print("\n".join(line for one in found for line in one.lines()) or "no statistics")
    return 1 if far else 0


def why_not(engine: str, device: torch.device) -> str | None:
    """Why an engine cannot run on a device, and what to type; None where it can."""
    reason = ENGINES[engine].why_not(device)
    return None if reason is None else reason.removeprefix(f"engine {engine}: ")


def why_no_gpu() -> str | None:
    """Why torch sees no GPU, and what to type; None where it sees one."""
    if torch.cuda.is_available():
        return None
    found = driver()
    there = "there is no NVIDIA driver" if found == "unknown" else f"there is an NVIDIA driver {found}"
    if torch.version.cuda is None:
        hint = "" if found == "unknown" else ": pip install --force-reinstall torch, in a build with CUDA"
        return f"torch {torch.__version__} is a build without CUDA; {there}{hint}"
    return f"torch {torch.__version__} sees no GPU; {there} (nvidia-smi says what the driver sees)"


def libraries() -> dict[str, str]:
    """Versions of what is installed of the package's dependencies, extras included."""
    found = {r.name: installed_version(r.name) for r in requirements() if not is_own(r)}
    return {name: version for name, version in sorted(found.items()) if version is not None and name != "torch"}


# -- extras -------------------------------------------------------------------------------------------------------


def requirements() -> list[Requirement]:
    """What the installed package says it needs, every extra included; empty where it runs from a bare checkout."""
    try:
        return [Requirement(text) for text in importlib.metadata.requires(PACKAGE) or []]
    except importlib.metadata.PackageNotFoundError:
        return []


def extras() -> dict[str, dict[str, Any]]:
    """By name of the extra: what is `missing` (nothing: it can be used), and what to type to `install` it."""
    needed = requirements()
    try:
        names = importlib.metadata.metadata(PACKAGE).get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:
        names = []
    return {
        name: {"missing": missing(name, needed), "install": f"pip install '{PACKAGE}[{name}]'"}
        for name in sorted(names)
    }


def missing(extra: str, needed: Sequence[Requirement]) -> list[str]:
    """Packages of an extra that are absent or of another version than it needs."""
    found: list[str] = []
    for one in needed:
        if one.marker is None or one.marker.evaluate({"extra": ""}) or not one.marker.evaluate({"extra": extra}):
            continue
        if is_own(one):  # an extra that brings others
            for other in sorted(one.extras):
                found += missing(other, needed)
            continue
        # opencv's builds with and without windows bring the same module.
        version = installed_version(one.name) or installed_version(one.name.removesuffix("-headless"))
        if version is None:
            found.append(one.name)
        elif not one.specifier.contains(version, prereleases=True):
            found.append(f"{one.name} {one.specifier} (there is {version})")
    return found


def is_own(requirement: Requirement) -> bool:
    """Whether a requirement names an extra of this package."""
    return canonicalize_name(requirement.name) == canonicalize_name(PACKAGE)


# -- the self-test ------------------------------------------------------------------------------------------------


def self_test(device: torch.device) -> dict[str, Any]:
    """One call of the bundled checkpoint in the default engine and one in FP32 eager, on the same noise."""
    began = time.perf_counter()
    try:
        policies = [OptimizedPolicy.from_pretrained("demo", c, device=str(device)) for c in (None, "eager_fp32")]
        about = policies[0].metadata
        noise = np.random.default_rng(0).standard_normal((about["action_horizon"], about["action_dim"]))
        observation = policies[0].processor.example()
        got, want = (policy.infer(observation, noise=noise)["actions"] for policy in policies)
    except Exception as error:  # whatever it is, it is the finding
        return {"passed": False, "error": f"{type(error).__name__}: {error}", "seconds": _since(began)}
    agreement = cosine(got, want)
    return {
        "passed": agreement >= LEAST_COSINE,
        "checkpoint": "demo",
        "device": str(device),
        "engines": about["engines"],
        "cosine": agreement,
        "least_cosine": LEAST_COSINE,
        "seconds": _since(began),
    }


def _since(began: float) -> float:
    return round(time.perf_counter() - began, 1)


# -- in words -----------------------------------------------------------------------------------------------------


def summary(report: dict[str, Any]) -> list[str]:
    """What was found as lines."""
    about = report["machine"]
    threads = f"{about['threads']} thread{'s' * (about['threads'] > 1)}"
    lines = ["machine", f"  {about['system']}", f"  {about['cpu']}, {threads}"]
    if about["no_gpu"] is None and "gpu" in about:
        memory, version = about["memory_gib"], about["compute_capability"]
        lines.append(f"  {about['gpu']}, compute capability {version}, {memory} GiB, driver {about['driver']}")
    else:
        lines.append(f"  no GPU: {about['no_gpu'] or 'not asked for'}")
    lines += ["software", "  " + ", ".join(f"{name} {version}" for name, version in report["software"].items())]
    lines += ["engines", *_list({name: one["why_not"] for name, one in report["engines"].items()})]
    reasons = {
        name: f"missing {', '.join(one['missing'])}: {one['install']}" if one["missing"] else None
        for name, one in report["extras"].items()
    }
    return [
        *lines,
        "extras",
        *(_list(reasons) or [f"  unknown: {PACKAGE} is not installed (pip install -e . in a checkout)"]),
    ]


def verdict(test: dict[str, Any]) -> str:
    """The self-test as a line."""
    if "error" in test:
        return f"  FAILED: {test['error']}"
    used = ", ".join(dict.fromkeys(str(engine["used"]) for engine in test["engines"]))
    return (
        f"  {'passed' if test['passed'] else 'FAILED'}: {used} on {test['device']} and FP32 eager agree to a cosine of "
        f"{test['cosine']:.6f} (at least {test['least_cosine']} wanted), {test['seconds']} s"
    )


def _list(reasons: dict[str, str | None]) -> list[str]:
    width = max(map(len, reasons), default=0)
    return [f"  {name:<{width}}  {'yes' if why is None else f'no   {why}'}" for name, why in reasons.items()]
