"""SmolVLA's KV cache: the prefix (image tokens, prompt, state) through the language model, leaving keys and values as
the expert reads them. Its vision and its denoise loop are those of every flow network."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vla_accel.component import Component, TensorSpec
from vla_accel.families.smolvla.network import SmolVla
from vla_accel.nn.padding import longest_prompt
from vla_accel.nn.quantised import QUANTISED

if TYPE_CHECKING:
    from vla_accel.families.smolvla.native import SmolVlaStore


class SmolVlaKvCache(nn.Module):
    """image_tokens (B, I, width), tokens (B, L) int64, state (B, state_dim) float32 to keys, values (depth, B, I + L +
    1, kv_heads, head_dim).

    A padded component has a fourth input, `lengths` (B,) int32: how many tokens of each row, the state included, are
    real. They come first.
    """

    def __init__(self, model: SmolVla) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, image_tokens: Tensor, tokens: Tensor, state: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return self.model.prefix_cache(image_tokens, tokens, state, lengths)


def smolvla_kv_cache_component(
    model: SmolVla, batch: int, views: int, length: int, padded: bool, store: SmolVlaStore | None = None
) -> Component:
    """The prefix for a fixed number of views and prompt tokens; `padded` rows may be shorter than `length`."""
    config, prefix = model.config, model.config.prefix
    inputs = [
        TensorSpec("image_tokens", (batch, views * config.image_tokens, prefix.width), model.dtype),
        TensorSpec("tokens", (batch, length), torch.int64, {1: (1, longest_prompt(model, length))}),
        TensorSpec("state", (batch, config.state_dim), torch.float32),
    ]
    if padded:
        inputs.append(TensorSpec("lengths", (batch,), torch.int32))
    cache = (prefix.depth, batch, config.prefix_tokens(views, length), prefix.kv_heads, prefix.head_dim)
    outputs = (TensorSpec("keys", cache, model.dtype), TensorSpec("values", cache, model.dtype))
    crossing = [name for name in model.names("expert") if ".key_proj." in name or ".value_proj." in name]
    return Component(
        "kv_cache",
        SmolVlaKvCache(model),
        tuple(inputs),
        outputs,
        native=partial(store.kv_cache, batch, views * config.image_tokens, length) if store and padded else None,
        quantised=QUANTISED["kv_cache"],
        fetch=partial(model.fetch, "embed", "prefix", "state_proj", *crossing),
    )
