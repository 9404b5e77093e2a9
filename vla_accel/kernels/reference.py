"""Torch reference of every op. Plain, differentiable, any device; normalisations compute in float32 or wider."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel.kernels.activation import Activation

MOMENTS_OF = 64
"""Columns of a row that share a pair of moments: their sum and their sum of squares."""


def _wide(x: Tensor) -> Tensor:
    """float32 for dtypes of fewer bits; float32 and float64 stay as they are."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def layer_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """LayerNorm over the last axis, in the parameters' dtype, returned in the dtype of `x`."""
    if norm.weight.dtype == x.dtype:
        return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    wide = x.to(norm.weight.dtype)
    return F.layer_norm(wide, norm.normalized_shape, norm.weight, norm.bias, norm.eps).to(x.dtype)


def _normalise(x: Tensor, eps: float) -> Tensor:
    wide = _wide(x)
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, offset: float = 1.0) -> Tensor:
    """RMSNorm: x / rms(x) * (offset + weight), the offset 1 in Gemma and 0 in Llama. x (..., width), weight (width,).
    Returns the dtype of x."""
    normed = _normalise(x, eps)
    return (normed * (offset + weight.to(normed.dtype))).to(x.dtype)


def adarms(x: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6) -> Tensor:
    """Adaptive RMSNorm of π0.5: x / rms(x) * (1 + scale) + shift; scale and shift broadcast to x."""
    normed = _normalise(x, eps)
    return (normed * (1.0 + scale.to(normed.dtype)) + shift.to(normed.dtype)).to(x.dtype)


def adaptive_layer_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """LayerNorm without weights, times 1 + scale, plus shift; scale and shift broadcast to x. Returns x's dtype."""
    wide = _wide(x)
    normed = F.layer_norm(wide, wide.shape[-1:], eps=eps)
    return (normed * (1.0 + scale.to(wide.dtype)) + shift.to(wide.dtype)).to(x.dtype)


def gated_residual(x: Tensor, y: Tensor, gate: Tensor | None) -> Tensor:
    """x + y * gate, or x + y where the norm before `y` was not adaptive."""
    return x + y if gate is None else x + y * gate.to(y.dtype)


def geglu(gate_up: Tensor) -> Tensor:
    """(..., 2 * hidden), gate first, to gelu_tanh(gate) * up, (..., hidden)."""
    return activate(gate_up, Activation.GEGLU)


def activate(x: Tensor, activation: Activation) -> Tensor:
    """An activation of x. For a gated one x is (..., 2 * hidden), gate first, and the result (..., hidden)."""
    if activation.gated:
        gate, up = x.chunk(2, dim=-1)
        return activate(gate, activation.gate) * up
    if activation is Activation.GELU:
        return F.gelu(x, approximate="tanh")
    plain = {
        Activation.NONE: lambda y: y, Activation.SILU: F.silu, Activation.RELU: F.relu, Activation.MISH: F.mish,
        Activation.GELU_ERF: F.gelu, Activation.QUICK_GELU: lambda y: y * torch.sigmoid(1.702 * y),
    }  # fmt: skip
    return plain[activation](x)


def rope_tables(positions: Tensor, head_dim: int, dtype: torch.dtype, theta: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """cos and sin of rotary embeddings, each (..., 1, head_dim / 2), for integer positions (...).

    Angles are formed in float32 (float64 when `dtype` is), as openpi does, then cast to `dtype`.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=wide) / head_dim
    angles = positions.to(wide)[..., None] * (1.0 / theta**exponent)
    return angles.cos()[..., None, :].to(dtype), angles.sin()[..., None, :].to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + head_dim / 2). x (B, T, heads, head_dim); tables (B, T, 1, head_dim / 2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Scaled dot-product attention with grouped key/value heads.

    q (B, T, heads, d); k, v (B, S, kv_heads, d), heads a multiple of kv_heads; mask (B, T or 1, S): bool, True = may
    attend; floats, added to the scores, for which q, k and v are widened to their dtype; or None. Returns (B, T, heads,
    d) in q's dtype. Scale is d ** -0.5.
    """
    batch, tokens, heads, head_dim = q.shape
    if mask is not None and mask.is_floating_point() and mask.dtype != q.dtype:
        wide = torch.promote_types(q.dtype, mask.dtype)
        return attention(q.to(wide), k.to(wide), v.to(wide), mask.to(wide)).to(q.dtype)
    kv_heads = k.shape[2]
    if kv_heads == heads:
        bias = None if mask is None else mask[:, None]
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=bias)
        return out.transpose(1, 2)
    # Query heads that share a key/value head are more rows of the same product: no copy of K or V is made.
    group = heads // kv_heads
    rows = q.view(batch, tokens, kv_heads, group, head_dim).permute(0, 2, 1, 3, 4)
    rows = rows.reshape(batch, kv_heads, tokens * group, head_dim)
    bias = None if mask is None else mask.expand(-1, tokens, -1).repeat_interleave(group, dim=1)[:, None]
    out = F.scaled_dot_product_attention(rows, k.transpose(1, 2), v.transpose(1, 2), attn_mask=bias)
    out = out.view(batch, kv_heads, tokens, group, head_dim).permute(0, 2, 1, 3, 4)
    return out.reshape(batch, tokens, heads, head_dim)
