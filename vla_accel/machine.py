"""The machine: its devices, and the hardware and software that figures were measured with."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from vla_accel.errors import ConfigError
from vla_accel.kernels.gpu import Gpu


def resolve_device(name: str) -> torch.device:
    """Return the device that a configuration or a command names. Raises ConfigError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        known = device.type in ("cpu", "cuda")
    except RuntimeError:
        known = False
    if not known:
        raise ConfigError(f"device: expected auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device: {name!r} was requested, but torch {torch.__version__} finds no CUDA GPU; auto and cpu need "
            "none, and `vla-accel doctor` reports what is missing"
        )
    return device


def devices() -> list[str]:
    """Return the devices of this machine: its GPUs, then the CPU."""
    return [*(f"cuda:{i}" for i in range(torch.cuda.device_count())), "cpu"]


def resolve_devices(names: str) -> tuple[str, ...]:
    """Return the devices of a list like `cuda:0,cuda:1`, or of `all`: every GPU, or the CPU. Raises ConfigError."""
    available = devices()
    if names == "all":
        return tuple(available[:-1] or available)
    requested = tuple("cuda:0" if name.strip() == "cuda" else name.strip() for name in names.split(","))
    for name in requested:
        if name not in available:
            raise ConfigError(f"devices: expected all, or a list of {', '.join(available)}, got {name!r}")
    return requested


def hardware(device: torch.device) -> dict[str, Any]:
    """Return the hardware that figures were measured on, as plain data."""
    info: dict[str, Any] = {"device": device.type, "cpu": _cpu_name(), "threads": torch.get_num_threads()}
    if device.type == "cuda":
        gpu = Gpu.of(device)
        assert gpu is not None
        info |= {"gpu": gpu.name, "compute_capability": gpu.version, "memory_gib": round(gpu.memory / 2**30, 1)}
        info["driver"] = driver()
    return info


def driver() -> str:
    """Return the version of the NVIDIA driver, or "unknown"."""
    with contextlib.suppress(OSError):
        return Path("/sys/module/nvidia/version").read_text().strip()
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.split()[0]
    return "unknown"


def commit() -> dict[str, Any] | None:
    """Return the commit of this code and whether the tree differs from it; None outside a repository.

    In a copy without its repository, set VLA_ACCEL_COMMIT, with "+" for a changed tree.
    """
    given = os.environ.get("VLA_ACCEL_COMMIT")
    if given:
        return {"commit": given.removesuffix("+"), "modified": given.endswith("+")}
    return _in_repository(Path(__file__).parent)


@functools.cache
def _in_repository(folder: Path) -> dict[str, Any] | None:
    """`commit` of a tracked folder; an installed package may be inside another repository (`.venv`)."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")
        return {"commit": git("rev-parse", "HEAD"), "modified": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.CalledProcessError):
        return None


def software() -> dict[str, str]:
    """Return the versions that affect speed or results."""
    import vla_accel

    versions = {"vla_accel": vla_accel.__version__, "python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    where = commit()
    if where is not None:
        versions["commit"] = where["commit"][:12] + ("+" if where["modified"] else "")
    return versions


def _cpu_name() -> str:
    with contextlib.suppress(OSError):  # not Linux
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
