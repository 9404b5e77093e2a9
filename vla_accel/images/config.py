"""The accelerated autoencoder's configuration: LightX2V's JSON as it is, and what it means.

{"vae_type": "tensorrt", "trt_vae_config": {"trt_engine_path": "…", "multi_profile": true}}
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vla_accel.config import EngineSpec
from vla_accel.config.mapping import Checked, from_mapping, read_mapping
from vla_accel.errors import ConfigError
from vla_accel.images.vae_component import Side, Size, check_size, size_key, size_text

VaeType = Literal["eager", "native", "tensorrt", "tensorrt_rtx"]
Pad = Literal["error", "auto"]
Inductor = Literal["never", "measure"]
VaePrecision = Literal["auto", "fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class TrtVaeConfig(Checked):
    """Where the engine files are. `trt_engine_path`: a folder, or the encoder's file (the old way). `multi_profile`:
    one file for every size, not one folder a size."""

    where = "trt_vae_config."

    trt_engine_path: str = ""
    multi_profile: bool = False


@dataclass(frozen=True)
class VaeConfig(Checked):
    """How an autoencoder runs. `vae_type` and `trt_vae_config` are LightX2V's keys, the others are ours.

    `vae_type`: the engine. `trt_vae_config`: the engine files of the TensorRT types. `pad`: what happens to a size
    that no engine file has: "error" refuses it, "auto" runs it without an engine, with a warning and an entry in the
    ledger (the picture itself is never padded, since that would change it). `memory_budget_gib`: for the engines of
    all sizes together; the least recently used go first. `inductor`: "measure" lets the native engine also compile
    its form with torch.compile (minutes a size) and run the faster of the two; the ledger has both times.
    `precision`: what the native engine computes in, between inputs and outputs of the model's dtype; "auto" is that
    dtype.
    """

    vae_type: VaeType = "native"
    trt_vae_config: TrtVaeConfig = field(default_factory=TrtVaeConfig)
    pad: Pad = "error"
    memory_budget_gib: float = 16.0
    inductor: Inductor = "never"
    precision: VaePrecision = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, given in (("precision", self.precision != "auto"), ("inductor", self.inductor != "never")):
            if given and self.vae_type != "native":
                raise ConfigError(f"{name}: {getattr(self, name)} is for vae_type native, got {self.vae_type}")
        if self.pad != "error" and not self.from_files:
            raise ConfigError(f"pad: {self.pad} is for vae_type tensorrt or tensorrt_rtx, got {self.vae_type}")
        if not self.memory_budget_gib > 0:
            raise ConfigError(f"memory_budget_gib: expected more than 0, got {self.memory_budget_gib}")
        if self.from_files and not self.trt_vae_config.trt_engine_path:
            raise ConfigError(f"trt_vae_config.trt_engine_path: expected a path for vae_type {self.vae_type}, got none")
        if not self.from_files and self.trt_vae_config != TrtVaeConfig():
            raise ConfigError(
                f"trt_vae_config: expected vae_type tensorrt or tensorrt_rtx next to it, got {self.vae_type}"
            )

    @property
    def from_files(self) -> bool:
        """Whether engines come from files built before."""
        return self.vae_type in ("tensorrt", "tensorrt_rtx")


def load_vae_config(source: VaeConfig | Mapping[str, Any] | str | Path) -> VaeConfig:
    """From a file, a mapping, or itself. Raises ConfigError; an unknown key names the nearest."""
    if isinstance(source, VaeConfig):
        return source
    return from_mapping(VaeConfig, source if isinstance(source, Mapping) else read_mapping(Path(source)))


def check_spec(name: str, spec: EngineSpec, precisions: Collection[str] = ()) -> None:
    """Raise ConfigError for options of an engine that an image model would ignore.

    Args:
        precisions: what the native engine computes this component in, besides "auto".
    """
    allowed = {"eager": ("auto",), "native": ("auto", *precisions)}.get(spec.engine, (spec.precision,))
    if spec.precision not in allowed:
        raise ConfigError(
            f"{name}: engine {spec.engine}: expected precision {', '.join(allowed)}, got {spec.precision}"
        )
    if spec.native.embeddings != "gpu":
        raise ConfigError(f"{name}: native.embeddings: expected gpu for an image model, got {spec.native.embeddings}")


def why_no_engine(config: VaeConfig, side: Side, size: Size) -> str | None:
    """Why the engine files do not have a size; None if they do, or if the whole folder is missing (`engine_file`)."""
    files = config.trt_vae_config
    try:
        check_size(size)
        if not files.multi_profile and Path(files.trt_engine_path).is_dir():
            engine_file(files, side, size)
    except ConfigError as error:
        return str(error)
    return None


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
        advice = "(without --static)" if config.multi_profile else f"--static --sizes {size_text(size)}"
        raise ConfigError(
            f"trt_engine_path {root}: expected {found.relative_to(root) if root.is_dir() else found.name}, found: "
            f"{there or 'nothing'}; build it: vla-accel build-vae --vae MODEL --output-dir {root} {advice}"
        )
    return found
