"""Convolutions of images in Triton. A program gathers the neighbourhoods of some pixels of the result, one tap and some
channels at a time, and multiplies them with the weights of some output channels."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from vla_accel.kernels.activation import Activation
from vla_accel.kernels.chain import launch
from vla_accel.kernels.gemm.triton_pipelined import sums_of_parts
from vla_accel.kernels.image.convolution import STEM, STEM_COLUMNS, ConvPlan, ConvSizes
from vla_accel.kernels.triton_common import activated, wait_for_previous

TAPS, COLUMNS = constexpr(STEM), constexpr(STEM_COLUMNS)
_PIXELS, _DEPTH = 64, 32
"""Pixels of a program of the stem, and columns of its weight that it multiplies at a time."""


@triton.jit
def _corner(row, out_size, STRIDE: constexpr, PAD: constexpr):
    """The image of pixels of the result, and the row and the column where their neighbourhoods begin."""
    out_height, out_width = out_size
    image = (row // (out_height * out_width)).to(tl.int64)
    return image, row // out_width % out_height * STRIDE - PAD, row % out_width * STRIDE - PAD


@triton.jit
def _convolve(
    pointers, workspace, rows, size, out_size, S: constexpr, TILE: constexpr, ACTIVATION: constexpr, PDL: constexpr
):  # fmt: skip
    x_ptr, w_ptr, shift_ptr, residual_ptr, out_ptr = pointers
    height, width = size
    C: constexpr = S.channels
    CHUNKS: constexpr = C // TILE.block_k
    STEPS: constexpr = S.taps * S.taps * CHUNKS
    SHARE: constexpr = STEPS // TILE.split
    row, k = tl.program_id(0) * TILE.rows + tl.arange(0, TILE.rows), tl.arange(0, TILE.block_k)
    n = tl.program_id(1) * TILE.columns + tl.arange(0, TILE.columns)
    image, top, left = _corner(row, out_size, S.stride, S.taps // 2)
    corner = (image * height + top) * width + left
    wait_for_previous(PDL)
    acc = tl.full((TILE.rows, TILE.columns), 0.0, tl.float32)
    for i in range(SHARE):
        step = tl.program_id(2) * SHARE + i
        tap = step // CHUNKS
        down, right = tap // S.taps, tap % S.taps
        y, x = top + down, left + right
        inside = (row < rows) & (y >= 0) & (y < height) & (x >= 0) & (x < width)
        at = (corner + down * width + right) * C + step % CHUNKS * TILE.block_k
        pixels = tl.load(x_ptr + at[:, None] + k[None, :], mask=inside[:, None], other=0.0)
        weights = tl.load(w_ptr + n[None, :] * (STEPS * TILE.block_k) + (step * TILE.block_k + k)[:, None])
        acc = tl.dot(pixels, weights, acc)
    last = True
    if TILE.split > 1:
        last, acc = sums_of_parts(acc, workspace, TILE)
    if last:
        if shift_ptr is not None:
            acc += tl.load(shift_ptr + n)[None, :]
        keep = (row < rows)[:, None]
        place = row.to(tl.int64)[:, None] * S.columns + n[None, :]
        if residual_ptr is not None:
            acc += tl.load(residual_ptr + place, mask=keep, other=0.0).to(tl.float32)
        tl.store(out_ptr + place, activated(acc, ACTIVATION).to(out_ptr.dtype.element_ty), mask=keep)


def convolve(
    x: Tensor, weight: Tensor, stride: int, shift: Tensor | None, residual: Tensor | None, activation: Activation,
    plan: ConvPlan,
) -> Tensor:  # fmt: skip
    (batch, height, width, channels), (outs, _, taps, _), tile = x.shape, weight.shape, plan.tile
    assert tile is not None
    out = x.new_empty(batch, -(-height // stride), -(-width // stride), outs)
    sizes = ConvSizes(out.numel() // outs, outs, channels, taps, stride)
    grid = (triton.cdiv(sizes.rows, tile.rows), outs // tile.columns, tile.split)
    launch(
        _convolve, grid, (x, weight, shift, residual, out), plan.workspace or (None, None), sizes.rows, (height, width),
        (out.shape[1], out.shape[2]), sizes, tile, activation.code, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


@triton.jit
def _convolve_pixels(
    pointers, strides, views, size, out_size, OUTS: constexpr, ROWS: constexpr, DEPTH: constexpr, PDL: constexpr
):  # fmt: skip
    w_ptr, image_ptr, scale_ptr, out_ptr = pointers
    by_batch, by_view, by_row, out_by_batch, out_by_view = strides
    height, width = size
    out_height, out_width = out_size
    batch, view = (tl.program_id(1) // views).to(tl.int64), tl.program_id(1) % views
    row, n = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, OUTS)
    _, top, left = _corner(row, out_size, 2, TAPS // 2)
    picture, scale = image_ptr + batch * by_batch + view * by_view, scale_ptr + view * 6
    acc = tl.full((ROWS, OUTS), 0.0, tl.float32)
    for k0 in tl.static_range(0, COLUMNS, DEPTH):
        k = k0 + tl.arange(0, DEPTH)
        tap, colour = k // 3, k % 3
        y, x = top[:, None] + (tap // TAPS)[None, :], left[:, None] + (tap % TAPS)[None, :]
        inside = (tap < TAPS * TAPS)[None, :] & (y >= 0) & (y < height) & (x >= 0) & (x < width)
        level = tl.load(picture + y * by_row + x * 3 + colour[None, :], mask=inside, other=0).to(tl.float32)
        scaled = level * tl.load(scale + colour)[None, :] + tl.load(scale + 3 + colour)[None, :]
        weights = tl.load(w_ptr + n[None, :] * COLUMNS + k[:, None])
        acc = tl.dot(tl.where(inside, scaled, 0.0).to(w_ptr.dtype.element_ty), weights, acc)
    # What it has read so far are inputs of the program and constants.
    wait_for_previous(PDL)
    place = out_ptr + batch * out_by_batch + view * out_by_view + row[:, None] * OUTS + n[None, :]
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=(row < out_height * out_width)[:, None])


def convolve_pixels(weight: Tensor, images: Tensor, scales: Tensor, out: Tensor) -> None:
    batch, views, height, width, _ = images.shape
    out_size, outs = (out.shape[2], out.shape[3]), len(weight)
    strides = (*images.stride()[:3], *out.stride()[:2])
    grid = (triton.cdiv(out_size[0] * out_size[1], _PIXELS), batch * views)
    launch(
        _convolve_pixels, grid, (weight, images, scales, out), strides, views, (height, width), out_size, outs, _PIXELS,
        _DEPTH, num_warps=4,
    )  # fmt: skip
