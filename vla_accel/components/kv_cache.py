"""KV cache: the prefix (image tokens and prompt) through the language model, leaving keys and values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vla_accel.component import Component, TensorSpec
from vla_accel.models.pi0 import Pi0


class KvCache(nn.Module):
    """image_tokens (B, I, width), tokens (B, L) int64 to keys, values (depth, B, I + L, kv_heads, head_dim).

    With `masked`, a third input `mask` (B, I + L) bool says which tokens are real.
    """

    def __init__(self, model: Pi0) -> None:
        super().__init__()
        self.model = model

    def forward(self, image_tokens: Tensor, tokens: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.model.prefix_cache(image_tokens, tokens, mask)


def kv_cache_component(model: Pi0, batch: int, views: int, length: int, masked: bool) -> Component:
    """The prefix for a fixed number of views and prompt tokens."""
    config = model.config
    image_tokens = views * config.vision.tokens
    total = image_tokens + length
    prefix = config.prefix
    inputs = [
        TensorSpec("image_tokens", (batch, image_tokens, prefix.width), model.dtype),
        TensorSpec("tokens", (batch, length), torch.int64),
    ]
    if masked:
        inputs.append(TensorSpec("mask", (batch, total), torch.bool))
    shape = (prefix.depth, batch, total, prefix.kv_heads, prefix.head_dim)
    outputs = (TensorSpec("keys", shape, model.dtype), TensorSpec("values", shape, model.dtype))
    return Component("kv_cache", KvCache(model), tuple(inputs), outputs)
