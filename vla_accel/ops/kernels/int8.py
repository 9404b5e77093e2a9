"""Products of INT8 weights and activations: exact sums in int32, scales and bias at the end. Any GPU with BF16."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vla_accel.ops.kernels.common import launch_options, let_next_start, wait_for_previous

GROUP = 8
"""Row tiles that take turns at the same columns of weights, which stay in L2 meanwhile."""


@triton.jit
def _int8_linear(x_ptr, w_ptr, scale_ptr, bias_ptr, out_ptr, input_scale, rows, N: tl.constexpr, K: tl.constexpr,
                 ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, TURNS: tl.constexpr,
                 HAS_BIAS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    let_next_start(PDL)
    program = tl.program_id(0)
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), tl.cdiv(N, COLUMNS)
    first = program // (TURNS * column_tiles) * TURNS
    turns = min(row_tiles - first, TURNS)
    row = (first + program % turns) * ROWS + tl.arange(0, ROWS)
    n = program % (TURNS * column_tiles) // turns * COLUMNS + tl.arange(0, COLUMNS)
    scale = tl.load(scale_ptr + n, mask=n < N, other=0.0) * input_scale
    if HAS_BIAS:
        bias = tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    total = tl.zeros((ROWS, COLUMNS), tl.int32)
    for start in range(0, K, DEPTH):
        k = start + tl.arange(0, DEPTH)
        x = tl.load(x_ptr + row.to(tl.int64)[:, None] * K + k[None, :], mask=(row < rows)[:, None] & (k < K)[None, :],
                    other=0)  # fmt: skip
        w = tl.load(w_ptr + n.to(tl.int64)[None, :] * K + k[:, None], mask=(n < N)[None, :] & (k < K)[:, None], other=0)
        total = tl.dot(x, w, total, out_dtype=tl.int32)
    y = total.to(tl.float32) * scale[None, :]
    if HAS_BIAS:
        y += bias[None, :]
    place = out_ptr + row.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(place, y.to(out_ptr.dtype.element_ty), mask=(row < rows)[:, None] & (n < N)[None, :])


def int8_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, input_scale: float, bias: Tensor | None, out: Tensor, *,
    pdl: bool = False,
) -> None:  # fmt: skip
    """See `vla_accel.ops.linear.linear`."""
    rows, k = x.shape
    n = weight.shape[0]
    # Three stages of both tiles take 48 or 72 KB, which every GPU has, and 32 KB where rows are few.
    tile_rows, tile_columns = (128, 128) if rows > 64 else (64, 128) if rows > 32 else (32, 128)
    grid = (triton.cdiv(rows, tile_rows) * triton.cdiv(n, tile_columns),)
    _int8_linear[grid](
        x, weight, weight_scale, weight_scale if bias is None else bias, out, input_scale, rows, n, k, tile_rows,
        tile_columns, 64, GROUP, bias is not None, pdl, num_warps=8 if rows > 64 else 4, num_stages=3,
        **launch_options(pdl),
    )  # fmt: skip
