"""Decode: actions as tokens, one after the other, each of which reads the keys and values of all before it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vla_accel.component import Component, TensorSpec
from vla_accel.families.pi0_fast.network import Pi0Fast, last_tokens
from vla_accel.nn.quantised import QUANTISED

if TYPE_CHECKING:
    from vla_accel.families.pi0.native import Pi0FastStore

RESULT = "action_tokens"


class Decode(nn.Module):
    """tokens (B, L) int64 of the prompt, keys, values (depth, B, S, kv_heads, head_dim) of the prefix, and, when rows
    may be shorter, `lengths` (B,) int32 of it, to tokens (B, steps) int64; behind the stop token of all rows 0.

    After every token it asks whether all rows are done, for which a GPU is waited.
    """

    def __init__(self, model: Pi0Fast, steps: int) -> None:
        super().__init__()
        self.model, self.steps = model, steps

    def forward(self, tokens: Tensor, keys: Tensor, values: Tensor, lengths: Tensor | None = None) -> Tensor:
        first, lengths = last_tokens(tokens, keys.shape[2], lengths)
        return self.model.decode(first, lengths, keys, values, self.steps)

    def fetch(self) -> list[Tensor]:
        """Bring the weights that `forward` reads."""
        return self.model.fetch("embed", "prefix", "norm", self.model.head_name)


def decode_component(
    model: Pi0Fast, batch: int, views: int, length: int, steps: int, padded: bool, store: Pi0FastStore | None = None
) -> Component:  # fmt: skip
    """At most `steps` tokens behind a prefix of a fixed number of views and prompt tokens; `padded` rows may have
    fewer."""
    prefix, module = model.config.prefix, Decode(model, steps)
    total = model.config.prefix_tokens(views, length)
    cache = (prefix.depth, batch, total, prefix.kv_heads, prefix.head_dim)
    inputs = [
        TensorSpec("tokens", (batch, length), torch.int64),
        TensorSpec("keys", cache, model.dtype),
        TensorSpec("values", cache, model.dtype),
    ]
    if padded:
        inputs.append(TensorSpec("lengths", (batch,), torch.int32))
    outputs = (TensorSpec(RESULT, (batch, steps), torch.int64),)
    native = None if store is None or not padded else partial(store.decode, batch, total, steps)
    return Component(
        "decode", module, tuple(inputs), outputs, native, quantised=QUANTISED["decode"], fetch=module.fetch,
        products=model.dtype,
    )  # fmt: skip
