"""π0 and π0.5 as model families: vision → image_tokens → kv_cache → keys, values → denoise → actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from vla_accel.checkpoints.checkpoint import is_own
from vla_accel.checkpoints.dialects import kind_of
from vla_accel.component import Component
from vla_accel.components import denoise_component, kv_cache_component, vision_component
from vla_accel.components.calibration import calibration
from vla_accel.components.padding import padded_prompt
from vla_accel.components.variants import needs_scales
from vla_accel.config import EngineSpec, PolicyConfig, RtcConfig
from vla_accel.errors import ObservationError
from vla_accel.families import pi0_openpi, pi0_stand_in
from vla_accel.families.pi0_folders import load_folder
from vla_accel.fp8 import Scales
from vla_accel.models.family import Family, Rows, Shape, Work
from vla_accel.models.pi0 import Kind, Pi0, Pi0Config, pi0, pi05, pi05_demo
from vla_accel.models.random_weights import drawn_model
from vla_accel.models.rtc import chunk_weights
from vla_accel.native.pi0 import Pi0Store
from vla_accel.quantize import calibrate
from vla_accel.transforms.processing import Inputs, Processor


@dataclass(frozen=True)
class Pi0Shape(Shape):
    """`views`: images of each observation; `tokens`: prompt tokens; `padded`: rows may have fewer, and `lengths` say
    how many."""

    views: int
    tokens: int
    padded: bool

    @property
    def title(self) -> str:
        return f"{self.views} views and {self.tokens} prompt tokens"


class Pi0Family(Family):
    """Either of the two: they differ in where state and time enter, and in where a horizon and views usually are."""

    parts = ("vision", "kv_cache", "denoise")
    guidance = ("target", "weights")
    fp8_systems: ClassVar = {"native-fp8": ("kv_cache",), "native-fp8-vision": ("vision", "kv_cache")}
    baselines = tuple(pi0_openpi.MODES)

    def __init__(self, kind: Kind, sizes: Mapping[str, Callable[..., Pi0Config]], horizon: int, views: int) -> None:
        self.name, self.sizes, self.horizon, self.views = kind, sizes, horizon, views

    # -- the network ----------------------------------------------------------------------------------------------

    def network(self, config: Pi0Config) -> Pi0:
        return Pi0(config)

    def random(self, config: Pi0Config, *, seed: int, device: str, dtype: torch.dtype) -> Pi0:
        return drawn_model(config, seed=seed, device=device, dtype=dtype)

    def action_shape(self, config: Pi0Config) -> tuple[int, int]:
        return config.action_horizon, config.action_dim

    def shallow(self, config: Pi0Config, depth: int) -> Pi0Config:
        """Prefix and expert; vision stays whole."""
        return replace(
            config, prefix=replace(config.prefix, depth=depth), expert=replace(config.expert, depth=depth)
        )  # fmt: skip

    # -- running it -----------------------------------------------------------------------------------------------

    def store(self, model: Pi0, scales: Scales | None) -> Pi0Store:  # type: ignore[override]
        return Pi0Store(model, scales)

    def components(  # type: ignore[override]
        self, model: Pi0, shape: Pi0Shape, *, store: Pi0Store | None = None, scales: Scales | None = None,
        rtc: RtcConfig | None = None,
    ) -> Sequence[Component]:  # fmt: skip
        batch, views, tokens, padded = shape.batch, shape.views, shape.tokens, shape.padded
        prefix = views * model.config.vision.tokens + tokens
        most = None if rtc is None else rtc.max_guidance_weight
        return (
            vision_component(model, batch, views, store),
            kv_cache_component(model, batch, views, tokens, padded, store, scales),
            denoise_component(model, batch, prefix, shape.steps, padded, store, most),
        )

    def shape(
        self, config: Pi0Config, inputs: Sequence[Inputs], steps: int, specs: Mapping[str, EngineSpec]
    ) -> Pi0Shape:
        del config
        views = len(inputs[0].images)
        if any(len(i.images) != views for i in inputs):
            raise ObservationError(f"batch: expected as many views of each, got {[len(i.images) for i in inputs]}")
        counts = [len(i.tokens) for i in inputs]
        longest = max(counts)
        # The native engine takes lengths: where it runs a part that reads the prompt, or may have to step in for
        # another, all parts must agree, and so must engines built ahead of time.
        bucketed = any("native" in (specs[n].engine, *specs[n].fallback) for n in ("kv_cache", "denoise"))
        tokens = padded_prompt(longest) if bucketed else longest
        return Pi0Shape(len(inputs), steps, views, tokens, bucketed or min(counts) != longest)

    def shapes(self, config: Pi0Config, shape: Pi0Shape) -> Sequence[Pi0Shape]:
        if not shape.padded:
            return (shape,)
        bucket, longest = padded_prompt(1), padded_prompt(config.max_token_len)
        return [replace(shape, tokens=tokens) for tokens in range(bucket, longest + 1, bucket)]

    def feed(self, config: Pi0Config, inputs: Sequence[Inputs]) -> dict[str, Rows]:
        images = len(inputs[0].images) * config.vision.tokens
        return {
            "images": [i.images for i in inputs],
            "tokens": [i.tokens for i in inputs],
            "lengths": np.array([images + len(i.tokens) for i in inputs], np.int32),
            "state": [i.state for i in inputs],
        }

    def rehearse(self, config: Pi0Config, shape: Pi0Shape, host: Mapping[str, np.ndarray]) -> None:
        # A length of zero would leave rows without a key.
        if "lengths" in host:
            host["lengths"][:] = shape.views * config.vision.tokens + shape.tokens

    def guide(self, config: Pi0Config, rtc: RtcConfig, previous: np.ndarray, delay: int) -> dict[str, np.ndarray]:
        target = np.zeros(self.action_shape(config), np.float32)
        target[: len(previous)] = previous
        weights = chunk_weights(rtc, delay, len(previous), config.action_horizon)
        return {"target": target, "weights": weights.numpy()}

    # -- measuring it ---------------------------------------------------------------------------------------------

    def internals(self, config: Pi0Config, outputs: Mapping[str, Tensor], inputs: Inputs) -> dict[str, Tensor]:
        """`image_tokens` (I, W), and `keys` and `values` (depth, S, kv_heads, d) of the real tokens."""
        real = len(inputs.images) * config.vision.tokens + len(inputs.tokens)
        return {
            "image_tokens": outputs["image_tokens"][0],
            "keys": outputs["keys"][:, 0, :real],
            "values": outputs["values"][:, 0, :real],
        }

    def work(self, config: Pi0Config, inputs: Inputs, steps: int, specs: Mapping[str, EngineSpec]) -> dict[str, Work]:
        """Vision and prefix are bound by their products, denoising by reading the expert's weights at every step.

        The exact savings are applied: the last prefix layer stops after its keys and values."""
        v, p, e = config.vision, config.prefix, config.expert
        image_tokens = len(inputs.images) * v.tokens
        per_token = 4 * v.width * v.width + 2 * v.width * v.mlp_dim
        vision = v.depth * (2 * image_tokens * per_token + 4 * image_tokens * v.tokens * v.width)
        vision += 2 * image_tokens * (3 * v.patch_size**2 * v.width + v.width * p.width)
        tokens = image_tokens + len(inputs.tokens)
        attended = p.heads * p.head_dim
        layer = p.width * (p.qkv_dim + attended + 3 * p.mlp_dim)
        last = p.width * 2 * p.kv_heads * p.head_dim
        prefix = 2 * tokens * ((p.depth - 1) * layer + last) + (p.depth - 1) * 4 * tokens * tokens * attended
        expert = e.depth * e.width * (e.qkv_dim + e.heads * e.head_dim + 3 * e.mlp_dim)
        cache = 2 * e.depth * tokens * e.kv_heads * e.head_dim * 2
        suffix = config.suffix_tokens
        attention = e.depth * 4 * suffix * (tokens + suffix) * e.heads * e.head_dim
        weight_bytes = 1 if specs["denoise"].precision == "fp8" else 2

        def products(name: str) -> Literal["bf16", "fp8"]:
            return "fp8" if specs[name].precision == "fp8" else "bf16"

        return {
            "vision": Work(float(vision), precision=products("vision")),
            "kv_cache": Work(float(prefix), precision=products("kv_cache")),
            "denoise": Work(
                float(steps * (2 * suffix * expert + attention)), float(steps * (expert * weight_bytes + cache))
            ),
        }

    def published(self, horizon: int | None = None) -> Pi0Config:
        """π0.5 without the state in its prompt, as in pi05_libero."""
        return self.sizes[self.name](action_horizon=horizon or self.horizon, discrete_state_input=False)

    def stand_in(self, config: Pi0Config, views: int) -> Processor:
        return pi0_stand_in.processor(config, views)

    def random_observation(self, transforms: Processor, rng: np.random.Generator) -> dict[str, Any]:
        return pi0_stand_in.observation(transforms, rng)

    def baseline(self, name: str, *, horizon: int, steps: int, device: str) -> Callable[[Mapping[str, Any]], Any]:
        return pi0_openpi.sampler(self.name, horizon, device, name, steps)

    # -- FP8 ------------------------------------------------------------------------------------------------------

    def needs_scales(self, specs: Mapping[str, EngineSpec]) -> bool:
        return needs_scales(specs)

    def calibrate(self, model: Pi0, inputs: Sequence[Inputs], source: str) -> Scales:  # type: ignore[override]
        with model.present():
            return calibrate(model, calibration(model), [(i.images, i.tokens) for i in inputs], source)

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

    def load(
        self, folder: Path, settings: PolicyConfig, *, device: str | torch.device, dtype: torch.dtype | None
    ) -> tuple[Pi0, Processor]:
        return load_folder(folder, settings, device=device, dtype=dtype)


PI0 = Pi0Family("pi0", {"pi0": pi0}, horizon=50, views=3)
PI05 = Pi0Family("pi05", {"pi05": pi05, "pi05_demo": pi05_demo}, horizon=10, views=2)
