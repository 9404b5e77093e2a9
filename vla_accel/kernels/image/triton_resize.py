"""Kernels that fit camera images: Pillow's filter along an axis in integers, and bilinear sampling. A public function
runs the op of the same name in `vla_accel.kernels.image.resize`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

if TYPE_CHECKING:
    from vla_accel.kernels.image.resize import Filter, Sampling

BLOCK = constexpr(1024)
PRECISION, HALF = constexpr(22), constexpr(1 << 21)


# Compiled once: the sizes of cameras are not known in advance.
SIZES = ("total", "outputs", "inner", "in_outer", "in_count", "out_outer", "out_step")


@triton.jit(do_not_specialize=SIZES)
def _filtered(tensors, total, outputs, inner, in_outer, in_count, out_outer, out_step, TAPS: constexpr):
    image_ptr, first_ptr, weights_ptr, out_ptr = tensors
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = n < total
    outer, j, e = n // (outputs * inner), n // inner % outputs, n % inner
    first = tl.load(first_ptr + j, mask=keep, other=0)
    sums = tl.full((BLOCK,), HALF, tl.int32)
    for tap in range(TAPS):
        place = tl.minimum(first + tap, in_count - 1)
        pixel = tl.load(image_ptr + outer * in_outer + place * inner + e, mask=keep, other=0).to(tl.int32)
        sums += pixel * tl.load(weights_ptr + j * TAPS + tap, mask=keep, other=0)
    byte = tl.clamp((sums >> PRECISION).to(tl.float32), 0.0, 255.0).to(tl.uint8)
    tl.store(out_ptr + outer * out_outer + j * out_step + e, byte, mask=keep)


def filtered(image: Tensor, by: Filter, out: Tensor, *, axis: int) -> None:
    row, (height, width) = image.shape[1] * 3, image.shape[:2]
    outputs, taps = by.weights.shape
    outer, inner = (height, 3) if axis else (1, row)
    strides = (row, width, out.stride(0), 3) if axis else (0, height, 0, out.stride(0))
    total, tensors = outer * outputs * inner, (image, by.first, by.weights, out)
    _filtered[(triton.cdiv(total, BLOCK.value),)](tensors, total, outputs, inner, *strides, taps, num_warps=4)


@triton.jit(do_not_specialize=("total", "width", "in_row", "out_row"))
def _sampled(image_ptr, rows, columns, out_ptr, total, width, in_row, out_row):
    low_ptr, next_ptr, down_ptr = rows
    left_ptr, right_ptr, part_ptr = columns
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = n < total
    y, x, channel = n // (width * 3), n // 3 % width, n % 3
    above, below = tl.load(low_ptr + y, mask=keep, other=0), tl.load(next_ptr + y, mask=keep, other=0)
    left, right = tl.load(left_ptr + x, mask=keep, other=0), tl.load(right_ptr + x, mask=keep, other=0)
    down, part = tl.load(down_ptr + y, mask=keep, other=0.0), tl.load(part_ptr + x, mask=keep, other=0.0)
    top_left = tl.load(image_ptr + above * in_row + left * 3 + channel, mask=keep, other=0).to(tl.float32)
    top_right = tl.load(image_ptr + above * in_row + right * 3 + channel, mask=keep, other=0).to(tl.float32)
    low_left = tl.load(image_ptr + below * in_row + left * 3 + channel, mask=keep, other=0).to(tl.float32)
    low_right = tl.load(image_ptr + below * in_row + right * 3 + channel, mask=keep, other=0).to(tl.float32)
    first = top_left + down * (low_left - top_left)
    second = top_right + down * (low_right - top_right)
    value = first + part * (second - first)
    # Adding 2^23, which has no bits behind the point, rounds halves to even.
    value = (value + 8388608.0) - 8388608.0
    tl.store(out_ptr + y * out_row + x * 3 + channel, value.to(tl.uint8), mask=keep)


def sampled(image: Tensor, rows: Sampling, columns: Sampling, out: Tensor) -> None:
    height, width = out.shape[:2]
    total = height * width * 3
    sides, run = [(s.low, s.next, s.part) for s in (rows, columns)], {"num_warps": 4, "enable_fp_fusion": False}
    _sampled[(triton.cdiv(total, BLOCK.value),)](
        image, *sides, out, total, width, image.shape[1] * 3, out.stride(0), **run
    )
