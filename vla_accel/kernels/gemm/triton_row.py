"""Products of one row: a token of π0-FAST, where reading the weights is the cost.

A program has all of the row in registers and takes several tiles of output columns, one after the other. It loads a
tile's weights into registers while it multiplies those of the tile before, and the first ones before the wait for the
previous kernel. There are no tensor cores, which would multiply 15 rows of zeros and need weights in shared memory.
Weights are read as words of 32 bits and widened by operations on bits, which take fewer cycles than conversions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from vla_accel.kernels.chain import launch
from vla_accel.kernels.gemm.config import OneRow
from vla_accel.kernels.gemm.epilogue import Epilogue, Heads, Norm
from vla_accel.kernels.gemm.triton_epilogues import (
    epilogue_arguments,
    load_columns,
    load_pair,
    load_residual,
    norm_arguments,
    product_shape,
    store_columns,
    store_pair,
)
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.triton_common import wait_for_previous

KINDS = {
    torch.float32: "float32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "int8",
    torch.float8_e4m3fn: "fp8",
}  # fmt: skip
_TINY = constexpr(2.0**-100)


@triton.jit
def _widened(words, INDEX: constexpr, KIND: constexpr):
    """The weight `INDEX` of each word, float32; of FP8 times 2⁻¹²⁰."""
    if KIND == "float32":
        return words.to(tl.float32, bitcast=True)
    elif KIND == "bf16":
        return (words << 16 if INDEX == 0 else words & -65536).to(tl.float32, bitcast=True)
    elif KIND == "fp16":
        return (words >> (16 * INDEX)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == "int8":
        # A byte below the bits of 2²³ is 2²³ plus that byte, here of the weight plus 128.
        bits = ((words ^ -2139062144) >> (8 * INDEX)) & 0xFF | 0x4B000000
        return bits.to(tl.float32, bitcast=True) - 8388736.0
    else:
        # Sign, exponent and mantissa go where float32 has them.
        return (((words << (24 - 8 * INDEX)) >> 4) & -2014314496).to(tl.float32, bitcast=True)


@triton.jit
def _row(x_ptr, norm, BLOCK_K: constexpr, K: constexpr, KIND: constexpr):
    """Four or fewer parts of the row x ∘ (1 + scale), rounded as it would be for tensor cores: the values by which each
    weight of a word is multiplied, (words, 1) float32. And the sum of x²."""
    k = tl.arange(0, BLOCK_K)
    x = tl.load(x_ptr + k, mask=k < K, other=0.0)
    wide = x.to(tl.float32)
    squares = tl.sum(wide * wide, 0)
    if norm.scale is not None:
        wide = (wide * (1.0 + tl.load(norm.scale + k, mask=k < K, other=0.0))).to(x.dtype).to(tl.float32)
    if KIND == "float32":
        return (wide[:, None],), squares
    else:
        even, odd = tl.split(tl.reshape(wide, (BLOCK_K // 2, 2)))
        if KIND == "bf16" or KIND == "fp16":
            return (even[:, None], odd[:, None]), squares
        else:
            if KIND == "fp8":
                even, odd = even / _TINY, odd / _TINY
            a, c = tl.split(tl.reshape(even, (BLOCK_K // 4, 2)))
            b, d = tl.split(tl.reshape(odd, (BLOCK_K // 4, 2)))
            return (a[:, None], b[:, None], c[:, None], d[:, None]), squares


@triton.jit
def _multiplied(words, row, KIND: constexpr):
    """The products of a tile's weights with the row, (columns,) float32."""
    y = _widened(words, 0, KIND) * row[0]
    for index in tl.static_range(1, len(row)):
        y += _widened(words, index, KIND) * row[index]
    if KIND == "fp8":
        return tl.sum(y, 0) * 1048576.0
    else:
        return tl.sum(y, 0)


@triton.jit
def _scale(wscale, n, KIND: constexpr):
    """The factor of the sums of columns n."""
    if KIND == "int8":
        return tl.load(wscale + n)[None, :]
    else:
        return wscale


@triton.jit
def _words(w_ptr, n, wanted, ROW: constexpr, WORDS: constexpr):
    """Words (WORDS, columns) of the weight rows n, where they are wanted. ROW: words of a weight row."""
    k = tl.arange(0, WORDS)[:, None]
    return tl.load(w_ptr + n.to(tl.int64)[None, :] * ROW + k, mask=wanted[None, :] & (k < ROW), other=0)


@triton.jit
def _pair_rows(tile, more, SHAPE: constexpr, TILE: constexpr):
    """The weight rows of a tile of pairs, first sides before second ones, and whether they are wanted."""
    IN_HALF: constexpr = (SHAPE.half + TILE.columns - 1) // TILE.columns
    column = tl.arange(0, 2 * TILE.columns)
    i = tile % IN_HALF * TILE.columns + column % TILE.columns
    n = tile // IN_HALF * (2 * SHAPE.half) + column // TILE.columns * SHAPE.half + i
    return n, (i < SHAPE.half) & (n < SHAPE.n) & more


@triton.jit
def _row_pair(
    x_ptr, weights, norm, e, SHAPE: constexpr, TILE: constexpr, KIND: constexpr, ROW: constexpr, BLOCK_K: constexpr,
    WORDS: constexpr, PDL: constexpr,
):  # fmt: skip
    w_ptr, wscale = weights
    IN_HALF: constexpr = (SHAPE.half + TILE.columns - 1) // TILE.columns
    tile = tl.program_id(0) * TILE.tiles
    n, wanted = _pair_rows(tile, True, SHAPE, TILE)
    coming = _words(w_ptr, n, wanted, ROW, WORDS)
    wait_for_previous(PDL)
    row, squares = _row(x_ptr, norm, BLOCK_K, SHAPE.k, KIND)
    rstd = tl.rsqrt(squares / SHAPE.k + norm.eps)
    for i in range(TILE.tiles):
        words = coming
        n, wanted = _pair_rows(tile + 1, i + 1 < TILE.tiles, SHAPE, TILE)
        coming = _words(w_ptr, n, wanted, ROW, WORDS)
        group, i0 = tile // IN_HALF, tile % IN_HALF * TILE.columns
        if group < SHAPE.n // (2 * SHAPE.half):
            at = (group, i0, 0)
            constants = load_pair(e, at, SHAPE, TILE)
            low = group * (2 * SHAPE.half) + i0 + tl.arange(0, TILE.columns)
            scale_a = _scale(wscale, tl.minimum(low, SHAPE.n - 1), KIND)
            scale_b = _scale(wscale, tl.minimum(low + SHAPE.half, SHAPE.n - 1), KIND)
            y = _multiplied(words, row, KIND) * rstd
            a, b = tl.split(tl.trans(tl.reshape(y, (2, TILE.columns))))
            store_pair(a[None, :] * scale_a, b[None, :] * scale_b, constants, e, at, SHAPE, TILE)
        tile += 1


@triton.jit
def _row_columns(
    x_ptr, weights, norm, e, SHAPE: constexpr, TILE: constexpr, KIND: constexpr, ROW: constexpr, BLOCK_K: constexpr,
    WORDS: constexpr, PDL: constexpr,
):  # fmt: skip
    w_ptr, wscale = weights
    column = tl.arange(0, TILE.columns)
    n0 = tl.program_id(0) * (TILE.tiles * TILE.columns)
    coming = _words(w_ptr, n0 + column, n0 + column < SHAPE.n, ROW, WORDS)
    wait_for_previous(PDL)
    row, _ = _row(x_ptr, norm, BLOCK_K, SHAPE.k, KIND)
    for i in range(TILE.tiles):
        words = coming
        n = n0 + TILE.columns + column
        coming = _words(w_ptr, n, (n < SHAPE.n) & (i + 1 < TILE.tiles), ROW, WORDS)
        at = (0, n0, 0)
        scale = _scale(wscale, tl.minimum(n0 + column, SHAPE.n - 1), KIND)
        constants = load_columns(e, at, SHAPE, TILE)
        residual = load_residual(e, at, SHAPE, TILE)
        store_columns(_multiplied(words, row, KIND)[None, :] * scale, constants, residual, e, at, SHAPE, TILE)
        n0 += TILE.columns


def product(
    x: Tensor, weights: Linear, out: Tensor | Heads, epilogue: Epilogue, norm: Norm | None, config: OneRow
) -> None:
    """`vla_accel.kernels.gemm.gemm` of one row. A product of columns takes no norm; no moments are read or written."""
    shape, w = product_shape(weights, epilogue, out, norm), weights.weight
    each, block_k = 4 // w.element_size(), triton.next_power_of_2(shape.k)
    after = epilogue_arguments(weights, epilogue, out, len(x))
    pairs = norm is not None
    tiles = shape.groups * triton.cdiv(shape.half, config.columns) if pairs else triton.cdiv(shape.n, config.columns)
    launch(
        _row_pair if pairs else _row_columns, (triton.cdiv(tiles, config.tiles),), x,
        (w.view(torch.int32), weights.sums_scale), norm_arguments(norm), after, shape, config, KINDS[w.dtype],
        shape.k // each, block_k, block_k // each, num_warps=config.warps, num_stages=1,
    )  # fmt: skip
