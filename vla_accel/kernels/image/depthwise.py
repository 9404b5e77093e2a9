"""A depthwise convolution with its residual and the norm after it, in one kernel: `depthwise_norm`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_accel.kernels.dispatch import op


class Depthwise(NamedTuple):
    """A 3x3 convolution of each channel, (9, C) by row and column with its bias (C,); the norm after it, (C,) each; and
    what the branch after that norm adds to its result, (C,). All float32."""

    weight: Tensor
    bias: Tensor
    norm_weight: Tensor
    norm_bias: Tensor
    shift: Tensor


@op("image.triton_depthwise")
def depthwise_norm(x: Tensor, layer: Depthwise, x_out: Tensor, h: Tensor, *, eps: float) -> None:
    """y = x + convolution(x), h = norm(y) and x_out = y + shift.

    Args:
        x, x_out, h: (N, H, W, C), contiguous and different; zeros surround x.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    weight, bias, norm_weight, norm_bias, shift = (part.to(wide) for part in layer)
    image = x.to(wide).permute(0, 3, 1, 2)
    kernel = weight.T.reshape(-1, 1, 3, 3)
    y = (image + F.conv2d(image, kernel, bias, padding=1, groups=len(kernel))).permute(0, 2, 3, 1)
    h.copy_(F.layer_norm(y, norm_weight.shape, norm_weight, norm_bias, eps))
    x_out.copy_(y + shift)
