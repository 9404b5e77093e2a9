"""π0-FAST: vision → image_tokens → kv_cache → keys, values → decode → action_tokens, which the transforms decode into
actions."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vla_accel.component import Component, TensorSpec
from vla_accel.errors import of_one
from vla_accel.families.pi0.native import Pi0FastStore
from vla_accel.families.pi0_fast.checkpoint import load_folder
from vla_accel.families.pi0_fast.network import Pi0Fast, Pi0FastConfig, last_tokens
from vla_accel.families.pi0_fast.transforms import FastProcessor
from vla_accel.families.prompted import PromptedFamily, PromptShape, prompt_capabilities
from vla_accel.nn.quantised import QUANTISED


class Decode(nn.Module):
    """tokens (B, L) int64 of the prompt, keys, values (depth, B, S, kv_heads, head_dim) of the prefix, and, when rows
    may be shorter, `lengths` (B,) int32 of it, to tokens (B, steps) int64; behind the stop token of all rows 0. The
    host waits after every token."""

    def __init__(self, model: Pi0Fast, steps: int) -> None:
        super().__init__()
        self.model, self.steps = model, steps

    def forward(self, tokens: Tensor, keys: Tensor, values: Tensor, lengths: Tensor | None = None) -> Tensor:
        first, lengths = last_tokens(tokens, keys.shape[2], lengths)
        return self.model.decode(first, lengths, keys, values, self.steps)


class Pi0FastFamily(PromptedFamily[Pi0FastConfig]):
    """Its steps are tokens."""

    name = "pi0_fast"
    network_class, store_class = Pi0Fast, Pi0FastStore
    parts = ("vision", "kv_cache", "decode")
    capabilities = prompt_capabilities(parts, "action_tokenizer", "relaxed_actions")

    def last(self, model: Pi0Fast, shape: PromptShape, store: Pi0FastStore | None, rtc: Any) -> Component:
        prefix, batch, total = model.config.prefix, shape.batch, model.config.prefix_tokens(shape.views, shape.tokens)
        cache = (prefix.depth, batch, total, prefix.kv_heads, prefix.head_dim)
        inputs = [
            TensorSpec("tokens", (batch, shape.tokens), torch.int64),
            TensorSpec("keys", cache, model.dtype),
            TensorSpec("values", cache, model.dtype),
        ]
        if shape.padded:
            inputs.append(TensorSpec("lengths", (batch,), torch.int32))
        native = None if store is None or not shape.padded else partial(store.decode, batch, total, shape.steps)
        return Component(
            "decode",
            Decode(model, shape.steps),
            tuple(inputs),
            (TensorSpec("action_tokens", (batch, shape.steps), torch.int64),),
            native,
            quantised=QUANTISED["decode"],
            fetch=partial(model.fetch, "embed", "prefix", "norm", model.head_name),
            products=model.dtype,
        )

    def normalised(self, transforms: FastProcessor, result: np.ndarray) -> np.ndarray:
        chunks = []
        for index, tokens in enumerate(result):
            with of_one(index, len(result)):
                chunks.append(transforms.detokeniser.chunk(tokens))
        return np.stack(chunks)

    load = staticmethod(load_folder)


PI0_FAST = Pi0FastFamily()
