"""The TensorRT libraries, `tensorrt` (10 and 11) and `tensorrt_rtx` (1.4 and newer), and the GPUs that they run on."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from vla_accel.errors import ConfigError, DependencyError, EngineError
from vla_accel.kernels.gpu import Gpu

LibraryName = Literal["tensorrt", "tensorrt_rtx"]
Capability = tuple[int, int]

_VERSIONS: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "tensorrt": ((10, 0), (12, 0)),
    "tensorrt_rtx": ((1, 4), (2, 0)),
}
_INSTALL = {
    "tensorrt": "pip install 'vla_accel[tensorrt]' tensorrt (NVIDIA's own package index has the library's wheels)",
    "tensorrt_rtx": "pip install 'vla_accel[tensorrt-rtx]'",
}
TITLES = {"tensorrt": "TensorRT", "tensorrt_rtx": "TensorRT-RTX"}
RTX_CAPABILITIES: tuple[Capability, ...] = ((7, 5), (8, 0), (8, 6), (8, 9), (12, 0), (12, 1))
"""GPUs that run TensorRT-RTX engines. TensorRT itself runs on 7.5 and newer."""
RTX_DEFAULT: tuple[Capability, ...] = ((8, 0), (8, 6), (8, 9), (12, 0))
"""Default targets of a TensorRT-RTX engine."""
_PRECISION_NEEDS: dict[torch.dtype, Capability] = {torch.bfloat16: (8, 0), torch.float8_e4m3fn: (8, 9)}

_log = logging.getLogger("vla_accel.tensorrt")


@dataclass(frozen=True)
class Library:
    """An imported library. Both modules, `trt`, have the same Python API."""

    name: LibraryName
    trt: Any
    version: str

    @property
    def title(self) -> str:
        return f"{TITLES[self.name]} {self.version}"

    @property
    def logger(self) -> Any:
        """The one logger of the process: the libraries keep the first one they get."""
        return _logger(self.trt)

    def take_errors(self) -> str:
        """The library's error messages since the last call, as one line."""
        messages, self.logger.errors = self.logger.errors, []
        return " | ".join(dict.fromkeys(messages))


def load_library(name: LibraryName) -> Library:
    """Import a library. Raises DependencyError if it is missing or has an unknown version."""
    try:
        trt = importlib.import_module(name)
        version = str(trt.__version__)
    # The package index has a stub of tensorrt that imports, but has no library.
    except (ImportError, AttributeError, OSError) as error:
        message = f"engine {name}: no usable {TITLES[name]} ({error}); install it: {_INSTALL[name]}"
        raise DependencyError(message) from error
    low, high = _VERSIONS[name]
    if not low <= major_minor(version) < high:
        raise DependencyError(
            f"engine {name}: expected {TITLES[name]} at least {low[0]}.{low[1]} and below {high[0]}.{high[1]}, "
            f"got {version}; {_INSTALL[name]}"
        )
    return Library(name, trt, version)


def installed_version(package: str) -> str | None:
    """The version of an installed distribution, without importing it; None if absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def major_minor(version: str) -> tuple[int, int]:
    """Parse "10.15.1.29" to (10, 15)."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise DependencyError(f"version: expected one like 10.15.1, got {version!r}")
    return int(match[1]), int(match[2])


def parse_target(text: str) -> Capability:
    """Parse "sm89" or "8.9" to (8, 9). Raises ConfigError."""
    match = re.fullmatch(r"(?:sm_?)?(\d\d?)\.?(\d)", text.strip().lower())
    if match is None:
        raise ConfigError(f"target: expected a compute capability like sm89 or 8.9, got {text!r}")
    return int(match[1]), int(match[2])


def target_name(capability: Capability) -> str:
    """Format (8, 9) as "sm89"."""
    return f"sm{capability[0]}{capability[1]}"


def dotted(capabilities: Sequence[Capability]) -> str:
    """Format capabilities for a message: "8.9, 12.0"."""
    return ", ".join(f"{a}.{b}" for a, b in sorted(capabilities))


def runs_on(name: LibraryName, capability: Capability) -> bool:
    """Whether the library runs engines on GPUs of this compute capability."""
    return capability in RTX_CAPABILITIES if name == "tensorrt_rtx" else capability >= (7, 5)


def known_capabilities(name: LibraryName) -> str:
    """What `runs_on` accepts, for a message."""
    return dotted(RTX_CAPABILITIES) if name == "tensorrt_rtx" else "7.5 and newer"


def why_not(name: LibraryName, device: torch.device) -> str | None:
    """Why the library runs no engine on `device` and what to type instead; None if it does."""
    try:
        load_library(name)
        check_target(name, capability_of(device), ())
    except (DependencyError, EngineError) as error:
        return str(error)
    return None


def check_target(name: LibraryName, capability: Capability, dtypes: Sequence[torch.dtype]) -> None:
    """Raise EngineError if this capability cannot run the library or a dtype of the engine."""
    if not runs_on(name, capability):
        raise EngineError(
            f"{TITLES[name]} does not run on compute capability {dotted([capability])}; it runs on "
            f"{known_capabilities(name)}"
        )
    for dtype in dtypes:
        needed = _PRECISION_NEEDS.get(dtype, (0, 0))
        if capability < needed:
            raise EngineError(
                f"{dtype} needs compute capability {dotted([needed])} or newer, got {dotted([capability])}"
            )


def capability_of(device: torch.device) -> Capability:
    """The compute capability of a CUDA device. Raises EngineError for any other device."""
    gpu = Gpu.of(device)
    if gpu is None:
        raise EngineError(
            f"TensorRT engines run on a CUDA GPU, the device is {device}; `vla-accel build --targets sm89` builds "
            "TensorRT-RTX engines for other machines without one"
        )
    return gpu.capability


def gpu_identity(device: torch.device) -> dict[str, str]:
    """What an engine for exactly this GPU depends on besides the library: the GPU's name and the driver."""
    driver = Path("/proc/driver/nvidia/version")
    text = driver.read_text().splitlines()[0] if driver.is_file() else f"CUDA {torch.version.cuda}"
    return {"gpu": torch.cuda.get_device_name(device), "driver": text}


def free_memory(device: torch.device) -> int:
    """Bytes free on a CUDA device."""
    return torch.cuda.mem_get_info(device)[0]


def stream_of(device: torch.device) -> int:
    """The handle of the current CUDA stream."""
    return torch.cuda.current_stream(device).cuda_stream


@functools.cache
def _logger(trt: Any) -> Any:
    class Logger(trt.ILogger):  # type: ignore[name-defined]
        """Forwards messages to Python's logging and collects errors."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            severities = trt.ILogger.Severity if hasattr(trt.ILogger, "Severity") else trt.Logger
            if severity in (severities.INTERNAL_ERROR, severities.ERROR):
                # Engines may be built on machines without a GPU.
                if "CUDA driver version is insufficient" in message:
                    _log.debug(message)
                    return
                self.errors.append(message.strip())
                _log.debug("error: %s", message)
            elif severity == severities.WARNING:
                _log.debug("warning: %s", message)

    return Logger()
