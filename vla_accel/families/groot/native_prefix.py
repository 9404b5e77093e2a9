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

from vla_accel.families.groot.head import Source
from vla_accel.families.groot.language import Layout, language_rope
from vla_accel.families.groot.network import Groot, GrootConfig
from vla_accel.kernels.gemm.ops import gemm
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.rows.rows import add_at, add_norm, place_tokens
from vla_accel.nn.plan import Rows, StackPlan
from vla_accel.nn.weights import Precision, StackWeights, stack_weights


@dataclass(frozen=True)
class ReaderWeights:
    """The weights of the prefix.

    `table` (vocabulary, W): token embeddings, shared with the model; `vl_scale`, `vl_shift` (W,) float32: of the norm
    before the vision-language attention; `final_norm` (W,) float32: of the language model's output, None if the raw
    output is read; `keys_values`: one product of all blocks of a source.
    """

    table: Tensor
    language: StackWeights
    vl_scale: Tensor
    vl_shift: Tensor
    vl_stack: StackWeights
    final_norm: Tensor | None
    keys_values: Mapping[Source, Linear]
    config: GrootConfig

    @classmethod
    def of(cls, model: Groot, precision: str) -> ReaderWeights:
        """Prepare the weights of a model. `precision`: fp32 or bf16."""
        stored, config = Precision(precision), model.config
        language = stack_weights(model, "language.layers", config.language.block, config.language.depth, stored)
        vl_stack = stack_weights(model, "head.vl_layers", config.head.vl_block, config.head.vl_depth, stored)
        scale, shift = (model.weight(f"head.vl_norm.{n}").float().clone() for n in ("weight", "bias"))

        final = model.weight("language.norm.weight").float().clone() if config.language.final_norm else None

        def joined(source: Source, part: str) -> Tensor:
            names = (f"head.layers.{i}.kv_proj.{part}" for i in config.head.blocks(source))
            return torch.cat([model.weight(name).to(stored.dtype) for name in names])

        keys_values: dict[Source, Linear] = {
            source: Linear(joined(source, "weight"), joined(source, "bias")) for source in config.head.sources
        }
        return cls(model.weight("embed.weight"), language, scale, shift, vl_stack, final, keys_values, config)


class NativeReader:
    """The program of the prefix.

    Inputs `image_tokens` (B, I, W), of N1.7 `deepstack` (n, B, I, W), `tokens` (B, L) int64 in the layout's order, and
    their `lengths` (B,) int32; outputs `HeadConfig.cached`, (n, B, tokens, heads, d) each.
    """

    def __init__(self, weights: ReaderWeights, batch: int, layout: Layout, attention: str) -> None:
        config, head, device = weights.config.language, weights.config.head, weights.table.device
        self.weights, self.batch, self.layout = weights, batch, layout
        self.places = places = layout.places(device)
        cos, sin = (t[:, 0].contiguous() for t in language_rope(config, places.positions, torch.float32))
        rows, deepstack = Rows(batch, layout.tokens, padded=True), len(weights.config.vision.deepstack)
        # Deepstack adds to the outputs of the first blocks; the next norm must come after that.
        self.language = StackPlan(weights.language, rows, attention, (cos, sin), range(deepstack + 1))
        self.chain, self.attention = self.language.chain, self.language.attention
        self.detail = f"fused ops, {self.language.kind}, {self.language.detail}"
        self.stack: StackPlan | None = None
        self.x = torch.empty_like(self.language.x)
        if head.vl_depth:
            self.stack = StackPlan(weights.vl_stack, rows, attention, normed_outside=(0,))
            self.x, self.attention = self.stack.x, self.stack.attention
            self.detail += f"; after it, {self.stack.detail}"

        def buffer(*shape: int) -> Tensor:
            return torch.empty(*shape, dtype=weights.language.dtype, device=device)

        every = {"text": places.text, "image": places.image, "all": torch.cat((places.image, places.text))}
        self.placed = {source: every[source] for source in head.sources}
        self.taken = {source: buffer(batch, len(at), config.width) for source, at in self.placed.items()}
        self.joined = {s: buffer(batch * len(at), len(weights.keys_values[s].weight)) for s, at in self.placed.items()}
        self.shape = (2, head.heads, head.head_dim)

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        with self.chain:
            self._read(inputs)
        for source, rows in self.placed.items():
            self._keys_values(source, rows, outputs[f"{source}_keys"], outputs[f"{source}_values"])

    def _read(self, inputs: Mapping[str, Tensor]) -> None:
        w, language, deepstack, x = self.weights, self.language, inputs.get("deepstack"), self.x

        def after(index: int) -> None:
            if deepstack is not None and index < len(deepstack):
                add_at(deepstack[index], self.places.image, language.x)
                language.enter(language.x)

        # Padding in front of a prompt; padding behind it changes nothing before it.
        starts = self.layout.text - inputs["lengths"] if self.layout.arrangement.text_first else None
        place_tokens(inputs["image_tokens"], inputs["tokens"], w.table, self.places.order, language.x)
        language.enter(language.x)
        language.run(starts, after=after)
        hidden = language.x
        if w.final_norm is not None:
            hidden = language.output()
            hidden.mul_(w.final_norm)
        add_norm(hidden, None, hidden, x, layer=True, eps=w.config.head.eps, inverse_scale=None)
        # This norm's result is the residual itself: its weights cannot be folded.
        x.copy_(torch.addcmul(w.vl_shift, x, w.vl_scale))
        if self.stack is None:
            return
        lengths = inputs["lengths"] + len(self.places.image)
        with self.stack.chain.resumed():
            self.stack.enter(x)
            self.stack.run(lengths)

    def _keys_values(self, source: Source, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        taken, joined = self.taken[source], self.joined[source]
        torch.index_select(self.x.view(self.batch, self.layout.tokens, -1), 1, rows, out=taken)
        gemm(taken.flatten(0, 1), self.weights.keys_values[source], joined)
        split = joined.view(self.batch, len(rows), -1, *self.shape).permute(3, 2, 0, 1, 4, 5)
        keys.copy_(split[0])
        values.copy_(split[1])
