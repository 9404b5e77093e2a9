"""GR00T's language model and vision-language attention in fused ops: image tokens and text to the keys and values that
the diffusion transformer reads in every step.

Exact savings: norms are folded into the next products, no layer runs after the last one that is read, and the keys and
values of all blocks of a source are one product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vla_accel.families.groot.head import DitLayer, Source
from vla_accel.families.groot.language import Layout, QwenLayer, language_rope
from vla_accel.families.groot.network import Groot
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.chain import Chain
from vla_accel.kernels.gemm.choice import block_products, can_be_inside, products_by
from vla_accel.kernels.gemm.epilogue import Epilogue, Norm
from vla_accel.kernels.gemm.moments import Moments
from vla_accel.kernels.gemm.ops import gemm
from vla_accel.kernels.gemm.weights import Linear, make_linear, pair
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.rows.rows import add_norm
from vla_accel.kernels.rows.sequence import add_at, causal_attention, norm_rope, place_tokens
from vla_accel.nn.native_vision import VisionLayer
from vla_accel.nn.stack import Stack, StackSizes, stack_weights
from vla_accel.nn.store import compute_dtype


@dataclass(frozen=True)
class LanguageLayer:
    """The four products of a block with folded norms, and the norms of its heads, (d,) float32."""

    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    q_norm: Tensor
    k_norm: Tensor

    @classmethod
    def of(cls, layer: QwenLayer, dtype: torch.dtype) -> LanguageLayer:
        return cls(
            make_linear(_folded(layer.qkv_proj, layer.input_layernorm), None, dtype),
            make_linear(layer.o_proj.weight, None, dtype),
            pair(make_linear(_folded(layer.gate_up_proj, layer.post_attention_layernorm), None, dtype)),
            make_linear(layer.down_proj.weight, None, dtype),
            layer.q_norm.weight.float().clone(),
            layer.k_norm.weight.float().clone(),
        )


def _folded(product: nn.Linear, norm: nn.RMSNorm) -> Tensor:
    return product.weight.float() * norm.weight.float()


@dataclass(frozen=True)
class ReaderWeights:
    """`table` (vocabulary, W): token embeddings, shared with the model; `vl_scale`, `vl_shift` (W,) float32: of the
    norm before the attention; `keys_values`: one product of all blocks for text, and one for images.
    """

    table: Tensor
    layers: tuple[LanguageLayer, ...]
    vl_scale: Tensor
    vl_shift: Tensor
    vl_layers: tuple[VisionLayer, ...]
    keys_values: Mapping[Source, Linear]
    dtype: torch.dtype

    @classmethod
    def of(cls, model: Groot, precision: str) -> ReaderWeights:
        """Prepare the weights of a model. `precision`: fp32 or bf16."""
        dtype, layers = compute_dtype(precision), []
        (table,) = model.fetched("embed")
        for index, layer in enumerate(model.language.layers):
            assert isinstance(layer, QwenLayer)
            with model.present(f"language.layers.{index}"):
                layers.append(LanguageLayer.of(layer, dtype))
        vl_layers = stack_weights(model, "head.vl_layers", list(model.head.vl_layers), dtype)
        with model.present("head.vl_norm"):
            scale, shift = (p.detach().float().clone() for p in (model.head.vl_norm.weight, model.head.vl_norm.bias))
        sources: tuple[Source, ...] = ("text", "image")
        joined: dict[Source, Linear] = {source: _keys_values(model, source, dtype) for source in sources}
        return cls(table.detach(), tuple(layers), scale, shift, vl_layers, joined, dtype)


def _keys_values(model: Groot, source: Source, dtype: torch.dtype) -> Linear:
    made = []
    for index in model.config.head.blocks(source):
        layer = model.head.layers[index]
        assert isinstance(layer, DitLayer)
        with model.present(f"head.layers.{index}.kv_proj"):
            made.append((layer.kv_proj.weight.to(dtype), layer.kv_proj.bias.to(dtype)))
    return Linear(torch.cat([w for w, _ in made]), torch.cat([b for _, b in made]))


class NativeReader:
    """The program of the prefix.

    Inputs `image_tokens` (B, I, W), `deepstack` (n, B, I, W), `tokens` (B, L) int64, and their `lengths` (B,) int32;
    outputs `text_keys`, `text_values` (n, B, L, heads, d), `image_keys`, `image_values` (n, B, I, heads, d).
    """

    def __init__(self, weights: ReaderWeights, model: Groot, batch: int, layout: Layout, attention: str) -> None:
        config, device, dtype = model.config.language, weights.table.device, weights.dtype
        self.weights, self.config, self.batch, self.layout = weights, config, batch, layout
        rows, width, first = batch * layout.tokens, config.width, weights.layers[0]
        self.places = layout.places(device)
        cos, sin = language_rope(config, self.places.positions, torch.float32)
        self.cos, self.sin = cos[:, 0].contiguous(), sin[:, 0].contiguous()
        four = block_products(first.qkv, first.o, first.gate_up, first.down, Activation.SWIGLU)
        self.norms_inside = first.gate_up.paired and can_be_inside(rows, width, *four.values())
        products, early = products_by(rows, four, four if self.norms_inside else ())
        self.chain = Chain(Gpu.of(device), early)
        products += ", norms inside" if self.norms_inside else ""
        head = model.config.head
        sizes = StackSizes(batch, layout.tokens, head.vl_heads, head.eps, padded=True)
        self.stack = Stack(weights.vl_layers, sizes, dtype, attention)
        self.attention = self.stack.attention
        self.detail = f"fused ops, {dtype}, causal attention in Triton{products}; after it{self.stack.detail}"
        self.head_eps = head.eps

        def buffer(columns: int, count: int = rows) -> Tensor:
            return torch.empty(count, columns, dtype=dtype, device=device)

        self.x, self.y, self.h = buffer(width), buffer(width), buffer(width)
        self.moments = Moments.like(self.x)
        self.qkv, self.context = buffer(config.qkv_dim), buffer(config.heads * config.head_dim)
        self.gate_up, self.active = buffer(2 * config.mlp_dim), buffer(config.mlp_dim)
        images, text = layout.views * layout.view_tokens, layout.text
        self.taken: Mapping[Source, Tensor] = {
            "text": torch.empty(batch, text, width, dtype=dtype, device=device),
            "image": torch.empty(batch, images, width, dtype=dtype, device=device),
        }
        counts: dict[Source, int] = {"text": text, "image": images}
        self.joined: dict[Source, Tensor] = {
            source: buffer(weights.keys_values[source].weight.shape[0], batch * count)
            for source, count in counts.items()
        }
        self.shape = (2, head.heads, head.head_dim)

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        with self.chain:
            self._read(inputs)
        placed: dict[Source, Tensor] = {"text": self.places.text, "image": self.places.image}
        for source, rows in placed.items():
            self._keys_values(source, rows, outputs[f"{source}_keys"], outputs[f"{source}_values"])

    def _read(self, inputs: Mapping[str, Tensor]) -> None:
        deepstack = inputs["deepstack"]
        place_tokens(inputs["image_tokens"], inputs["tokens"], self.weights.table, self.places.order, self.x)
        self._norm(self.x, self.h)
        for index, layer in enumerate(self.weights.layers):
            self._attention(layer, normed=not self.norms_inside or index <= len(deepstack))
            self._mlp(layer)
            if index < len(deepstack):
                add_at(deepstack[index], self.places.image, self.x)
                self._norm(self.x, self.h)
        self._attend_to_all(inputs["lengths"])

    def _norm(self, x: Tensor, h: Tensor, y: Tensor | None = None) -> None:
        add_norm(x, y, x, h, layer=False, eps=self.config.eps, inverse_scale=None)

    def _attention(self, layer: LanguageLayer, *, normed: bool) -> None:
        """Enqueue attention. `normed`: `h` has the normed rows; otherwise `moments` are those of `x`."""
        c = self.config
        if normed:
            gemm(self.h, layer.qkv, self.qkv)
        else:
            gemm(self.x, layer.qkv, self.qkv, norm=Norm(c.eps, self.moments))
        norm_rope(self.qkv, layer.q_norm, layer.k_norm, self.cos, self.sin, c.heads, c.kv_heads, eps=c.eps)
        heads = self.qkv.view(self.batch, self.layout.tokens, -1, c.head_dim)
        q, k, v = heads.split((c.heads, c.kv_heads, c.kv_heads), 2)
        causal_attention(q, k, v, self.context.view(self.batch, self.layout.tokens, -1))

    def _mlp(self, layer: LanguageLayer) -> None:
        """Enqueue output projection, residual, MLP and residual. Afterwards `h` has the normed rows, or `moments` are
        those of `x`.
        """
        active = Epilogue(activation=Activation.SWIGLU)
        if self.norms_inside:
            residual = Epilogue(residual=True, moments=self.moments)
            gemm(self.context, layer.o, self.x, residual)
            gemm(self.x, layer.gate_up, self.active, active, Norm(self.config.eps, self.moments))
            gemm(self.active, layer.down, self.x, residual)
            return
        gemm(self.context, layer.o, self.y)
        self._norm(self.x, self.h, self.y)
        gemm(self.h, layer.gate_up, self.active, active, workspace=(self.gate_up,))
        gemm(self.active, layer.down, self.y)
        self._norm(self.x, self.h, self.y)

    def _attend_to_all(self, lengths: Tensor) -> None:
        w, x = self.weights, self.stack.x
        add_norm(self.x, None, self.x, x, layer=True, eps=self.head_eps, inverse_scale=None)
        # This norm's result is the residual itself: its weights cannot be folded.
        x.copy_(torch.addcmul(w.vl_shift, x, w.vl_scale))
        with self.stack.chain.resumed():
            self.stack.run(lengths + len(self.places.image))

    def _keys_values(self, source: Source, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        taken, joined = self.taken[source], self.joined[source]
        torch.index_select(self.stack.x.view(self.batch, self.layout.tokens, -1), 1, rows, out=taken)
        gemm(taken.flatten(0, 1), self.weights.keys_values[source], joined)
        split = joined.view(self.batch, len(rows), -1, *self.shape).permute(3, 2, 0, 1, 4, 5)
        keys.copy_(split[0])
        values.copy_(split[1])
