"""The depthwise convolution in Triton: a program for each pixel, with all its channels."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from vla_accel.kernels.chain import launch
from vla_accel.kernels.image.depthwise import Depthwise
from vla_accel.kernels.triton_common import let_next_start, wait_for_previous


@triton.jit
def _depthwise_norm(x_ptr, layer, x_out_ptr, h_ptr, height, width, eps, CHANNELS: constexpr, PDL: constexpr):
    weight_ptr, bias_ptr, norm_weight_ptr, norm_bias_ptr, shift_ptr = layer
    column, row, image = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    channel = tl.arange(0, triton.next_power_of_2(CHANNELS))
    keep = channel < CHANNELS
    pixel = (image * height + row) * width + column
    let_next_start(PDL)
    wait_for_previous(PDL)
    y = tl.load(x_ptr + pixel * CHANNELS + channel, mask=keep, other=0.0).to(tl.float32)
    y += tl.load(bias_ptr + channel, mask=keep, other=0.0)
    for down in tl.static_range(-1, 2):
        for right in tl.static_range(-1, 2):
            inside = (row + down >= 0) & (row + down < height) & (column + right >= 0) & (column + right < width)
            value = tl.load(x_ptr + (pixel + down * width + right) * CHANNELS + channel, mask=keep & inside, other=0.0)
            factor = tl.load(weight_ptr + (3 * down + right + 4) * CHANNELS + channel, mask=keep, other=0.0)
            y += value.to(tl.float32) * factor
    centred = tl.where(keep, y - tl.sum(y, 0) / CHANNELS, 0.0)
    h = centred * tl.rsqrt(tl.sum(centred * centred, 0) / CHANNELS + eps)
    h = h * tl.load(norm_weight_ptr + channel, mask=keep, other=0.0)
    h += tl.load(norm_bias_ptr + channel, mask=keep, other=0.0)
    y += tl.load(shift_ptr + channel, mask=keep, other=0.0)
    tl.store(h_ptr + pixel * CHANNELS + channel, h.to(h_ptr.dtype.element_ty), mask=keep)
    tl.store(x_out_ptr + pixel * CHANNELS + channel, y.to(x_out_ptr.dtype.element_ty), mask=keep)


def depthwise_norm(x: Tensor, layer: Depthwise, x_out: Tensor, h: Tensor, *, eps: float) -> None:
    images, height, width, channels = x.shape
    warps = 2 if channels <= 512 else 4
    grid = (width, height, images)
    launch(_depthwise_norm, grid, x, tuple(layer), x_out, h, height, width, eps, channels, num_warps=warps)
