"""The vision component of networks with Qwen3-VL's or Eagle's tower: images → image_tokens, deepstack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vla_accel.component import Component, TensorSpec
from vla_accel.nn.fixed import Fixed
from vla_accel.nn.network import Network
from vla_accel.nn.qwen_language import Layout
from vla_accel.nn.qwen_vision import Placed


class Vision(Fixed[Network]):
    """images uint8 (B, V, H, W, 3) to image tokens (B, I, width) and, of towers with them, deepstack features (n, B, I,
    width)."""

    def __init__(self, model: Network, layout: Layout) -> None:
        vision: Any = model.get_submodule("vision")

        fixed = [f"vision.{name}" for name in vision.fixed]

        def placed() -> Placed:
            with model.present(*fixed):
                return vision.placed(layout.grid)

        super().__init__(model, placed, [n for n in model.names("vision") if n not in fixed])

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        vision: Any = self.model.get_submodule("vision")
        # The processor's order: x / 255, then minus and over a half.
        pixels = (images.to(vision.patch_embedding.weight.dtype).permute(0, 1, 4, 2, 3) / 255.0 - 0.5) / 0.5
        return tuple(x for x in vision.views(pixels, Placed(*self.kept())) if x is not None)


def vision_component(model: Network, batch: int, layout: Layout, native: Callable[..., Any] | None) -> Component:
    """The component of `batch` observations."""
    unit = model.config.vision.unit
    pixels = (batch, layout.views, layout.grid[0] * unit, layout.grid[1] * unit, 3)
    module = Vision(model, layout)
    return Component(
        "vision", module, (TensorSpec("images", pixels, torch.uint8),), image_specs(model, batch, layout), native,
        fetch=module.fetch, products=model.dtype,
    )  # fmt: skip


def image_specs(model: Network, batch: int, layout: Layout) -> tuple[TensorSpec, ...]:
    """What `Vision` computes: `image_tokens` and, of towers with it, `deepstack`."""
    hidden = (batch, layout.images, model.config.language.width)
    tokens, levels = TensorSpec("image_tokens", hidden, model.dtype), len(model.config.vision.deepstack)
    return (tokens, TensorSpec("deepstack", (levels, *hidden), model.dtype)) if levels else (tokens,)
