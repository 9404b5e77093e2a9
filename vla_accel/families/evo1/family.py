"""Evo-1: vision → image_tokens → kv_cache → keys and values of state and prompt → denoise → actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vla_accel.component import Component, TensorSpec
from vla_accel.config import EngineSpec, RtcConfig
from vla_accel.errors import ObservationError
from vla_accel.families.evo1.checkpoint import SIGNS, load_folder
from vla_accel.families.evo1.native import QUANTISED, Evo1Store
from vla_accel.families.evo1.network import Evo1, Evo1Config, StepConstants
from vla_accel.families.family import Capabilities
from vla_accel.families.prompted import FlowChunking, TextFamily
from vla_accel.families.qwen import LayoutShape
from vla_accel.nn.fixed import Fixed
from vla_accel.nn.flow import Schedule
from vla_accel.nn.padding import real_tokens
from vla_accel.nn.qwen_components import image_specs, vision_component
from vla_accel.nn.qwen_language import Layout, Places
from vla_accel.nn.rtc import Guidance, step_gains
from vla_accel.transforms.processing import Inputs

_CACHE = (".kv_proj.", "head.state_")
"""Parts of the head that keys and values are computed with."""


class Evo1Shape(LayoutShape):
    """`lengths` are the keys that are no padding: of the state, of images and of text."""

    def row_length(self, config: Evo1Config) -> int:
        return 1 + self.layout.tokens


class KvCache(Fixed[Evo1]):
    """image_tokens (B, I, W), text tokens (B, L) int64 and `state` (B, state_dim) float32 to keys and values (depth, B,
    1 + I + L, heads, d) of the state and of the prompt."""

    def __init__(self, model: Evo1, layout: Layout) -> None:
        head = [name for name in model.names("head") if any(part in name for part in _CACHE)]
        super().__init__(model, lambda: layout.places(model.device), [*model.names("embed", "language"), *head])

    def forward(self, image_tokens: Tensor, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.read(image_tokens, tokens, state, Places(*self.kept()))


class Denoise(Fixed[Evo1]):
    """noise (B, H, A) float32, keys, values, `target` (B, H, A) and `weights` (B, H) float32 of a previous chunk
    (weights of zero: a plain call) and, where rows may be shorter, `lengths` (B,) int32; to normalised actions (B, H,
    A) float32."""

    def __init__(self, model: Evo1, schedule: Schedule, rtc: RtcConfig) -> None:
        read = [name for name in model.names("head") if not any(part in name for part in _CACHE)]
        super().__init__(model, lambda: model.constants(schedule), read)
        self.schedule, self.times = schedule, model.times(schedule)
        self.gains = step_gains(self.times, schedule.dts, rtc.max_guidance_weight)

    def extra_repr(self) -> str:
        """What a graph of `forward` has as constants; keys of built engines contain it."""
        return f"times={self.schedule.times}, gains={self.gains}"

    def forward(
        self, noise: Tensor, keys: Tensor, values: Tensor, target: Tensor, weights: Tensor,
        lengths: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        mask = None if lengths is None else real_tokens(lengths, keys.shape[2])
        guidance = Guidance(target, weights, self.times, self.gains)
        constants = StepConstants(*self.kept())
        return self.model.integrate(noise, constants, keys, values, mask, guidance, self.schedule)


class Evo1Chunking(FlowChunking[Evo1Config]):
    """lerobot's guidance by the previous chunk; no checkpoint is trained with clean prefixes."""

    settings = ("schedule", "max_guidance_weight", "execution_horizon")


class Evo1Family(TextFamily[Evo1Config, Inputs, Evo1Shape]):
    """Evo-1 of any size."""

    name, signs = "evo1", SIGNS
    network_class, store_class = Evo1, Evo1Store
    parts = ("vision", "kv_cache", "denoise")
    capabilities = Capabilities(quantised=QUANTISED)
    chunking = Evo1Chunking()
    flow = True
    uniform_noise = True

    def components(
        self, model: Evo1, shape: Evo1Shape, *, store: Any = None, scales: Any = None, rtc: RtcConfig | None = None
    ) -> Sequence[Component]:
        layout, batch, config, rtc = shape.layout, shape.batch, model.config, rtc or RtcConfig()
        keys = (config.head.depth, batch, 1 + layout.tokens, config.head.heads, config.head_dim)
        cache = TensorSpec("keys", keys, model.dtype), TensorSpec("values", keys, model.dtype)
        actions = (batch, config.action_horizon, config.action_dim)

        def native(make: str, *sizes: Any) -> Callable[..., Any] | None:
            return None if store is None or not shape.padded else partial(getattr(store, make), batch, *sizes)

        reader, denoise = KvCache(model, layout), Denoise(model, shape.schedule, rtc)
        tokens = TensorSpec("tokens", (batch, layout.text), torch.int64)
        state = TensorSpec("state", (batch, config.state_dim), torch.float32)
        guided = [TensorSpec("target", actions, torch.float32), TensorSpec("weights", actions[:2], torch.float32)]
        lengths = [TensorSpec("lengths", (batch,), torch.int32)] if shape.padded else []
        return (
            vision_component(model, batch, layout, native("vision", layout)),
            Component(
                "kv_cache", reader, (*image_specs(model, batch, layout), tokens, state), cache,
                native("kv_cache", layout), fetch=reader.fetch, products=model.dtype,
            ),
            Component(
                "denoise", denoise, (TensorSpec("noise", actions, torch.float32), *cache, *guided, *lengths),
                (TensorSpec("actions", actions, torch.float32),),
                native("denoise", 1 + layout.tokens, shape.schedule, rtc.max_guidance_weight),
                quantised=QUANTISED["denoise"], fetch=denoise.fetch, products=model.dtype,
            ),
        )  # fmt: skip

    def shape(
        self, config: Evo1Config, inputs: Sequence[Inputs], schedule: Schedule, specs: Mapping[str, EngineSpec]
    ) -> Evo1Shape:
        sizes = {(len(i.images), i.cameras) for i in inputs}
        if len(sizes) > 1:
            found = sorted({(views, () if cameras is None else cameras.sizes) for views, cameras in sizes})
            raise ObservationError(f"batch: expected equally many views of the same sizes, got {found}")
        ((views, cameras),) = sizes
        tokens, padded = self.prompt_bucket(inputs, specs, self.parts)
        grid = config.layout(views, tokens).grid
        return Evo1Shape(len(inputs), schedule, views, tokens, padded, grid, config.arrangement, cameras=cameras)

    def length(self, config: Evo1Config, inputs: Inputs) -> int:
        return 1 + len(inputs.images) * config.vision.image_tokens + len(inputs.tokens)

    load = staticmethod(load_folder)


EVO1 = Evo1Family()
