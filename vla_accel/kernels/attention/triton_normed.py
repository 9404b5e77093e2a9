"""The kernel of `kernels.attention.normed`. A program owns a head and a tile of queries, and has all keys.

Keys of the prefix, constants of the loop, are fetched before the wait for the product that writes the rows. Heads are
loaded as halves, which meet in a rotation.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from vla_accel.kernels.attention.config import NormedShape, NormedTile, normed_tiles
from vla_accel.kernels.attention.normed import HeadsNorm, Keys
from vla_accel.kernels.chain import launch
from vla_accel.kernels.gemm.moments import Moments
from vla_accel.kernels.triton_common import LOG2E, softmax_step, wait_for_previous
from vla_accel.numeric import power_of_two
from vla_accel.runtime import current


class Shape(NamedTuple):
    """Constants: tokens of a sequence, keys of the prefix, heads of two halves, columns of a half and of its tile,
    parts of a row, and tiles of a part's moments."""

    tokens: int
    source: int
    heads: int
    half: int
    block: int
    parts: int
    tiles: int


@triton.jit
def _rstd(norm, row, real, PART: constexpr, SHAPE: constexpr):
    """The factor of a norm, (rows,)."""
    squares_ptr, rows, part_stride, row_stride, eps = norm
    tile = tl.arange(0, triton.next_power_of_2(SHAPE.tiles))[:, None]
    at = PART * part_stride + tile * rows + row[None, :] * row_stride
    squares = tl.load(squares_ptr + at, mask=(tile < SHAPE.tiles) & real[None, :], other=0.0)
    return tl.rsqrt(tl.sum(squares, 0) / (SHAPE.heads * 2 * SHAPE.half) + eps)


@triton.jit
def _halves(ptr, at, keep, SHAPE: constexpr):
    return tl.load(ptr + at, mask=keep, other=0.0), tl.load(ptr + at + SHAPE.half, mask=keep, other=0.0)


@triton.jit
def _part(x_ptr, row, keep, head, PART: constexpr, SHAPE: constexpr):
    """Both halves (rows, block) of a head of one part of rows."""
    WIDTH: constexpr = SHAPE.heads * 2 * SHAPE.half
    i = tl.arange(0, SHAPE.block)[None, :]
    at = row[:, None] * (SHAPE.parts * WIDTH) + PART * WIDTH + head * (2 * SHAPE.half) + i
    return _halves(x_ptr, at, keep, SHAPE)


@triton.jit
def _rotated_norm(x_ptr, weight_ptr, rope, norm, at, PART: constexpr, SHAPE: constexpr):
    """Both halves of a head of one part, normed, and rotated if there is a `rope`."""
    cos_ptr, sin_ptr = rope
    head, row, token, keep, real = at
    rstd = _rstd(norm, row, real, PART, SHAPE)[:, None]
    low, high = _part(x_ptr, row, keep, head, PART, SHAPE)
    i = tl.arange(0, SHAPE.block)[None, :]
    factors = _halves(weight_ptr, head * (2 * SHAPE.half) + i, i < SHAPE.half, SHAPE)
    a, b = low.to(tl.float32) * rstd * factors[0], high.to(tl.float32) * rstd * factors[1]
    if cos_ptr is not None:
        angle = token[:, None] * SHAPE.half + i
        cos, sin = tl.load(cos_ptr + angle, mask=keep, other=0.0), tl.load(sin_ptr + angle, mask=keep, other=0.0)
        turned = a * cos - b * sin
        b = b * cos + a * sin
        a = turned
    return a.to(low.dtype), b.to(low.dtype)


@triton.jit
def _of_prefix(prefix, key, batch, head, SHAPE: constexpr):
    """Halves of keys and of values (keys, block), and what is added to their scores (keys,)."""
    k_ptr, v_ptr, bias_ptr = prefix
    real = key < SHAPE.source
    i = tl.arange(0, SHAPE.block)[None, :]
    keep = real[:, None] & (i < SHAPE.half)
    at = ((batch * SHAPE.source + key[:, None]) * SHAPE.heads + head) * (2 * SHAPE.half) + i
    k, v = _halves(k_ptr, at, keep, SHAPE), _halves(v_ptr, at, keep, SHAPE)
    added = tl.where(real, 0.0, -float("inf"))
    if bias_ptr is not None:
        added += LOG2E * tl.load(bias_ptr + batch * SHAPE.source + key, mask=real, other=0.0)
    return k, v, added


@triton.jit
def _seen(q, k, v, added, scale, sums):
    """The sums after a tile of keys: the largest score, the weights, and both halves of the values."""
    best, total, low, high = sums
    s = tl.dot(q[1], tl.trans(k[1]), tl.dot(q[0], tl.trans(k[0]))) * scale + added[None, :]
    # The first tile has a key that every query sees.
    p, shrink, best, total = softmax_step(s, best, total, False)
    low = tl.dot(p.to(v[0].dtype), v[0], low * shrink[:, None])
    high = tl.dot(p.to(v[0].dtype), v[1], high * shrink[:, None])
    return best, total, low, high


@triton.jit
def _normed_attention(
    x_ptr, weights, rope, norm, prefix, outs, scale, SHAPE: constexpr, TILE: constexpr, PDL: constexpr
):
    q_norm, k_norm = weights
    out_ptr, cache_keys, cache_values = outs
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    token, key = tl.program_id(0) * TILE.queries + tl.arange(0, TILE.queries), tl.arange(0, TILE.keys)
    i = tl.arange(0, SHAPE.block)[None, :]
    real = token < SHAPE.tokens
    keep = real[:, None] & (i < SHAPE.half)
    if SHAPE.source > 0:
        k, v, added = _of_prefix(prefix, key, batch, head, SHAPE)
    wait_for_previous(PDL)
    row = batch * SHAPE.tokens + token
    q = _rotated_norm(x_ptr, q_norm, rope, norm, (head, row, token, keep, real), 0, SHAPE)
    none = tl.full((TILE.queries, SHAPE.block), 0.0, tl.float32)
    sums = (tl.full((TILE.queries,), -float("inf"), tl.float32), tl.full((TILE.queries,), 0.0, tl.float32), none, none)
    if SHAPE.source > 0:
        sums = _seen(q, k, v, added, scale, sums)
        for start in range(TILE.keys, SHAPE.source, TILE.keys):
            k, v, added = _of_prefix(prefix, start + key, batch, head, SHAPE)
            sums = _seen(q, k, v, added, scale, sums)
    if k_norm is not None:
        for start in range(0, SHAPE.tokens, TILE.own):
            its = start + tl.arange(0, TILE.own)
            known = its < SHAPE.tokens
            inside = known[:, None] & (i < SHAPE.half)
            at = batch * SHAPE.tokens + its
            own = _rotated_norm(x_ptr, k_norm, rope, norm, (head, at, its, inside, known), 1, SHAPE)
            values = _part(x_ptr, at, inside, head, 2, SHAPE)
            if cache_keys is not None:
                # Each tile of keys is stored by one of the programs that have it.
                mine = inside & (start // TILE.own % tl.num_programs(0) == tl.program_id(0))
                to = (at[:, None] * SHAPE.heads + head) * (2 * SHAPE.half) + i
                tl.store(cache_keys + to, own[0], mask=mine)
                tl.store(cache_keys + to + SHAPE.half, own[1], mask=mine)
                tl.store(cache_values + to, values[0], mask=mine)
                tl.store(cache_values + to + SHAPE.half, values[1], mask=mine)
            sums = _seen(q, own, values, tl.where(known, 0.0, -float("inf")), scale, sums)
    target = out_ptr + (row[:, None] * SHAPE.heads + head) * (2 * SHAPE.half) + i
    kind = out_ptr.dtype.element_ty
    tl.store(target, (sums[2] / sums[1][:, None]).to(kind), mask=keep)
    tl.store(target + SHAPE.half, (sums[3] / sums[1][:, None]).to(kind), mask=keep)


def normed_attention(
    x: Tensor, moments: Moments, norm: HeadsNorm, out: Tensor, prefix: Keys | None, cache: Keys | None,
    tile: NormedTile | None,
) -> None:  # fmt: skip
    """See `vla_accel.kernels.attention.normed.normed_attention`."""
    batch, tokens, heads, head_dim = out.shape
    source, rows = 0 if prefix is None else prefix.keys.shape[1], len(x)
    shape = NormedShape(batch, tokens, source, heads, head_dim, x.element_size(), norm.parts == 3)
    tile = tile or normed_tiles(current(x).gpu, shape)[0]
    # Moments of the product's columns; or of rows whose parts are rows of their own.
    by_column = moments.squares.shape[1] == rows
    tiles = len(moments.squares) // norm.parts if by_column else 1
    strides = (tiles * rows, 1) if by_column else (1, norm.parts)
    half = head_dim // 2
    constants = Shape(tokens, source, heads, half, max(16, power_of_two(half)), norm.parts, tiles)
    keys = (None, None, None) if prefix is None else (prefix.keys, prefix.values, prefix.bias)
    outs = (out, None, None) if cache is None else (out, cache.keys, cache.values)
    arguments = (x, (norm.q, norm.k), norm.rope or (None, None), (moments.squares, rows, *strides, norm.eps), keys)
    grid, run = (triton.cdiv(tokens, tile.queries), heads, batch), {"num_warps": tile.warps, "num_stages": 1}
    launch(_normed_attention, grid, *arguments, outs, head_dim**-0.5 * LOG2E.value, constants, tile, **run)
