"""Products of a suffix's rows, ten to some hundreds, with large weights: K passes through shared memory in stages.

A program owns a tile of rows and a tile of columns, and of K all or, where columns are few, a part (SPLIT): the program
of a tile that comes last adds the parts, always in the same order. Row tiles of the same weights run side by side, so
that a weight is read from memory once. RMSNorm costs no pass of its own: where the rows' moments were written beside
them, it is a factor of the sums; elsewhere as in `skinny`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vla_accel.kernels.activation import Activation
from vla_accel.kernels.chain import launch
from vla_accel.kernels.gemm.moments import Moments
from vla_accel.kernels.gemm.suffix_tilings import Pipelined
from vla_accel.kernels.gemm.suffix_types import Heads, Rotation
from vla_accel.kernels.gemm.triton_epilogues import (
    for_geglu,
    for_heads,
    for_residual,
    own_row,
    residual,
    store_geglu,
    store_heads,
    store_residual,
)
from vla_accel.kernels.gemm.triton_moments import of_tiles, store_moments, tiles_of
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.triton_common import can_fetch_ahead, fetch_ahead, scale_of_sums, wait_for_previous


@triton.jit
def row_tile(
    x_ptr, x_tma, row, row0, k0, K: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr
):
    """(BLOCK_M, BLOCK_K) of (rows, K) activations, from `k0` on: of rows `row`, or, by TMA, of those from `row0` on,
    where what lies beyond the last is zero."""
    if TMA:
        return x_tma.load([row0, k0])
    else:
        k = k0 + tl.arange(0, BLOCK_K)
        place = x_ptr + row[:, None] * K + k[None, :]
        if EVEN:
            return tl.load(place)
        else:
            return tl.load(place, mask=(k < K)[None, :], other=0.0)


@triton.jit
def weight_tile(w_ptr, w_tma, n, n0, k0, K: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
                TMA: tl.constexpr, WEIGHTS_FIRST: tl.constexpr):  # fmt: skip
    """Of a (N, K) weight what `multiply` takes: (BLOCK_N, BLOCK_K) with WEIGHTS_FIRST, else (BLOCK_K, BLOCK_N). `n` and
    `n0` as `row` and `row0` of `row_tile`."""
    if WEIGHTS_FIRST:
        return row_tile(w_ptr, w_tma, n, n0, k0, K, BLOCK_K, EVEN, TMA)
    elif TMA:
        return w_tma.load([n0, k0]).T
    else:
        k = k0 + tl.arange(0, BLOCK_K)
        place = w_ptr + n[None, :] * K + k[:, None]
        if EVEN:
            return tl.load(place)
        else:
            return tl.load(place, mask=(k < K)[:, None], other=0.0)


@triton.jit
def no_sums(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WEIGHTS_FIRST: tl.constexpr):
    """Where `multiply` begins."""
    if WEIGHTS_FIRST:
        return tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        return tl.zeros((BLOCK_M, BLOCK_N), tl.float32)


@triton.jit
def multiply(x, w, sums, WEIGHTS_FIRST: tl.constexpr):
    """Adds the product of a tile of activations (BLOCK_M, BLOCK_K) and one of weights. On Hopper the first operand may
    come from registers: there weights of one byte are widened without a way back to memory."""
    if WEIGHTS_FIRST:
        return tl.dot(w.to(x.dtype), x.T, sums)
    else:
        return tl.dot(x, w.to(x.dtype), sums)


@triton.jit
def by_row(sums, WEIGHTS_FIRST: tl.constexpr):
    """(BLOCK_M, BLOCK_N) of what `multiply` added up."""
    if WEIGHTS_FIRST:
        return sums.T
    else:
        return sums


@triton.jit
def normed_pair(x_ptr, x_tma, w_ptr, w_tma, scale_a, scale_b, scale_ptr, pinned_ptr, squares_ptr, row0, end, rows,
                first, first_end, second, second_end, eps, K: tl.constexpr, BLOCK_M: tl.constexpr,
                BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr,
                HAS_SCALE: tl.constexpr, TILES: tl.constexpr, BLOCK_T: tl.constexpr, PINNED: tl.constexpr,
                WEIGHTS_FIRST: tl.constexpr):  # fmt: skip
    """Normed rows, of all `rows` those from `row0` to before `end`, times two tiles of weight rows, from `first` and
    from `second`, whose sums are multiplied by `scale_a` and `scale_b`. With moments (TILES > 0) the rows come scaled,
    and the norm is a factor of the sums."""
    # Rows beyond the last are the last one again: they are not stored.
    row = tl.minimum(row0 + tl.arange(0, BLOCK_M), end - 1)
    real = (row0 + tl.arange(0, BLOCK_M) < end)[:, None]
    n_a = tl.minimum(first + tl.arange(0, BLOCK_N), first_end - 1)
    n_b = tl.minimum(second + tl.arange(0, BLOCK_N), second_end - 1)
    acc_a = no_sums(BLOCK_M, BLOCK_N, WEIGHTS_FIRST)
    acc_b = no_sums(BLOCK_M, BLOCK_N, WEIGHTS_FIRST)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    if TILES > 0:
        parts = of_tiles(squares_ptr, row, rows, TILES, BLOCK_T)
    if PINNED:
        own = own_row(pinned_ptr, row, rows, K)[:, None]
    for k0 in range(0, K, BLOCK_K):
        x = row_tile(x_ptr, x_tma, row, row0, k0, K, BLOCK_K, EVEN, TMA)
        wa = weight_tile(w_ptr, w_tma, n_a, first, k0, K, BLOCK_K, EVEN, TMA, WEIGHTS_FIRST)
        wb = weight_tile(w_ptr, w_tma, n_b, second, k0, K, BLOCK_K, EVEN, TMA, WEIGHTS_FIRST)
        if TILES == 0:
            k = k0 + tl.arange(0, BLOCK_K)
            # The product takes x from registers, never from the stage that the sum reads: on Hopper a stage that has
            # both readers is overwritten too early (triton-lang/triton#6691).
            wide = tl.where(real, x.to(tl.float32), 0.0)
            squares += tl.sum(wide * wide, 1)
            if HAS_SCALE:
                if PINNED:
                    wide *= 1.0 + tl.load(scale_ptr + own + k[None, :], mask=(k < K)[None, :], other=0.0)
                else:
                    wide *= (1.0 + tl.load(scale_ptr + k, mask=k < K, other=0.0))[None, :]
            x = wide.to(x.dtype)
        acc_a = multiply(x, wa, acc_a, WEIGHTS_FIRST)
        acc_b = multiply(x, wb, acc_b, WEIGHTS_FIRST)
    if TILES > 0:
        squares = tl.sum(parts, 0)
    rstd = tl.rsqrt(squares / K + eps)[:, None]
    return by_row(acc_a, WEIGHTS_FIRST) * scale_a * rstd, by_row(acc_b, WEIGHTS_FIRST) * scale_b * rstd


@triton.jit
def _qkv_rope_pipelined(x_ptr, x_tma, w_ptr, w_tma, wscale, scale_ptr, squares_ptr, shift_ptr, pinned_ptr, cos_ptr,
                        sin_ptr, length_ptr, q_ptr, k_ptr, v_ptr, rows, tokens, eps, K: tl.constexpr,
                        HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_M: tl.constexpr,
                        BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr,
                        AHEAD: tl.constexpr, HAS_SCALE: tl.constexpr, TILES: tl.constexpr, BLOCK_T: tl.constexpr,
                        PINNED: tl.constexpr, WEIGHTS_FIRST: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    IN_HALF: tl.constexpr = (HALF + BLOCK_N - 1) // BLOCK_N
    row0 = tl.program_id(0) * BLOCK_M
    head, i0 = tl.program_id(1) // IN_HALF, (tl.program_id(1) % IN_HALF) * BLOCK_N
    # Rotary embeddings mix columns i and i + HALF of a head: one program owns both.
    low, high = head * (2 * HALF), head * (2 * HALF) + HALF
    i = tl.minimum(i0 + tl.arange(0, BLOCK_N), HALF - 1)
    # Programs of the same weights run side by side: the first of them fetches.
    if tl.program_id(0) == 0:
        fetch_ahead(w_ptr + (low + i) * K, K, AHEAD, PDL)
        fetch_ahead(w_ptr + (high + i) * K, K, AHEAD, PDL)
    scale_a, scale_b = scale_of_sums(w_ptr, wscale, low + i), scale_of_sums(w_ptr, wscale, high + i)
    of_low, of_high, cos, sin = for_heads(shift_ptr, pinned_ptr, cos_ptr, sin_ptr, length_ptr, head, i0, row0, rows,
                                          tokens, HEADS, KV_HEADS, HALF, BLOCK_M, BLOCK_N, HAS_SCALE,
                                          PINNED)  # fmt: skip
    wait_for_previous(PDL)
    a, b = normed_pair(x_ptr, x_tma, w_ptr, w_tma, scale_a, scale_b, scale_ptr, pinned_ptr, squares_ptr, row0, rows,
                       rows, low + i0, low + HALF, high + i0, high + HALF, eps, K, BLOCK_M, BLOCK_N, BLOCK_K, EVEN, TMA,
                       HAS_SCALE, TILES, BLOCK_T, PINNED, WEIGHTS_FIRST)  # fmt: skip
    store_heads(a, b, of_low, of_high, cos, sin, q_ptr, k_ptr, v_ptr, head, i0, row0, rows, HEADS, KV_HEADS, HALF,
                BLOCK_M, BLOCK_N)  # fmt: skip


@triton.jit
def _gate_up_pipelined(x_ptr, x_tma, w_ptr, w_tma, wscale, scale_ptr, squares_ptr, shift_ptr, pinned_ptr, out_ptr,
                       rows, eps, K: tl.constexpr, HIDDEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                       BLOCK_K: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr, AHEAD: tl.constexpr,
                       HAS_SCALE: tl.constexpr, TILES: tl.constexpr, BLOCK_T: tl.constexpr, GATE: tl.constexpr,
                       PINNED: tl.constexpr, WEIGHTS_FIRST: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    row0, n0 = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    n = tl.minimum(n0 + tl.arange(0, BLOCK_N), HIDDEN - 1)
    if tl.program_id(0) == 0:
        fetch_ahead(w_ptr + n * K, K, AHEAD, PDL)
        fetch_ahead(w_ptr + (HIDDEN + n) * K, K, AHEAD, PDL)
    scale_g, scale_u = scale_of_sums(w_ptr, wscale, n), scale_of_sums(w_ptr, wscale, HIDDEN + n)
    gate, up = for_geglu(shift_ptr, pinned_ptr, n0, row0, rows, HIDDEN, BLOCK_M, BLOCK_N, HAS_SCALE, PINNED)
    wait_for_previous(PDL)
    g, u = normed_pair(x_ptr, x_tma, w_ptr, w_tma, scale_g, scale_u, scale_ptr, pinned_ptr, squares_ptr, row0, rows,
                       rows, n0, HIDDEN, HIDDEN + n0, 2 * HIDDEN, eps, K, BLOCK_M, BLOCK_N, BLOCK_K, EVEN, TMA,
                       HAS_SCALE, TILES, BLOCK_T, PINNED, WEIGHTS_FIRST)  # fmt: skip
    store_geglu(g, u, gate, up, out_ptr, n0, row0, rows, HIDDEN, BLOCK_M, BLOCK_N, GATE)


@triton.jit
def _project_pipelined(a_ptr, a_tma, w_ptr, w_tma, wscale, bias_ptr, gate_ptr, pinned_ptr, x_ptr, part_ptr,
                       count_ptr, next_scale_ptr, sums_ptr, squares_ptr, scaled_ptr, rows, tokens,
                       N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                       BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr,
                       AHEAD: tl.constexpr, RESIDUAL: tl.constexpr, HAS_GATE: tl.constexpr, HAS_BIAS: tl.constexpr,
                       SKIP_FIRST: tl.constexpr, MOMENTS: tl.constexpr, NEXT_SCALE: tl.constexpr, PINNED: tl.constexpr,
                       WEIGHTS_FIRST: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    row0, n0, split = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N, tl.program_id(2)
    row = tl.minimum(row0 + tl.arange(0, BLOCK_M), rows - 1)
    n = tl.minimum(n0 + tl.arange(0, BLOCK_N), N - 1)
    SHARE: tl.constexpr = ((K + BLOCK_K - 1) // BLOCK_K + SPLIT - 1) // SPLIT * BLOCK_K
    if tl.program_id(0) == 0 and split * SHARE < K:
        fetch_ahead(w_ptr + n * K + split * SHARE, tl.minimum(SHARE, K - split * SHARE), AHEAD, PDL)
    scale = scale_of_sums(w_ptr, wscale, n)
    bias, gate = for_residual(
        bias_ptr, gate_ptr, pinned_ptr, n0, row0, rows, N, BLOCK_M, BLOCK_N, HAS_GATE, HAS_BIAS, PINNED
    )
    wait_for_previous(PDL)
    before, keep = residual(x_ptr, n0, row0, rows, tokens, N, BLOCK_M, BLOCK_N, RESIDUAL, SKIP_FIRST)
    acc = no_sums(BLOCK_M, BLOCK_N, WEIGHTS_FIRST)
    for k0 in range(0, SHARE, BLOCK_K):
        k = split * SHARE + k0
        a = row_tile(a_ptr, a_tma, row, row0, k, K, BLOCK_K, EVEN, TMA)
        w = weight_tile(w_ptr, w_tma, n, n0, k, K, BLOCK_K, EVEN, TMA, WEIGHTS_FIRST)
        acc = multiply(a, w, acc, WEIGHTS_FIRST)
    acc = by_row(acc, WEIGHTS_FIRST)
    if SPLIT == 1:
        y = store_residual(acc * scale, bias, gate, before, keep, x_ptr, n0, row0, N, BLOCK_M, BLOCK_N)
        if MOMENTS:
            store_moments(y, keep, row0 + tl.arange(0, BLOCK_M), n0 + tl.arange(0, BLOCK_N), next_scale_ptr, sums_ptr,
                          squares_ptr, scaled_ptr, tl.program_id(1), rows, N, NEXT_SCALE)  # fmt: skip
    else:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        inside = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        parts = part_ptr + tile * (SPLIT * BLOCK_M * BLOCK_N) + inside
        tl.store(parts + split * (BLOCK_M * BLOCK_N), acc)
        tl.debug_barrier()
        arrived = tl.atomic_add(count_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLIT - 1:
            # The program that arrives last adds the parts.
            tl.debug_barrier()
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for other in range(SPLIT):
                total += tl.load(parts + other * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
            y = store_residual(total * scale, bias, gate, before, keep, x_ptr, n0, row0, N, BLOCK_M, BLOCK_N)
            if MOMENTS:
                store_moments(y, keep, row0 + tl.arange(0, BLOCK_M), n0 + tl.arange(0, BLOCK_N), next_scale_ptr,
                              sums_ptr, squares_ptr, scaled_ptr, tl.program_id(1), rows, N, NEXT_SCALE)  # fmt: skip
            tl.store(count_ptr + tile, 0)


def described(x: Tensor, weight: Tensor, cut: Pipelined) -> tuple[Any, Any, Any, Any]:
    """Activations and a weight as a kernel takes them, each followed by its tensor map where tiles come by TMA."""
    if not cut.tma:
        return x, x, weight, weight
    of_rows = TensorDescriptor.from_tensor(x, [cut.rows, cut.block_k])
    return x, of_rows, weight, TensorDescriptor.from_tensor(weight, [cut.columns, cut.block_k])


def rows_of(x: Tensor, moments: Moments | None) -> Tensor:
    """What a product reads of x: the rows as they were written beside their moments, where they are scaled."""
    return x if moments is None or moments.scaled is None else moments.scaled


def _squares(x: Tensor, moments: Moments | None) -> Tensor:
    return x if moments is None else moments.squares


def _room(a: Tensor, moments: Moments | None) -> tuple[Tensor, Tensor, Tensor]:
    if moments is None:
        return a, a, a
    return moments.sums, moments.squares, a if moments.scaled is None else moments.scaled


def _prefetches(weight: Tensor, cut: Pipelined) -> bool:
    return cut.ahead and can_fetch_ahead(weight)


def qkv_rope(
    x: Tensor, layer: Linear, scale: Tensor | None, shift: Tensor | None,
    rotation: Rotation, out: Heads, *, eps: float, pinned: Tensor | None, cut: Pipelined, moments: Moments | None,
) -> None:  # fmt: skip
    """See `vla_accel.kernels.gemm.suffix.qkv_rope`."""
    batch, tokens, heads, head_dim = out.q.shape
    rows, width, half = batch * tokens, x.shape[-1], head_dim // 2
    grid = (triton.cdiv(rows, cut.rows), (heads + 2 * out.k.shape[2]) * triton.cdiv(half, cut.columns))
    launch(
        _qkv_rope_pipelined, grid,
        *described(rows_of(x, moments), layer.weight, cut), layer.sums_scale, scale if scale is not None else x,
        _squares(x, moments), shift if shift is not None else x, pinned if pinned is not None else x, rotation.cos,
        rotation.sin, rotation.starts, out.q, out.k, out.v, rows, tokens, eps, width, heads, out.k.shape[2], half,
        cut.rows, cut.columns, cut.block_k,
        width % cut.block_k == 0, cut.tma, _prefetches(layer.weight, cut), scale is not None, *tiles_of(moments),
        pinned is not None, cut.weights_first, num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip


def gate_up_geglu(
    x: Tensor, layer: Linear, scale: Tensor | None, shift: Tensor | None, out: Tensor, *,
    eps: float, activation: Activation, pinned: Tensor | None, cut: Pipelined, moments: Moments | None,
) -> None:  # fmt: skip
    """See `vla_accel.kernels.gemm.suffix.gate_up_geglu`."""
    rows, hidden = out.shape
    width = x.shape[-1]
    launch(
        _gate_up_pipelined,
        (triton.cdiv(rows, cut.rows), triton.cdiv(hidden, cut.columns)),
        *described(rows_of(x, moments), layer.weight, cut),
        layer.sums_scale,
        scale if scale is not None else x,
        _squares(x, moments),
        shift if shift is not None else x,
        pinned if pinned is not None else x,
        out,
        rows,
        eps,
        width,
        hidden,
        cut.rows,
        cut.columns,
        cut.block_k,
        width % cut.block_k == 0,
        cut.tma,
        _prefetches(layer.weight, cut),
        scale is not None,
        *tiles_of(moments),
        activation.gate.code,
        pinned is not None,
        cut.weights_first,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )


def project(
    a: Tensor, layer: Linear, gate: Tensor | None, x: Tensor, *,
    residual: bool, skip_every: int, pinned: Tensor | None, cut: Pipelined,
    workspace: tuple[Tensor, Tensor] | None, moments: Moments | None, next_scale: Tensor | None,
) -> None:  # fmt: skip
    """See `vla_accel.kernels.gemm.suffix.project`."""
    rows, k = a.shape
    n = layer.weight.shape[0]
    parts, counters = workspace if workspace is not None and cut.split > 1 else (a, a)
    grid = (triton.cdiv(rows, cut.rows), triton.cdiv(n, cut.columns), cut.split)
    launch(
        _project_pipelined,
        grid,
        *described(a, layer.weight, cut),
        layer.sums_scale,
        a if layer.bias is None else layer.bias,
        gate if gate is not None else a,
        pinned if pinned is not None else a,
        x,
        parts,
        counters,
        next_scale if next_scale is not None else a,
        *_room(a, moments),
        rows,
        skip_every or 1,
        n,
        k,
        cut.rows,
        cut.columns,
        cut.block_k,
        cut.split,
        k % (cut.block_k * cut.split) == 0,
        cut.tma,
        _prefetches(layer.weight, cut),
        residual,
        gate is not None,
        layer.bias is not None,
        skip_every > 0,
        moments is not None,
        moments is not None and moments.scaled is not None and next_scale is not None,
        pinned is not None,
        cut.weights_first,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
