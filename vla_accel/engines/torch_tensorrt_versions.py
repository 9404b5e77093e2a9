"""Which Torch-TensorRT goes with which torch and TensorRT, and how its versions differ: here and nowhere else.

Knows nothing about modules or engines. `import torch_tensorrt` needs a CUDA build of torch and a GPU; versions are
compared before that, from the installed distributions.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vla_accel.config import TensorrtOptions
from vla_accel.engines import tensorrt_library
from vla_accel.engines.tensorrt_library import LibraryName, installed_version, major_minor
from vla_accel.errors import DependencyError

PAIRS: dict[tuple[int, int], tuple[tuple[int, int], tuple[int, int], tuple[int, int]]] = {
    (2, 11): ((2, 11), (10, 15), (1, 4)),
    (2, 12): ((2, 12), (10, 16), (1, 4)),
    (2, 13): ((2, 13), (11, 0), (1, 5)),
    (2, 14): ((2, 14), (11, 1), (1, 6)),
}
"""torch-tensorrt to the torch, the TensorRT and the TensorRT-RTX that it works with (its wheels' own requirements;
2.11 with TensorRT-RTX 1.4 was tried)."""


@dataclass(frozen=True)
class Flavour:
    """An installed Torch-TensorRT: built on TensorRT or on TensorRT-RTX."""

    version: str
    library: LibraryName


def find_flavour(versions: Mapping[str, str | None] | None = None) -> Flavour:
    """The installed Torch-TensorRT, its pair checked before anything is imported.

    Args: `versions`: of the distributions torch-tensorrt, torch-tensorrt-rtx, torch, tensorrt, tensorrt-rtx; by
    default those installed. Raises DependencyError that says what is missing, or which pair would work.
    """
    found = _installed() if versions is None else dict(versions)
    torch_version = str(found["torch"])
    rtx = found.get("torch-tensorrt") is None and found.get("torch-tensorrt-rtx") is not None
    package = "torch-tensorrt-rtx" if rtx else "torch-tensorrt"
    library: LibraryName = "tensorrt_rtx" if rtx else "tensorrt"
    version, library_version = found.get(package), found.get("tensorrt-rtx" if rtx else "tensorrt")
    if version is None:
        raise DependencyError(
            f"engine torch_tensorrt: torch-tensorrt is not installed; {_install(major_minor(torch_version), rtx=False)}"
        )
    pair = PAIRS.get(major_minor(version))
    if pair is None:
        known = ", ".join(f"{a}.{b}" for a, b in PAIRS)
        raise DependencyError(f"engine torch_tensorrt: expected {package} {known}, got {version}")
    if major_minor(torch_version) != pair[0]:
        raise DependencyError(
            f"engine torch_tensorrt: {package} {version} works with torch {_dotted(pair[0])}, got torch "
            f"{torch_version}; {_install(major_minor(torch_version), rtx)}"
        )
    wanted = pair[2] if rtx else pair[1]
    title = tensorrt_library.TITLES[library]
    if library_version is None or major_minor(library_version) != wanted:
        got = "none is installed" if library_version is None else f"got {library_version}"
        raise DependencyError(
            f"engine torch_tensorrt: {package} {version} works with {title} {_dotted(wanted)}, {got}; "
            f"{_install(major_minor(torch_version), rtx)}"
        )
    return Flavour(version, library)


def _installed() -> dict[str, str | None]:
    rtx = ("tensorrt-rtx", "tensorrt-rtx-cu13", "tensorrt-rtx-cu13-libs", "tensorrt-rtx-cu12", "tensorrt-rtx-cu12-libs")
    plain = ("tensorrt", "tensorrt-cu13", "tensorrt-cu13-libs", "tensorrt-cu12", "tensorrt-cu12-libs")
    return {
        "torch": torch.__version__,
        "torch-tensorrt": installed_version("torch-tensorrt"),
        "torch-tensorrt-rtx": installed_version("torch-tensorrt-rtx"),
        "tensorrt": next(filter(None, map(installed_version, plain)), None),
        "tensorrt-rtx": next(filter(None, map(installed_version, rtx)), None),
    }


def _install(torch_version: tuple[int, int], rtx: bool) -> str:
    for version, pair in PAIRS.items():
        if pair[0] == torch_version:
            library = f"tensorrt-rtx-cu13=={_dotted(pair[2])}.*" if rtx else f"tensorrt=={_dotted(pair[1])}.*"
            package = "torch-tensorrt-rtx" if rtx else "torch-tensorrt"
            return (
                f"the set for torch {_dotted(torch_version)}: pip install '{package}=={_dotted(version)}.*' '{library}'"
            )
    known = ", ".join(_dotted(pair[0]) for pair in PAIRS.values())
    return f"no torch-tensorrt is known for torch {_dotted(torch_version)}; it exists for torch {known}"


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def load_torch_tensorrt() -> tuple[Any, Flavour]:
    """The imported package and its flavour. Raises DependencyError: missing, wrong pair, no CUDA torch or GPU."""
    flavour = find_flavour()
    if torch.version.cuda is None or not torch.cuda.is_available():
        raise DependencyError(
            f"engine torch_tensorrt: importing it needs a CUDA build of torch and a GPU; torch is {torch.__version__} "
            f"and sees {torch.cuda.device_count()} GPUs"
        )
    try:
        return importlib.import_module("torch_tensorrt"), flavour
    except (ImportError, OSError, RuntimeError) as error:
        raise DependencyError(
            f"engine torch_tensorrt: torch-tensorrt {flavour.version} does not import: {error}"
        ) from (error)


def conversion_options(version: tuple[int, int], options: TensorrtOptions) -> dict[str, Any]:
    """What to pass to Torch-TensorRT. The only place that knows how its versions differ.

    Precision comes from the module's dtypes in all of them: 2.11 and 2.12 must be told so, from 2.13 on nothing else
    exists, and the old option would land unread in `**kwargs`.
    """
    given: dict[str, Any] = {
        "require_full_compilation": True,
        "min_block_size": 1,
        "truncate_double": True,
        "cache_built_engines": False,
        "reuse_cached_engines": False,
        "immutable_weights": not options.refit,
        "version_compatible": options.version_compatible,
        "hardware_compatible": options.hardware_compatible,
        "enable_weight_streaming": options.weight_streaming,
    }
    if options.optimization_level is not None:
        given["optimization_level"] = options.optimization_level
    if options.workspace_mb is not None:
        given["workspace_size"] = options.workspace_mb * 2**20
    if version < (2, 13):
        given["use_explicit_typing"] = True
    return given
