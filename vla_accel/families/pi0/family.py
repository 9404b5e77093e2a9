"""π0 and π0.5 as model families: vision → image_tokens → kv_cache → keys, values → denoise → actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vla_accel.checkpoints.checkpoint import is_own
from vla_accel.config import EngineSpec, RtcConfig
from vla_accel.errors import ConfigError
from vla_accel.families.family import Work, weight_bytes
from vla_accel.families.pi0 import openpi as pi0_openpi
from vla_accel.families.pi0 import realtime_vla as pi0_realtime_vla
from vla_accel.families.pi0.checkpoint import kind_of, load_folder
from vla_accel.families.pi0.native import Pi0Store
from vla_accel.families.pi0.network import Kind, Pi0, Pi0Config, pi0, pi05, pi05_demo
from vla_accel.families.prompted import DenoisingFamily, prefix_work
from vla_accel.transforms.processing import Inputs


class Pi0Family(DenoisingFamily):
    """Either of the two: they differ in where state and time enter, and in where a horizon and views usually are."""

    network_class, store_class = Pi0, Pi0Store
    baselines = tuple(pi0_openpi.MODES)

    def __init__(self, kind: Kind, sizes: Mapping[str, Callable[..., Pi0Config]], horizon: int, views: int) -> None:
        self.name, self.sizes, self.horizon, self.views = kind, sizes, horizon, views
        self.settings = ("asset_id", *(("discrete_state_input",) if kind == "pi05" else ()))
        self.realtime_vla = tuple(pi0_realtime_vla.CLASSES[kind])

    # -- the network ----------------------------------------------------------------------------------------------

    def chunking(self, config: Pi0Config, rtc: RtcConfig) -> RtcConfig:
        longest = config.trained_delay
        if longest is None:
            return rtc
        if rtc == RtcConfig():
            return RtcConfig(trained=True, max_delay=longest) if longest else rtc
        if rtc.trained and (rtc.max_delay or 1) > longest:
            got = f"trained chunking with {'delays' if rtc.max_delay is None else f'max_delay {rtc.max_delay}'}"
            expected = f"a max_delay of at most {longest}" if longest else "guided chunking"
            raise ConfigError(f"rtc: expected {expected}, as the checkpoint was trained, got {got}")
        return replace(rtc, max_delay=rtc.max_delay or longest) if rtc.trained else rtc

    # -- measuring it ---------------------------------------------------------------------------------------------

    def work(self, config: Pi0Config, inputs: Inputs, steps: int, specs: Mapping[str, EngineSpec]) -> dict[str, Work]:
        """Vision and prefix are bound by their products, denoising by reading the expert's weights at every step.

        The exact savings are applied: the last prefix layer stops after its keys and values."""
        e = config.expert
        tokens = config.prefix_tokens(len(inputs.images), len(inputs.tokens))
        expert = e.depth * e.width * (e.qkv_dim + e.heads * e.head_dim + 3 * e.mlp_dim)
        cache = 2 * e.depth * tokens * e.kv_heads * e.head_dim * 2
        suffix = config.suffix_tokens
        attention = e.depth * 4 * suffix * (tokens + suffix) * e.heads * e.head_dim
        return {
            **prefix_work(config, inputs, specs),
            "denoise": Work(
                float(steps * (2 * suffix * expert + attention)),
                float(steps * (expert * weight_bytes(specs["denoise"]) + cache)),
            ),
        }

    def published(self, horizon: int | None = None) -> Pi0Config:
        """π0.5 without the state in its prompt, as in pi05_libero."""
        return self.sizes[self.name](action_horizon=horizon or self.horizon, discrete_state_input=False)

    def baseline(self, name: str, *, horizon: int, steps: int, device: str) -> Callable[[Mapping[str, Any]], Any]:
        return pi0_openpi.sampler(self.name, horizon, device, name, steps)

    def from_checkout(self, name: str, checkout: Path, *, views: int, horizon: int, tokens: int) -> Callable[..., Any]:
        return pi0_realtime_vla.sampler(name, self.name, checkout, views=views, horizon=horizon, tokens=tokens)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def recognises(self, content: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
        if is_own(content):
            return content.get("kind") == self.name
        if "type" in content and "input_features" in content:  # lerobot's
            return content["type"] == self.name
        return kind_of(shapes) == self.name

    def hint(self, folder: Path) -> str | None:
        if (folder / "params").is_dir() and not any(folder.glob("model*.safetensors")):
            return (
                "expected model.safetensors, found openpi's JAX parameters: vla-accel convert makes the one from the "
                "other"
            )
        return None

    load = staticmethod(load_folder)


PI0 = Pi0Family("pi0", {"pi0": pi0}, horizon=50, views=3)
PI05 = Pi0Family("pi05", {"pi05": pi05, "pi05_demo": pi05_demo}, horizon=10, views=2)
