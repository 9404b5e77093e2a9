"""Vision: uint8 images to projected image tokens. Normalisation runs on the device, so bytes travel, not floats."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vla_accel.component import Component, TensorSpec
from vla_accel.components.padding import MOST_VIEWS
from vla_accel.components.variants import variants
from vla_accel.models.prefixed import PrefixNetwork
from vla_accel.models.quantised import QUANTISED

if TYPE_CHECKING:
    from vla_accel.native.flow import FlowStore


class Vision(nn.Module):
    """images uint8 (B, V, H, W, 3) to image tokens (B, V * tokens, prefix width) in the prefix's dtype."""

    def __init__(self, model: PrefixNetwork) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        wide = self.model.vision.patch_embedding.weight.dtype
        # openpi: x / 255 * 2 - 1, in this order, in float32.
        pixels = images.to(wide).permute(0, 1, 4, 2, 3) / 255.0 * 2.0 - 1.0
        return self.model.embed_images(pixels).to(self.model.dtype)


def vision_component(model: PrefixNetwork, batch: int, views: int, store: FlowStore[Any] | None = None) -> Component:
    """The vision component for a fixed number of views."""
    config = model.config
    size = config.vision.image_size
    return Component(
        "vision",
        Vision(model),
        inputs=(TensorSpec("images", (batch, views, size, size, 3), torch.uint8, {1: (1, max(views, MOST_VIEWS))}),),
        outputs=(TensorSpec("image_tokens", (batch, views * config.image_tokens, config.prefix.width), model.dtype),),
        native=None if store is None else partial(store.vision, batch, views),
        variants=variants(model, "vision"),
        quantised=QUANTISED["vision"],
        fetch=partial(model.fetched, "vision", "projector"),
    )
