"""The depthwise convolution in Triton: a program for some pixels of a row, with all their channels, reads the weights
once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from vla_accel.kernels.chain import launch
from vla_accel.kernels.image.depthwise import Depthwise
from vla_accel.kernels.triton_common import let_next_start, wait_for_previous


@triton.jit
def _depthwise_norm(
    x_ptr, layer, x_out_ptr, h_ptr, height, width, eps, CHANNELS: constexpr, STRIP: constexpr, PDL: constexpr
):  # fmt: skip
    weight_ptr, bias_ptr, norm_weight_ptr, norm_bias_ptr, shift_ptr = layer
    column = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    row, image = tl.program_id(1), tl.program_id(2).to(tl.int64)
    channel = tl.arange(0, triton.next_power_of_2(CHANNELS))
    keep = channel < CHANNELS
    place = ((image * height + row) * width + column)[:, None] * CHANNELS + channel[None, :]
    real = (column < width)[:, None] & keep[None, :]
    let_next_start(PDL)
    wait_for_previous(PDL)
    y = tl.load(x_ptr + place, mask=real, other=0.0).to(tl.float32)
    y += tl.load(bias_ptr + channel, mask=keep, other=0.0)[None, :]
    for down in tl.static_range(-1, 2):
        for right in tl.static_range(-1, 2):
            inside = (row + down >= 0) & (row + down < height) & (column + right >= 0) & (column + right < width)
            source = x_ptr + place + (down * width + right) * CHANNELS
            value = tl.load(source, mask=real & inside[:, None], other=0.0).to(tl.float32)
            factor = tl.load(weight_ptr + (3 * down + right + 4) * CHANNELS + channel, mask=keep, other=0.0)
            y += value * factor[None, :]
    centred = tl.where(keep[None, :], y - tl.sum(y, 1)[:, None] / CHANNELS, 0.0)
    h = centred * tl.rsqrt(tl.sum(centred * centred, 1) / CHANNELS + eps)[:, None]
    h = h * tl.load(norm_weight_ptr + channel, mask=keep, other=0.0)[None, :]
    h += tl.load(norm_bias_ptr + channel, mask=keep, other=0.0)[None, :]
    y += tl.load(shift_ptr + channel, mask=keep, other=0.0)[None, :]
    tl.store(h_ptr + place, h.to(h_ptr.dtype.element_ty), mask=real)
    tl.store(x_out_ptr + place, y.to(x_out_ptr.dtype.element_ty), mask=real)


def depthwise_norm(x: Tensor, layer: Depthwise, x_out: Tensor, h: Tensor, *, eps: float) -> None:
    images, height, width, channels = x.shape
    strip, warps = (4 if channels <= 1024 else 2), (4 if channels <= 512 else 8)
    sizes = (height, width, eps, channels, strip)
    launch(
        _depthwise_norm, (triton.cdiv(width, strip), height, images), x, tuple(layer), x_out, h, *sizes, num_warps=warps
    )
