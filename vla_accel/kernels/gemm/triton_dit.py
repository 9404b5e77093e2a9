"""Kernels of a diffusion transformer's few rows (`dit.py`), with K in stages through shared memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vla_accel.kernels.activation import Activation
from vla_accel.kernels.chain import launch
from vla_accel.kernels.gemm.dit import NormTables
from vla_accel.kernels.gemm.moments import Moments
from vla_accel.kernels.gemm.suffix_tilings import Pipelined
from vla_accel.kernels.gemm.suffix_types import Guidance
from vla_accel.kernels.gemm.triton_moments import of_tiles, tiles_of
from vla_accel.kernels.gemm.triton_pipelined import by_row, described, multiply, no_sums, row_tile, rows_of, weight_tile
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.triton_common import activated, can_fetch_ahead, fetch_ahead, scale_of_sums, wait_for_previous
from vla_accel.numeric import power_of_two


@triton.jit
def _constants(w_ptr, wscale, shift_ptr, sums_ptr, n, N: tl.constexpr, NORM: tl.constexpr):
    """Of columns n, (1, BLOCK_N) or one of all: the scale of their sums, their shift, sums of the weight's own rows."""
    shift = tl.load(shift_ptr + n, mask=n < N, other=0.0)[None, :]
    of_weight = shift
    if NORM:
        of_weight = tl.load(sums_ptr + n, mask=n < N, other=0.0)[None, :]
    return scale_of_sums(w_ptr, wscale, tl.minimum(n, N - 1)), shift, of_weight


@triton.jit
def _product(x_ptr, x_tma, w_ptr, w_tma, wscale, scale_ptr, sums_ptr, total_ptr, squares_ptr, shift_ptr, out_ptr,
             rows, eps, N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
             BLOCK_K: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr, AHEAD: tl.constexpr, NORM: tl.constexpr,
             HAS_SCALE: tl.constexpr, TILES: tl.constexpr, BLOCK_T: tl.constexpr, ACTIVATION: tl.constexpr,
             WEIGHTS_FIRST: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    # Rows of the same weights run side by side. What lies beyond the last row or column is the last one again.
    row0, n0 = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    row, n = row0 + tl.arange(0, BLOCK_M), n0 + tl.arange(0, BLOCK_N)
    in_rows, in_n = row < rows, n < N
    from_row, from_n = tl.minimum(row, rows - 1), tl.minimum(n, N - 1)
    if tl.program_id(0) == 0:
        fetch_ahead(w_ptr + from_n * K, K, AHEAD, PDL)
    # Before the wait, but in tiles of many rows, which need the registers.
    if BLOCK_M <= 64:
        scale, shift, of_weight = _constants(w_ptr, wscale, shift_ptr, sums_ptr, n, N, NORM)
    wait_for_previous(PDL)
    acc = no_sums(BLOCK_M, BLOCK_N, WEIGHTS_FIRST)
    total = tl.zeros((BLOCK_M,), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    if TILES > 0:
        # Added up here: both moments of all tiles would not fit in the registers beside the sums.
        total = tl.sum(of_tiles(total_ptr, from_row, rows, TILES, BLOCK_T), 0)
        squares = tl.sum(of_tiles(squares_ptr, from_row, rows, TILES, BLOCK_T), 0)
    for k0 in range(0, K, BLOCK_K):
        x = row_tile(x_ptr, x_tma, from_row, row0, k0, K, BLOCK_K, EVEN, TMA)
        w = weight_tile(w_ptr, w_tma, from_n, n0, k0, K, BLOCK_K, EVEN, TMA, WEIGHTS_FIRST)
        if NORM and TILES == 0:
            # From registers, as in `pipelined`.
            wide = tl.where(in_rows[:, None], x.to(tl.float32), 0.0)
            total += tl.sum(wide, 1)
            squares += tl.sum(wide * wide, 1)
            if HAS_SCALE:
                k = k0 + tl.arange(0, BLOCK_K)
                wide *= (1.0 + tl.load(scale_ptr + k, mask=k < K, other=0.0))[None, :]
            x = wide.to(x.dtype)
        acc = multiply(x, w, acc, WEIGHTS_FIRST)
    if BLOCK_M > 64:
        scale, shift, of_weight = _constants(w_ptr, wscale, shift_ptr, sums_ptr, n, N, NORM)
    y = by_row(acc, WEIGHTS_FIRST) * scale
    if NORM:
        mean = total / K
        rstd = tl.rsqrt(squares / K - mean * mean + eps)
        y = (y - mean[:, None] * of_weight) * rstd[:, None]
    y += shift
    y = activated(y, ACTIVATION)
    place = out_ptr + row[:, None] * N + n[None, :]
    tl.store(place, y.to(out_ptr.dtype.element_ty), mask=in_rows[:, None] & in_n[None, :])


def product(
    x: Tensor, layer: Linear, shift: Tensor, out: Tensor, *, norm: NormTables | None,
    activation: Activation, cut: Pipelined, moments: Moments | None,
) -> None:  # fmt: skip
    """See `vla_accel.kernels.gemm.dit.product`."""
    rows, k = x.shape
    n = layer.weight.shape[0]
    grid = (triton.cdiv(rows, cut.rows), triton.cdiv(n, cut.columns))
    scale = None if norm is None else norm.scale
    sums, squares = (shift, shift) if moments is None else (moments.sums, moments.squares)
    launch(
        _product, grid,
        *described(rows_of(x, moments), layer.weight, cut), layer.sums_scale, shift if scale is None else scale,
        shift if norm is None else norm.sums, sums, squares, shift, out, rows,
        0.0 if norm is None else norm.eps, n, k, cut.rows, cut.columns, cut.block_k, k % cut.block_k == 0,
        cut.tma, cut.ahead and can_fetch_ahead(layer.weight), norm is not None, scale is not None, *tiles_of(moments),
        activation.code, cut.weights_first, num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip


@triton.jit
def _flow_step(velocity_ptr, before_ptr, target_ptr, weights_ptr, w_in_ptr, b_in_ptr, after_ptr, hidden_ptr, dt, rows,
               horizon, tokens, WIDTH: tl.constexpr, ACTIONS: tl.constexpr, BLOCK_M: tl.constexpr,
               BLOCK_W: tl.constexpr, BLOCK_A: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
               PDL: tl.constexpr):  # fmt: skip
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < rows
    token = (row // horizon) * tokens + (tokens - horizon) + row % horizon
    action = tl.arange(0, BLOCK_A)
    both = real[:, None] & (action < ACTIONS)[None, :]
    place = row[:, None] * ACTIONS + action[None, :]
    column = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    wait_for_previous(PDL)
    weight = tl.load(weights_ptr + row, mask=real, other=0.0)[:, None]
    moved = tl.load(before_ptr + place, mask=both, other=0.0)
    if FIRST:
        moved = tl.where(weight > 0, tl.load(target_ptr + place, mask=both, other=0.0), moved)
    else:
        velocity = tl.load(velocity_ptr + token[:, None] * ACTIONS + action[None, :], mask=both, other=0.0)
        moved += dt * (1.0 - weight) * velocity
    if tl.program_id(0) == 0:
        tl.store(after_ptr + place, moved, mask=both)
    if not LAST:
        w_in = tl.load(
            w_in_ptr + action[:, None] * WIDTH + column[None, :],
            mask=(action < ACTIONS)[:, None] & (column < WIDTH)[None, :],
            other=0.0,
        )
        embedded = tl.dot(moved, w_in, input_precision="ieee")
        embedded += tl.load(b_in_ptr + column, mask=column < WIDTH, other=0.0)[None, :]
        embedded = embedded / (1.0 + tl.exp(-embedded))
        out = hidden_ptr + token[:, None] * WIDTH + column[None, :]
        tl.store(out, embedded.to(hidden_ptr.dtype.element_ty), mask=real[:, None] & (column < WIDTH)[None, :])


def flow_step(
    velocity: Tensor, before: Tensor, guidance: Guidance, w_in: Tensor, b_in: Tensor, after: Tensor,
    hidden: Tensor, *, dt: float, tokens: int, first: bool, last: bool,
) -> None:  # fmt: skip
    """See `vla_accel.kernels.gemm.dit.flow_step`."""
    batch, horizon, actions = before.shape
    rows, width = batch * horizon, w_in.shape[1]
    grid = (1 if last else triton.cdiv(width, 32), triton.cdiv(rows, 16))
    launch(
        _flow_step, grid,
        velocity, before, guidance.target, guidance.weights, w_in, b_in, after, hidden,
        dt, rows, horizon, tokens, width, actions, 16, 32,
        max(16, power_of_two(actions)), first, last, num_warps=4, num_stages=1,
    )  # fmt: skip
