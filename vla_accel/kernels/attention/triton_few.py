"""Attention of one sequence of up to 16 rows with a product inside (`vla_accel.kernels.attention.few`).

`_attention_into`: a program owns columns of the product and computes the attention of all heads, which costs it less
than waiting for another kernel. `_query_attention`: a program owns a head and a tile of the prefix's keys, and makes
the head's queries itself. Both load their weights, and the latter its keys, before the wait.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from vla_accel.kernels.attention.config import KeySplit, SuffixShape
from vla_accel.kernels.attention.few import ROWS, WARPS, Queries, head_tile, query_splits
from vla_accel.kernels.attention.suffix import AttentionWorkspace, Prefix
from vla_accel.kernels.attention.triton_attention import LOG2E, attend_once, store_parts
from vla_accel.kernels.chain import launch
from vla_accel.kernels.gemm.epilogue import Epilogue
from vla_accel.kernels.gemm.triton_epilogues import (
    epilogue_arguments,
    load_columns,
    load_residual,
    norm_arguments,
    product_shape,
    store_columns,
)
from vla_accel.kernels.gemm.triton_skinny import early_weights, modulated, row_chunk, weight_chunk
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.triton_common import scale_of_sums, wait_for_previous
from vla_accel.numeric import power_of_two
from vla_accel.runtime import current

COLUMNS = 16
"""Columns of the product of a program of `_attention_into`."""


class FewHeads(NamedTuple):
    """Constants of a kernel: heads, columns of half a head, and the powers of two of heads, of half a head, and of a
    head."""

    heads: int
    half: int
    all: int
    half_block: int
    block: int


class Tile(NamedTuple):
    """Constants of a kernel: rows and columns of a program's output."""

    rows: int
    columns: int


class Crossed(NamedTuple):
    """Constants of a kernel: columns of a row and of a head, heads, the prefix's keys, those of a program, and the
    programs that share them."""

    k: int
    dim: int
    heads: int
    source: int
    keys: int
    splits: int


@triton.jit
def _attention_into(qkv_ptr, rope, weights, e, scales, SHAPE: constexpr, H: constexpr, TILE: constexpr, PDL: constexpr):
    cos_ptr, sin_ptr = rope
    w_ptr, wscale = weights
    scale, eps = scales
    DIM: constexpr = 2 * H.half
    WIDTH: constexpr = H.heads * DIM
    n0 = tl.program_id(0) * TILE.columns
    at = (tl.program_id(0), n0, 0)
    head = tl.arange(0, H.all)[:, None, None]
    t = tl.arange(0, TILE.rows)
    i, d = tl.arange(0, H.half_block), tl.arange(0, H.block)
    in_row, in_t = i[None, None, :] < H.half, t[None, :, None] < e.rows
    n = n0 + tl.arange(0, TILE.columns)[None, None, :]
    inside = (head < H.heads) & (d[None, :, None] < DIM) & (n < SHAPE.n)
    w = tl.load(w_ptr + n.to(tl.int64) * WIDTH + head * DIM + d[None, :, None], mask=inside, other=0.0)
    sums_scale = scale_of_sums(w_ptr, wscale, tl.minimum(n0 + tl.arange(0, TILE.columns), SHAPE.n - 1))
    constants = load_columns(e, at, SHAPE, TILE)
    # Angles of queries (1, T, half) and of keys (1, half, T).
    angle, turned = t[None, :, None] * H.half + i[None, None, :], t[None, None, :] * H.half + i[None, :, None]
    keep, kept = in_t & in_row, (t[None, None, :] < e.rows) & (i[None, :, None] < H.half)
    q_cos, q_sin = tl.load(cos_ptr + angle, mask=keep, other=0.0), tl.load(sin_ptr + angle, mask=keep, other=0.0)
    k_cos, k_sin = tl.load(cos_ptr + turned, mask=kept, other=0.0), tl.load(sin_ptr + turned, mask=kept, other=0.0)
    wait_for_previous(PDL)
    residual = load_residual(e, at, SHAPE, TILE)
    kind = qkv_ptr.dtype.element_ty
    is_head = head < H.heads
    q_at = qkv_ptr + t[None, :, None] * (3 * WIDTH) + head * DIM + i[None, None, :]
    k_at = qkv_ptr + WIDTH + t[None, None, :] * (3 * WIDTH) + head * DIM + i[None, :, None]
    q_low = tl.load(q_at, mask=is_head & keep, other=0.0).to(tl.float32)
    q_high = tl.load(q_at + H.half, mask=is_head & keep, other=0.0).to(tl.float32)
    k_low = tl.load(k_at, mask=is_head & kept, other=0.0).to(tl.float32)
    k_high = tl.load(k_at + H.half, mask=is_head & kept, other=0.0).to(tl.float32)
    v_at = qkv_ptr + 2 * WIDTH + t[None, :, None] * (3 * WIDTH) + head * DIM + d[None, None, :]
    v = tl.load(v_at, mask=is_head & in_t & (d[None, None, :] < DIM), other=0.0)
    q_rstd = tl.rsqrt(tl.sum(q_low * q_low + q_high * q_high, 2) / DIM + eps)[:, :, None]
    k_rstd = tl.rsqrt(tl.sum(k_low * k_low + k_high * k_high, 1) / DIM + eps)[:, None, :]
    s = tl.dot(
        ((q_low * q_cos - q_high * q_sin) * q_rstd).to(kind), ((k_low * k_cos - k_high * k_sin) * k_rstd).to(kind)
    )
    s = tl.dot(
        ((q_high * q_cos + q_low * q_sin) * q_rstd).to(kind), ((k_high * k_cos + k_low * k_sin) * k_rstd).to(kind), s
    )
    s = tl.where(t[None, None, :] < e.rows, s * scale, -float("inf"))
    p = tl.exp2(s - tl.max(s, 2)[:, :, None])
    context = tl.dot(p.to(kind), v) / tl.sum(p, 2)[:, :, None]
    y = tl.sum(tl.dot(context.to(kind), w.to(kind)), 0)
    store_columns(y * sums_scale, constants, residual, e, at, SHAPE, TILE)


def attention_into(
    qkv: Tensor, rope: tuple[Tensor, Tensor], weights: Linear, out: Tensor, epilogue: Epilogue, eps: float
) -> None:
    """See `vla_accel.kernels.attention.few.attention_into`."""
    half = rope[0].shape[1]
    heads = weights.weight.shape[1] // (2 * half)
    sizes = FewHeads(heads, half, power_of_two(heads), max(16, power_of_two(half)), max(16, power_of_two(2 * half)))
    shape, scales = product_shape(weights, epilogue, out, None), ((2 * half) ** -0.5 * LOG2E.value, eps)
    operands, after = (weights.weight, weights.sums_scale), epilogue_arguments(weights, epilogue, out, len(qkv))
    grid = (triton.cdiv(shape.n, COLUMNS),)
    launch(
        _attention_into, grid, qkv, rope, operands, after, scales, shape, sizes, Tile(ROWS, COLUMNS), num_warps=WARPS,
        num_stages=1,
    )  # fmt: skip


@triton.jit
def _query_attention(
    x_ptr, weights, norm, shift_ptr, prefix, out_ptr, workspace, sizes, C: constexpr, TILE: constexpr, PDL: constexpr
):
    w_ptr, wscale = weights
    k_ptr, v_ptr, length_ptr = prefix
    tokens, scale, head_eps = sizes
    K: constexpr = C.k
    BLOCK_K: constexpr = TILE.block_k
    split, head = tl.program_id(0), tl.program_id(1)
    first, end = head * C.dim, (head + 1) * C.dim
    d, t = tl.arange(0, TILE.columns), tl.arange(0, TILE.rows)
    in_d = d < C.dim
    early = early_weights(w_ptr, first, end, K, TILE)
    sums_scale = scale_of_sums(w_ptr, wscale, tl.minimum(first + d, end - 1))
    shift = tl.load(shift_ptr + first + d, mask=in_d, other=0.0)[None, :]
    # The prefix was complete before the first kernel of the loop.
    key = split * C.keys + tl.arange(0, C.keys)
    real, place = key < tl.load(length_ptr), (key * C.heads + head) * C.dim
    inside = key < C.source
    k = tl.load(k_ptr + place[None, :] + d[:, None], mask=inside[None, :] & in_d[:, None], other=0.0)
    v = tl.load(v_ptr + place[:, None] + d[None, :], mask=inside[:, None] & in_d[None, :], other=0.0)
    wait_for_previous(PDL)
    acc = tl.full((TILE.parts, TILE.rows, TILE.columns), 0.0, tl.float32)
    squares = tl.full((TILE.rows,), 0.0, tl.float32)
    coming = row_chunk(x_ptr, 0, tokens, 0, K, TILE)
    for k0 in tl.static_range(0, K, BLOCK_K):
        x = coming
        if k0 + BLOCK_K < K:
            coming = row_chunk(x_ptr, 0, tokens, k0 + BLOCK_K, K, TILE)
        w = weight_chunk(early, k0 // BLOCK_K, w_ptr, first, end, K, TILE)
        x, more = modulated(x, norm.scale, 0, k0, K, TILE)
        squares += more
        acc = tl.dot(x, w.to(x.dtype), acc)
    q = tl.sum(acc, 0) * sums_scale * tl.rsqrt(squares / K + norm.eps)[:, None] + shift
    q *= tl.rsqrt(tl.sum(q * q, 1) / C.dim + head_eps)[:, None]
    seen = (t < tokens)[:, None] & real[None, :]
    part, best, total = attend_once(q.to(k.dtype), k, v, seen, real, scale)
    target = out_ptr + (t[:, None] * C.heads + head) * C.dim + d[None, :]
    store_parts(part, best, total, workspace, target, (t < tokens)[:, None] & in_d[None, :], split, head, C.splits)


def query_attention(
    x: Tensor, queries: Queries, prefix: Prefix, out: Tensor, workspace: AttentionWorkspace, config: KeySplit | None
) -> None:
    """See `vla_accel.kernels.attention.few.query_attention`."""
    _, source, heads, head_dim = prefix.keys.shape
    gpu, width = current(x).gpu, x.shape[1]
    sizes = SuffixShape(1, len(x), source, heads, heads, head_dim, x.element_size(), own=False)
    config = config or query_splits(gpu, sizes, width)[0]
    weight, tile = queries.weights.weight, head_tile(gpu, sizes, width, config.keys)
    assert tile is not None
    constants = Crossed(width, head_dim, heads, source, config.keys, config.splits(sizes))
    numbers, operands = (len(x), head_dim**-0.5 * LOG2E.value, queries.eps), (weight, queries.weights.sums_scale)
    tensors = (x, operands, norm_arguments(queries.norm), queries.shift, (prefix.keys, prefix.values, prefix.lengths))
    grid, run = (constants.splits, heads), {"num_warps": tile.parts, "num_stages": 1}
    launch(_query_attention, grid, *tensors, out, workspace, numbers, constants, tile, **run)
