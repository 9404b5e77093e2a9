"""Vision: uint8 images to projected image tokens. The device scales pixels, so that bytes travel and no floats."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vla_accel.component import Component, TensorSpec
from vla_accel.kernels.image.pixels import pixels
from vla_accel.nn.padding import MOST_VIEWS
from vla_accel.nn.prefixed import PrefixNetwork
from vla_accel.nn.quantised import QUANTISED
from vla_accel.nn.variants import variants
from vla_accel.pictures import MAP_WIDTH, example_map

if TYPE_CHECKING:
    from vla_accel.nn.native_prefix import PrefixStore


class Vision(nn.Module):
    """images uint8 (B, V, S, S, 3) to image tokens (B, V * tokens, prefix width) in the prefix's dtype.

    `pixel_maps` float32 (B, V, `pictures.MAP_WIDTH`), for checkpoints whose pixels need them.
    """

    def __init__(self, model: PrefixNetwork) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, pixel_maps: Tensor | None = None) -> Tensor:
        made = pixels(images, pixel_maps, self.model.vision.patch_embedding.weight.dtype)
        return self.model.embed_images(made).to(self.model.dtype)


def vision_component(
    model: PrefixNetwork, batch: int, views: int, store: PrefixStore[Any] | None = None, *, mapped: bool = False
) -> Component:  # fmt: skip
    """The vision component for a fixed number of views.

    Args: `mapped`: whether it has a second input, `pixel_maps`.
    """
    config = model.config
    size = config.vision.image_size
    some = {1: (1, max(views, MOST_VIEWS))}
    images = TensorSpec("images", (batch, views, size, size, 3), torch.uint8, some)
    maps = TensorSpec("pixel_maps", (batch, views, MAP_WIDTH), torch.float32, some, example_map(size))
    return Component(
        "vision",
        Vision(model),
        inputs=(images, maps) if mapped else (images,),
        outputs=(TensorSpec("image_tokens", (batch, views * config.image_tokens, config.prefix.width), model.dtype),),
        native=None if store is None else partial(store.vision, batch, views),
        variants=variants(model, "vision"),
        quantised=QUANTISED["vision"],
        fetch=partial(model.fetch, "vision", "projector"),
    )
