"""Products of INT8 weights and activations, on any GPU with BF16: exact sums in int32, scales, bias and activation."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vla_accel.kernels.chain import launch
from vla_accel.kernels.gemm.epilogue import Epilogue
from vla_accel.kernels.gemm.int8 import Int8Tile
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.triton_common import activated, let_next_start, store_rounded, wait_for_previous

TURNS = tl.constexpr(8)
"""Row tiles that take turns at the same columns of weights, which stay in L2 meanwhile."""


@triton.jit
def _own_tile(rows, column_tiles, ROWS: tl.constexpr):
    """A program's rows (ROWS,) and which of the column tiles is its own."""
    program = tl.program_id(0)
    first = program // (TURNS * column_tiles) * TURNS
    turns = min(tl.cdiv(rows, ROWS) - first, TURNS)
    row = (first + program % turns) * ROWS + tl.arange(0, ROWS)
    return row, program % (TURNS * column_tiles) // turns


@triton.jit
def _fetched(at, real, k, K: tl.constexpr, DEPTH: tl.constexpr):
    """An operand's next DEPTH of K, zero beyond its end."""
    if K % DEPTH == 0:
        return tl.load(at, mask=real, other=0)
    else:
        return tl.load(at, mask=real & (k < K), other=0)


@triton.jit
def _in_units(total, n, real, scale_ptr, bias_ptr, input_scale):
    """Sums of the weight's rows n times their scales, and the bias."""
    y = total.to(tl.float32) * (tl.load(scale_ptr + n, mask=real, other=0.0) * input_scale)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n, mask=real, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit
def _store(out_ptr, y, row, n, rows, inverse_scale, N: tl.constexpr):
    keep = (row < rows)[:, None] & (n < N)[None, :]
    store_rounded(out_ptr + row.to(tl.int64)[:, None] * N + n[None, :], y, keep, inverse_scale)


@triton.jit
def _int8_linear(x_ptr, w_ptr, scale_ptr, bias_ptr, out_ptr, scales, rows, N: tl.constexpr, K: tl.constexpr,
                 TILE: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    let_next_start(PDL)
    ROWS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.columns
    DEPTH: tl.constexpr = TILE.depth
    row, tile = _own_tile(rows, tl.cdiv(N, COLUMNS), ROWS)
    n = tile * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    x_at = x_ptr + row.to(tl.int64)[:, None] * K + k[None, :]
    w_at = w_ptr + n.to(tl.int64)[None, :] * K + k[:, None]
    wait_for_previous(PDL)
    total = tl.zeros((ROWS, COLUMNS), tl.int32)
    for start in range(0, K, DEPTH):
        x = _fetched(x_at, (row < rows)[:, None], start + k[None, :], K, DEPTH)
        w = _fetched(w_at, (n < N)[None, :], start + k[:, None], K, DEPTH)
        total = tl.dot(x, w, total, out_dtype=tl.int32)
        x_at += DEPTH
        w_at += DEPTH
    y = _in_units(total, n, n < N, scale_ptr, bias_ptr, scales[0])
    _store(out_ptr, activated(y, ACTIVATION), row, n, rows, scales[1], N)


@triton.jit
def _int8_gated(x_ptr, w_ptr, scale_ptr, bias_ptr, out_ptr, scales, rows, HIDDEN: tl.constexpr, K: tl.constexpr,
                TILE: tl.constexpr, GATE: tl.constexpr, PAIRED: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Half of the tile's columns are of the gate and half of up. PAIRED: eight columns of each in turns, otherwise all
    of the gate first.
    """
    let_next_start(PDL)
    ROWS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.columns // 2
    DEPTH: tl.constexpr = TILE.depth
    row, tile = _own_tile(rows, tl.cdiv(HIDDEN, COLUMNS), ROWS)
    n = tile * COLUMNS + tl.arange(0, COLUMNS)
    gate_row, up_row = n, n + HIDDEN
    if PAIRED:
        gate_row = n // 8 * 16 + n % 8
        up_row = gate_row + 8
    k = tl.arange(0, DEPTH)
    x_at = x_ptr + row.to(tl.int64)[:, None] * K + k[None, :]
    gate_at = w_ptr + gate_row.to(tl.int64)[None, :] * K + k[:, None]
    up_at = w_ptr + up_row.to(tl.int64)[None, :] * K + k[:, None]
    wait_for_previous(PDL)
    gates, ups = tl.zeros((ROWS, COLUMNS), tl.int32), tl.zeros((ROWS, COLUMNS), tl.int32)
    for start in range(0, K, DEPTH):
        x = _fetched(x_at, (row < rows)[:, None], start + k[None, :], K, DEPTH)
        gate = _fetched(gate_at, (n < HIDDEN)[None, :], start + k[:, None], K, DEPTH)
        up = _fetched(up_at, (n < HIDDEN)[None, :], start + k[:, None], K, DEPTH)
        gates = tl.dot(x, gate, gates, out_dtype=tl.int32)
        ups = tl.dot(x, up, ups, out_dtype=tl.int32)
        x_at += DEPTH
        gate_at += DEPTH
        up_at += DEPTH
    g = _in_units(gates, gate_row, n < HIDDEN, scale_ptr, bias_ptr, scales[0])
    u = _in_units(ups, up_row, n < HIDDEN, scale_ptr, bias_ptr, scales[0])
    _store(out_ptr, activated(g, GATE) * u, row, n, rows, scales[1], HIDDEN)


def product(x: Tensor, weights: Linear, out: Tensor, epilogue: Epilogue, tile: Int8Tile) -> None:
    """See `vla_accel.kernels.gemm.gemm`."""
    (rows, k), n, activation = x.shape, out.shape[1], epilogue.activation
    if activation.gated:
        kernel, columns, kind = _int8_gated, tile.columns // 2, (activation.gate.code, weights.paired)
    else:
        kernel, columns, kind = _int8_linear, tile.columns, (activation.code,)
    launch(
        kernel, (triton.cdiv(rows, tile.rows) * triton.cdiv(n, columns),), x, weights.weight, weights.weight_scale,
        weights.bias, out, (weights.input_scale_value, epilogue.quantize), rows, n, k, tile, *kind,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
