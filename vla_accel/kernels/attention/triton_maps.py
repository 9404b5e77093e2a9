"""Triton kernels of attention on maps (`maps.py`)."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from vla_accel.kernels.attention.maps import Windows
from vla_accel.kernels.chain import launch
from vla_accel.kernels.triton_common import LOG2E, softmax_step, wait_for_previous
from vla_accel.numeric import power_of_two

_SHARED_PIXELS = 1024
"""Pixels from which on several programs write the output of a group of channels."""


class WindowShape(NamedTuple):
    """Constants of a kernel: columns of the output, of a head and of its tile; a window's side, windows in a row and in
    a map; queries and keys of a tile.
    """

    columns: int
    dim: int
    block: int
    side: int
    across: int
    windows: int
    queries: int = 64
    keys: int = 64


@triton.jit
def _window_attention(qkv_ptr, padding_ptr, out_ptr, height, width, scale, S: constexpr, PDL: constexpr):
    head, image = tl.program_id(1), (tl.program_id(2) // S.windows).to(tl.int64)
    window = tl.program_id(2) % S.windows
    top, left = window // S.across * S.side, window % S.across * S.side
    # The pixels of a window that are in the map are a rectangle.
    wide = tl.minimum(S.side, width - left)
    count = tl.minimum(S.side, height - top) * wide
    d = tl.arange(0, S.block)
    in_d = d < S.dim
    first = tl.program_id(0) * S.queries
    wait_for_previous(PDL)
    if first < count:
        m = first + tl.arange(0, S.queries)
        in_q = (m < count)[:, None] & in_d[None, :]
        pixel = (top + m // wide) * width + left + m % wide
        base = qkv_ptr + image * height * width * (3 * S.columns) + head * S.dim
        q = tl.load(base + pixel[:, None] * (3 * S.columns) + d[None, :], mask=in_q, other=0.0)
        # All rows of padding have the same key and the same value.
        pad = padding_ptr + head * S.dim + d
        k_pad = tl.load(pad + S.columns, mask=in_d, other=0.0).to(q.dtype).to(tl.float32)
        v_pad = tl.load(pad + 2 * S.columns, mask=in_d, other=0.0).to(q.dtype).to(tl.float32)
        pads = (S.side * S.side - count).to(tl.float32)
        best = tl.where(pads > 0.0, tl.sum(q.to(tl.float32) * k_pad[None, :], 1) * scale, -float("inf"))
        total = tl.full((S.queries,), 0.0, tl.float32) + pads
        acc = tl.full((S.queries, S.block), 0.0, tl.float32) + pads * v_pad[None, :]
        for start in range(0, S.side * S.side, S.keys):
            n = start + tl.arange(0, S.keys)
            real = n < count
            place = ((top + n // wide) * width + left + n % wide) * (3 * S.columns)
            k = tl.load(base + S.columns + place[None, :] + d[:, None], mask=real[None, :] & in_d[:, None], other=0.0)
            s = tl.dot(q, k, input_precision="ieee") * scale
            s = tl.where(real[None, :], s, -float("inf"))
            p, shrink, best, total = softmax_step(s, best, total, False)
            v = tl.load(
                base + 2 * S.columns + place[:, None] + d[None, :], mask=real[:, None] & in_d[None, :], other=0.0
            )
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        target = out_ptr + (image * height * width + pixel[:, None]) * S.columns + head * S.dim + d[None, :]
        tl.store(target, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=in_q)


def window_attention(qkv: Tensor, padding: Tensor, out: Tensor, windows: Windows, heads: int) -> None:
    """See `vla_accel.kernels.attention.maps.window_attention`."""
    columns, side, count = out.shape[2], windows.side, windows.down * windows.across
    dim = columns // heads
    shape = WindowShape(columns, dim, max(16, power_of_two(dim)), side, windows.across, count)
    grid = (triton.cdiv(side * side, shape.queries), heads, len(qkv) * count)
    sizes = (windows.height, windows.width, dim**-0.5 * LOG2E.value)
    launch(_window_attention, grid, qkv, padding, out, *sizes, shape, num_warps=4, num_stages=3)


class ChannelShape(NamedTuple):
    """Constants of a kernel: pixels of a map and columns of its output, channels of a group and of its tile, pixels of
    a tile, and tiles of the output that a program writes.
    """

    pixels: int
    columns: int
    dim: int
    block: int
    tile: int
    written: int


@triton.jit
def _channel_attention(qkv_ptr, out_ptr, scale, S: constexpr, PDL: constexpr):
    group, image = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i, p = tl.arange(0, S.block), tl.arange(0, S.tile)
    inside = i < S.dim
    base = qkv_ptr + image * S.pixels * (3 * S.columns) + group * S.dim
    wait_for_previous(PDL)
    scores = tl.full((S.block, S.block), 0.0, tl.float32)
    for start in range(0, S.pixels, S.tile):
        place = (start + p) * (3 * S.columns)
        real = start + p < S.pixels
        q = tl.load(base + place[None, :] + i[:, None], mask=real[None, :] & inside[:, None], other=0.0)
        k = tl.load(base + S.columns + place[:, None] + i[None, :], mask=real[:, None] & inside[None, :], other=0.0)
        scores = tl.dot(q, k, scores, input_precision="ieee")
    scores = tl.where(inside[None, :], scores * scale, -float("inf"))
    weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
    weights = tl.trans(weights / tl.sum(weights, 1)[:, None])
    first = tl.program_id(2) * (S.tile * S.written)
    for start in range(0, S.tile * S.written, S.tile):
        pixel = first + start + p
        real = (pixel < S.pixels)[:, None] & inside[None, :]
        v = tl.load(base + 2 * S.columns + pixel[:, None] * (3 * S.columns) + i[None, :], mask=real, other=0.0)
        out = tl.dot(v, weights.to(v.dtype), input_precision="ieee")
        target = out_ptr + (image * S.pixels + pixel)[:, None] * S.columns + group * S.dim + i[None, :]
        tl.store(target, out.to(out_ptr.dtype.element_ty), mask=real)


def channel_attention(qkv: Tensor, out: Tensor, groups: int) -> None:
    """See `vla_accel.kernels.attention.maps.channel_attention`."""
    images, pixels, columns = out.shape
    dim, tile = columns // groups, 128 if pixels > 64 else 64
    parts = 4 if pixels > _SHARED_PIXELS else 1
    written = triton.cdiv(triton.cdiv(pixels, tile), parts)
    shape = ChannelShape(pixels, columns, dim, max(16, power_of_two(dim)), tile, written)
    grid = (groups, images, triton.cdiv(pixels, tile * written))
    launch(_channel_attention, grid, qkv, out, pixels**-0.5 * LOG2E.value, shape, num_warps=4, num_stages=3)
