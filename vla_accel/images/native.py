"""What the native programs of image models share: weights laid out for the GPU, and choices measured once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel.errors import EngineError
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.autotune import Fastest, fastest
from vla_accel.kernels.image import ops
from vla_accel.kernels.image.ops import GroupNorm, Sum
from vla_accel.runtime import current

Convolution = Callable[[Tensor, Tensor], Tensor]
"""A 3x3 convolution with padding 1 of an image and a weight."""


def measure(ways: Mapping[str, Any], like: Tensor, repeats: int) -> Fastest:
    """Time calls of the same result on the GPU of `like`. Raises EngineError during graph capture."""
    if like.is_cuda and torch.cuda.is_current_stream_capturing():
        raise EngineError("native program: run once at this size before the graph is captured")
    return fastest(ways, current(like), repeats=repeats)


class Choices(dict[str, str]):
    """The fastest way of each operation, by its kind and shapes; measured on first use."""

    def pick(self, key: str, ways: Mapping[str, Any], like: Tensor, repeats: int = 5) -> str:
        """Return the name of the fastest of `ways`."""
        if key not in self:
            self[key] = measure(ways, like, repeats).candidate
        return self[key]


def describe(dtype: torch.dtype, parts: str, chosen: Iterable[str]) -> str:
    """A program's `detail`: its layout, `parts`, and the chosen ways."""
    measured = ", ".join(chosen)
    return f"channels-last {str(dtype).removeprefix('torch.')}, {parts}" + (f"; measured: {measured}" * bool(measured))


def fast_convolutions() -> contextlib.AbstractContextManager[None]:
    """cuDNN measures its convolutions and may use TF32."""
    return torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=True)


def laid_out(weight: Tensor) -> Tensor:
    """A convolution's weight in the layout of cuDNN's fast kernels: output, row, column, input."""
    return weight.contiguous(memory_format=torch.channels_last)


def padded(weight: Tensor, dim: int) -> Tensor:
    """`laid_out`, with zero output (`dim` 0) or input (1) channels up to a multiple of 8, for tensor cores."""
    missing = -weight.shape[dim] % 8
    sizes = (0, 0, 0, 0, 0, missing) if dim == 1 else (0, 0, 0, 0, 0, 0, 0, missing)
    return laid_out(F.pad(weight, sizes) if missing else weight)


def channels_last(x: Tensor, channels: int) -> Tensor:
    """(B, C, H, W) to contiguous (B, H, W, `channels`), with zeros in the added channels."""
    x = x.permute(0, 2, 3, 1)
    if x.shape[-1] == channels:
        return x.contiguous()
    wide = x.new_zeros((*x.shape[:-1], channels))
    wide[..., : x.shape[-1]] = x
    return wide


def write(y: Tensor, bias: Tensor, target: Tensor) -> None:
    """Write y (B, H, W, padded C) plus bias (C, 1, 1) to `target` (B, C, H, W)."""
    torch.add(y[..., : target.shape[1]].permute(0, 3, 1, 2), bias, out=target)


def bias_of(layer: nn.Conv2d | nn.Linear) -> Tensor:
    """A layer's bias in float32."""
    assert layer.bias is not None
    return layer.bias.float()


class NormAct:
    """A norm and its activation. Returns the sum (with `keep`) and the normed sum; see `ops.group_act`."""

    def __init__(self, norm: Any, activation: Activation = Activation.SILU) -> None:
        self.activation, self.norm = activation, None
        if isinstance(norm, nn.GroupNorm):
            self.norm = GroupNorm(norm.num_groups, norm.weight.float(), norm.bias.float(), norm.eps)
        else:
            self.gamma = norm.gamma.float()

    def __call__(self, x: Sum, *, keep: bool, skip: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.norm is None:
            return ops.rms_act(x, self.gamma, activation=self.activation, keep=keep)
        return ops.group_act(x, self.norm, activation=self.activation, keep=keep, skip=skip)


class Residual:
    """A residual block: norm, SiLU, 3x3 convolution, twice, plus the input. `part` has diffusers' or our names."""

    def __init__(self, part: Any, shortcut: nn.Conv2d | None) -> None:
        self.norm1, self.norm2 = NormAct(part.norm1), NormAct(part.norm2)
        self.conv1, self.conv2 = laid_out(part.conv1.weight), laid_out(part.conv2.weight)
        self.shift = bias_of(part.conv2)
        self.shortcut = None
        if shortcut is not None:
            self.shortcut = shortcut.weight.flatten(1)
            self.shift = self.shift + bias_of(shortcut)

    def run(self, x: Sum, shift: Tensor, conv: Convolution, skip: Tensor | None = None) -> tuple[Tensor, Sum]:
        """Return the sum x and the block's result; `shift` is added after the first convolution."""
        y, h = self.norm1(x, keep=True, skip=skip)
        _, h = self.norm2(Sum(conv(h, self.conv1), shift=shift), keep=False)
        h = conv(h, self.conv2)
        return y, Sum(h, y if self.shortcut is None else F.linear(y, self.shortcut), self.shift)


def upsample(x: Tensor, phases: Tensor, shift: Tensor) -> Sum:
    """Double every pixel and convolve, with weights of `ops.phase_weights`."""
    return Sum(ops.conv_phases(x, phases).value, shift=shift, phased=True)
