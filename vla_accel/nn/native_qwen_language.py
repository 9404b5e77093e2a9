"""Qwen3's language model in fused ops: image tokens and text to the outputs of its last layer, normed or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    """The folded weights of the stack. `table` (vocabulary, W): token embeddings, shared with the model; `final_norm`
    (W,) float32, None if the output is not normed; `deepstack`: layers to whose output image features are added."""

    table: Tensor
    stack: StackWeights
    final_norm: Tensor | None
    config: QwenConfig
    deepstack: int

    @classmethod
    def of(cls, model: Network, stored: Precision) -> LanguageWeights:
        """Prepare the weights of a model with the modules `embed` and `language`."""
        config = model.config.language
        stack = stack_weights(model, "language.layers", config.block, config.depth, stored)
        norm = model.weight("language.norm.weight").float().clone() if config.final_norm else None
        return cls(model.weight("embed.weight"), stack, norm, config, len(model.config.vision.deepstack))


class NativeLanguage:
    """The launches of the model. Inputs `image_tokens` (B, I, W), `deepstack` (n, B, I, W) if its layers read it, and
    `tokens` (B, L) int64 in the layout's order; without a final norm, the last layer's output (B * S, W) is in `x`."""

    def __init__(self, weights: LanguageWeights, batch: int, layout: Layout, attention: str) -> None:
        self.weights, self.places = weights, layout.places(weights.table.device)
        cos, sin = (t[:, 0].contiguous() for t in language_rope(weights.config, self.places.positions, torch.float32))
        # Deepstack adds to the outputs of the first blocks; the next norm must come after that.
        outside = range(weights.deepstack + 1)
        rows = Rows(batch, layout.tokens, padded=True)
        self.stack = StackPlan(weights.stack, rows, attention, (cos, sin), outside)
        self.chain, self.x = self.stack.chain, self.stack.x

    def run(
        self, inputs: Mapping[str, Tensor], padding: Tensor | None = None,
        each: Callable[[int], None] = lambda index: None,
    ) -> Tensor:  # fmt: skip
        """Enqueue the model and return its output. Open `chain` around it. `padding` (B,) int32: tokens in front of
        each prompt that are none; `each`: called with every layer when the rows hold its output, before image features
        are added to it."""
        stack, deepstack = self.stack, inputs.get("deepstack")

        def after(index: int) -> None:
            each(index)
            if deepstack is not None and index < len(deepstack):
                add_at(deepstack[index], self.places.image, stack.x)
                stack.enter(stack.x)

        place_tokens(inputs["image_tokens"], inputs["tokens"], self.weights.table, self.places.order, stack.x)
        stack.enter(stack.x)
        stack.run(padding, after=after)
        if self.weights.final_norm is None:
            return stack.x
        return stack.output().mul_(self.weights.final_norm)
