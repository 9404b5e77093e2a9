"""What this machine can run, why not and what to type, and a self-test; for `vla-accel doctor`."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from vla_accel.engines import ENGINES
from vla_accel.engines.tensorrt_library import installed_version
from vla_accel.machine import driver, hardware, software
from vla_accel.measure.parity import cosine
from vla_accel.policy import OptimizedPolicy

SCHEMA = "vla_accel.doctor/1"
LEAST_COSINE = 0.99
"""Of the self-test's actions with FP32 eager's: far below rounding errors, far above any mistake."""
PACKAGE = "vla_accel"


def examine(device: torch.device) -> dict[str, Any]:
    """Return everything but the self-test (schema `vla_accel.doctor/1`)."""
    return {
        "schema": SCHEMA,
        "machine": {"system": platform.platform(), **hardware(device), "no_gpu": why_no_gpu()},
        "software": software() | libraries(),
        "engines": {name: {"why_not": why_not(name, device)} for name in ENGINES},
        "extras": extras(),
    }


def why_not(engine: str, device: torch.device) -> str | None:
    """Return why an engine cannot run on a device, and what to type; None if it can."""
    reason = ENGINES[engine].why_not(device)
    return None if reason is None else reason.removeprefix(f"engine {engine}: ")


def why_no_gpu() -> str | None:
    """Return why torch sees no GPU, and what to type; None if it sees one."""
    if torch.cuda.is_available():
        return None
    found = driver()
    there = "there is no NVIDIA driver" if found == "unknown" else f"there is an NVIDIA driver {found}"
    if torch.version.cuda is None:
        hint = "" if found == "unknown" else ": pip install --force-reinstall torch, in a build with CUDA"
        return f"torch {torch.__version__} is a build without CUDA; {there}{hint}"
    return f"torch {torch.__version__} sees no GPU; {there} (nvidia-smi says what the driver sees)"


def libraries() -> dict[str, str]:
    """Return the versions of the installed dependencies, including those of extras."""
    found = {r.name: installed_version(r.name) for r in requirements() if not is_own(r)}
    return {name: version for name, version in sorted(found.items()) if version is not None and name != "torch"}


def requirements() -> list[Requirement]:
    """Return the installed package's requirements with every extra; empty for a bare checkout."""
    try:
        return [Requirement(text) for text in importlib.metadata.requires(PACKAGE) or []]
    except importlib.metadata.PackageNotFoundError:
        return []


def extras() -> dict[str, dict[str, Any]]:
    """Return, for each extra, its `missing` packages and the command to `install` it."""
    needed = requirements()
    names = importlib.metadata.metadata(PACKAGE).get_all("Provides-Extra") or [] if needed else []
    return {
        name: {"missing": missing(name, needed), "install": f"pip install '{PACKAGE}[{name}]'"}
        for name in sorted(names)
    }


def missing(extra: str, needed: Sequence[Requirement]) -> list[str]:
    """Return the packages of an extra that are absent or have another version."""
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


def self_test(device: torch.device) -> dict[str, Any]:
    """Make one call of the bundled checkpoint in the default engine and one in FP32 eager, on the same noise."""
    began = time.perf_counter()
    try:
        policies = [OptimizedPolicy.from_pretrained("demo", c, device=str(device)) for c in (None, "eager_fp32")]
        about = policies[0].metadata
        noise = np.random.default_rng(0).standard_normal((about["action_horizon"], about["action_dim"]))
        observation = policies[0].processor.example()
        got, want = (policy.infer(observation, noise=noise)["actions"] for policy in policies)
    except Exception as error:  # whatever it is, it is the finding
        found: dict[str, Any] = {"passed": False, "error": f"{type(error).__name__}: {error}"}
    else:
        agreement = cosine(got, want)
        found = {"passed": agreement >= LEAST_COSINE, "checkpoint": "demo", "device": str(device)}
        found |= {"engines": about["engines"], "cosine": agreement, "least_cosine": LEAST_COSINE}
    return found | {"seconds": round(time.perf_counter() - began, 1)}
