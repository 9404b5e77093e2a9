"""What the native programs of image models share: weights laid out for the GPU, and choices measured once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel.errors import EngineError
from vla_accel.kernels.autotune import Fastest, fastest
from vla_accel.kernels.image.ops import GroupNorm
from vla_accel.runtime import current


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


def group_norm(norm: nn.GroupNorm) -> GroupNorm:
    """A group norm's parameters for the kernels."""
    return GroupNorm(norm.num_groups, norm.weight.float(), norm.bias.float(), norm.eps)
