"""The changes that JPEG of quality 95 makes to an image, in the integer arithmetic of libjpeg as TensorFlow runs it:
encoded with the accurate transform and chroma of half the size, decoded with the fast one and smooth chroma. No bytes
are written.

Source of the arithmetic: libjpeg-turbo 2 (IJG and BSD licences).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_LUMA = (
    16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55, 14, 13, 16, 24, 40, 57, 69, 56, 14, 17, 22, 29, 51,
    87, 80, 62, 18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113, 92, 49, 64, 78, 87, 103, 121, 120, 101,
    72, 92, 95, 98, 112, 100, 103, 99,
)  # fmt: skip
_CHROMA = (
    17, 18, 24, 47, 99, 99, 99, 99, 18, 21, 26, 66, 99, 99, 99, 99, 24, 26, 56, 99, 99, 99, 99, 99, 47, 66, 99, 99, 99,
    99, 99, 99, *(99,) * 32,
)  # fmt: skip
_SCALE = 10
"""Of the tables above, in percent, for quality 95."""
_ANGLES = (16384, 22725, 21407, 19266, 16384, 12873, 8867, 4520)
"""Factors of the fast transform along one axis, with 14 bits behind the point."""
_COSINES = (
    (8192, 8192, 8192, 8192, 8192, 8192, 8192, 8192),
    (11363, 9633, 6437, 2260, -2260, -6437, -9633, -11363),
    (10703, 4433, -4433, -10703, -10703, -4433, 4433, 10703),
    (9633, -2259, -11362, -6436, 6436, 11362, 2259, -9633),
    (8192, -8192, -8192, 8192, 8192, -8192, -8192, 8192),
    (6437, -11362, 2261, 9633, -9633, -2261, 11362, -6437),
    (4433, -10704, 10704, -4433, -4433, 10704, -10704, 4433),
    (2260, -6436, 9633, -11363, 11363, -9633, 6436, -2260),
)
"""The accurate transform, with 13 bits behind the point."""


@dataclass(frozen=True)
class Tables:
    """Constants on a device: of luma and of chroma the divisors and the factors (8, 8) of a block, int32; and `cosines`
    (8, 8) float64, whose products of integers are exact and run on a GPU."""

    luma: tuple[Tensor, Tensor]
    chroma: tuple[Tensor, Tensor]
    cosines: Tensor

    @classmethod
    def on(cls, device: torch.device) -> Tables:
        """Make the tables."""
        wanted = (np.outer(_ANGLES, _ANGLES) + (1 << 13)) >> 14

        def block(table: tuple[int, ...]) -> tuple[Tensor, Tensor]:
            steps = ((np.array(table).reshape(8, 8) * _SCALE + 50) // 100).clip(1, 255)
            divisors, factors = 8 * steps, (steps * wanted + (1 << 11)) >> 12
            return torch.from_numpy(divisors).int().to(device), torch.from_numpy(factors).int().to(device)

        return cls(block(_LUMA), block(_CHROMA), torch.tensor(_COSINES, dtype=torch.float64).T.contiguous().to(device))


def round_trip(image: Tensor, tables: Tables) -> Tensor:
    """Return levels int32 (H, W, 3) that were encoded and decoded. `image`: levels uint8 or int32 (H, W, 3)."""
    image, (height, width) = image.int(), image.shape[:2]
    r, g, b = image[..., 0], image[..., 1], image[..., 2]
    half = 1 << 15
    offset = (128 << 16) + half - 1
    luma = (19595 * r + 38470 * g + 7471 * b + half) >> 16
    blue, red = -11059 * r - 21709 * g + 32768 * b, 32768 * r - 27439 * g - 5329 * b
    chroma = _halved((torch.stack((blue, red)) + offset) >> 16)
    luma = _coded(_padded(luma, 8, 8), tables.luma, tables)[:height, :width]
    blue, red = _enlarged(_coded(chroma, tables.chroma, tables), height, width) - 128
    found = (
        luma + ((91881 * red + half) >> 16),
        luma + ((-22554 * blue - 46802 * red + half) >> 16),
        luma + ((116130 * blue + half) >> 16),
    )
    return torch.stack(found, -1).clip(0, 255)


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """Repeat the last row and column of (..., H, W) up to multiples of these numbers."""
    height, width = x.shape[-2:]
    if below := -height % rows:
        x = torch.cat((x, *[x[..., -1:, :]] * below), -2)
    if right := -width % columns:
        x = torch.cat((x, *[x[..., -1:]] * right), -1)
    return x


def _halved(x: Tensor) -> Tensor:
    """Means of 2 x 2 levels, rounded down and up by turns."""
    x = _padded(x, 2, 16)
    lines = x[..., ::2, :] + x[..., 1::2, :]
    sums = lines[..., ::2] + lines[..., 1::2]
    found = torch.stack(((sums[..., ::2] + 1) >> 2, (sums[..., 1::2] + 2) >> 2), -1).reshape(sums.shape)
    return _padded(found, 8, 8)


def _enlarged(x: Tensor, height: int, width: int) -> Tensor:
    """Twice the size, by weights of 3/4 and 1/4 along each axis."""
    x = x[..., : -(-height // 2), : -(-width // 2)]
    above = torch.cat((x[..., :1, :], x[..., :-1, :]), -2)
    below = torch.cat((x[..., 1:, :], x[..., -1:, :]), -2)
    lines = torch.stack((3 * x + above, 3 * x + below), -2).reshape(len(x), -1, x.shape[-1])
    left = torch.cat((lines[..., :1], lines[..., :-1]), -1)
    right = torch.cat((lines[..., 1:], lines[..., -1:]), -1)
    found = torch.stack(((3 * lines + left + 8) >> 4, (3 * lines + right + 7) >> 4), -1)
    return found.reshape(*lines.shape[:-1], -1)[..., :height, :width]


def _coded(x: Tensor, table: tuple[Tensor, Tensor], tables: Tables) -> Tensor:
    """Levels (..., H, W), of whole blocks, after transform, rounding and inverse transform."""
    height, width = x.shape[-2:]
    blocks = x.reshape(*x.shape[:-2], height // 8, 8, width // 8, 8).swapaxes(-3, -2) - 128
    values = _forward(_forward(blocks, 11, tables).swapaxes(-2, -1), 15, tables).swapaxes(-2, -1)
    divisors, factors = table
    rounded = (abs(values) + (divisors >> 1)) // divisors
    values = torch.where(values < 0, -rounded, rounded) * factors
    values = _inverse(_inverse(values.swapaxes(-2, -1)).swapaxes(-2, -1))
    return ((values >> 5) + 128).clip(0, 255).swapaxes(-3, -2).reshape(x.shape)


def _forward(x: Tensor, bits: int, tables: Tables) -> Tensor:
    """The accurate transform along the last axis, without the last `bits`, rounded."""
    return ((x.double() @ tables.cosines).int() + (1 << (bits - 1))) >> bits


def _inverse(x: Tensor) -> Tensor:
    """The fast inverse transform along the last axis."""

    def times(value: Tensor, constant: int) -> Tensor:
        return (value * constant) >> 8

    x0, x1, x2, x3, x4, x5, x6, x7 = (x[..., i] for i in range(8))
    a, b, c = x0 + x4, x0 - x4, x2 + x6
    e = times(x2 - x6, 362) - c
    even = a + c, b + e, b - e, a - c
    z13, z10, z11, z12 = x5 + x3, x5 - x3, x1 + x7, x1 - x7
    seven = z11 + z13
    z5 = times(z10 + z12, 473)
    six = times(z10, -669) + z5 - seven
    five = times(z11 - z13, 362) - six
    four = times(z12, 277) - z5 + five
    first = (even[0] + seven, even[1] + six, even[2] + five, even[3] - four)
    last = (even[3] + four, even[2] - five, even[1] - six, even[0] - seven)
    return torch.stack((*first, *last), -1)
