"""The accelerated autoencoder's configuration: LightX2V's JSON with further keys, and the engine files it names.

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
from vla_accel.files import user_path
from vla_accel.images.vae_component import Side, Size, check_size, size_key, size_text


@dataclass(frozen=True)
class TrtVaeConfig(Checked):
    """The engine files: a folder, or the encoder's file (LightX2V's older form); `multi_profile`: one file for every
    size instead of one folder for each size."""

    where = "trt_vae_config."

    trt_engine_path: str = ""
    multi_profile: bool = False


@dataclass(frozen=True)
class VaeConfig(Checked):
    """How an autoencoder runs. `vae_type` and `trt_vae_config` are LightX2V's keys.

    Attributes:
        pad: what happens to a size without an engine file: "error" refuses it, "auto" runs it without an engine, with
            a warning and an entry in the ledger. Pictures are never padded, as that would change them.
        memory_budget_gib: for the engines of all sizes together; the least recently used go first.
        inductor: "measure" lets the native engine also compile with torch.compile (minutes a size) and run the faster
            program; the ledger has both times.
        precision: dtype that the native engine computes in; "auto" is the model's dtype, which inputs and outputs keep.
    """

    vae_type: Literal["eager", "native", "tensorrt", "tensorrt_rtx"] = "native"
    trt_vae_config: TrtVaeConfig = field(default_factory=TrtVaeConfig)
    pad: Literal["error", "auto"] = "error"
    memory_budget_gib: float = 16.0
    inductor: Literal["never", "measure"] = "never"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, default in (("precision", "auto"), ("inductor", "never")):
            if (value := getattr(self, name)) != default and self.vae_type != "native":
                raise ConfigError(f"{name}: {value} is for vae_type native, got {self.vae_type}")
        if self.pad != "error" and not self.from_files:
            raise ConfigError(f"pad: {self.pad} is for vae_type tensorrt or tensorrt_rtx, got {self.vae_type}")
        if not self.memory_budget_gib > 0:
            raise ConfigError(f"memory_budget_gib: expected more than 0, got {self.memory_budget_gib}")
        if self.from_files and not self.trt_vae_config.trt_engine_path:
            raise ConfigError(f"trt_vae_config.trt_engine_path: expected a path for vae_type {self.vae_type}, got none")
        if not self.from_files and self.trt_vae_config != TrtVaeConfig():
            raise ConfigError(f"trt_vae_config: expected vae_type tensorrt or tensorrt_rtx, got {self.vae_type}")

    @property
    def from_files(self) -> bool:
        return self.vae_type in ("tensorrt", "tensorrt_rtx")


def load_vae_config(source: VaeConfig | Mapping[str, Any] | str | Path) -> VaeConfig:
    """Load a configuration from a file or a mapping. Raises ConfigError."""
    if isinstance(source, VaeConfig):
        return source
    return from_mapping(VaeConfig, source if isinstance(source, Mapping) else read_mapping(user_path(source)))


def check_spec(name: str, spec: EngineSpec, precisions: Collection[str] = ()) -> None:
    """Raise ConfigError for options that an image model would ignore. `precisions`: the native engine's, but "auto"."""
    allowed = {"eager": ("auto",), "native": ("auto", *precisions)}.get(spec.engine, (spec.precision,))
    if spec.precision not in allowed:
        expected = f"expected precision {', '.join(allowed)}"
        raise ConfigError(f"{name}: engine {spec.engine}: {expected}, got {spec.precision}")
    if spec.native.embeddings != "gpu":
        raise ConfigError(f"{name}: native.embeddings: expected gpu for an image model, got {spec.native.embeddings}")


def why_no_engine(config: VaeConfig, side: Side, size: Size) -> str | None:
    """Return why the engine files lack a size; None if they have it, or if the folder is missing (`engine_file`)."""
    files = config.trt_vae_config
    try:
        check_size(size)
        if not files.multi_profile and user_path(files.trt_engine_path).is_dir():
            engine_file(files, side, size)
    except ConfigError as error:
        return str(error)
    return None


def engine_file(config: TrtVaeConfig, side: Side, size: Size) -> Path:
    """Return the engine file of one side and size. Raises ConfigError if there is none."""
    root = user_path(config.trt_engine_path)
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
