"""Queries of a suffix and their attention to a prefix's keys in one kernel, for layers with cross-attention only.

A program owns a head and a tile of rows. It computes its queries as `gemm.triton_pipelined` does, rotates them in
registers, and reads the keys once. Queries and scores never go through global memory.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from vla_accel.kernels.attention.config import CrossTile
from vla_accel.kernels.attention.suffix import Prefix
from vla_accel.kernels.chain import launch
from vla_accel.kernels.gemm.config import Pipelined
from vla_accel.kernels.gemm.epilogue import Norm
from vla_accel.kernels.gemm.triton_epilogues import EpilogueArguments, ProductShape, moment_tiles, norm_arguments
from vla_accel.kernels.gemm.triton_pipelined import normed_pair
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.triton_common import (
    LOG2E,
    can_prefetch,
    prefetch_rows,
    scale_of_sums,
    softmax_step,
    wait_for_previous,
)
from vla_accel.numeric import power_of_two


class Keys(NamedTuple):
    """Constants of a kernel: keys of the prefix and of a tile, and the scale of the scores."""

    source: int
    block: int
    scale: float


@triton.jit
def _keys_of(ptr, at, i, mask, HALF: constexpr, SIDE: constexpr):
    """A tile of keys (SIDE 0: transposed) or of values (SIDE 1), both halves of a head."""
    place = ptr + (at[None, :] + i[:, None] if SIDE == 0 else at[:, None] + i[None, :])
    return tl.load(place, mask=mask, other=0.0), tl.load(place + HALF, mask=mask, other=0.0)


@triton.jit
def _cross_attention(
    x_ptr, weights, norm, e, prefix, SHAPE: constexpr, TILE: constexpr, KEYS: constexpr, PDL: constexpr
):
    w_ptr, wscale = weights
    k_ptr, v_ptr, length_ptr = prefix
    HALF: constexpr = SHAPE.half
    KV_HEADS: constexpr = SHAPE.kv_heads
    K: constexpr = SHAPE.k
    head, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    first, end = tl.program_id(1) * TILE.rows, (batch + 1) * e.tokens
    row0 = batch * e.tokens + first
    i = tl.arange(0, TILE.columns)
    in_half = i < HALF
    row = head * (2 * HALF) + tl.minimum(i, HALF - 1)
    if tl.program_id(1) == 0:
        prefetch_rows(w_ptr + row * K, K, TILE.prefetch, PDL)
        prefetch_rows(w_ptr + (row + HALF) * K, K, TILE.prefetch, PDL)
    scales = (scale_of_sums(w_ptr, wscale, row), scale_of_sums(w_ptr, wscale, row + HALF))
    # The prefix was complete before the loop's first kernel; x is what the previous kernel wrote.
    place = first + tl.arange(0, TILE.rows)[:, None]
    keep = (place < e.tokens) & in_half[None, :]
    cos = tl.load(e.cos + place * HALF + i[None, :], mask=keep, other=0.0)
    sin = tl.load(e.sin + place * HALF + i[None, :], mask=keep, other=0.0)
    ONE: constexpr = KEYS.source <= KEYS.block
    key = tl.arange(0, KEYS.block)
    length = tl.load(length_ptr + batch)
    cache = (batch * KEYS.source * KV_HEADS + head // (SHAPE.heads // KV_HEADS)) * (2 * HALF)
    if ONE:
        at, real = cache + key * (KV_HEADS * 2 * HALF), key < length
        k_low, k_high = _keys_of(k_ptr, at, i, real[None, :] & in_half[:, None], HALF, 0)
        v_low, v_high = _keys_of(v_ptr, at, i, real[:, None] & in_half[None, :], HALF, 1)
    wait_for_previous(PDL)
    a, b = normed_pair(x_ptr, w_ptr, scales, norm, e, (head, 0, row0), end, SHAPE, TILE)
    kind = k_ptr.dtype.element_ty
    q_low = tl.where(keep, a * cos - b * sin, 0.0).to(kind)
    q_high = tl.where(keep, b * cos + a * sin, 0.0).to(kind)
    if ONE:
        s = tl.dot(q_high, k_high, tl.dot(q_low, k_low)) * KEYS.scale
        s = tl.where(real[None, :], s, -float("inf"))
        p = tl.exp2(s - tl.max(s, 1)[:, None])
        total = tl.sum(p, 1)
        acc_low, acc_high = tl.dot(p.to(kind), v_low), tl.dot(p.to(kind), v_high)
    else:
        best = tl.full((TILE.rows,), -float("inf"), tl.float32)
        total = tl.full((TILE.rows,), 0.0, tl.float32)
        acc_low = tl.full((TILE.rows, TILE.columns), 0.0, tl.float32)
        acc_high = tl.full((TILE.rows, TILE.columns), 0.0, tl.float32)
        for start in range(0, KEYS.source, KEYS.block):
            at, real = cache + (start + key) * (KV_HEADS * 2 * HALF), start + key < length
            k_low, k_high = _keys_of(k_ptr, at, i, real[None, :] & in_half[:, None], HALF, 0)
            s = tl.dot(q_high, k_high, tl.dot(q_low, k_low)) * KEYS.scale
            s = tl.where(real[None, :], s, -float("inf"))
            # A row has at least one key, and the first block holds it.
            p, shrink, best, total = softmax_step(s, best, total, False)
            v_low, v_high = _keys_of(v_ptr, at, i, real[:, None] & in_half[None, :], HALF, 1)
            acc_low = tl.dot(p.to(kind), v_low, acc_low * shrink[:, None])
            acc_high = tl.dot(p.to(kind), v_high, acc_high * shrink[:, None])
    target = e.out[0] + ((batch * e.tokens + place) * SHAPE.heads + head) * (2 * HALF) + i[None, :]
    tl.store(target, (acc_low / total[:, None]).to(e.out[0].dtype.element_ty), mask=keep)
    tl.store(target + HALF, (acc_high / total[:, None]).to(e.out[0].dtype.element_ty), mask=keep)


def cross_attention(
    x: Tensor, weights: Linear, rope: tuple[Tensor, Tensor], prefix: Prefix, out: Tensor, norm: Norm, tile: CrossTile
) -> None:
    """See `vla_accel.kernels.attention.suffix.cross_attention`."""
    batch, source, kv_heads, head_dim = prefix.keys.shape
    tokens, half, (n, k) = len(x) // batch, head_dim // 2, weights.weight.shape
    shape = ProductShape(n, k, moment_tiles(norm), 0, False, half, n // head_dim, kv_heads)
    columns, prefetch = max(16, power_of_two(half)), can_prefetch(weights.weight)
    config = Pipelined(tile.rows, columns, tile.block_k, stages=tile.stages, warps=8, prefetch=prefetch)
    constants = (shape, config, Keys(source, tile.keys, head_dim**-0.5 * LOG2E.value))
    operands, to = (weights.weight, weights.sums_scale), EpilogueArguments((out,), len(x), tokens, *rope)
    arguments = (x, operands, norm_arguments(norm), to, (prefix.keys, prefix.values, prefix.lengths), *constants)
    grid, run = (shape.heads, triton.cdiv(tokens, tile.rows), batch), {"num_warps": 8, "num_stages": tile.stages}
    launch(_cross_attention, grid, *arguments, **run)
