"""The conditions under which a launch plays: code, hardware, versions. Kept in the episode log and in results."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from typing import Any

from eval.harness.benchmark import Benchmark
from vla_accel import machine

PACKAGES = ("numpy", "imageio-ffmpeg")


def launch(
    benchmark: Benchmark, command: Sequence[str], *, hardware: Mapping[str, Any], workers: int
) -> dict[str, Any]:
    """The record of a launch (JSON types); `hardware`: the policy's."""
    return {
        "began": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": list(command),
        "git": machine.commit(),
        "hardware": dict(hardware),
        "software": {**software(benchmark), "platform": platform.platform()},
        "workers": workers,
    }


def software(benchmark: Benchmark) -> dict[str, str]:
    """Versions on this machine that an episode depends on."""
    versions = dict(machine.software())
    for name in (*benchmark.packages, *PACKAGES):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # optional: absent from the list means absent from the machine
    return versions
