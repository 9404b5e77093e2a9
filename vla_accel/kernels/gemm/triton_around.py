"""What stands around a library's product of a suffix's rows: the same norm, rotation, gates and moments as in
`pipelined`, of sums that lie in memory.

Every kernel lets the next one start at once: it reads nothing but constants before it has waited for the product.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vla_accel.kernels.activation import Activation
from vla_accel.kernels.chain import launch
from vla_accel.kernels.gemm.moments import Moments
from vla_accel.kernels.gemm.suffix_types import Heads, Rotation
from vla_accel.kernels.gemm.triton_epilogues import (
    for_geglu,
    for_heads,
    for_residual,
    residual,
    store_geglu,
    store_heads,
    store_residual,
)
from vla_accel.kernels.gemm.triton_moments import of_tiles, store_moments, tiles_of
from vla_accel.kernels.triton_common import let_next_start, wait_for_previous
from vla_accel.numeric import power_of_two

ROWS = 4
"""Rows of a program that rotates or gates: as many as keep its loads long and the chip busy."""


@triton.jit
def sums_of(y_ptr, row, rows, n, in_row, N: tl.constexpr):
    """(BLOCK_M, BLOCK_N) float32 of a product (rows, N) in memory: columns n, those of `in_row`."""
    place = row.to(tl.int64)[:, None] * N + n[None, :]
    return tl.load(y_ptr + place, mask=(row < rows)[:, None] & in_row[None, :], other=0.0).to(tl.float32)


@triton.jit
def rstd_of(squares_ptr, row, rows, eps, K: tl.constexpr, TILES: tl.constexpr, BLOCK_T: tl.constexpr):
    """(BLOCK_M, 1): the factor of rows whose moments were written beside them."""
    parts = of_tiles(squares_ptr, tl.minimum(row, rows - 1), rows, TILES, BLOCK_T)
    return tl.rsqrt(tl.sum(parts, 0) / K + eps)[:, None]


@triton.jit
def _heads_around(y_ptr, squares_ptr, shift_ptr, cos_ptr, sin_ptr, length_ptr, q_ptr, k_ptr, v_ptr, rows, tokens, eps,
                  K: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
                  BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, BLOCK_T: tl.constexpr,
                  HAS_SHIFT: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    N: tl.constexpr = (HEADS + 2 * KV_HEADS) * 2 * HALF
    row0, head = tl.program_id(0) * BLOCK_M, tl.program_id(1)
    row, i = row0 + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    let_next_start(PDL)
    low, high, cos, sin = for_heads(shift_ptr, shift_ptr, cos_ptr, sin_ptr, length_ptr, head, 0, row0, rows, tokens,
                                    HEADS, KV_HEADS, HALF, BLOCK_M, BLOCK_N, HAS_SHIFT, False)  # fmt: skip
    wait_for_previous(PDL)
    rstd = rstd_of(squares_ptr, row, rows, eps, K, TILES, BLOCK_T)
    a = sums_of(y_ptr, row, rows, head * (2 * HALF) + i, i < HALF, N) * rstd
    b = sums_of(y_ptr, row, rows, head * (2 * HALF) + HALF + i, i < HALF, N) * rstd
    store_heads(
        a, b, low, high, cos, sin, q_ptr, k_ptr, v_ptr, head, 0, row0, rows, HEADS, KV_HEADS, HALF, BLOCK_M, BLOCK_N
    )


@triton.jit
def _geglu_around(y_ptr, squares_ptr, shift_ptr, out_ptr, rows, eps, K: tl.constexpr, HIDDEN: tl.constexpr,
                  BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, BLOCK_T: tl.constexpr,
                  HAS_SHIFT: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    row0, n0 = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    row, n = row0 + tl.arange(0, BLOCK_M), n0 + tl.arange(0, BLOCK_N)
    let_next_start(PDL)
    gate, up = for_geglu(shift_ptr, shift_ptr, n0, row0, rows, HIDDEN, BLOCK_M, BLOCK_N, HAS_SHIFT, False)
    wait_for_previous(PDL)
    rstd = rstd_of(squares_ptr, row, rows, eps, K, TILES, BLOCK_T)
    g = sums_of(y_ptr, row, rows, n, n < HIDDEN, 2 * HIDDEN) * rstd
    u = sums_of(y_ptr, row, rows, HIDDEN + n, n < HIDDEN, 2 * HIDDEN) * rstd
    store_geglu(g, u, gate, up, out_ptr, n0, row0, rows, HIDDEN, BLOCK_M, BLOCK_N, GATE)


@triton.jit
def _residual_around(y_ptr, gate_ptr, x_ptr, next_scale_ptr, sums_ptr, squares_ptr, scaled_ptr, rows, tokens,
                     N: tl.constexpr, BLOCK_N: tl.constexpr, RESIDUAL: tl.constexpr, HAS_GATE: tl.constexpr,
                     SKIP_FIRST: tl.constexpr, MOMENTS: tl.constexpr, NEXT_SCALE: tl.constexpr,
                     PDL: tl.constexpr):  # fmt: skip
    row0 = tl.program_id(0)
    row, n = row0 + tl.arange(0, 1), tl.arange(0, BLOCK_N)
    let_next_start(PDL)
    bias, gate = for_residual(gate_ptr, gate_ptr, gate_ptr, 0, row0, rows, N, 1, BLOCK_N, HAS_GATE, False, False)
    wait_for_previous(PDL)
    before, keep = residual(x_ptr, 0, row0, rows, tokens, N, 1, BLOCK_N, RESIDUAL, SKIP_FIRST)
    y = store_residual(sums_of(y_ptr, row, rows, n, n < N, N), bias, gate, before, keep, x_ptr, 0, row0, N, 1, BLOCK_N)
    if MOMENTS:
        store_moments(y, keep, row, n, next_scale_ptr, sums_ptr, squares_ptr, scaled_ptr, 0, rows, N, NEXT_SCALE)


def heads(
    y: Tensor, moments: Moments, width: int, shift: Tensor | None, rotation: Rotation, out: Heads, *,
    eps: float,
) -> None:  # fmt: skip
    """The heads of the product y (R, N) of rows of this width, as `suffix.qkv_rope` makes them."""
    tokens, heads, head_dim = out.q.shape[1:]
    rows, kv_heads, half = len(y), out.k.shape[2], head_dim // 2
    launch(
        _heads_around, (triton.cdiv(rows, ROWS), heads + 2 * kv_heads),
        y, moments.squares, y if shift is None else shift, rotation.cos, rotation.sin, rotation.starts,
        out.q, out.k, out.v, rows, tokens, eps, width, heads,
        kv_heads, half, ROWS, power_of_two(half), *tiles_of(moments), shift is not None, num_warps=4,
    )  # fmt: skip


def geglu(
    y: Tensor, moments: Moments, width: int, shift: Tensor | None, out: Tensor, *, eps: float, activation: Activation
) -> None:
    """out (R, H) of the product y (R, 2 H), as `suffix.gate_up_geglu` makes it."""
    rows, hidden = out.shape
    columns = min(512, power_of_two(hidden))
    launch(
        _geglu_around, (triton.cdiv(rows, ROWS), triton.cdiv(hidden, columns)),
        y, moments.squares, y if shift is None else shift, out, rows, eps, width, hidden, ROWS, columns,
        *tiles_of(moments), shift is not None, activation.gate.code, num_warps=4,
    )  # fmt: skip


def onto(
    y: Tensor, gate: Tensor | None, x: Tensor, *, residual: bool, skip_every: int,
    moments: Moments | None, next_scale: Tensor | None,
) -> None:  # fmt: skip
    """x (R, N) and its moments, of one tile, of the product y (R, N), as `suffix.project` makes them."""
    rows, n = x.shape
    given = (y, y, y) if moments is None else (moments.sums, moments.squares, moments.scaled)
    sums, squares, scaled = (y if tensor is None else tensor for tensor in given)
    launch(
        _residual_around, (rows,),
        y, y if gate is None else gate, x, y if next_scale is None else next_scale, sums, squares, scaled, rows,
        skip_every or 1, n, power_of_two(n), residual, gate is not None, skip_every > 0, moments is not None,
        moments is not None and moments.scaled is not None and next_scale is not None, num_warps=4,
    )  # fmt: skip
