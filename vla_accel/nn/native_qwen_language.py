"""Qwen3-VL's language model in fused ops: image tokens and text to the raw outputs of its last layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vla_accel.kernels.rows.rows import add_at, place_tokens
from vla_accel.nn.network import Network
from vla_accel.nn.plan import Rows, StackPlan
from vla_accel.nn.qwen_language import Layout, QwenConfig, language_rope
from vla_accel.nn.weights import Precision, StackWeights, stack_weights


@dataclass(frozen=True)
class LanguageWeights:
    """The folded weights of the stack. `table` (vocabulary, W): token embeddings, shared with the model; `deepstack`:
    layers to whose output image features are added."""

    table: Tensor
    stack: StackWeights
    config: QwenConfig
    deepstack: int

    @classmethod
    def of(cls, model: Network, stored: Precision) -> LanguageWeights:
        """Prepare the weights of a model with the modules `embed` and `language`."""
        config = model.config.language
        stack = stack_weights(model, "language.layers", config.block, config.depth, stored)
        return cls(model.weight("embed.weight"), stack, config, len(model.config.vision.deepstack))


class NativeLanguage:
    """The launches of the model. Inputs `image_tokens` (B, I, W), `deepstack` (n, B, I, W), `tokens` (B, L) int64; the
    rows (B * S, W) of the last layer's output are in `x`."""

    def __init__(self, weights: LanguageWeights, batch: int, layout: Layout, attention: str) -> None:
        self.weights, self.places = weights, layout.places(weights.table.device)
        cos, sin = (t[:, 0].contiguous() for t in language_rope(weights.config, self.places.positions, torch.float32))
        # Deepstack adds to the outputs of the first blocks; the next norm must come after that.
        outside = range(weights.deepstack + 1)
        rows = Rows(batch, layout.tokens, padded=True)
        self.stack = StackPlan(weights.stack, rows, attention, (cos, sin), outside)
        self.chain, self.x = self.stack.chain, self.stack.x

    def run(self, inputs: Mapping[str, Tensor]) -> None:
        """Enqueue the model. Open `chain` around it."""
        stack, deepstack = self.stack, inputs["deepstack"]

        def after(index: int) -> None:
            if index < len(deepstack):
                add_at(deepstack[index], self.places.image, stack.x)
                stack.enter(stack.x)

        place_tokens(inputs["image_tokens"], inputs["tokens"], self.weights.table, self.places.order, stack.x)
        stack.enter(stack.x)
        stack.run(after=after)
