"""Ops between the products of denoising networks: norms that write im2col rows for the next products, adaptive norms of
each observation, and scheduler steps.

A convolution over a sequence is a product of im2col rows, which hold its taps one after the other. The op before it
writes each value to every row that reads it (`Target`). The padding of a sequence is never written: buffers start as
zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_accel.errors import EngineError
from vla_accel.kernels.dispatch import op
from vla_accel.kernels.image.ops import GroupNorm

_TRITON = "conv1d.triton_conv1d"
MOST_TARGETS = 4


@dataclass(frozen=True)
class Target:
    """A buffer of rows (B * length, taps * channels), where a map (B * T, C) goes.

    Tap j of output row t holds the map's row t * stride + j - pad; its channels begin at `offset` of `channels`. One
    tap makes plain rows.
    """

    rows: Tensor
    channels: int
    taps: int = 1
    stride: int = 1
    pad: int = 0
    offset: int = 0


@dataclass(frozen=True)
class Film:
    """The condition of each channel: constants (n,) float32 plus the observations' (B, n) float32, whose rows may be
    apart. Of n = 2 C the first half scales; of 3 C, gates come first, then shifts and scales."""

    step: Tensor
    own: Tensor


@dataclass(frozen=True)
class StepSizes:
    """The numbers of a scheduler's step: x ← clean · clamp(x_of · x + out_of · e, ±clip) + keep · x + out · e
    + noise · z."""

    x_of: float
    out_of: float
    clean: float
    keep: float
    out: float
    noise: float
    clip: float


@op(_TRITON)
def normed(
    x: Tensor, length: int, targets: Sequence[Target], norm: GroupNorm | None = None, film: Film | None = None,
    residual: Tensor | None = None,
) -> None:  # fmt: skip
    """Write film(mish(group norm of x)) + residual to all targets; without a norm, x alone.

    Args:
        x: (B * length, C) float32, the sums of a product.
        length: Rows of a sequence.
        targets: At most `MOST_TARGETS`.
        norm: Over a sequence's rows and a group's channels.
        film: Of the channels.
        residual: (B * length, C).
    """
    wide = torch.promote_types(torch.float32, x.dtype)
    y = x.to(wide).unflatten(0, (-1, length))
    if norm is not None:
        weight, bias = norm.weight.to(wide), norm.bias.to(wide)
        y = F.mish(F.group_norm(y.transpose(1, 2), norm.groups, weight, bias, norm.eps)).transpose(1, 2)
    if film is not None:
        parts = (film.step + film.own)[:, None]
        scale, shift = parts.split(x.shape[1], 2) if parts.shape[2] > x.shape[1] else (1.0, parts)
        y = scale * y + shift
    if residual is not None:
        y = y + residual.to(wide).view_as(y)
    for target in targets:
        _place(y, target)


@op(_TRITON)
def scheduler_step(
    before: Tensor, output: Tensor | None, noise: Tensor | None, after: Tensor, sizes: StepSizes,
    targets: Sequence[Target],
) -> None:  # fmt: skip
    """Compute a step of a noise scheduler, and write its result to `after` and to all targets.

    Args:
        before: (B, T, A) float32, the noisy chunk; may be `after`.
        output: (B * T, at least A) float32, what the network computed; None before the first step: x stays.
        noise: (B, T, A) float32, for a step with `sizes.noise`.
        after: (B, T, A) float32.
        sizes: Of the step.
        targets: At most `MOST_TARGETS`, whose channels beyond A stay zero.
    """
    x = before
    if output is not None:
        e = output[:, : x.shape[2]].reshape(x.shape)
        clean = (sizes.x_of * x + sizes.out_of * e).clamp(-sizes.clip, sizes.clip)
        y = sizes.clean * clean + sizes.keep * x + sizes.out * e
        x = y if noise is None else y + sizes.noise * noise
    after.copy_(x)
    for target in targets:
        _place(x, target)


@op(_TRITON)
def modulate(x: Tensor, y: Tensor, out: Tensor, h: Tensor, film: Film, *, eps: float | None) -> None:
    """out = x + gate · y and h = LayerNorm(out) · (1 + scale) + shift.

    Args:
        x: (R, C) float32, or fewer rows that are repeated.
        y: (R, C).
        out: (R, C) float32, may be x.
        h: (R, C).
        film: Of each observation, which has R / B rows. Gates, shifts and scales; gates alone without a norm.
        eps: Of the norm; None: h = out.
    """
    wide = torch.promote_types(torch.float32, y.dtype)
    parts = (film.step + film.own).to(wide).repeat_interleave(len(y) // len(film.own), 0)
    gate, *others = parts.split(y.shape[1], 1)
    out.copy_(x.repeat(len(y) // len(x), 1) + gate * y.to(wide))
    if eps is None:
        h.copy_(out)
    else:
        h.copy_(F.layer_norm(out.to(wide), out.shape[1:], eps=eps) * (1.0 + others[1]) + others[0])


def _place(y: Tensor, target: Target) -> None:
    """Write a map (B, T, C) to the places of a target."""
    batch, length, channels = y.shape
    out = target.rows.view(batch, -1, target.taps, target.channels)
    columns = slice(target.offset, target.offset + channels)
    for tap in range(target.taps):
        # Output row t reads row t * stride + tap - pad of the map.
        rows = torch.arange(out.shape[1], device=y.device) * target.stride + tap - target.pad
        real = (rows >= 0) & (rows < length)
        out[:, real, tap, columns] = y[:, rows[real]].to(out.dtype)


def check(targets: Sequence[Target]) -> None:
    """Raise EngineError for more targets than the kernels take."""
    if len(targets) > MOST_TARGETS:
        raise EngineError(f"conv1d: expected at most {MOST_TARGETS} targets, got {len(targets)}")
