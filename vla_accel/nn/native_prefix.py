"""The prefix in fused ops: image tokens and prompt to keys and values.

Exact savings: norm weights are folded into q/k/v and gate/up, prefix attention and the expert read the same copy of
keys and values, and nothing runs after the last layer's keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from vla_accel.component import Program
from vla_accel.config import EngineSpec
from vla_accel.fp8 import Scales, named
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.attention.attending import Sizes, attend, choose
from vla_accel.kernels.chain import Chain
from vla_accel.kernels.gemm.choice import block_products, can_be_inside, products_by
from vla_accel.kernels.gemm.epilogue import Epilogue, Norm
from vla_accel.kernels.gemm.moments import Moments
from vla_accel.kernels.gemm.ops import gemm
from vla_accel.kernels.gemm.weights import Linear, make_linear, pair
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.rows.rows import add_norm, embed_norm, rope_cache, rope_tables
from vla_accel.nn.fold import fold_norm, plain
from vla_accel.nn.gemma import GemmaLayer
from vla_accel.nn.overlap import Ahead
from vla_accel.nn.paligemma import PaliGemma
from vla_accel.nn.prefix_store import FlowStore
from vla_accel.nn.prefixed import PrefixNetwork
from vla_accel.nn.quantised import QUANTISED
from vla_accel.nn.smollm import SmolLmLayer
from vla_accel.nn.store import amax_of, compute_dtype, format_of

N = TypeVar("N", bound=PaliGemma)


@dataclass(frozen=True)
class PrefixLayer:
    """The four products of a block. The last block has only keys and values, in `qkv`."""

    qkv: Linear
    o: Linear | None
    gate_up: Linear | None
    down: Linear | None


@dataclass(frozen=True)
class PrefixWeights:
    """The folded weights of the stack.

    `table` (vocabulary, W): the unscaled token embedding, on the GPU or in page-locked memory; `activation`: GEGLU or
    SWIGLU.
    """

    table: Tensor
    layers: tuple[PrefixLayer, ...]
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    activation: Activation = Activation.GEGLU

    @classmethod
    def of(
        cls, model: PrefixNetwork, precision: str, scales: Scales | None, embeddings: Literal["gpu", "host"] = "gpu",
        keep: Sequence[str] = (), paired: bool = True,
    ) -> PrefixWeights:  # fmt: skip
        """Prepare the weights of a model.

        Args:
            precision: fp32, bf16, or fp8 or int8, which apply to the products in `QUANTISED` except `keep`; the rest is
            BF16. embeddings: where the token embedding stays (`config.NativeOptions`). paired: whether the rows of gate
            and up alternate (`ops.weights.pair`). This is fastest for many rows; ops for few
                rows do not support it.
        """
        config, dtype, form = model.config.prefix, compute_dtype(precision), format_of(precision)
        narrow = QUANTISED["kv_cache"]["native"].without(keep)
        layers = []
        for index, layer in enumerate(model.prefix.layers):
            assert isinstance(layer, GemmaLayer)
            name = f"prefix.layers.{index}"
            amax = amax_of(scales, precision, name, narrow)
            if index + 1 == config.depth:
                # Nothing asks the last layer anything: only its keys and values are needed.
                with model.present(f"{name}.qkv_proj", f"{name}.input_layernorm"):
                    weight, _ = fold_norm(layer.qkv_proj, plain(layer.input_layernorm))
                    only = make_linear(weight[config.heads * config.head_dim :], None, dtype)
                layers.append(PrefixLayer(only, None, None, None))
                continue
            # Each product from its own weights: no more than one of them is here twice.
            with model.present(f"{name}.qkv_proj", f"{name}.input_layernorm"):
                folded = fold_norm(layer.qkv_proj, plain(layer.input_layernorm))
                qkv = make_linear(*folded, dtype, amax("qkv_proj"), form=form)
            with model.present(f"{name}.o_proj"):
                o = make_linear(layer.o_proj.weight, None, dtype, amax("o_proj"), form=form)
            with model.present(f"{name}.gate_up_proj", f"{name}.post_attention_layernorm"):
                folded = fold_norm(layer.gate_up_proj, plain(layer.post_attention_layernorm))
                gate_up = make_linear(*folded, dtype, amax("gate_up_proj"), form=form)
                del folded
            gate_up = pair(gate_up) if paired else gate_up
            with model.present(f"{name}.down_proj"):
                down = make_linear(layer.down_proj.weight, None, dtype, amax("down_proj"), form=form)
            layers.append(PrefixLayer(qkv, o, gate_up, down))
        if embeddings == "host":
            table = model.on_host("embed.weight")
        else:
            with model.present("embed"):
                table = model.embed.weight.detach()
        smol = isinstance(model.prefix.layers[0], SmolLmLayer)
        activation = Activation.SWIGLU if smol else Activation.GEGLU
        return cls(table, tuple(layers), dtype, config.heads, config.kv_heads, config.head_dim, config.eps, activation)

    @property
    def bytes(self) -> int:
        """Bytes of the weights of all products."""
        products = (p for layer in self.layers for p in (layer.qkv, layer.o, layer.gate_up, layer.down))
        return sum(p.bytes for p in products if p is not None)


class NativePrefix:
    """The program of the prefix.

    Inputs `image_tokens` (B, I, W), `tokens` (B, L) int64 and `lengths` (B,) int32, the real tokens of each row, which
    come first; outputs `keys`, `values` (depth, B, I + L, kv_heads, d).
    """

    state_last: ClassVar[bool] = False
    """Whether a row's last token is its state, which no other token sees."""

    def __init__(
        self, weights: PrefixWeights, batch: int, image_tokens: int, length: int, attention: str = "own"
    ) -> None:
        self.weights = weights
        first, dtype, device = weights.layers[0], weights.dtype, weights.layers[0].qkv.weight.device
        others = [p for p in (first.o, first.gate_up, first.down) if p is not None and p.weight_scale is not None]
        self.detail = f"fused ops, {named(others[0].weight.dtype) if others else dtype}"
        self.batch, self.tokens = batch, image_tokens + length
        rows, width = batch * self.tokens, weights.table.shape[1]

        def taken_by(product: Linear | None) -> torch.dtype:
            """The dtype of a product's input."""
            return dtype if product is None or product.weight_scale is None else product.weight.dtype

        sizes = Sizes(
            batch, self.tokens, self.tokens, weights.heads, weights.kv_heads, weights.head_dim, dtype, padded=True,
            quantised=taken_by(first.o) != dtype, stored=taken_by(first.o), last=self.state_last,
        )  # fmt: skip
        self.attention = choose(attention, sizes, device)
        self.detail += f", {self.attention.detail}"
        products, early, self.norms_inside, self.mlp_norms_inside = "", False, False, False
        if first.o is not None and first.gate_up is not None and first.down is not None:
            four = block_products(first.qkv, first.o, first.gate_up, first.down, weights.activation)
            self.norms_inside = can_be_inside(rows, width, four["down"], four["qkv"])
            self.mlp_norms_inside = first.gate_up.paired and can_be_inside(rows, width, four["o"], four["gate_up"])
            taking = {"down", "qkv"} if self.norms_inside else set()
            taking |= {"o", "gate_up"} if self.mlp_norms_inside else set()
            products, early = products_by(rows, four, taking)
        self.chain = Chain(Gpu.of(device), early)
        self.detail += products
        if weights.table.device != device:
            self.detail += ", embeddings on the host"
        inside = [n for n, is_so in (("q/k/v", self.norms_inside), ("gate/up", self.mlp_norms_inside)) if is_so]
        if inside:
            self.detail += f", norm of {' and '.join(inside)} inside"

        def buffer(columns: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.empty(rows, columns, dtype=kind, device=device)

        self.x, self.y, self.h = buffer(width), buffer(width), buffer(width)
        self.moments, self.normed = Moments.like(self.x), Moments.of_normed(self.x, weights.eps)
        self.h_mlp = buffer(width, taken_by(first.gate_up))
        self.qkv = buffer((weights.heads + 2 * weights.kv_heads) * weights.head_dim)
        self.last_kv = buffer(2 * weights.kv_heads * weights.head_dim)
        self.context = buffer(weights.heads * weights.head_dim, taken_by(first.o))
        if first.gate_up is not None:
            hidden = first.gate_up.weight.shape[0] // 2
            self.gate_up, self.active = buffer(2 * hidden), buffer(hidden, taken_by(first.down))
        self.cos, self.sin = rope_tables(self.tokens, weights.head_dim, device)
        self.ahead: Ahead | None = None
        """Where it says which layers are done."""

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        if self.ahead is not None:
            self.ahead.begin()
        with self.chain:
            self._layers(inputs, outputs)
        if self.ahead is None:
            self.finish(outputs)

    def _layers(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        w, lengths = self.weights, inputs["lengths"]
        self.embed(inputs)
        q = self.qkv.view(self.batch, self.tokens, -1, w.head_dim)[:, :, : w.heads]
        # What the next q/k/v multiplies: rows that are normed, or rows that are not and their moments.
        x, moments = self.h, self.normed
        for index, layer in enumerate(w.layers):
            keys, values = self.cache(outputs, index)
            if layer.o is None or layer.gate_up is None or layer.down is None:
                if self.norms_inside and index:
                    add_norm(self.x, None, self.x, self.h, layer=False, eps=w.eps, inverse_scale=None)
                gemm(self.h, layer.qkv, self.last_kv)
                rope_cache(self.last_kv, self.cos, self.sin, keys, values, 0)
                self._reached(index)
                break
            if self.norms_inside:
                gemm(x, layer.qkv, self.qkv, norm=Norm(w.eps, moments))
            else:
                gemm(self.h, layer.qkv, self.qkv)
            rope_cache(self.qkv, self.cos, self.sin, keys, values, w.heads)
            self._reached(index)
            attend(
                self.attention.way, q, keys, values, self.context, lengths, inverse_scale=layer.o.inverse_scale,
                last=self.state_last, tile=self.attention.tile,
            )  # fmt: skip
            residual = Epilogue(residual=True, moments=self.moments)
            active = Epilogue(activation=w.activation, quantize=layer.down.inverse_scale)
            if self.mlp_norms_inside:
                gemm(self.context, layer.o, self.x, residual)
                gemm(self.x, layer.gate_up, self.active, active, Norm(w.eps, self.moments))
            else:
                gemm(self.context, layer.o, self.y)
                self._residual(self.h_mlp, layer.gate_up)
                gemm(self.h_mlp, layer.gate_up, self.active, active, workspace=(self.gate_up,))
            if self.norms_inside:
                x, moments = self.x, self.moments
                gemm(self.active, layer.down, x, residual)
            else:
                gemm(self.active, layer.down, self.y)
                self._residual(self.h, w.layers[index + 1].qkv)

    def embed(self, inputs: Mapping[str, Tensor]) -> None:
        """Enqueue the rows of the stack and their norm."""
        w = self.weights
        embed_norm(inputs["image_tokens"], inputs["tokens"], w.table, self.x, self.h, eps=w.eps, inverse_scale=None)

    def cache(self, outputs: Mapping[str, Tensor], index: int) -> tuple[Tensor, Tensor]:
        """Return where the keys and values of a layer are written, (B, S, kv_heads, d) each."""
        return outputs["keys"][index], outputs["values"][index]

    def finish(self, outputs: Mapping[str, Tensor]) -> None:
        """Enqueue the work after the last layer."""

    def complete(self, outputs: Mapping[str, Tensor], index: int) -> None:
        """Enqueue the remaining work of one layer after its keys and values."""

    def go_ahead(self, outputs: Mapping[str, Tensor]) -> Ahead:
        """From now on, record an event for each layer once its keys and values are enqueued. The consumer completes
        each layer that it waits for.
        """
        device, depth = self.x.device, len(self.weights.layers)
        self.ahead = Ahead(device, depth, lambda index: self.complete(outputs, index))
        return self.ahead

    def _reached(self, index: int) -> None:
        if self.ahead is not None:
            self.ahead.reached(index)

    def _residual(self, normed: Tensor, following: Linear) -> None:
        add_norm(
            self.x, self.y, self.x, normed, layer=False, eps=self.weights.eps, inverse_scale=following.inverse_scale,
        )  # fmt: skip


class PaliGemmaStore(FlowStore[N]):
    """Prepared weights of a model on PaliGemma."""

    paired: ClassVar[bool] = True
    """As of `PrefixWeights`."""

    def kv_cache(self, batch: int, image_tokens: int, length: int, spec: EngineSpec) -> Program:
        """Return the prefix program for `image_tokens` image tokens and `length` prompt tokens in each row."""
        weights = self.prefix_weights(spec, partial(PrefixWeights.of, paired=self.paired))
        return NativePrefix(weights, batch, image_tokens, length, spec.attention)
