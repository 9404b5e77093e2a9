"""Pixel maps (`vla_accel.pictures`) in torch, for the eager engine and as the kernels' reference."""

from __future__ import annotations

import torch
from torch import Tensor

from vla_accel.pictures import BOTTOM, HIGHEST, LEFT, LOWEST, MAP_WIDTH, OFFSET, OUTSIDE, RIGHT, SCALE, SHIFT, TOP


def levels(images: Tensor, pixel_maps: Tensor) -> Tensor:
    """Return the levels of images uint8 (…, S, S, 3) by pixel maps float32 (…, `MAP_WIDTH`), float32 (…, S, S, 3)."""
    side = torch.arange(images.shape[-2], device=images.device, dtype=torch.float32)
    # Slices keep an axis each for rows, columns and channels.
    maps = pixel_maps[..., None, None, :]
    y, x = side[:, None, None], side[None, :, None]
    inside = (y >= maps[..., TOP : TOP + 1]) & (y < maps[..., BOTTOM : BOTTOM + 1])
    inside = inside & (x >= maps[..., LEFT : LEFT + 1]) & (x < maps[..., RIGHT : RIGHT + 1])
    scaled = (images.float() - maps[..., SHIFT:SCALE]) * maps[..., SCALE:MAP_WIDTH] + maps[..., OFFSET : OFFSET + 1]
    clipped = torch.minimum(torch.maximum(scaled, maps[..., LOWEST : LOWEST + 1]), maps[..., HIGHEST : HIGHEST + 1])
    return torch.where(inside, clipped, maps[..., OUTSIDE : OUTSIDE + 1])


def pixels(images: Tensor, pixel_maps: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return images uint8 (…, S, S, 3) as the pixels (…, 3, S, S) that a model reads: x / 255 * 2 - 1, in this order.

    Args:
        images: Fitted images.
        pixel_maps: float32 (…, `MAP_WIDTH`), for checkpoints that need them; None leaves the bytes as they are.
        dtype: Of the result.
    """
    values = images.to(dtype) if pixel_maps is None else levels(images, pixel_maps)
    return (values.movedim(-1, -3) / 255.0 * 2.0 - 1.0).to(dtype)
