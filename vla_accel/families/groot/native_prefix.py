"""GR00T's language model and vision-language attention in fused ops: image tokens and text to the keys and values that
the diffusion transformer reads in every step.

Exact savings: norms are folded into the next products, no layer runs after the last one that is read, and the keys and
values of all blocks of a source are one product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vla_accel.families.groot.network import Groot, GrootConfig
from vla_accel.kernels.gemm.ops import gemm
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.rows.rows import add_norm
from vla_accel.nn.dit import Source
from vla_accel.nn.native_qwen_language import LanguageWeights, NativeLanguage
from vla_accel.nn.plan import StackPlan
from vla_accel.nn.qwen_language import Layout
from vla_accel.nn.weights import Precision, StackWeights, stack_weights


@dataclass(frozen=True)
class ReaderWeights:
    """The weights of the prefix.

    `vl_scale`, `vl_shift` (W,) float32: of the norm before the vision-language attention; `keys_values`: one product of
    all blocks of a source.
    """

    language: LanguageWeights
    vl_scale: Tensor
    vl_shift: Tensor
    vl_stack: StackWeights
    keys_values: Mapping[Source, Linear]
    config: GrootConfig

    @classmethod
    def of(cls, model: Groot, precision: str) -> ReaderWeights:
        """Prepare the weights of a model. `precision`: fp32 or bf16."""
        stored, config = Precision(precision), model.config
        vl_stack = stack_weights(model, "head.vl_layers", config.head.vl_block, config.head.vl_depth, stored)
        scale, shift = (model.weight(f"head.vl_norm.{n}").float().clone() for n in ("weight", "bias"))

        def joined(source: Source, part: str) -> Tensor:
            names = (f"head.layers.{i}.kv_proj.{part}" for i in config.head.blocks(source))
            return torch.cat([model.weight(name).to(stored.dtype) for name in names])

        keys_values: dict[Source, Linear] = {
            source: Linear(joined(source, "weight"), joined(source, "bias")) for source in config.head.sources
        }
        return cls(LanguageWeights.of(model, stored), scale, shift, vl_stack, keys_values, config)


class NativeReader:
    """The program of the prefix.

    Inputs `image_tokens` (B, I, W), of N1.7 `deepstack` (n, B, I, W), `tokens` (B, L) int64 in the layout's order, and
    `lengths` (B,) int32; outputs keys and values of each source of the head, (n, B, tokens, heads, d).
    """

    def __init__(self, weights: ReaderWeights, batch: int, layout: Layout, attention: str) -> None:
        config, head, device = weights.config.language, weights.config.head, weights.language.table.device
        self.weights, self.batch, self.layout = weights, batch, layout
        self.language = NativeLanguage(weights.language, batch, layout, attention)
        self.chain, language, places = self.language.chain, self.language.stack, self.language.places
        self.detail, self.attention = f"fused ops, {language.kind}, {language.detail}", language.attention
        self.stack: StackPlan | None = None
        self.x = torch.empty_like(language.x)
        if head.vl_depth:
            self.stack = StackPlan(weights.vl_stack, language.rows, attention, normed_outside=(0,))
            self.x, self.attention = self.stack.x, self.stack.attention
            self.detail += f"; after it, {self.stack.detail}"

        def buffer(*shape: int) -> Tensor:
            return torch.empty(*shape, dtype=language.x.dtype, device=device)

        joint = torch.cat((places.image, places.text))
        every: dict[Source, Tensor] = {"text": places.text, "image": places.image, "all": joint}
        self.placed: dict[Source, Tensor] = {source: every[source] for source in head.sources}
        self.taken = {source: buffer(batch, len(at), config.width) for source, at in self.placed.items()}
        self.joined = {s: buffer(batch * len(at), len(weights.keys_values[s].weight)) for s, at in self.placed.items()}
        self.shape = (2, head.heads, head.head_dim)

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        with self.chain:
            self._read(inputs)
        for source, rows in self.placed.items():
            self._keys_values(source, rows, outputs[f"{source}_keys"], outputs[f"{source}_values"])

    def _read(self, inputs: Mapping[str, Tensor]) -> None:
        w, layout, x = self.weights, self.layout, self.x
        text = w.config.text_lengths(layout, inputs["lengths"])
        hidden = self.language.run(inputs, layout.text - text if layout.arrangement.text_first else None)
        add_norm(hidden, None, hidden, x, layer=True, eps=w.config.head.eps, inverse_scale=None)
        # This norm's result is the residual itself: its weights cannot be folded.
        x.copy_(torch.addcmul(w.vl_shift, x, w.vl_scale))
        if self.stack is None:
            return
        with self.stack.chain.resumed():
            self.stack.enter(x)
            self.stack.run(text + layout.images)

    def _keys_values(self, source: Source, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        taken, joined = self.taken[source], self.joined[source]
        torch.index_select(self.x.view(self.batch, self.layout.tokens, -1), 1, rows, out=taken)
        gemm(taken.flatten(0, 1), self.weights.keys_values[source], joined)
        split = joined.view(self.batch, len(rows), -1, *self.shape).permute(3, 2, 0, 1, 4, 5)
        keys.copy_(split[0])
        values.copy_(split[1])
