"""The accelerated autoencoder's configuration: LightX2V's JSON as it is, and what it means.

{"vae_type": "tensorrt", "trt_vae_config": {"trt_engine_path": "…", "multi_profile": true}}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vla_accel.components.vae import Side, Size, size_key
from vla_accel.config.mapping import from_mapping, read_mapping
from vla_accel.errors import ConfigError

VaeType = Literal["eager", "native", "tensorrt", "tensorrt_rtx"]
Pad = Literal["error", "auto"]
Inductor = Literal["never", "measure"]
VaePrecision = Literal["auto", "fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class TrtVaeConfig:
    """Where the engine files are. `trt_engine_path`: a folder, or the encoder's file (the old way). `multi_profile`:
    one file for every size, not one folder a size."""

    trt_engine_path: str = ""
    multi_profile: bool = False


@dataclass(frozen=True)
class VaeConfig:
    """`vae_type`: what runs the autoencoder; `trt_vae_config`: for the TensorRT types.

    Beyond LightX2V's keys: `pad`: "auto" pads a size that no engine takes and crops the result back, "error" refuses
    it. `memory_budget_gib`: for the engines of all sizes together; the least recently used go first. `inductor`:
    "measure" lets the native engine compile its form with torch.compile, too (minutes a size), and run the quicker of
    the two; which one, and both times, are in the ledger. `precision`: what the native engine computes in, between
    inputs and outputs of the model's dtype; "auto" is that dtype.
    """

    vae_type: VaeType = "native"
    trt_vae_config: TrtVaeConfig = field(default_factory=TrtVaeConfig)
    pad: Pad = "error"
    memory_budget_gib: float = 16.0
    inductor: Inductor = "never"
    precision: VaePrecision = "auto"

    def __post_init__(self) -> None:
        if self.precision != "auto" and self.vae_type != "native":
            raise ConfigError(f"precision: {self.precision} is for vae_type native, got {self.vae_type}")
        if self.memory_budget_gib <= 0:
            raise ConfigError(f"memory_budget_gib: expected more than 0, got {self.memory_budget_gib}")
        if self.from_files and not self.trt_vae_config.trt_engine_path:
            raise ConfigError(f"trt_vae_config.trt_engine_path: expected a path for vae_type {self.vae_type}, got none")

    @property
    def from_files(self) -> bool:
        """Whether engines come from files built before."""
        return self.vae_type in ("tensorrt", "tensorrt_rtx")


def load_vae_config(source: VaeConfig | Mapping[str, Any] | str | Path) -> VaeConfig:
    """From a file, a mapping, or itself. Raises ConfigError; an unknown key names the nearest."""
    if isinstance(source, VaeConfig):
        return source
    return from_mapping(VaeConfig, source if isinstance(source, Mapping) else read_mapping(Path(source)))


def engine_file(config: TrtVaeConfig, side: Side, size: Size) -> Path:
    """The engine file for one side and size. Raises ConfigError, naming what was looked for and what is there."""
    root = Path(config.trt_engine_path)
    if root.is_file():
        if "encoder" not in root.name:
            raise ConfigError(f"trt_engine_path: expected a folder or an encoder's file, got {root.name}")
        found = root.with_name(root.name.replace("encoder", side))
    elif config.multi_profile:
        found = root / f"vae_{side}_multi_profile.trt"
    else:
        found = root / size_key(size) / f"vae_{side}.trt"
    if not found.is_file():
        there = ", ".join(sorted(p.name for p in root.iterdir())) if root.is_dir() else "no such folder"
        advice = "(without --static)" if config.multi_profile else f"--static --sizes {size[1]}x{size[0]}"
        raise ConfigError(
            f"trt_engine_path {root}: expected {found.relative_to(root) if root.is_dir() else found.name}, found: "
            f"{there or 'nothing'}; build it: vla-accel build-vae --vae MODEL --output-dir {root} {advice}"
        )
    return found
