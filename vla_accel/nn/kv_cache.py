"""KV cache: the prefix (image tokens and prompt) through the language model, leaving keys and values."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vla_accel.component import Component, TensorSpec
from vla_accel.fp8 import Scales
from vla_accel.nn.padding import longest_prompt, real_tokens
from vla_accel.nn.paligemma import PaliGemma
from vla_accel.nn.quantised import QUANTISED
from vla_accel.nn.variants import variants

if TYPE_CHECKING:
    from vla_accel.nn.native_prefix import PrefixStore


class KvCache(nn.Module):
    """image_tokens (B, I, width), tokens (B, L) int64 to keys, values (depth, B, I + L, kv_heads, head_dim).

    A padded component has a third input, `lengths` (B,) int32: how many tokens of each row are real. They come first.
    """

    def __init__(self, model: PaliGemma) -> None:
        super().__init__()
        self.model = model

    def forward(self, image_tokens: Tensor, tokens: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = image_tokens.shape[1] + tokens.shape[1]
        return self.model.prefix_cache(image_tokens, tokens, None if lengths is None else real_tokens(lengths, total))


def prefix_weights(model: PaliGemma) -> list[str]:
    """The prefix's parts that compute something: the last layer stops after its keys and values."""
    *whole, last = (f"prefix.layers.{index}" for index in range(model.config.prefix.depth))
    return [*whole, f"{last}.input_layernorm", f"{last}.qkv_proj"]


def kv_cache_component(
    model: PaliGemma,
    batch: int,
    views: int,
    length: int,
    padded: bool,
    store: PrefixStore[Any] | None = None,
    scales: Scales | None = None,
) -> Component:
    """The prefix for a fixed number of views and prompt tokens; `padded` rows may be shorter than `length`. `scales`:
    for engines that are built from a quantised module."""
    config = model.config
    image_tokens = views * config.image_tokens
    total = image_tokens + length
    prefix = config.prefix
    inputs = [
        TensorSpec("image_tokens", (batch, image_tokens, prefix.width), model.dtype),
        TensorSpec("tokens", (batch, length), torch.int64, {1: (1, longest_prompt(model, length))}),
    ]
    if padded:
        inputs.append(TensorSpec("lengths", (batch,), torch.int32))
    shape = (prefix.depth, batch, total, prefix.kv_heads, prefix.head_dim)
    outputs = (TensorSpec("keys", shape, model.dtype), TensorSpec("values", shape, model.dtype))
    native = None
    if store is not None and padded:
        native = partial(store.kv_cache, batch, image_tokens, length)
    return Component(
        "kv_cache",
        KvCache(model),
        tuple(inputs),
        outputs,
        native,
        variants(model, "kv_cache", scales),
        quantised=QUANTISED["kv_cache"],
        fetch=partial(model.fetch, "embed", *prefix_weights(model)),
    )
