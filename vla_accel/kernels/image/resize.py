"""Fit camera images to the model's size on a GPU, with the same bits as `transforms.images.resize` on the host;
resampled images may differ by a level where float32 rounds otherwise.

For images more than twice as high as wide, Pillow's newest versions filter rows first, which changes a byte by 1.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vla_accel.kernels.dispatch import op
from vla_accel.kernels.image.jpeg import Tables, round_trip
from vla_accel.kernels.nvrtc import on
from vla_accel.pictures import CentreCrop, Resampling, Resize, neighbours, placed

PRECISION = 22
"""Bits of a filter's weights behind the point, as in Pillow: sums of bytes times weights fit into 32 bits."""


@dataclass(frozen=True)
class Filter:
    """One axis of Pillow's bilinear filter: output j is Σ weights[j, t] · input[first[j] + t], rounded to a byte.
    `first` (n,), `weights` (n, taps) int32, taps a power of two; weights of unused taps are zero."""

    first: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Sampling:
    """One axis of bilinear sampling: low + part · (next - low) of the inputs `low` and `next` (n,) int32, with `part`
    (n,) float32."""

    low: Tensor
    next: Tensor
    part: Tensor


@dataclass(frozen=True)
class Resampled:
    """Images · weights along both axes: `rows` (out, H) and `columns` (out, W), float32."""

    rows: Tensor
    columns: Tensor


@dataclass(frozen=True)
class Cropped:
    """`CentreCrop`: `first` resizes images of another size, after JPEG; `sides` samples the middle along both axes."""

    first: tuple[Tables, Resampled] | None
    sides: Sampling


@dataclass(frozen=True)
class Fit:
    """How to fit images (height, width, 3) to (size, size, 3): they fill `inner` (top, left, height, width) of the
    square, the rest is black."""

    size: int
    inner: tuple[int, int, int, int]
    rows: Filter | Sampling
    columns: Filter | Sampling

    @property
    def whole(self) -> bool:
        """Whether the image fills the square."""
        return self.inner[2:] == (self.size, self.size)


Fitting = Fit | Resampled | Cropped
"""How images of one size become the model's."""


def fits_on(device: torch.device) -> bool:
    """Return whether a device fits images itself; a CPU uses Pillow."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


@functools.lru_cache(maxsize=64)
def fit_of(
    height: int, width: int, size: int, method: Resize | Resampling | CentreCrop, device: torch.device
) -> Fitting | None:
    """Return the fit of images of a size, None for those that resampling keeps. Raises ObservationError if nothing of
    the image would be left."""
    if isinstance(method, (Resampling, CentreCrop)):
        resampled = None
        if not method.keeps(height, width):
            resampled = Resampled(*(torch.from_numpy(w).float().to(device) for w in method.weights(height, width)))
        if isinstance(method, Resampling):
            return resampled
        first = None if resampled is None else (Tables.on(device), resampled)
        return Cropped(first, Sampling(*(torch.from_numpy(x).to(device) for x in method.neighbours())))
    inner = placed(height, width, size, method)
    axis = _filter if method == "antialias" else _sampling
    return Fit(size, inner, axis(height, inner[2], device), axis(width, inner[3], device))


def fit(image: Tensor, how: Fitting | None, out: Tensor) -> None:
    """out = the image (H, W, 3), fitted, or copied if `how` is None; all uint8 and contiguous."""
    if how is None:
        out.copy_(image)
        return
    if isinstance(how, Resampled):
        out.copy_(_resampled(image, how))
        return
    if isinstance(how, Cropped):
        if how.first is not None:
            tables, resampled = how.first
            image = _resampled(round_trip(image, tables), resampled)
        _crop(image, how.sides, out)
        return
    if not how.whole:
        out.zero_()
    top, left, height, width = how.inner
    inner = out[top : top + height, left : left + width]
    if isinstance(how.rows, Filter) and isinstance(how.columns, Filter):
        # Columns first, as Pillow does: the intermediate image is rounded, too.
        between = image.new_empty(len(image), width, 3)
        filtered(image, how.columns, between, axis=1)
        filtered(between, how.rows, inner, axis=0)
    elif isinstance(how.rows, Sampling) and isinstance(how.columns, Sampling):
        sampled(image, how.rows, how.columns, inner)


def _resampled(image: Tensor, by: Resampled) -> Tensor:
    """Return whole levels float32 (out, out, 3)."""
    return (by.rows @ image.permute(2, 0, 1).float() @ by.columns.T).round_().clamp_(0, 255).permute(1, 2, 0)


def _crop(image: Tensor, by: Sampling, out: Tensor) -> None:
    """out = the middle of levels (S, S, 3), rounded as TensorFlow does."""
    levels = image.float() * (1 / 255)
    lines = levels[:, by.low]
    lines = lines + (levels[:, by.next] - lines) * by.part[:, None]
    above = lines[by.low]
    out.copy_((above + (lines[by.next] - above) * by.part[:, None, None]).clamp(0, 1) * 255.5)


def rehearse(device: torch.device) -> None:
    """Compile the kernels before the first call, for cameras of up to fifteen times the model's size."""
    out = torch.empty(8, 8, 3, dtype=torch.uint8, device=device)
    with on(device):
        for size in (4, 12, 40, 80):
            fit(out.new_zeros(size, size, 3), fit_of(size, size, 8, "antialias", device), out)
        fit(out.new_zeros(4, 4, 3), fit_of(4, 4, 8, "bilinear", device), out)


@op("image.triton_resize")
def filtered(image: Tensor, by: Filter, out: Tensor, *, axis: int) -> None:
    """out = `image` filtered along an axis; the last dimensions of `out` are contiguous."""
    lines = image.movedim(axis, 0).long()
    sums = lines.new_full((len(by.first), *lines.shape[1:]), 1 << (PRECISION - 1))
    for tap in range(by.weights.shape[1]):
        place = (by.first.long() + tap).clamp(max=len(lines) - 1)
        sums += lines[place] * by.weights[:, tap].long()[:, None, None]
    out.copy_((sums >> PRECISION).clamp(0, 255).movedim(0, axis).to(torch.uint8))


@op("image.triton_resize")
def sampled(image: Tensor, rows: Sampling, columns: Sampling, out: Tensor) -> None:
    """out = `image` sampled along both axes, rows first, and rounded, halves to even."""
    pixels = image.float()
    above, below = pixels[rows.low.long()], pixels[rows.next.long()]
    lines = above + rows.part[:, None, None] * (below - above)
    left, right = lines[:, columns.low.long()], lines[:, columns.next.long()]
    out.copy_((left + columns.part[None, :, None] * (right - left)).round().to(torch.uint8))


def _filter(count: int, out: int, device: torch.device) -> Filter:
    """Return a filter of triangles as wide as an output pixel, but at least as an input pixel."""
    step = count / out
    reach = max(step, 1.0)
    first = np.zeros(out, np.int32)
    weights = np.zeros((out, 1 << (math.ceil(reach) * 2).bit_length()))
    for j in range(out):
        centre = (j + 0.5) * step
        low, high = max(int(centre - reach + 0.5), 0), min(int(centre + reach + 0.5), count)
        triangle = np.maximum(1.0 - np.abs((np.arange(low, high) - centre + 0.5) / reach), 0.0)
        first[j], weights[j, : high - low] = low, triangle / triangle.sum()
    fixed = np.trunc(weights * (1 << PRECISION) + 0.5).astype(np.int32)
    return Filter(torch.from_numpy(first).to(device), torch.from_numpy(fixed).to(device))


def _sampling(count: int, out: int, device: torch.device) -> Sampling:
    low, following, part = (torch.from_numpy(x).to(device) for x in neighbours(count, out))
    return Sampling(low.int(), following.int(), part)
