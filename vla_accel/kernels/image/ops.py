"""Fused operations of image networks: one API, torch references, Triton kernels on a GPU.

Images are (B, H, W, C), contiguous: convolutions see them as channels-last, products see rows of channels, and nothing
is ever transposed. The bias of a convolution, the time embedding and the residual are not added where they arise but
by the next norm, which reads the result anyway: a `Sum` is such a value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_accel.kernels import reference
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.dispatch import kernels, op, path

_TRITON = "image.triton_image"


@dataclass(frozen=True)
class Sum:
    """`value` + `residual` + `shift`, (B, H, W, C).

    `shift` is float32, (C,) or (B, C). If `phased`, `value` is the result of `conv_phases`, (B, H/2 + 1, W/2 + 1, 4 C).
    """

    value: Tensor
    residual: Tensor | None = None
    shift: Tensor | None = None
    phased: bool = False

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, height, width, channels = self.value.shape
        if self.phased:
            return batch, 2 * height - 2, 2 * width - 2, channels // 4
        return batch, height, width, channels

    @property
    def device(self) -> torch.device:
        return self.value.device

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    @property
    def plain(self) -> bool:
        """Whether `value` is the sum."""
        return self.residual is None and self.shift is None and not self.phased


@dataclass(frozen=True)
class GroupNorm:
    """A group norm's parameters in float32, so that the kernels need no casts."""

    groups: int
    weight: Tensor
    bias: Tensor
    eps: float


def _half(x: Tensor | Sum) -> bool:
    # In float32 these networks are references, and torch's own operations keep its digits.
    return x.dtype in (torch.float16, torch.bfloat16)


@op(_TRITON)
def normalise_pixels(images: Tensor, scale: Tensor, out: Tensor) -> None:
    """Write level * scale[0] + scale[1] of images uint8 (B, H, W, 3), then zeros, to `out` (B, H, W, lanes).

    scale (2, 3) float32; an image of `out` is contiguous, and there are at least three lanes, a power of two.
    """
    wide = torch.promote_types(torch.float32, out.dtype)
    factor, shift = scale.to(wide)
    out.copy_(F.pad(images.to(wide) * factor + shift, (0, out.shape[3] - 3)))


@op(_TRITON, _half)
def add_up(x: Sum, *, pad: bool = False, activation: Activation = Activation.NONE) -> Tensor:
    """Return the activation of the sum (B, H, W, C). `pad`: with a row and a column of zeros at the far edges."""
    total = reference.activate(_total(x), activation).to(x.dtype)
    return F.pad(total, (0, 0, 0, 1, 0, 1)) if pad else total


@op(_TRITON, _half)
def rms_act(x: Sum, gamma: Tensor, *, activation: Activation, keep: bool) -> tuple[Tensor, Tensor]:
    """Return the sum and act(sum / |sum| * sqrt(C) * gamma), Qwen-Image's channel norm. gamma (C,) float32.

    Without `keep` the sum is not written, and the first tensor is the norm.
    """
    total = _total(x)
    normed = F.normalize(total, dim=-1) * gamma.numel() ** 0.5 * gamma.to(total.dtype)
    normed = reference.activate(normed, activation).to(x.dtype)
    return (total.to(x.dtype) if keep else normed), normed


@op(_TRITON, _half)
def group_act(
    x: Sum, norm: GroupNorm, *, activation: Activation, keep: bool, skip: Tensor | None = None,
    after: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the sum and act(group norm of sum + `after`).

    Without `keep` the first tensor is the norm.

    Args:
        skip: (B, H, W, S), appended to the sum's channels before the norm.
        after: (B, H, W, C + S), contiguous, added behind the norm.
    """
    total = _total(x)
    if skip is not None:
        total = torch.cat((total, skip.to(total.dtype)), dim=-1)
    batch, height, width, channels = total.shape
    grouped = total.reshape(batch, height * width, norm.groups, channels // norm.groups)
    variance, mean = torch.var_mean(grouped, dim=(1, 3), keepdim=True, correction=0)
    normed = ((grouped - mean) * torch.rsqrt(variance + norm.eps)).reshape(total.shape)
    normed = normed * norm.weight.to(total.dtype) + norm.bias.to(total.dtype)
    normed = normed if after is None else normed + after.to(total.dtype)
    normed = reference.activate(normed, activation).to(x.dtype)
    return (total.to(x.dtype) if keep else normed), normed


@op(_TRITON, _half)
def add_layer_norm(
    x: Tensor, residual: Tensor | None, shift: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the sum x + residual + shift and its layer norm over the last axis. x (..., C); the rest float32 (C,)."""
    total = _total(Sum(x, residual, shift))
    normed = F.layer_norm(total, weight.shape, weight.to(total.dtype), bias.to(total.dtype), eps)
    return total.to(x.dtype), normed.to(x.dtype)


@op(_TRITON, _half)
def geglu_erf(x: Tensor) -> Tensor:
    """Return value * gelu(gate), exact GELU, of (..., 2 * hidden), value first: diffusers' GEGLU."""
    value, gate = x.chunk(2, dim=-1)
    return value * F.gelu(gate)


def conv(x: Tensor, weight: Tensor, stride: int = 1, padding: int = 0) -> Tensor:
    """Convolution without bias. x (B, H, W, C); weight (O, C, kh, kw), channels-last in memory."""
    out = F.conv2d(x.permute(0, 3, 1, 2), weight, None, stride, padding)
    # A copy only where the library chose another layout (CPU).
    return out.permute(0, 2, 3, 1).contiguous()


def conv_product(x: Tensor, weight: Tensor, stride: int = 1, padding: int = 0) -> Tensor:
    """`conv` as one matrix product over gathered neighbourhoods, for small images, where libraries leave a GPU idle."""
    outs, channels, kh, kw = weight.shape
    batch = x.shape[0]
    padded = F.pad(x, (0, 0, padding, padding, padding, padding)) if padding else x
    height, width = (padded.shape[1] - kh) // stride + 1, (padded.shape[2] - kw) // stride + 1
    by_image, by_row, by_col, _ = padded.stride()
    windows = padded.as_strided(
        (batch, height, width, kh, kw, channels), (by_image, stride * by_row, stride * by_col, by_row, by_col, 1)
    )
    # Channels-last weights are (O, kh, kw, C) in memory: a view.
    flat = weight.permute(0, 2, 3, 1).reshape(outs, kh * kw * channels)
    return F.linear(windows.reshape(batch, height, width, -1), flat)


def phase_weights(weight: Tensor) -> Tensor:
    """(O, C, 3, 3) to (4 O, C, 2, 2): "double every pixel, then convolve" as one convolution of the small image.

    Of the nine taps of an output pixel, those that fall on the same input pixel are summed, once, here. The four
    kinds of output pixel (even or odd row, even or odd column) become four groups of output channels.
    """
    wide = weight.double()
    # Even outputs see inputs (i - 1, i): taps 0 | 1 + 2. Odd ones see (i, i + 1): taps 0 + 1 | 2.
    even = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]], dtype=wide.dtype, device=wide.device)
    odd = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]], dtype=wide.dtype, device=wide.device)
    phases = [torch.einsum("ocyx,py,qx->ocpq", wide, a, b) for a in (even, odd) for b in (even, odd)]
    return torch.cat(phases).to(weight.dtype).contiguous(memory_format=torch.channels_last)


def conv_phases(x: Tensor, weight: Tensor) -> Sum:
    """The convolution of `x` doubled, with weights of `phase_weights`: 4/9 of the arithmetic, nothing doubled."""
    return Sum(conv(x, weight, padding=1), phased=True)


SCORES = {"products": 1 << 24, "products-wide": 1 << 26}
"""Backends of `attend` that store scores, and how many at a time: 64 MiB, which a large GPU's L2 cache nearly holds, or
256 MiB, which fills the GPU better."""
FLASH = {"flash": 128, "flash-64": 64}
"""Backends of `attend` that store no scores, and their queries a program. They take heads of 384 or 512 in BF16 or FP16
on a GPU."""


def attend(q: Tensor, k: Tensor, v: Tensor, *, how: str = "sdpa") -> Tensor:
    """Return softmax(q k' / sqrt(d)) v of one head, q (B, N, d), k and v (B, S, d).

    Args:
        how: "sdpa"; one of `SCORES`: matrix products and a softmax, some rows at a time, with float32 scores, for heads
            wider than the libraries' flash kernels take (256); or one of `FLASH`.

    Raises:
        NotImplementedError: this backend does not take these tensors.
    """
    if how == "sdpa":
        return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
    if how in FLASH:
        if path(q) == "reference" or not _half(q):
            raise NotImplementedError(f"attend: {how} needs a GPU and BF16 or FP16")
        return kernels(_TRITON).wide_attention(q, k, v, FLASH[how])
    if how not in SCORES:
        raise ValueError(f"attend: expected sdpa, {', '.join((*SCORES, *FLASH))}, got {how!r}")
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    # Scaled before the product: FP16 scores of unscaled queries could leave the range.
    q, keys = q * q.shape[-1] ** -0.5, k.transpose(1, 2)
    rows = max(128, SCORES[how] // k.shape[1])
    for begin in range(0, q.shape[1], rows):
        weights = softmax(_product_f32(q[:, begin : begin + rows], keys), v.dtype)
        out[:, begin : begin + rows] = torch.bmm(weights, v)
    return out


def softmax(scores: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the softmax over the last axis of float32 scores, in `dtype`."""
    if path(scores) != "reference" and scores.dtype == torch.float32 and dtype != torch.float32:
        return kernels(_TRITON).softmax(scores, dtype)
    return torch.softmax(scores, -1).to(dtype)


def _product_f32(a: Tensor, b: Tensor) -> Tensor:
    if a.is_cuda and _half(a):
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a, b).float() if _half(a) else torch.bmm(a, b)


def _total(x: Sum) -> Tensor:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    value = x.value.to(wide)
    if x.phased:
        batch, height, width, channels = x.shape
        parts = value.reshape(batch, height // 2 + 1, width // 2 + 1, 2, 2, channels)
        value = value.new_empty(batch, height, width, channels)
        for row in (0, 1):
            for col in (0, 1):
                value[:, row::2, col::2] = parts[:, row : row + height // 2, col : col + width // 2, row, col]
    if x.residual is not None:
        value = value + x.residual.to(wide)
    if x.shift is not None:
        value = value + (x.shift if x.shift.dim() == 1 else x.shift[:, None, None]).to(wide)
    return value
