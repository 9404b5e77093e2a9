"""The machine: which device is meant, and what figures were measured on and with (driver, versions, commit)."""

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
    """The device that a configuration or a command names; "auto" is the GPU if there is one. Raises ConfigError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device: expected auto, cpu, cuda or cuda:N, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: expected auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device: {name!r} was asked for, but torch {torch.__version__} sees no CUDA GPU; auto and cpu do without "
            "one, and `vla-accel doctor` says what is missing"
        )
    return device


def devices() -> list[str]:
    """Every device that this machine has: its GPUs, and the CPU."""
    return [*(f"cuda:{i}" for i in range(torch.cuda.device_count())), "cpu"]


def resolve_devices(names: str) -> tuple[str, ...]:
    """The devices in a list like `cuda:0,cuda:1`, in which one may stand twice; `all` is every GPU, or the CPU where
    there is none. Raises ConfigError that lists the devices there are."""
    there = devices()
    if names == "all":
        return tuple(there[:-1] or there)
    wanted = tuple("cuda:0" if name.strip() == "cuda" else name.strip() for name in names.split(","))
    for name in wanted:
        if name not in there:
            raise ConfigError(f"devices: expected all, or a list of {', '.join(there)}, got {name!r}")
    return wanted


def hardware(device: torch.device) -> dict[str, Any]:
    """What the figures were measured on."""
    info: dict[str, Any] = {"device": device.type, "cpu": _cpu_name(), "threads": torch.get_num_threads()}
    if device.type == "cuda":
        gpu = Gpu.of(device)
        assert gpu is not None
        info |= {
            "gpu": gpu.name,
            "compute_capability": gpu.version,
            "memory_gib": round(gpu.memory / 2**30, 1),
            "driver": driver(),
        }
    return info


def driver() -> str:
    """Version of the NVIDIA driver, or "unknown"."""
    with contextlib.suppress(OSError):
        return Path("/sys/module/nvidia/version").read_text().strip()
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.split()[0]
    return "unknown"


def commit() -> dict[str, Any] | None:
    """Commit of this code and whether the tree differs from it; None outside a repository.

    A copy without its repository may be told by the environment: VLA_ACCEL_COMMIT, with "+" for a changed tree.
    """
    told = os.environ.get("VLA_ACCEL_COMMIT")
    if told:
        return {"commit": told.removesuffix("+"), "modified": told.endswith("+")}
    return _in_repository(Path(__file__).parent)


@functools.cache
def _in_repository(folder: Path) -> dict[str, Any] | None:
    """Of a folder that git keeps; an installed package may lie in a repository of something else (`.venv`)."""
    try:
        _, found, changes = (
            subprocess.run(
                ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True
            ).stdout.strip()
            for arguments in (
                ("ls-files", "--error-unmatch", "__init__.py"),
                ("rev-parse", "HEAD"),
                ("status", "--porcelain", "-uno"),
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"commit": found, "modified": bool(changes)}


def software() -> dict[str, str]:
    """Versions that decide speed or results."""
    import vla_accel

    versions = {"vla_accel": vla_accel.__version__, "python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    where = commit()
    if where is not None:
        versions["commit"] = where["commit"][:12] + ("+" if where["modified"] else "")
    return versions


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux: platform knows
    return platform.processor() or platform.machine()
