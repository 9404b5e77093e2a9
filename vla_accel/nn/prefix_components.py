"""The components of a network with a prefix: vision, uint8 images to image tokens (the device scales pixels, so that
bytes travel and no floats); and the KV cache, the prefix to keys and values of every layer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vla_accel.component import Component, TensorSpec
from vla_accel.fp8 import Scales
from vla_accel.kernels.image.pixels import pixels
from vla_accel.nn.padding import MOST_VIEWS, longest_prompt
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
    """The vision component for a fixed number of views. `mapped`: whether it has a second input, `pixel_maps`."""
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


class KvCache(nn.Module):
    """image_tokens (B, I, width), tokens (B, L) int64, if the prefix has it `state` (B, state_dim) float32, and in a
    padded component `lengths` (B,) int32, the real tokens of each row, which come first; to keys, values (depth, B, S,
    kv_heads, head_dim).
    """

    def __init__(self, model: PrefixNetwork) -> None:
        super().__init__()
        self.model = model

    def forward(self, image_tokens: Tensor, tokens: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.keys_values(image_tokens, tokens, *rest)


def kv_cache_component(
    model: PrefixNetwork, batch: int, views: int, length: int, padded: bool, store: PrefixStore[Any] | None = None,
    scales: Scales | None = None,
) -> Component:  # fmt: skip
    """The prefix for a fixed number of views and prompt tokens. `padded`: whether rows may be shorter than `length`;
    `scales`: for engines that are built from a quantised module."""
    config, prefix = model.config, model.config.prefix
    image_tokens = views * config.image_tokens
    inputs = [
        TensorSpec("image_tokens", (batch, image_tokens, prefix.width), model.dtype),
        TensorSpec("tokens", (batch, length), torch.int64, {1: (1, longest_prompt(model, length))}),
    ]
    if model.state_in_prefix:
        inputs.append(TensorSpec("state", (batch, config.state_dim), torch.float32))
    if padded:
        inputs.append(TensorSpec("lengths", (batch,), torch.int32))
    shape = (prefix.depth, batch, config.prefix_tokens(views, length), *model.cache_heads)
    return Component(
        "kv_cache",
        KvCache(model),
        tuple(inputs),
        outputs=(TensorSpec("keys", shape, model.dtype), TensorSpec("values", shape, model.dtype)),
        native=partial(store.kv_cache, batch, image_tokens, length) if store is not None and padded else None,
        variants={} if model.state_in_prefix else variants(model, "kv_cache", scales),
        quantised=QUANTISED["kv_cache"],
        fetch=partial(model.fetch, *model.prefix_parts()),
    )
