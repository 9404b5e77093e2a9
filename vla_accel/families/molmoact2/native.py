"""The native programs of MolmoAct2's images and prompt: the components in fused ops over static buffers, for a CUDA
graph.

Exact savings besides those of the stacks: keys and values of all layers are projected in one product each; queries and
keys of the pooling are made before patches are joined to squares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from vla_accel.component import Program
from vla_accel.config import EngineSpec
from vla_accel.families.molmoact2.native_loop import LoopWeights, MolmoLoop, step_tables
from vla_accel.families.molmoact2.network import EPS, MolmoAct2, MolmoAct2Config
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.attention.ops import attention as attend
from vla_accel.kernels.gemm.epilogue import Epilogue
from vla_accel.kernels.gemm.ops import gemm, patch_product
from vla_accel.kernels.gemm.weights import Linear, make_linear, pair
from vla_accel.kernels.rows.rows import add_at, norm_rows, patchify, place_tokens
from vla_accel.nn.flow import Schedule
from vla_accel.nn.native_vision import patch_embedding
from vla_accel.nn.plan import Rows, StackPlan
from vla_accel.nn.quantised import QUANTISED
from vla_accel.nn.store import NativeStore
from vla_accel.nn.weights import Precision, StackWeights, stack_weights

W = TypeVar("W")


@dataclass(frozen=True)
class VisionWeights:
    """The folded weights of the tower, of the pooling and of the projector.

    `patch` (W, 2 * stride): the embedding in two halves; `place` (T, W) float32: positions and bias; `frame`: the
    embedded tokens of a view.
    """

    patch: Tensor
    place: Tensor
    stack: StackWeights
    queries: Linear
    keys_values: Linear
    out: Linear
    up: Linear
    down: Linear
    frame: Tensor
    config: MolmoAct2Config

    @classmethod
    def of(cls, model: MolmoAct2, stored: Precision) -> VisionWeights:
        """Prepare the weights of a model."""
        config = model.config.vision
        stack = stack_weights(model, "vision.layers", config.block, config.depth, stored)
        weight = model.weight("vision.patch_embedding.weight").unflatten(1, (config.patch_size, config.patch_size, 3))
        bias, position = (model.weight(f"vision.{n}") for n in ("patch_embedding.bias", "position_embedding"))
        patch, place = patch_embedding(weight.permute(0, 3, 1, 2), bias, position, stored.name)

        def product(name: str, *, biased: bool = True) -> Linear:
            bias = model.weight(f"pooling.{name}.bias") if biased else None
            return make_linear(model.weight(f"pooling.{name}.weight"), bias, stored.dtype)

        table = model.weight("embed.weight")
        frame = table[torch.tensor(model.config.frame(), device=table.device)].to(stored.dtype)
        return cls(
            patch, place, stack, product("q_proj"), product("kv_proj"), product("out_proj"),
            pair(product("gate_up_proj", biased=False)), product("down_proj", biased=False), frame, model.config,
        )  # fmt: skip


class NativeVision:
    """The program of images. Input `images` uint8 (B, V, S, S, 3); output `image_tokens` (B, V * T, W)."""

    def __init__(self, weights: VisionWeights, batch: int, views: int, attention: str) -> None:
        config, device, dtype = weights.config.vision, weights.patch.device, weights.stack.dtype
        self.weights, count = weights, batch * views
        self.stack = StackPlan(weights.stack, Rows(count, config.tokens), attention)
        self.attention = self.stack.attention
        self.detail = f"fused ops, {self.stack.kind}, {self.stack.detail}"
        rows, squares = count * config.tokens, config.squares**2
        self.patches = torch.empty(rows, weights.patch.shape[1], dtype=weights.patch.dtype, device=device)
        self.embedded = torch.empty(rows, config.width, dtype=torch.float32, device=device)
        self.places = config.places().to(device)
        self.tokens = torch.tensor(weights.config.squares(), device=device)
        # Patches beyond the edge stay zero.
        self.features = torch.zeros(count, 4 * squares, len(config.levels), config.width, dtype=dtype, device=device)
        self.bias, inside = None, config.inside().to(device)
        self.share = torch.full((squares, 1), 0.25, dtype=torch.float32, device=device)
        if config.masked:
            hidden = torch.zeros(inside.shape, device=device).masked_fill(~inside, -torch.inf)
            self.bias, self.share = hidden.repeat(count, 1), 1.0 / inside.sum(1, keepdim=True)

        def buffer(rows: int, columns: int) -> Tensor:
            return torch.empty(rows, columns, dtype=dtype, device=device)

        joined = count * squares
        self.mean, self.q = buffer(joined, config.features), buffer(joined, config.pool_width)
        self.both, self.context = buffer(4 * joined, 2 * config.pool_width), buffer(joined, config.pool_width)
        self.pooled, self.hidden = buffer(joined, config.pool_width), buffer(joined, 2 * config.hidden)
        self.active, self.projected = buffer(joined, config.hidden), buffer(joined, len(weights.down.weight))

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        weights, stack, config = self.weights, self.stack, self.weights.config.vision
        patchify(inputs["images"].flatten(0, 1), self.patches, config.patch_size)
        patch_product(self.patches, weights.patch, self.embedded)

        def after(index: int) -> None:
            if index in config.levels:
                rows = stack.x.view(len(self.features), config.tokens, -1)
                self.features[:, :, config.levels.index(index)].index_copy_(1, self.places, rows)
                stack.chain.restart()

        with stack.chain:
            stack.enter(self.embedded, weights.place)
            stack.run(after=after)
        self._pool()
        tokens = outputs["image_tokens"].view(len(self.features), -1, outputs["image_tokens"].shape[2])
        tokens.copy_(weights.frame.expand_as(tokens))
        add_at(self.projected.view(len(tokens), -1, tokens.shape[2]), self.tokens, tokens.flatten(0, 1))

    def _pool(self) -> None:
        """Squares of patches to the features of a view's tokens."""
        weights, config = self.weights, self.weights.config.vision
        squares = self.features.view(len(self.features), -1, 4, config.features)
        self.mean.view(*squares.shape[:2], -1).copy_(squares.sum(2, dtype=torch.float32) * self.share)
        gemm(self.mean, weights.queries, self.q)
        gemm(squares.flatten(0, 2), weights.keys_values, self.both)
        q = self.q.view(len(self.q), 1, config.pool_heads, -1)
        k, v = self.both.view(len(self.q), 4, 2 * config.pool_heads, -1).chunk(2, 2)
        attend(q, k, v, self.context.view(len(self.q), 1, -1), None, bias=self.bias)
        gemm(self.context, weights.out, self.pooled)
        gated = Epilogue(activation=Activation.SWIGLU)
        gemm(self.pooled, weights.up, self.active, gated, workspace=(self.hidden,))
        gemm(self.active, weights.down, self.projected)


@dataclass(frozen=True)
class ReaderWeights:
    """The weights of the prompt: `table` (vocabulary, W), token embeddings, shared with the model; the stack; and the
    projections of its keys and values."""

    table: Tensor
    stack: StackWeights
    keys: Linear
    values: Linear
    config: MolmoAct2Config

    @classmethod
    def of(cls, model: MolmoAct2, stored: Precision) -> ReaderWeights:
        """Prepare the weights of a model."""
        config = model.config.prefix
        stack = stack_weights(model, "prefix.layers", config.block(), config.depth, stored, keys_values_last=True)
        keys, values = (
            make_linear(model.weight(f"context.{name}_proj.weight"), None, stored.dtype) for name in ("key", "value")
        )
        return cls(model.weight("embed.weight"), stack, keys, values, model.config)


class NativeReader:
    """The program of the prompt. Inputs `image_tokens` (B, I, W), `tokens` (B, L) int64 and `lengths` (B,) int32, the
    tokens that the expert sees; outputs `keys`, `values` (depth, B, S, heads, d) of the expert."""

    attention = None

    def __init__(self, weights: ReaderWeights, batch: int, image_tokens: int, length: int, attention: str) -> None:
        config, device = weights.config, weights.stack.products[0].weight.device
        self.weights, self.tokens, views = weights, image_tokens + length, image_tokens // config.image_tokens
        self.order = config.order(views, length).to(device)
        together = config.is_image(views, self.tokens).to(device, torch.int32)
        cos, sin = config.prefix.rope(torch.arange(self.tokens, device=device), torch.float32)
        rope = cos[:, 0].contiguous(), sin[:, 0].contiguous()
        rows = Rows(batch, self.tokens, padded=True, together=together)
        self.stack = StackPlan(weights.stack, rows, attention, rope)
        self.detail = f"fused ops, {self.stack.kind}, {self.stack.detail}"
        text = config.prefix
        self.keys = self.stack.x.new_empty(text.depth, batch, self.tokens, text.kv_heads, text.head_dim)
        self.values, self.first = torch.empty_like(self.keys), torch.arange(batch, device=device)[:, None] * self.tokens
        seen = text.depth * batch * (self.tokens - len(config.hidden))
        self.projected = self.stack.x.new_empty(seen, config.expert.width)

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        weights, stack, config = self.weights, self.stack, self.weights.config
        with stack.chain:
            place_tokens(inputs["image_tokens"], inputs["tokens"], weights.table, self.order, stack.x)
            stack.enter(stack.x)
            stack.run(cache=lambda index: (self.keys[index], self.values[index]))
        rows = None
        if config.hidden:
            rows = (config.seen(inputs["lengths"], self.tokens) + self.first).flatten()
        for name, found, product in (("keys", self.keys, weights.keys), ("values", self.values, weights.values)):
            flat = found.view(len(found), -1, product.weight.shape[1])
            flat = flat if rows is None else flat.index_select(1, rows)
            gemm(flat.flatten(0, 1), product, self.projected)
            norm_rows(self.projected, outputs[name], heads=config.expert.heads if name == "keys" else 1, eps=EPS)


class MolmoAct2Store(NativeStore[MolmoAct2]):
    """Prepared weights of one MolmoAct2."""

    def vision(self, batch: int, views: int, spec: EngineSpec) -> Program:
        """The program of images."""
        weights = self._prefix_weights("vision", spec, VisionWeights.of)
        return NativeVision(weights, batch, views, spec.attention)

    def kv_cache(self, batch: int, image_tokens: int, length: int, spec: EngineSpec) -> Program:
        """The program of the prompt."""
        weights = self._prefix_weights("kv_cache", spec, ReaderWeights.of)
        return NativeReader(weights, batch, image_tokens, length, spec.attention)

    def _prefix_weights(self, component: str, spec: EngineSpec, of: Callable[[MolmoAct2, Precision], W]) -> W:
        """The weights of images or prompt, which `of` prepares."""
        products = QUANTISED[component]["native"]
        precision = self.precision(component, spec, products)
        stored = Precision(precision, products.without(spec.keep), self.scales)
        return self.weights((component, precision, spec.keep), lambda: of(self.model, stored))

    def denoise(
        self, batch: int, prefix_tokens: int, schedule: Schedule, spec: EngineSpec, max_weight: float | None = None,
        trained: bool = False,
    ) -> Program:  # fmt: skip
        """The whole Euler loop. Its FP8 and INT8 are of weights alone and need no scales. `max_weight`: as in
        `RtcConfig`; `trained`: never."""
        del trained
        precision = self.precision("denoise", spec, QUANTISED["denoise"]["native"])
        form = ("denoise", precision)
        weights = self.weights(form, lambda: LoopWeights.of(self.model, precision))
        tables = self.weights(
            (*form, schedule, max_weight), lambda: step_tables(self.model, weights, schedule, max_weight)
        )
        return MolmoLoop(weights, tables, self.model.config, batch, prefix_tokens)
