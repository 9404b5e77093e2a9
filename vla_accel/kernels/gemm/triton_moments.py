"""Moments of rows in Triton kernels: stored with the rows, read by the product after the norm (`gemm/moments.py`)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from vla_accel.kernels.chain import launch
from vla_accel.kernels.gemm.moments import Moments
from vla_accel.kernels.triton_common import wait_for_previous
from vla_accel.numeric import power_of_two


@triton.jit
def store_moments(y, keep, row, n, moments, tile, rows, N: constexpr):
    """Store the moments of a tile y (BLOCK_M, BLOCK_N) float32 of rows as they were stored, and the scaled rows.

    `keep`: which elements of the tile are in the tensor; `moments`: the scale, and where all are stored.
    """
    scale_ptr, sums_ptr, squares_ptr, scaled_ptr = moments
    y = tl.where(keep, y, 0.0)
    at = tile * rows + row
    tl.store(sums_ptr + at, tl.sum(y, 1), mask=row < rows)
    tl.store(squares_ptr + at, tl.sum(y * y, 1), mask=row < rows)
    if scaled_ptr is not None:
        scaled = y * (1.0 + tl.load(scale_ptr + n, mask=n < N, other=0.0))[None, :]
        tl.store(scaled_ptr + row[:, None] * N + n[None, :], scaled.to(scaled_ptr.dtype.element_ty), mask=keep)


@triton.jit
def of_tiles(moment_ptr, row, rows, TILES: constexpr):
    """One moment (tiles, BLOCK_M) of every tile of rows that are all in the tensor.

    Loaded before a product and added up after it, they arrive while the product waits for its own operands.
    """
    tile = tl.arange(0, triton.next_power_of_2(TILES))[:, None]
    return tl.load(moment_ptr + tile * rows + row[None, :], mask=tile < TILES, other=0.0)


@triton.jit
def _measure(x_ptr, moments, rows, WIDTH: constexpr, BLOCK_W: constexpr, PDL: constexpr):
    row = tl.program_id(0) + tl.arange(0, 1)
    n = tl.arange(0, BLOCK_W)
    keep = (row < rows)[:, None] & (n < WIDTH)[None, :]
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row[:, None] * WIDTH + n[None, :], mask=keep, other=0.0).to(tl.float32)
    store_moments(x, keep, row, n, moments, 0, rows, WIDTH)


def measure(x: Tensor, scale: Tensor | None, out: Moments) -> None:
    """See `vla_accel.kernels.gemm.moments.measure`."""
    rows, width = x.shape
    moments = (scale, out.sums, out.squares, out.scaled)
    launch(_measure, (rows,), x, moments, rows, width, power_of_two(width), num_warps=4)
