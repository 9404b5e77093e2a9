"""π0 and π0.5: vision → image_tokens → kv_cache → keys, values → denoise → actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vla_accel.checkpoints.checkpoint import is_own
from vla_accel.checkpoints.lerobot import is_lerobot_config
from vla_accel.config import RtcConfig
from vla_accel.errors import ConfigError
from vla_accel.families.pi0.checkpoint import kind_of, load_folder
from vla_accel.families.pi0.native import Pi0Store
from vla_accel.families.pi0.network import Kind, Pi0, Pi0Config, pi0, pi05, pi05_demo
from vla_accel.families.prompted import DenoisingFamily, FlowChunking


class Pi0Chunking(FlowChunking[Pi0Config]):
    """A checkpoint may state the longest delay that it was trained with (`Pi0Config.trained_delay`)."""

    def resolve(self, config: Pi0Config, rtc: RtcConfig) -> RtcConfig:
        rtc, longest = super().resolve(config, rtc), config.trained_delay
        if longest is None:
            return rtc
        if rtc == RtcConfig():
            return RtcConfig(trained=True, max_delay=longest) if longest else rtc
        if rtc.trained and (rtc.max_delay or 1) > longest:
            got = f"trained chunking with {'delays' if rtc.max_delay is None else f'max_delay {rtc.max_delay}'}"
            expected = f"a max_delay of at most {longest}" if longest else "guided chunking"
            raise ConfigError(f"rtc: expected {expected}, as the checkpoint was trained, got {got}")
        return replace(rtc, max_delay=rtc.max_delay or longest) if rtc.trained else rtc


class Pi0Family(DenoisingFamily[Pi0Config]):
    """π0 or π0.5, which differ in where state and time enter."""

    network_class, store_class = Pi0, Pi0Store
    chunking = Pi0Chunking()

    def __init__(self, kind: Kind, sizes: Mapping[str, Callable[..., Pi0Config]]) -> None:
        self.name, self.sizes = kind, sizes
        self.settings = ("asset_id", *(("discrete_state_input",) if kind == "pi05" else ()))

    def recognises(self, content: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
        if is_own(content):
            return content.get("kind") == self.name
        if is_lerobot_config(content):
            return content["type"] == self.name
        return kind_of(shapes) == self.name

    def hint(self, folder: Path) -> str | None:
        if (folder / "params").is_dir() and not any(folder.glob("model*.safetensors")):
            return "expected model.safetensors, found openpi's JAX parameters: convert them with vla-accel convert"
        return None

    load = staticmethod(load_folder)


PI0 = Pi0Family("pi0", {"pi0": pi0})
PI05 = Pi0Family("pi05", {"pi05": pi05, "pi05_demo": pi05_demo})
