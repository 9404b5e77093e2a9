"""Queries of a suffix and their attention to a prefix's keys in one kernel: what a layer needs that only crosses.

A program owns a head and a tile of rows. It makes its queries as the pipelined products do (`kernels.pipelined`),
rotates them in registers, and reads the keys once; nothing of it passes through memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vla_accel.kernels.attention.config import CrossTile
from vla_accel.kernels.attention.suffix import Prefix
from vla_accel.kernels.attention.triton_attention import LOG2E
from vla_accel.kernels.chain import launch
from vla_accel.kernels.gemm.epilogue import Norm
from vla_accel.kernels.gemm.triton_epilogues import norm_arguments, tiles_of
from vla_accel.kernels.gemm.triton_pipelined import normed_pair
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.triton_common import (
    can_fetch_ahead,
    fetch_ahead,
    scale_of_sums,
    softmax_step,
    wait_for_previous,
)
from vla_accel.numeric import power_of_two


@triton.jit
def _keys_of(ptr, at, i, mask, HALF: tl.constexpr, SIDE: tl.constexpr):
    """A tile of keys (SIDE 0: transposed) or of values (SIDE 1), both halves of a head."""
    place = ptr + (at[None, :] + i[:, None] if SIDE == 0 else at[:, None] + i[None, :])
    return tl.load(place, mask=mask, other=0.0), tl.load(place + HALF, mask=mask, other=0.0)


@triton.jit
def _cross_attention(x_ptr, w_ptr, wscale, norm, cos_ptr, sin_ptr, k_ptr, v_ptr, length_ptr, out_ptr, rows,
                     tokens, scale, SOURCE: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr,
                     KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_HALF: tl.constexpr,
                     BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr,
                     TILES: tl.constexpr, BLOCK_T: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    head, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    first, end = tl.program_id(1) * BLOCK_M, (batch + 1) * tokens
    row0 = batch * tokens + first
    low = head * (2 * HALF)
    i = tl.arange(0, BLOCK_HALF)
    in_half = i < HALF
    row = low + tl.minimum(i, HALF - 1)
    if tl.program_id(1) == 0:
        fetch_ahead(w_ptr + row * K, K, AHEAD, PDL)
        fetch_ahead(w_ptr + (row + HALF) * K, K, AHEAD, PDL)
    scale_a, scale_b = scale_of_sums(w_ptr, wscale, row), scale_of_sums(w_ptr, wscale, row + HALF)
    # The prefix was complete before the loop's first kernel; x is what the previous kernel wrote.
    place = first + tl.arange(0, BLOCK_M)[:, None]
    keep = (place < tokens) & in_half[None, :]
    cos = tl.load(cos_ptr + place * HALF + i[None, :], mask=keep, other=0.0)
    sin = tl.load(sin_ptr + place * HALF + i[None, :], mask=keep, other=0.0)
    ONE: tl.constexpr = SOURCE <= BLOCK_S
    key = tl.arange(0, BLOCK_S)
    length = tl.load(length_ptr + batch)
    cache = (batch * SOURCE * KV_HEADS + head // (HEADS // KV_HEADS)) * (2 * HALF)
    if ONE:
        at, real = cache + key * (KV_HEADS * 2 * HALF), key < length
        k_low, k_high = _keys_of(k_ptr, at, i, real[None, :] & in_half[:, None], HALF, 0)
        v_low, v_high = _keys_of(v_ptr, at, i, real[:, None] & in_half[None, :], HALF, 1)
    wait_for_previous(PDL)
    a, b = normed_pair(x_ptr, None, w_ptr, None, scale_a, scale_b, norm, None, row0, end, rows, low, low + HALF,
                       low + HALF, low + 2 * HALF, K, BLOCK_M, BLOCK_HALF, BLOCK_K, TILES, BLOCK_T, False)  # fmt: skip
    kind = k_ptr.dtype.element_ty
    q_low = tl.where(keep, a * cos - b * sin, 0.0).to(kind)
    q_high = tl.where(keep, b * cos + a * sin, 0.0).to(kind)
    if ONE:
        s = tl.dot(q_high, k_high, tl.dot(q_low, k_low)) * scale
        s = tl.where(real[None, :], s, -float("inf"))
        p = tl.exp2(s - tl.max(s, 1)[:, None])
        total = tl.sum(p, 1)
        acc_low, acc_high = tl.dot(p.to(kind), v_low), tl.dot(p.to(kind), v_high)
    else:
        best = tl.full((BLOCK_M,), -float("inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc_low = tl.zeros((BLOCK_M, BLOCK_HALF), tl.float32)
        acc_high = tl.zeros((BLOCK_M, BLOCK_HALF), tl.float32)
        for start in range(0, SOURCE, BLOCK_S):
            at, real = cache + (start + key) * (KV_HEADS * 2 * HALF), start + key < length
            k_low, k_high = _keys_of(k_ptr, at, i, real[None, :] & in_half[:, None], HALF, 0)
            s = tl.dot(q_high, k_high, tl.dot(q_low, k_low)) * scale
            s = tl.where(real[None, :], s, -float("inf"))
            # A row has at least one key, and the first block holds it.
            p, shrink, best, total = softmax_step(s, best, total, False)
            v_low, v_high = _keys_of(v_ptr, at, i, real[:, None] & in_half[None, :], HALF, 1)
            acc_low = tl.dot(p.to(kind), v_low, acc_low * shrink[:, None])
            acc_high = tl.dot(p.to(kind), v_high, acc_high * shrink[:, None])
    target = out_ptr + ((batch * tokens + place) * HEADS + head) * (2 * HALF) + i[None, :]
    tl.store(target, (acc_low / total[:, None]).to(out_ptr.dtype.element_ty), mask=keep)
    tl.store(target + HALF, (acc_high / total[:, None]).to(out_ptr.dtype.element_ty), mask=keep)


def cross_attention(
    x: Tensor, weights: Linear, rope: tuple[Tensor, Tensor], prefix: Prefix, out: Tensor, norm: Norm, tile: CrossTile
) -> None:
    """See `vla_accel.kernels.attention.suffix.cross_attention`."""
    batch, source, kv_heads, head_dim = prefix.keys.shape
    tokens, width, half = len(x) // batch, x.shape[1], head_dim // 2
    heads = weights.weight.shape[0] // head_dim
    launch(
        _cross_attention, (heads, triton.cdiv(tokens, tile.rows), batch),
        x, weights.weight, weights.sums_scale, norm_arguments(norm), *rope, prefix.keys, prefix.values, prefix.lengths,
        out, len(x), tokens, head_dim**-0.5 * LOG2E, source, width, heads, kv_heads, half, tile.rows,
        max(16, power_of_two(half)), tile.keys, tile.block_k, can_fetch_ahead(weights.weight), *tiles_of(norm),
        num_warps=8, num_stages=tile.stages,
    )  # fmt: skip
