"""Max pooling in a ResNet's stem in Triton: a program for some pixels of the result, with all their channels."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from vla_accel.kernels.activation import Activation
from vla_accel.kernels.chain import launch
from vla_accel.kernels.triton_common import activated, wait_for_previous

_TILE = 2048
"""Numbers that one program makes."""


@triton.jit
def _max_pool(
    x_ptr, shift_ptr, out_ptr, pixels, size, out_size, C: constexpr, PIXELS: constexpr, ACTIVATION: constexpr,
    PDL: constexpr,
):  # fmt: skip
    height, width = size
    out_height, out_width = out_size
    pixel, channel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS), tl.arange(0, triton.next_power_of_2(C))[None, :]
    keep = (pixel < pixels)[:, None] & (channel < C)
    image = (pixel // (out_height * out_width)).to(tl.int64)
    top, left = 2 * (pixel // out_width % out_height) - 1, 2 * (pixel % out_width) - 1
    wait_for_previous(PDL)
    most = tl.full((PIXELS, triton.next_power_of_2(C)), float("-inf"), tl.float32)
    for down in tl.static_range(3):
        for right in tl.static_range(3):
            row, column = top + down, left + right
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            place = ((image * height + row) * width + column)[:, None] * C + channel
            value = tl.load(x_ptr + place, mask=keep & inside[:, None], other=float("-inf")).to(tl.float32)
            most = tl.maximum(most, value)
    if shift_ptr is not None:
        most += tl.load(shift_ptr + channel, mask=channel < C, other=0.0)
    out = activated(most, ACTIVATION).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + pixel.to(tl.int64)[:, None] * C + channel, out, mask=keep)


def max_pool(x: Tensor, shift: Tensor | None, *, activation: Activation) -> Tensor:
    batch, height, width, channels = x.shape
    out = x.new_empty(batch, (height + 1) // 2, (width + 1) // 2, channels)
    pixels, each = out.numel() // channels, max(1, _TILE // triton.next_power_of_2(channels))
    sizes = (height, width), (out.shape[1], out.shape[2])
    grid = (triton.cdiv(pixels, each),)
    launch(_max_pool, grid, x, shift, out, pixels, *sizes, channels, each, activation.code, num_warps=4)
    return out
