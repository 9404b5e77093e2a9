"""Plan a stack of blocks for a number of rows: which kernels run it, in which buffers. The only place that fuses.

Norm weights are folded into the next product (`nn.weights`). Where the kernels of both products can, a norm has no
kernel of its own: the product before it adds to the residual and writes the moments of the new rows, and the product
after it multiplies the rows as they are and norms its sums. Gate and up are one product with the activation inside.
Products prefetch the weights of the product after the next one to the L2 cache. The ledger's text lists the fusions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from vla_accel.fp8 import INT8, named
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.attention.choice import Choice, choose, fastest_causal_tile
from vla_accel.kernels.attention.config import AttentionShape, FlashTile
from vla_accel.kernels.attention.ops import attend, causal_attention
from vla_accel.kernels.chain import Chain
from vla_accel.kernels.gemm.choice import Product, is_inside, products_by
from vla_accel.kernels.gemm.epilogue import Epilogue, Norm
from vla_accel.kernels.gemm.moments import Moments
from vla_accel.kernels.gemm.ops import gemm
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.rows.rows import HeadNorms, add_norm, rotate
from vla_accel.nn.block import Attention
from vla_accel.nn.weights import BlockWeights, StackWeights
from vla_accel.runtime import current

Pair = tuple[Tensor, Tensor]
"""cos and sin (tokens, head_dim / 2) float32, or keys and values (B, tokens, kv_heads, d)."""


@dataclass(frozen=True)
class Rows:
    """`batch` sequences of `tokens` rows.

    Args:
        padded: whether sequences may have fewer real rows, which come first.
        state_last: whether a sequence's last row is its state, which no other row attends to.
        together: (tokens,) int32, 1 for rows that attend to each other in causal attention, whatever their order.
    """

    batch: int
    tokens: int
    padded: bool = False
    state_last: bool = False
    together: Tensor | None = None


def why_norm_apart(weights: StackWeights, rows: int, before: Product, after: Product) -> str | None:
    """Explain why the norm between two products is a kernel of its own; None if it runs inside them."""
    up = weights.blocks[0].up
    if after[0] is up and weights.block.activation.gated and not up.paired:
        return "the rows of gate and up do not alternate"
    if weights.block.layer_norm and any(p.weight_scale is not None for p in weights.products):
        return "rows are quantised after their LayerNorm"
    if not is_inside(rows, before, after):
        return "no kernel takes both products, or they are slower"
    return None


class StackPlan:
    """The launches of all blocks of a stack, and their buffers.

    The caller opens `chain`, writes the rows (batch * tokens, width) to `x` and their norm to `h`, and calls `run`.
    `detail`: the text for the ledger; `kind`: the dtype of the products.
    """

    def __init__(
        self, weights: StackWeights, rows: Rows, attention: str = "own", rope: Pair | None = None,
        normed_outside: Collection[int] = (),
    ) -> None:  # fmt: skip
        """
        Args:
            attention: the requested attention backend.
            rope: the tables of blocks that rotate.
            normed_outside: blocks whose input is normed outside of the plan. They read `h`, whatever runs inside.
        """
        self.weights, self.rows, self.rope, self.normed_outside = weights, rows, rope, normed_outside
        block, dtype, count = weights.block, weights.dtype, rows.batch * rows.tokens
        first = weights.blocks[0] if weights.blocks else None
        if rows.together is not None and block.attention is not Attention.CAUSAL:
            raise ValueError("together: only causal attention reads it")
        some = weights.products[0]
        device = some.weight.device

        def taken_by(product: Linear | None) -> torch.dtype:
            """The dtype of a product's input."""
            return dtype if product is None or product.weight_scale is None else product.weight.dtype

        def buffer(columns: int, product: Linear | None = None) -> Tensor:
            return torch.empty(count, columns, dtype=taken_by(product), device=device)

        quantised = [] if first is None else [p for p in first if p.weight_scale is not None]
        self.kind = named(quantised[0].weight.dtype) if quantised else str(dtype)
        self.tile: FlashTile | None = None
        self.attention = self._choose_attention(attention, taken_by(first.out if first else None), device)
        tile = "" if self.tile is None else f" ({self.tile})"
        self.detail = f"causal attention in Triton{tile}" if self.attention is None else self.attention.detail
        self.attention_norm_inside = self.mlp_norm_inside = early = False
        if first is not None:
            early = self._fuse(first, count)
        self.chain = Chain(current(device).gpu, early)
        self.x, self.y, self.h = buffer(block.width), buffer(block.width), buffer(block.width, first and first.qkv)
        self.moments, self.normed = Moments.like(self.x), Moments.of_normed(self.x, block.eps)
        self.qkv = buffer(block.qkv_dim)
        self.last, self.h_mlp = self.h, self.h
        if weights.last_kv is not None:
            self.last_kv = buffer(weights.last_kv.weight.shape[0])
        if first is None:
            return
        self.context = buffer(block.heads * block.head_dim, first.out)
        self.hidden = buffer(first.up.weight.shape[0])
        if block.activation.gated or first.down.weight_scale is not None:
            self.active = buffer(first.down.weight.shape[1], first.down)
        else:
            self.active = self.hidden
        if taken_by(first.up) != self.h.dtype:
            self.h_mlp = buffer(block.width, first.up)
        if self.h.dtype != dtype:
            self.last = buffer(block.width)

    def _choose_attention(self, requested: str, stored: torch.dtype, device: torch.device) -> Choice | None:
        """The backend of attention; None for causal attention, which has one kernel."""
        block, rows, dtype = self.weights.block, self.rows, self.weights.dtype
        sizes = AttentionShape(
            rows.batch, rows.tokens, rows.tokens, block.heads, block.kv_heads, block.head_dim, dtype,
            padded=rows.padded, quantised=stored != dtype, stored=stored, last=rows.state_last,
        )  # fmt: skip
        if block.attention is Attention.CAUSAL:
            self.tile = fastest_causal_tile(sizes, rows.together, current(device))
            return None
        return choose(requested, sizes, current(device))

    def _fuse(self, first: BlockWeights, count: int) -> bool:
        """Decide which norms run inside the products around them; whether dependent launches pay off."""
        block, names = self.weights.block, self.weights.block.names
        # The activation of gate and up is inside their product if they are paired, or in INT8.
        inside = not block.activation.gated or first.up.paired or first.up.weight.dtype == INT8.dtype
        activations = (Activation.NONE, Activation.NONE, block.activation if inside else Activation.NONE)
        qkv, out, up = zip((first.qkv, first.out, first.up), activations, strict=True)
        down = (first.down, Activation.NONE)
        self.attention_norm_inside = why_norm_apart(self.weights, count, down, qkv) is None
        self.mlp_norm_inside = why_norm_apart(self.weights, count, out, up) is None
        short = [name.removesuffix("_proj") for name in (names.qkv, names.out, names.up, names.down)]
        fused = {short[0], short[3]} if self.attention_norm_inside else set()
        fused |= {short[1], short[2]} if self.mlp_norm_inside else set()
        text, early = products_by(count, dict(zip(short, (qkv, out, up, down), strict=True)), fused)
        self.detail += text
        which = {"q/k/v": self.attention_norm_inside, short[2]: self.mlp_norm_inside}
        if all(which.values()):
            self.detail += ", norms inside"
        elif any(which.values()):
            self.detail += f", norm of {next(n for n, is_so in which.items() if is_so)} inside"
        return early

    def enter(self, rows: Tensor, bias: Tensor | None = None) -> None:
        """Enqueue `x` = rows + bias, and the norm of the first block."""
        self._norm(rows, bias, self.h, self.weights.products[0])

    def run(
        self, lengths: Tensor | None = None, cache: Callable[[int], Pair] | None = None,
        cached: Callable[[int], None] = lambda index: None, after: Callable[[int], None] = lambda index: None,
    ) -> None:  # fmt: skip
        """Enqueue all blocks on `x`.

        Args:
            lengths: (B,) int32, the real rows of each sequence, or None for all. Of causal attention, whose padding
                comes first, the padding rows.
            cache: where a block writes its keys and values, if it has a cache.
            cached: called with each block's index once its keys and values are enqueued.
            after: called with each block's index once it is enqueued; `x` then holds its output.
        """
        blocks, following = self.weights.blocks, [b.qkv for b in self.weights.blocks[1:]]
        for index, (weights, product) in enumerate(zip(blocks, [*following, self.weights.last_kv], strict=True)):
            self._qkv(index, weights)
            self._attend(index, weights, lengths, cache, cached)
            self._mlp(weights, product)
            self._down(weights, product)
            after(index)
        if self.weights.last_kv is not None:
            assert cache is not None and self.rope is not None
            if self.attention_norm_inside:
                self._norm(self.x, None, self.h, None)
            gemm(self.h, self.weights.last_kv, self.last_kv)
            norm = self.weights.last_norm
            norms = None if norm is None else HeadNorms(norm, norm, self.weights.block.eps)
            rotate(self.last_kv, *self.rope, 0, norms, *cache(len(blocks)))
            cached(len(blocks))

    def output(self) -> Tensor:
        """Enqueue the norm of the output if it has not run yet, and return the normed rows."""
        if self.attention_norm_inside:
            self._norm(self.x, None, self.last, None)
        return self.last

    def _qkv(self, index: int, weights: BlockWeights) -> None:
        plain = Epilogue(prefetch=weights.up.prefetchable)
        if not self.attention_norm_inside or index in self.normed_outside:
            return gemm(self.h, weights.qkv, self.qkv, plain)
        # The first block's rows are normed already: their moments are those of normed rows.
        x, moments = (self.x, self.moments) if index else (self.h, self.normed)
        gemm(x, weights.qkv, self.qkv, plain, self._norm_inside(moments, weights.qkv))

    def _attend(
        self, index: int, weights: BlockWeights, lengths: Tensor | None, cache: Callable[[int], Pair] | None,
        cached: Callable[[int], None],
    ) -> None:  # fmt: skip
        block, rows = self.weights.block, self.rows
        heads, norms = self.qkv.view(rows.batch, rows.tokens, -1, block.head_dim), None
        if weights.q_norm is not None and weights.k_norm is not None:
            norms = HeadNorms(weights.q_norm, weights.k_norm, block.eps)
        if cache is not None and self.rope is not None:
            keys, values = cache(index)
            rotate(self.qkv, *self.rope, block.heads, norms, keys, values)
            cached(index)
            q = heads[:, :, : block.heads]
        else:
            if self.rope is not None:
                rotate(self.qkv, *self.rope, block.heads, norms)
            q, keys, values = heads.split((block.heads, block.kv_heads, block.kv_heads), 2)
        inverse_scale = weights.out.inverse_scale
        if self.attention is None:
            context = self.context.view(rows.batch, rows.tokens, -1)
            return causal_attention(
                q, keys, values, context, lengths, rows.together, inverse_scale=inverse_scale, tile=self.tile
            )
        attend(
            self.attention.backend, q, keys, values, self.context, lengths, inverse_scale=inverse_scale,
            last=rows.state_last, tile=self.attention.tile,
        )  # fmt: skip

    def _mlp(self, weights: BlockWeights, following: Linear | None) -> None:
        """Output projection, residual, norm, and the first product of the MLP with its activation. `following`: the
        product after the MLP."""
        active = Epilogue(
            activation=self.weights.block.activation, quantize=weights.down.inverse_scale,
            prefetch=None if following is None else following.prefetchable,
        )  # fmt: skip
        later = weights.down.prefetchable
        if self.mlp_norm_inside:
            gemm(self.context, weights.out, self.x, Epilogue(residual=True, moments=self.moments, prefetch=later))
            gemm(self.x, weights.up, self.active, active, self._norm_inside(self.moments, weights.up))
        else:
            gemm(self.context, weights.out, self.y, Epilogue(prefetch=later))
            self._norm(self.x, self.y, self.h_mlp, weights.up)
            gemm(self.h_mlp, weights.up, self.active, active, workspace=(self.hidden,))

    def _down(self, weights: BlockWeights, following: Linear | None) -> None:
        """The second product of the MLP, residual, and the norm before the product `following`."""
        if self.attention_norm_inside:
            return gemm(self.active, weights.down, self.x, Epilogue(residual=True, moments=self.moments))
        gemm(self.active, weights.down, self.y)
        self._norm(self.x, self.y, self.last if following is None else self.h, following)

    def _norm_inside(self, moments: Moments, product: Linear) -> Norm:
        """The norm of rows with these moments, inside a product."""
        block = self.weights.block
        return Norm(block.eps, moments, sums=product.sums if block.layer_norm else None)

    def _norm(self, x: Tensor, y: Tensor | None, out: Tensor, product: Linear | None) -> None:
        """`self.x` = x + y, and its norm as the input of a product."""
        block = self.weights.block
        inverse = None if product is None else product.inverse_scale
        add_norm(x, y, self.x, out, layer=block.layer_norm, eps=block.eps, inverse_scale=inverse)
