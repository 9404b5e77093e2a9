"""Attention of DaViT on maps: of pixels within each window, and of channels to each other.

N maps of P = height * width pixels come as rows of queries, keys and values (N, P, 3 W); the result is (N, P, W).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_accel.kernels import reference
from vla_accel.kernels.dispatch import op


@dataclass(frozen=True)
class Windows:
    """Maps of a `height` and a `width`, cut into windows of `side` pixels a side, padded on the right and below."""

    height: int
    width: int
    side: int

    @property
    def down(self) -> int:
        """Windows in a column."""
        return -(-self.height // self.side)

    @property
    def across(self) -> int:
        """Windows in a row."""
        return -(-self.width // self.side)

    def pixels(self, device: torch.device) -> Tensor:
        """Return the pixel of each row in order of windows, int64 (windows, side * side); height * width for
        padding."""
        pixels = torch.arange(self.height * self.width, device=device).view(self.height, self.width)
        pad = (0, -self.width % self.side, 0, -self.height % self.side)
        pixels = F.pad(pixels, pad, value=self.height * self.width)
        cut = pixels.unflatten(1, (-1, self.side)).unflatten(0, (-1, self.side))
        return cut.transpose(1, 2).flatten(2).flatten(0, 1)

    def places(self, device: torch.device) -> Tensor:
        """Return the row of each pixel in that order, int64 (height * width,)."""
        rows, columns = (torch.arange(count, device=device) for count in (self.height, self.width))
        windows = (rows // self.side)[:, None] * self.across + columns // self.side
        inside = (rows % self.side)[:, None] * self.side + columns % self.side
        return (windows * self.side**2 + inside).flatten()


def by_window(qkv: Tensor, padding: Tensor, windows: Windows, heads: int) -> Tensor:
    """Attention within each window, whose padding is not masked. `padding` (3 W,): its queries, keys and values."""
    attended = reference.attention(*windowed(qkv, padding, windows.pixels(qkv.device), heads), None)
    return unwindowed(attended.flatten(2), windows.places(qkv.device), len(qkv))


def windowed(qkv: Tensor, padding: Tensor, pixels: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values in order of windows, (N * windows, side * side, heads, d) each. `pixels`: as
    returned by `Windows.pixels`."""
    padded = torch.cat((qkv, padding.to(qkv.dtype).expand(len(qkv), 1, -1)), 1)
    q, k, v = padded[:, pixels].flatten(0, 1).unflatten(-1, (3, heads, -1)).unbind(2)
    return q, k, v


def unwindowed(rows: Tensor, places: Tensor, images: int) -> Tensor:
    """Return rows (N * windows, side * side, W) in order of pixels, without padding. `places`: as returned by
    `Windows.places`."""
    return rows.reshape(images, -1, rows.shape[2])[:, places]


def by_channel(qkv: Tensor, groups: int) -> Tensor:
    """Attention of the channels of a group to each other, over all pixels."""
    q, k, v = qkv.unflatten(-1, (3, groups, -1)).permute(2, 0, 3, 4, 1)
    weights = (q @ k.transpose(-1, -2) * qkv.shape[1] ** -0.5).softmax(-1)
    return (weights @ v).permute(0, 3, 1, 2).flatten(2)


@op("attention.triton_maps")
def window_attention(qkv: Tensor, padding: Tensor, out: Tensor, windows: Windows, heads: int) -> None:
    """out = `by_window`. The kernel reads the key of the padding once, however many rows have it."""
    out.copy_(by_window(qkv, padding, windows, heads))


@op("attention.triton_maps")
def channel_attention(qkv: Tensor, out: Tensor, groups: int) -> None:
    """out = `by_channel`."""
    out.copy_(by_channel(qkv, groups))
